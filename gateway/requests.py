"""What the gateway refuses itself, before a request waits for anything: every range that common.proto states.

What needs the model (token counts, vocabulary, context) is checked by the target, whose answer names the field as well.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Callable, Iterator

from google.protobuf.message import Message
from slipstream.v1 import common_pb2, gateway_pb2, target_pb2

from services.serving.errors import FieldViolation, InvalidRequest, Unsupported

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ROLES = ("system", "user", "assistant")
MAX_DRAFT_LENGTH = 16
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS = 16, 256, 64
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("[0, 2]", lambda v: 0 <= v <= 2),
    "top_k": ("[0, 2^31)", lambda v: v >= 0),
    "top_p": ("(0, 1]", lambda v: 0 < v <= 1),
    "min_p": ("[0, 1]", lambda v: 0 <= v <= 1),
    "repetition_penalty": ("(0, 10]", lambda v: 0 < v <= 10),
}
MAX_VIOLATIONS = 16
"""Named in one answer: they travel in trailing metadata, which takes 8 KiB."""
Violations = Iterator[FieldViolation]


def accepted_id(asked: str) -> str:
    """The caller's request id if it is one; otherwise a new one, which also names what is refused in the logs."""
    return asked if REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex


def check_size(message: Message, limit: int) -> None:
    """Raises InvalidRequest for a message over the limit."""
    size = message.ByteSize()
    if size > limit:
        raise InvalidRequest.of([FieldViolation("prompt", f"the request has {size} bytes, at most {limit} are taken")])


def to_target(
    message: gateway_pb2.GatewayServiceGenerateRequest, request_id: str
) -> target_pb2.TargetServiceGenerateRequest:
    """The request as the target takes it. Raises InvalidRequest or Unsupported, naming each bad field."""
    refuse_unsupported(message.unsupported)
    _raise_if_any(*_identity(message), *_prompt(message.prompt), *_sampling(message.sampling), *_stop(message.stop))
    return target_pb2.TargetServiceGenerateRequest(
        request_id=request_id,
        prompt=message.prompt,
        sampling=message.sampling,
        stop=message.stop,
        mode=message.mode or common_pb2.MODE_AUTO,
        max_draft_length=message.max_draft_length,
    )


def check_count(message: gateway_pb2.CountTokensRequest) -> None:
    """Raises InvalidRequest naming each bad field."""
    _raise_if_any(*_prompt(message.prompt))


def refuse_unsupported(options: common_pb2.UnsupportedOptions) -> None:
    """Raises Unsupported naming each option that is not built."""
    asked = [name for name in ("logprobs", "grammar") if options.HasField(name)]
    if options.HasField("n") and options.n != 1:
        asked.append("n")
    if asked:
        violations = [FieldViolation(f"unsupported.{name}", "is not supported yet; leave it unset") for name in asked]
        raise Unsupported("; ".join(f"{v.field} {v.description}" for v in violations), violations=violations)


def _raise_if_any(*violations: FieldViolation) -> None:
    if violations:
        raise InvalidRequest.of(violations[:MAX_VIOLATIONS])


def _identity(message: gateway_pb2.GatewayServiceGenerateRequest) -> Violations:
    if message.request_id and not REQUEST_ID.fullmatch(message.request_id):
        yield FieldViolation("request_id", "1 to 128 characters of A-Z a-z 0-9 . _ : -")
    if message.mode not in common_pb2.Mode.values():
        yield FieldViolation("mode", "MODE_AUTO, MODE_STANDARD or MODE_SPECULATIVE")
    if not 0 <= message.max_draft_length <= MAX_DRAFT_LENGTH:
        yield FieldViolation("max_draft_length", f"in [0, {MAX_DRAFT_LENGTH}], got {message.max_draft_length}")


def _prompt(prompt: common_pb2.Prompt) -> Violations:
    match prompt.WhichOneof("content"):
        case "text":
            if not prompt.text:
                yield FieldViolation("prompt.text", "must not be empty")
        case "chat":
            if not prompt.chat.messages:
                yield FieldViolation("prompt.chat.messages", "must hold at least one turn")
            for i, turn in enumerate(prompt.chat.messages):
                if turn.role not in ROLES:
                    yield FieldViolation(f"prompt.chat.messages[{i}].role", '"system", "user" or "assistant"')
        case "token_ids":
            ids = prompt.token_ids.ids
            if not ids:
                yield FieldViolation("prompt.token_ids", "must hold at least one token")
            elif min(ids) < 0:
                i = next(i for i, token in enumerate(ids) if token < 0)
                yield FieldViolation(f"prompt.token_ids.ids[{i}]", f"must not be negative, got {ids[i]}")
        case _:
            yield FieldViolation("prompt", "one of text, chat or token_ids must be set")


def _sampling(sampling: common_pb2.SamplingParams) -> Violations:
    for name, (allowed, fits) in NUMBERS.items():
        value = getattr(sampling, name)
        if sampling.HasField(name) and not (math.isfinite(value) and fits(value)):
            yield FieldViolation(f"sampling.{name}", f"in {allowed}, got {value:g}")
    if sampling.verification not in common_pb2.Verification.values():
        yield FieldViolation("sampling.verification", "VERIFICATION_TOKEN, VERIFICATION_BLOCK or VERIFICATION_COUPLED")


def _stop(stop: common_pb2.StopConditions) -> Violations:
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        yield FieldViolation("stop.max_tokens", f"in [1, context limit], got {stop.max_tokens}")
    if stop.min_tokens < 0 or (stop.HasField("max_tokens") and stop.min_tokens > max(stop.max_tokens, 0)):
        yield FieldViolation("stop.min_tokens", f"in [0, max_tokens], got {stop.min_tokens}")
    if len(stop.stop) > MAX_STOP_STRINGS:
        yield FieldViolation("stop.stop", f"at most {MAX_STOP_STRINGS} strings, got {len(stop.stop)}")
    for i, string in enumerate(stop.stop[:MAX_STOP_STRINGS]):
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            yield FieldViolation(f"stop.stop[{i}]", f"1 to {MAX_STOP_CHARACTERS} characters, got {len(string)}")
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation("stop.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(stop.stop_token_ids)}")
    for i, token in enumerate(stop.stop_token_ids[:MAX_STOP_TOKEN_IDS]):
        if token < 0:
            yield FieldViolation(f"stop.stop_token_ids[{i}]", f"must not be negative, got {token}")
