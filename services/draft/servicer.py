"""DraftService on the wire: one session with a target, on a stream that stays open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import structlog
from slipstream.v1 import common_pb2, draft_pb2, draft_pb2_grpc

from services.draft import metrics
from services.link.round import ContextUpdate, SequenceDraft
from services.link.server import Drafter, SessionServer

log = structlog.get_logger()


class CountedDrafter:
    """A drafter whose rounds are seen in the metrics."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.info = drafter.name, drafter.info
        self.columns, self.hidden_size = drafter.columns, drafter.hidden_size

    @property
    def held(self) -> int:
        return self._drafter.held

    @property
    def passes(self) -> int:
        return self._drafter.passes

    def propose(self, updates: Sequence[ContextUpdate]) -> list[SequenceDraft]:
        before = self.passes
        with metrics.ROUND_SECONDS.time():
            drafts = self._drafter.propose(updates)
        metrics.ROUNDS.inc()
        metrics.PASSES.inc(self.passes - before)
        metrics.TOKENS.inc(sum(len(d.tokens) for d in drafts))
        for draft in drafts:
            if draft.refusal:
                name = common_pb2.FallbackReason.Name(draft.refusal).removeprefix("FALLBACK_REASON_").lower()
                metrics.REFUSALS.labels(name).inc()
        metrics.SEQUENCES.set(self._drafter.held)
        return drafts

    def release(self, sequence_ids: Sequence[int]) -> None:
        self._drafter.release(sequence_ids)
        metrics.SEQUENCES.set(self._drafter.held)


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Implements draft.proto."""

    def __init__(self, drafter: Drafter, shared_memory: Path | None) -> None:
        self._drafter = CountedDrafter(drafter)
        self._sessions = SessionServer(self._drafter, shared_memory)
        metrics.ATTACHED.set_function(lambda: float(self._sessions.sessions))

    def GetInfo(
        self,
        request: draft_pb2.DraftServiceGetInfoRequest,
        context: grpc.ServicerContext,
    ) -> draft_pb2.DraftServiceGetInfoResponse:
        return self._drafter.info

    def Speculate(
        self,
        request_iterator: Iterator[draft_pb2.SpeculateRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[draft_pb2.SpeculateResponse]:
        try:
            yield from self._sessions.speculate(_until_gone(request_iterator))
        finally:
            metrics.SEQUENCES.set(self._drafter.held)


def _until_gone(requests: Iterator[draft_pb2.SpeculateRequest]) -> Iterator[draft_pb2.SpeculateRequest]:
    """The requests of a stream; a target that dies ends it like one that closes it."""
    try:
        yield from requests
    except Exception as error:
        # grpc raises a bare Exception here when the peer is gone, and hands nothing else on.
        log.debug("target gone", error=type(error).__name__)
