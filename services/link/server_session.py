"""One session of the draft with a target: its arenas, its sequences, and its rounds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from slipstream.v1 import common_pb2, draft_pb2

from services.link import pairing, tensors
from services.link.arena import Arena, ArenaError
from services.link.pairing import AttachError
from services.link.round import ContextUpdate, RoundError, SequenceDraft

if TYPE_CHECKING:
    from services.link.server import Drafter

log = structlog.get_logger()

LARGEST_PAYLOAD = 16 * 1024 * 1024
"""Bytes of a slot at most; what does not fit rides inline."""
FEATURE_ROWS = 768
"""Rows of features that a slot holds: chunks of prompts and a row or two for everyone else."""
MOST_SEQUENCES = 65536
"""That one target may have open: more are a leak of its own."""


class ServerSession:
    """Called by one thread at a time. Ids of sequences are the session's own: no other session can name them."""

    def __init__(self, attach: draft_pb2.Attach, drafter: Drafter, folder: Path | None, ids: Iterator[int]) -> None:
        """Raises AttachError for a target that this draft cannot ride with."""
        info = drafter.info
        _check(attach, drafter)
        self.id = secrets.token_hex(8)
        self._drafter = drafter
        self._folder = folder if attach.shared_memory else None
        self._ids = ids
        self._names: dict[int, int] = {}
        """The drafter's id of each sequence, by the target's."""
        self._vocabulary = attach.target.vocabulary_size
        self._row = (len(info.feature_layers), attach.hidden_size)
        self._rounds = 0
        width = pairing.width(attach.target, info.model, drafter.columns)
        self.proposals = self._create(info.max_sequences * info.max_draft_length * width * 4)
        self.features = self._create(FEATURE_ROWS * self._row[0] * self._row[1] * 2) if info.feature_layers else None

    def _create(self, payload: int) -> Arena | None:
        if self._folder is None:
            return None
        try:
            return Arena.create(self._folder, min(payload, LARGEST_PAYLOAD))
        except ArenaError as error:
            log.warning("no shared memory; tensors ride inline", detail=str(error))
            return None

    def attached(self) -> draft_pb2.Attached:
        """The answer to `attach`."""
        message = draft_pb2.Attached(info=self._drafter.info, session_id=self.id)
        for name, arena in (("proposals", self.proposals), ("features", self.features)):
            if arena is not None:
                i = arena.info
                getattr(message, name).CopyFrom(
                    draft_pb2.Arena(name=i.name, size=i.size, epoch=i.epoch, slots=i.slots, slot_size=i.slot_size)
                )
        if self._drafter.columns is not None:
            message.draft_vocabulary.extend(self._drafter.columns.tolist())
        return message

    def handle(self, request: draft_pb2.SpeculateRequest) -> draft_pb2.Proposal | None:
        """Raises RoundError, TensorError or ArenaError for a request that cannot be meant."""
        match request.WhichOneof("message"):
            case "propose":
                return self._propose(request.propose)
            case "release":
                self._release(request.release.sequence_ids)
            case "mapped":
                self._unlink()
                if not request.mapped.ok:
                    self._close_arenas()
            case "attach":
                raise RoundError("a session is attached once")
            case _:
                raise RoundError("a request without a message")
        return None

    def close(self) -> None:
        """Free everything that the session holds. Idempotent."""
        self._unlink()
        self._close_arenas()
        self._release(list(self._names))

    # --- a round ---

    def _propose(self, propose: draft_pb2.Propose) -> draft_pb2.Proposal:
        started, passes = time.perf_counter(), self._drafter.passes
        self._rounds += 1
        if propose.round != self._rounds:
            raise RoundError("rounds must count up by one, from 1")
        if len({context.sequence_id for context in propose.sequences}) != len(propose.sequences):
            raise RoundError("a sequence stands twice in the round")
        updates = [self._read(context) for context in propose.sequences]
        drafts = self._drafter.propose(updates)
        message = draft_pb2.Proposal(round=propose.round)
        self._describe(message, propose, drafts)
        message.draft_passes = self._drafter.passes - passes
        message.draft_time_us = int((time.perf_counter() - started) * 1e6)
        return message

    def _describe(self, message: draft_pb2.Proposal, propose: draft_pb2.Propose, drafts: list[SequenceDraft]) -> None:
        slot = None
        if self.proposals is not None and any(draft.q is not None for draft in drafts):
            slot = self.proposals.begin(propose.round)
        for context, draft in zip(propose.sequences, drafts, strict=True):
            sequence = message.sequences.add(
                sequence_id=context.sequence_id,
                base_length=draft.base_length,
                tokens=draft.tokens,
                refusal=draft.refusal,
            )
            if draft.q is not None:
                sequence.distribution.CopyFrom(tensors.write(draft.q, tensors.FLOAT32, slot))
        if slot is not None:
            slot.finish()

    def _read(self, context: draft_pb2.SequenceContext) -> ContextUpdate:
        info = self._drafter.info
        if not 0 <= context.draft_length <= info.max_draft_length:
            raise RoundError(f"draft_length must be in [0, {info.max_draft_length}]")
        if context.committed_length < len(context.tokens):
            raise RoundError("committed_length must count the tokens")
        if any(not 0 <= token < info.model.vocabulary_size for token in context.tokens):
            raise RoundError("token outside the vocabulary")
        features = None
        if context.HasField("features"):
            if not info.feature_layers:
                raise RoundError("features, which this draft does not take")
            rows = len(context.tokens) - 1 if context.start else len(context.tokens)
            features = tensors.read(context.features, tensors.BFLOAT16, (rows, *self._row), self.features)
        update = ContextUpdate(
            self._name(context),
            context.committed_length,
            list(context.tokens),
            context.draft_length,
            context.start,
            context.sampling if context.HasField("sampling") else None,
            features,
            context.want_distribution,
            context.request_id,
        )
        return replace(update, vocabulary=self._vocabulary)

    def _name(self, context: draft_pb2.SequenceContext) -> int:
        """The drafter's id of a sequence. One that was never started has one too: the drafter will refuse it."""
        name = self._names.get(context.sequence_id)
        if name is None:
            if len(self._names) >= MOST_SEQUENCES:
                raise RoundError("too many sequences are open; release those that have ended")
            name = self._names[context.sequence_id] = next(self._ids)
        return name

    def _release(self, sequence_ids: Iterable[int]) -> None:
        known = [self._names.pop(i) for i in list(sequence_ids) if i in self._names]
        self._drafter.release(known)

    def _unlink(self) -> None:
        for arena in (self.proposals, self.features):
            if arena is not None and self._folder is not None:
                arena.unlink(self._folder)

    def _close_arenas(self) -> None:
        for arena in (self.proposals, self.features):
            if arena is not None:
                arena.close()
        self.proposals = self.features = None


def _check(attach: draft_pb2.Attach, drafter: Drafter) -> None:
    invalid = common_pb2.FALLBACK_REASON_DRAFT_INVALID
    pairing.check_models(attach.target, drafter.info.model)
    if attach.target.vocabulary_size < 1:
        raise AttachError(invalid, "target.vocabulary_size must be set")
    if drafter.columns is not None and drafter.columns[-1] >= attach.target.vocabulary_size:
        raise AttachError(invalid, "the draft's vocabulary is larger than the target's")
    if drafter.hidden_size and attach.hidden_size != drafter.hidden_size:
        raise AttachError(
            invalid,
            f"the draft wants hidden states of {drafter.hidden_size} values, the target's have {attach.hidden_size}",
        )
