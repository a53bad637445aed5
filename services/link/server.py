"""The draft's end of the link: sessions with targets, on streams that stay open, and the drafter that they share."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray
from slipstream.v1 import common_pb2, draft_pb2

from services.link import metrics
from services.link.arena import ArenaError
from services.link.pairing import AttachError
from services.link.round import ContextUpdate, RoundError, SequenceDraft
from services.link.server_session import ServerSession
from services.link.tensors import TensorError

log = structlog.get_logger()

SESSIONS = 4
"""Open at once: one target, and those that its restarts have left behind for a moment."""


class Drafter(Protocol):
    """Guesses. Called by one thread at a time; sequences of all sessions have ids of their own here."""

    name: str
    info: draft_pb2.DraftServiceGetInfoResponse
    columns: NDArray[np.int32] | None
    """Token of each column of q, ascending; None: column i is token i."""
    hidden_size: int
    """Width of the states that it wants to be fed with; 0: none."""

    @property
    def held(self) -> int:
        """Sequences held now."""
        ...

    @property
    def passes(self) -> int:
        """Passes run so far."""
        ...

    def propose(self, updates: Sequence[ContextUpdate]) -> list[SequenceDraft]:
        """Take in what was committed and guess on: one answer for each update, in order.

        Raises RoundError for an update that cannot be meant.
        """
        ...

    def release(self, sequence_ids: Sequence[int]) -> None:
        """Forget sequences; unknown ones are ignored."""
        ...


class SessionServer:
    """Serves targets on one drafter. What a session leaves behind, however it ends, is freed."""

    def __init__(self, drafter: Drafter, folder: Path | None) -> None:
        """``folder`` is the agreed shared-memory folder; None: tensors ride inline."""
        self._drafter = drafter
        self._folder = folder
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._open = 0

    @property
    def sessions(self) -> int:
        """Open now."""
        return self._open

    def speculate(self, requests: Iterator[draft_pb2.SpeculateRequest]) -> Iterator[draft_pb2.SpeculateResponse]:
        """One session, from `attach` to the end of the stream."""
        first = next(requests, None)
        if first is None:
            return
        try:
            session = self._attach(first)
        except AttachError as error:
            log.warning("target refused", detail=str(error))
            yield _failed(error.reason, str(error))
            return
        try:
            yield draft_pb2.SpeculateResponse(attached=session.attached())
            for request in requests:
                try:
                    with self._lock:
                        answer = session.handle(request)
                except (RoundError, TensorError, ArenaError) as error:
                    log.warning("request refused", session=session.id, detail=str(error))
                    yield _failed(common_pb2.FALLBACK_REASON_DRAFT_INVALID, str(error))
                    return
                except Exception:  # Its text may name a path: it stays here.
                    log.exception("round failed", session=session.id)
                    yield _failed(common_pb2.FALLBACK_REASON_DRAFT_INVALID, "the draft failed")
                    return
                if answer is not None:
                    yield draft_pb2.SpeculateResponse(proposal=answer)
        finally:
            self._end(session)

    def _attach(self, first: draft_pb2.SpeculateRequest) -> ServerSession:
        if first.WhichOneof("message") != "attach":
            raise AttachError(common_pb2.FALLBACK_REASON_DRAFT_INVALID, "the first request must be `attach`")
        with self._lock:
            if self._open >= SESSIONS:
                raise AttachError(common_pb2.FALLBACK_REASON_DRAFT_FULL, "too many targets are attached")
            session = ServerSession(first.attach, self._drafter, self._folder, self._ids)
            self._open += 1
        metrics.SESSIONS.inc()
        log.info(
            "target attached",
            session=session.id,
            target=first.attach.target.model_id,
            shared_memory=session.proposals is not None,
        )
        return session

    def _end(self, session: ServerSession) -> None:
        with self._lock:
            self._open -= 1
            session.close()
        log.info("session ended", session=session.id)


def _failed(reason: common_pb2.FallbackReason, detail: str) -> draft_pb2.SpeculateResponse:
    return draft_pb2.SpeculateResponse(failed=draft_pb2.Failed(reason=reason, detail=detail))
