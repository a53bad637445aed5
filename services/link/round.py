"""What the target's engine hands to the link in a round, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from slipstream.v1 import common_pb2, draft_pb2

OK = common_pb2.FALLBACK_REASON_UNSPECIFIED
_KNOWN = frozenset(common_pb2.FallbackReason.values())


def known_reason(sent: common_pb2.FallbackReason) -> common_pb2.FallbackReason:
    """A reason from a message. One without a name here counts as DRAFT_INVALID: everything behind the link names it."""
    return sent if sent in _KNOWN else common_pb2.FALLBACK_REASON_DRAFT_INVALID


class RoundError(Exception):
    """A message that the other side cannot mean. The text names no path, no address."""


@dataclass(frozen=True, slots=True)
class ContextUpdate:
    """What the draft must know of one sequence to go on with it; the fields are draft.proto's."""

    sequence_id: int
    committed_length: int
    tokens: Sequence[int]
    draft_length: int
    start: bool = False
    sampling: common_pb2.SamplingParams | None = None
    features: NDArray[np.uint16] | None = None
    """[rows, layers, hidden], bfloat16 by its bits."""
    want_distribution: bool = False
    request_id: str = ""
    vocabulary: int = 0
    """Tokens of the target's vocabulary: guesses stay below it. 0: no limit. Set by the draft's end."""

    def then(self, later: ContextUpdate) -> ContextUpdate:
        """This update and the next one of the same sequence as one, for a draft that was not told this one."""
        if later.start:
            return later
        parts = [u.features for u in (self, later) if u.features is not None]
        return replace(
            later,
            tokens=[*self.tokens, *later.tokens],
            start=self.start,
            sampling=self.sampling,
            features=np.concatenate(parts) if parts else None,
            request_id=self.request_id,
        )


@dataclass(frozen=True, slots=True)
class SequenceDraft:
    """Guesses for one sequence."""

    base_length: int
    tokens: list[int]
    q: NDArray[np.float32] | None
    """[guesses, columns]; None for a deterministic draft."""
    refusal: common_pb2.FallbackReason = OK


@dataclass(frozen=True, slots=True)
class RoundResult:
    drafts: dict[int, SequenceDraft] = field(default_factory=dict)
    reason: common_pb2.FallbackReason = OK
    """Why there are no drafts; unspecified if the draft answered."""
    draft_time_s: float = 0.0
    """The draft's own computing."""
    link_time_s: float = 0.0
    """The rest of the wait."""
    draft_passes: int = 0
    stale: int = 0
    """Proposals that came too late for their round and were dropped now."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """Whether a draft rides along, and what it is."""

    ready: bool
    reason: common_pb2.FallbackReason
    """Why not; unspecified if ready."""
    session: int = 0
    """Changes with every session: sequences must be opened anew."""
    info: draft_pb2.DraftServiceGetInfoResponse | None = None
    columns: NDArray[np.int64] | None = None
    """Token of each column of a q; None: column i is token i."""
