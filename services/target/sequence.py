"""One request on its way through the engine."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.v1 import common_pb2

from services.model.sampling import History, Noise, SamplingParams, Verification
from services.target.statistics import Statistics
from services.target.stopping import Answer, Finish, StopConditions
from services.target.verification import Proposal, Verdict

VERIFICATIONS = {
    Verification.TOKEN: common_pb2.VERIFICATION_TOKEN,
    Verification.BLOCK: common_pb2.VERIFICATION_BLOCK,
    Verification.COUPLED: common_pb2.VERIFICATION_COUPLED,
}


class Mode(enum.Enum):
    """What a request asks for."""

    AUTO = "auto"
    STANDARD = "standard"
    SPECULATIVE = "speculative"
    EXTERNAL = "external"
    """The caller proposes (TargetService.Verify)."""


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request: everything in it can be done."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    mode: Mode
    requested_mode: common_pb2.Mode
    draft_length: int
    """At most so many guesses a round; 0 is standard decoding."""

    @property
    def limit(self) -> int:
        """Tokens that the cache must hold at most."""
        return len(self.prompt) + self.stop.max_tokens


@dataclass(frozen=True, slots=True)
class Started:
    active_mode: common_pb2.Mode
    mode_reason: str


@dataclass(frozen=True, slots=True)
class Emitted:
    """The tokens of one round."""

    tokens: list[int]
    text: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a caller's proposal; the first token has no proposal."""

    verdict: Verdict
    drafted: int
    committed_length: int


@dataclass(frozen=True, slots=True)
class Finished:
    reason: Finish
    error: BaseException | None
    prompt_tokens: int
    completion_tokens: int
    tag: common_pb2.OptimizationTag


Event = Started | Emitted | Judged | Finished


@dataclass(eq=False)
class Sequence:
    """State of a request. ``committed`` is prompt and answer; keys and values of its first ``cached`` tokens are in
    ``blocks``.

    Between rounds all committed tokens but the last are cached, once the prompt has been run.
    """

    id: int
    request: Request
    answer: Answer
    emit: Callable[[Event], None]
    committed: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    statistics: Statistics = field(default_factory=Statistics)
    history: History = field(default_factory=History)
    mode_reason: str = ""
    drafter: str = ""
    drafter_fingerprint: str = ""
    arrived: float = field(default_factory=time.perf_counter)
    started: bool = False
    proposal: Proposal | None = None
    """What the caller of Verify proposes next."""

    def __post_init__(self) -> None:
        self.committed.extend(self.request.prompt)
        if self.request.sampling.penalised:
            self.history = History(self.request.prompt)
        self.noise = Noise(self.request.sampling.seed)

    @property
    def waiting_rows(self) -> int:
        """Committed tokens whose keys and values are not cached."""
        return len(self.committed) - self.cached

    @property
    def in_prefill(self) -> bool:
        return len(self.committed) == len(self.request.prompt)

    @property
    def ready(self) -> bool:
        """Whether there is something to run: a caller of Verify may be thinking."""
        return self.request.mode is not Mode.EXTERNAL or self.in_prefill or self.proposal is not None

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.stop.max_tokens - self.answer.count

    def commit(self, tokens: list[int]) -> None:
        """Append emitted tokens; all before the last are cached by the pass that judged them."""
        self.committed.extend(tokens)
        self.cached = len(self.committed) - 1
        if self.request.sampling.penalised:
            for token in tokens:
                self.history.push(token)

    def tag(self) -> common_pb2.OptimizationTag:
        return self.statistics.tag(
            self.request.requested_mode,
            self.mode_reason,
            self.drafter,
            self.drafter_fingerprint,
            VERIFICATIONS[self.request.sampling.verification],
        )
