"""One session of the target with the draft: a stream, its arenas, and the round that is on its way."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import structlog
from numpy.typing import NDArray
from slipstream.v1 import common_pb2, draft_pb2, draft_pb2_grpc

from services.link import pairing, tensors
from services.link.arena import Arena, ArenaError, ArenaInfo, SlotWriter
from services.link.pairing import AttachError
from services.link.round import ContextUpdate, RoundError, known_reason

log = structlog.get_logger()

ATTACH_TIMEOUT_S = 10.0

_numbers = itertools.count(1)
_Requests = queue.SimpleQueue[draft_pb2.SpeculateRequest | None]


@dataclass(frozen=True, slots=True)
class Offer:
    """What the target brings to every session."""

    target: common_pb2.ModelInfo
    hidden_size: int
    folder: Path | None
    """Where arenas lie; None: tensors ride inline."""
    num_layers: int | None = None
    """Layers of the target that a draft may ask for; None: not known here."""


@dataclass(slots=True)
class Outstanding:
    """A round that was sent and is not answered yet."""

    number: int
    updates: Sequence[ContextUpdate]
    since: float
    given_up: bool = False
    """The budget ran out: what comes will be dropped, and nobody waits for it any more."""

    @property
    def asked(self) -> bool:
        """Whether guesses were asked for; else it only told the draft what was committed."""
        return any(update.draft_length for update in self.updates)


@dataclass(eq=False)
class Session:
    """An attached stream. One thread receives, the engine's thread sends; either may close."""

    call: Any
    requests: _Requests
    info: draft_pb2.DraftServiceGetInfoResponse
    columns: NDArray[np.int64] | None
    width: int
    """Columns of a q."""
    vocabulary: int
    """Tokens of the target's vocabulary."""
    proposals: Arena | None = None
    features: Arena | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    answers: queue.SimpleQueue[draft_pb2.Proposal | None] = field(default_factory=queue.SimpleQueue)
    """What was received; None is the end of the stream."""
    outstanding: Outstanding | None = None
    untold: dict[int, ContextUpdate] = field(default_factory=dict)
    """What the draft could not be told yet, by sequence: an earlier round was still on its way."""
    breaches: int = 0
    """Rounds in a row that broke the budget."""
    answered: int = 0
    """Rounds answered in time."""
    failure: common_pb2.FallbackReason = common_pb2.FALLBACK_REASON_DRAFT_ABSENT
    """Why there will be no draft once this session is over."""
    _rounds: int = 0

    @property
    def shared_memory(self) -> bool:
        return self.proposals is not None or self.features is not None

    def receive_all(self) -> None:
        """Hand answers over until the stream ends; for the link's thread."""
        try:
            for response in self.call:
                if response.WhichOneof("message") != "proposal":
                    self.failure = known_reason(response.failed.reason) or common_pb2.FALLBACK_REASON_DRAFT_INVALID
                    log.warning("draft failed", session=self.number, detail=response.failed.detail[:200])
                    return
                if not self.answers.empty():  # At most one round is on its way; more would only pile up here.
                    self.failure = common_pb2.FALLBACK_REASON_DRAFT_INVALID
                    log.warning("draft failed", session=self.number, detail="answers that nobody asked for")
                    return
                self.answers.put(response.proposal)
        except grpc.RpcError:
            pass
        finally:
            self.answers.put(None)

    def send(self, updates: Sequence[ContextUpdate]) -> None:
        """Send a round. Raises ArenaError if the session was closed meanwhile."""
        self._rounds += 1
        slot = None
        if self.features is not None and any(update.features is not None for update in updates):
            slot = self.features.begin(self._rounds)
        message = draft_pb2.Propose(round=self._rounds)
        for update in updates:
            _describe(update, message.sequences.add(), slot)
        if slot is not None:
            slot.finish()
        self.outstanding = Outstanding(self._rounds, updates, time.monotonic())
        self.requests.put(draft_pb2.SpeculateRequest(propose=message))

    def receive(self, timeout_s: float) -> draft_pb2.Proposal | None:
        """The answer to the outstanding round, or None if it does not come in time.

        Raises RoundError for an answer to something else, EOFError when the stream has ended.
        """
        try:
            answer = self.answers.get(timeout=timeout_s) if timeout_s > 0 else self.answers.get_nowait()
        except queue.Empty:
            return None
        if answer is None:
            self.answers.put(None)  # For whoever asks next.
            raise EOFError
        outstanding, self.outstanding = self.outstanding, None
        if outstanding is None or answer.round != outstanding.number:
            raise RoundError("an answer to another round than the one that was sent")
        return answer

    def release(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self.untold.pop(sequence_id, None)
        self.requests.put(draft_pb2.SpeculateRequest(release=draft_pb2.Release(sequence_ids=sequence_ids)))

    def close(self) -> None:
        """Idempotent; from any thread."""
        self.requests.put(None)
        self.call.cancel()
        for arena in (self.proposals, self.features):
            if arena is not None:
                arena.close()


def _describe(update: ContextUpdate, context: draft_pb2.SequenceContext, slot: SlotWriter | None) -> None:
    context.sequence_id = update.sequence_id
    context.committed_length = update.committed_length
    context.tokens.extend(update.tokens)
    context.draft_length = update.draft_length
    context.start = update.start
    context.want_distribution = update.want_distribution
    context.request_id = update.request_id
    if update.sampling is not None:
        context.sampling.CopyFrom(update.sampling)
    if update.features is not None:
        context.features.CopyFrom(tensors.write(update.features, tensors.BFLOAT16, slot))


def attach(channel: grpc.Channel, offer: Offer) -> Session:
    """Open a stream and agree on it.

    Raises AttachError for a draft that does not fit, grpc.RpcError if there is none.
    """
    stub = draft_pb2_grpc.DraftServiceStub(channel)
    info = stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest(), timeout=ATTACH_TIMEOUT_S)
    pairing.check_models(offer.target, info.model)
    requests: _Requests = queue.SimpleQueue()
    call: Any = stub.Speculate(_until_none(requests))
    try:
        return _agree(call, requests, offer)
    except BaseException:
        requests.put(None)  # Ends gRPC's thread that waits for requests.
        call.cancel()
        raise


def _agree(call: Any, requests: _Requests, offer: Offer) -> Session:
    message = draft_pb2.Attach(
        target=offer.target, shared_memory=offer.folder is not None, hidden_size=offer.hidden_size
    )
    requests.put(draft_pb2.SpeculateRequest(attach=message))
    attached = _first_answer(call)
    # GetInfo may have been answered by the draft before this one.
    pairing.check_models(offer.target, attached.info.model)
    pairing.check_draft(attached.info, offer.num_layers)
    columns = pairing.read_columns(attached, offer.target.vocabulary_size)
    arenas = _open_arenas(attached, offer.folder)
    requests.put(draft_pb2.SpeculateRequest(mapped=draft_pb2.Mapped(ok=arenas is not None)))
    proposals, features = arenas or (None, None)
    width = pairing.width(offer.target, attached.info.model, columns)
    vocabulary = offer.target.vocabulary_size
    return Session(call, requests, attached.info, columns, width, vocabulary, proposals, features)


def _first_answer(call: Any) -> draft_pb2.Attached:
    watchdog = threading.Timer(ATTACH_TIMEOUT_S, call.cancel)
    watchdog.daemon = True
    watchdog.start()
    try:
        first = next(call)
    except StopIteration:
        raise AttachError(common_pb2.FALLBACK_REASON_DRAFT_LOST, "the draft closed the stream at once") from None
    finally:
        watchdog.cancel()
    if first.WhichOneof("message") == "failed":
        reason = known_reason(first.failed.reason) or common_pb2.FALLBACK_REASON_DRAFT_INVALID
        raise AttachError(reason, first.failed.detail[:200])
    if first.WhichOneof("message") != "attached":
        raise AttachError(common_pb2.FALLBACK_REASON_DRAFT_INVALID, "the first answer was not `attached`")
    attached: draft_pb2.Attached = first.attached
    return attached


def _open_arenas(attached: draft_pb2.Attached, folder: Path | None) -> tuple[Arena | None, Arena | None] | None:
    """Both arenas, as far as there are any; None if one cannot be used."""
    opened: list[Arena | None] = []
    try:
        for name in ("proposals", "features"):
            opened.append(_open_arena(getattr(attached, name), folder) if attached.HasField(name) and folder else None)
    except ArenaError as error:
        log.warning("no shared memory with the draft; tensors ride inline", detail=str(error))
        for arena in opened:
            if arena is not None:
                arena.close()
        return None
    return opened[0], opened[1]


def _open_arena(message: draft_pb2.Arena, folder: Path) -> Arena:
    info = ArenaInfo(message.name, message.epoch, message.slots, message.slot_size)
    if message.size != info.size:
        raise ArenaError("the arena's slots do not fill it")
    return Arena.open(folder, info)


def _until_none(requests: _Requests) -> Iterator[draft_pb2.SpeculateRequest]:
    while (request := requests.get()) is not None:
        yield request
