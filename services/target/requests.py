"""From the wire to the engine: every field of a request checked, every bad one named."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.v1 import common_pb2, target_pb2

from services.model.chat_template import ChatTemplateError
from services.model.sampling import SamplingParams, Verification
from services.model.tokenizer import Tokenizer, TokenizerError
from services.serving.errors import FieldViolation, InvalidRequest, Unsupported
from services.target.sequence import Mode, Request
from services.target.stopping import StopConditions

DEFAULT_MAX_TOKENS = 256
MAX_DRAFT_LENGTH = 16

MODES = {
    common_pb2.MODE_UNSPECIFIED: Mode.AUTO,
    common_pb2.MODE_AUTO: Mode.AUTO,
    common_pb2.MODE_STANDARD: Mode.STANDARD,
    common_pb2.MODE_SPECULATIVE: Mode.SPECULATIVE,
}
VERIFICATIONS = {
    common_pb2.VERIFICATION_TOKEN: Verification.TOKEN,
    common_pb2.VERIFICATION_BLOCK: Verification.BLOCK,
    common_pb2.VERIFICATION_COUPLED: Verification.COUPLED,
}


class Violations:
    """Collects what is wrong with a request, so that all of it can be told at once."""

    def __init__(self) -> None:
        self.found: list[FieldViolation] = []

    def check(self, holds: bool, field: str, description: str) -> bool:
        """Note a violation unless the condition holds; returns whether it does."""
        if not holds:
            self.found.append(FieldViolation(field, description))
        return holds

    def raise_if_any(self) -> None:
        """Raises InvalidRequest naming each bad field."""
        if self.found:
            raise InvalidRequest.of(self.found)


@dataclass(frozen=True, slots=True)
class Limits:
    """What this target can do."""

    vocabulary_size: int
    context: int
    """Tokens of prompt and answer together; what the cache holds if that is less."""
    verification: Verification


class RequestReader:
    """Reads requests for one model. Raises services.serving.errors.InvalidRequest for what cannot be done."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits, draft_length: int) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._draft_length = draft_length

    def generate(self, message: target_pb2.TargetServiceGenerateRequest) -> Request:
        refuse_unsupported(message.unsupported)
        violations = Violations()
        violations.check(len(message.request_id) <= 128, "request_id", "at most 128 characters")
        mode = MODES.get(message.mode)
        violations.check(mode is not None, "mode", "MODE_AUTO, MODE_STANDARD or MODE_SPECULATIVE")
        k = message.max_draft_length
        violations.check(0 <= k <= MAX_DRAFT_LENGTH, "max_draft_length", f"in [0, {MAX_DRAFT_LENGTH}]")
        sampling = self._sampling(message.sampling, violations)
        prompt = self.prompt(message.prompt, violations)
        stop = self._stop(message.stop, len(prompt), violations)
        violations.raise_if_any()
        assert mode is not None
        return Request(
            message.request_id or secrets.token_hex(8),
            prompt,
            sampling,
            stop,
            mode,
            message.mode or common_pb2.MODE_AUTO,
            min(self._draft_length, k or self._draft_length) if mode is not Mode.STANDARD else 0,
        )

    def verify_open(self, message: target_pb2.VerifyOpen) -> Request:
        """A sequence whose guesses come from the caller; it may grow to the end of the context."""
        violations = Violations()
        violations.check(len(message.request_id) <= 128, "open.request_id", "at most 128 characters")
        sampling = self._sampling(message.sampling, violations, "open.sampling")
        prompt = self.prompt(message.prompt, violations, "open.prompt")
        violations.raise_if_any()
        stop = StopConditions(max_tokens=min(self._limits.context - len(prompt), 4096))
        name = message.request_id or secrets.token_hex(8)
        return Request(name, prompt, sampling, stop, Mode.EXTERNAL, common_pb2.MODE_SPECULATIVE, MAX_DRAFT_LENGTH)

    def prompt(self, message: common_pb2.Prompt, violations: Violations, field: str = "prompt") -> tuple[int, ...]:
        """Token ids of a prompt; empty, and a violation noted, if it is not one."""
        content = message.WhichOneof("content")
        if not violations.check(content is not None, field, "one of text, chat or token_ids must be set"):
            return ()
        try:
            tokens = self._tokens(message, violations, field)
        except (ChatTemplateError, TokenizerError) as error:
            violations.check(False, f"{field}.{content}", str(error))
            return ()
        if tokens or not violations.found:
            violations.check(len(tokens) > 0, f"{field}.{content}", "must hold at least one token")
        longest = self._limits.context - 1
        violations.check(
            len(tokens) <= longest,
            f"{field}.{content}",
            f"has {len(tokens)} tokens; at most {longest} fit, with one left for the answer",
        )
        return tuple(tokens)

    def _tokens(self, message: common_pb2.Prompt, violations: Violations, field: str) -> list[int]:
        match message.WhichOneof("content"):
            case "text":
                return self._tokenizer.encode(message.text)
            case "chat":
                turns = message.chat.messages
                if not violations.check(len(turns) > 0, f"{field}.chat.messages", "must hold at least one turn"):
                    return []
                for i, turn in enumerate(turns):
                    known = turn.role in ("system", "user", "assistant")
                    violations.check(known, f"{field}.chat.messages[{i}].role", '"system", "user" or "assistant"')
                return self._tokenizer.encode_chat([{"role": t.role, "content": t.content} for t in turns])
            case _:
                ids = list(message.token_ids.ids)
                size = self._limits.vocabulary_size
                bad = next((i for i, token in enumerate(ids) if not 0 <= token < size), None)
                violations.check(bad is None, f"{field}.token_ids.ids[{bad}]", f"in [0, {size - 1}]")
                return ids

    def _sampling(
        self, message: common_pb2.SamplingParams, violations: Violations, field: str = "sampling"
    ) -> SamplingParams:
        def number(name: str, default: float, allowed: Callable[[float], bool], range_: str) -> float:
            value = float(getattr(message, name)) if message.HasField(name) else default
            fits = math.isfinite(value) and allowed(value)
            violations.check(fits, f"{field}.{name}", f"in {range_}, got {value:g}")
            return value

        default = self._limits.verification
        verification = VERIFICATIONS.get(message.verification, default)
        known = message.verification in (common_pb2.VERIFICATION_UNSPECIFIED, *VERIFICATIONS)
        violations.check(
            known, f"{field}.verification", "VERIFICATION_TOKEN, VERIFICATION_BLOCK or VERIFICATION_COUPLED"
        )
        return SamplingParams(
            temperature=number("temperature", 0.0, lambda v: 0 <= v <= 2, "[0, 2]"),
            top_k=int(number("top_k", 0, lambda v: v >= 0, "[0, 2^31)")),
            top_p=number("top_p", 1.0, lambda v: 0 < v <= 1, "(0, 1]"),
            min_p=number("min_p", 0.0, lambda v: 0 <= v <= 1, "[0, 1]"),
            repetition_penalty=number("repetition_penalty", 1.0, lambda v: 0 < v <= 10, "(0, 10]"),
            seed=message.seed if message.HasField("seed") else secrets.randbits(63),
            verification=verification,
        )

    def _stop(self, message: common_pb2.StopConditions, prompt: int, violations: Violations) -> StopConditions:
        room = max(1, self._limits.context - prompt)
        max_tokens = message.max_tokens if message.HasField("max_tokens") else min(DEFAULT_MAX_TOKENS, room)
        violations.check(
            1 <= max_tokens <= room,
            "stop.max_tokens",
            f"in [1, {room}] after a prompt of {prompt} tokens, got {max_tokens}",
        )
        min_tokens = message.min_tokens if message.HasField("min_tokens") else 0
        violations.check(0 <= min_tokens <= max_tokens, "stop.min_tokens", "in [0, max_tokens]")
        violations.check(len(message.stop) <= 16, "stop.stop", "at most 16 strings")
        for i, string in enumerate(message.stop):
            violations.check(1 <= len(string) <= 256, f"stop.stop[{i}]", "1 to 256 characters")
        ids = list(message.stop_token_ids)
        violations.check(len(ids) <= 64, "stop.stop_token_ids", "at most 64 ids")
        size = self._limits.vocabulary_size
        for i, token in enumerate(ids):
            violations.check(0 <= token < size, f"stop.stop_token_ids[{i}]", f"in [0, {size - 1}]")
        ends = () if message.ignore_eos else self._tokenizer.eos_token_ids
        return StopConditions(max_tokens, min_tokens, tuple(message.stop), frozenset((*ids, *ends)))


def refuse_unsupported(options: common_pb2.UnsupportedOptions) -> None:
    """Raises Unsupported naming each option that is not built."""
    asked = [name for name in ("logprobs", "grammar") if options.HasField(name)]
    if options.HasField("n") and options.n != 1:
        asked.append("n")
    if asked:
        violations = [FieldViolation(f"unsupported.{name}", "is not supported yet; leave it unset") for name in asked]
        raise Unsupported("; ".join(f"{v.field} {v.description}" for v in violations), violations=violations)
