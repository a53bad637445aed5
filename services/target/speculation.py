"""Who proposes, and how much: what the draft knows of each sequence, the draft length of each round, and why there is
none."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Protocol

import torch
from slipstream.v1 import common_pb2

from services.link.round import OK, ContextUpdate, LinkState, RoundResult
from services.model.sampling import SamplingParams
from services.model.sampling import Verification as Verify
from services.target.scheduler import Scheduled
from services.target.sequence import VERIFICATIONS, Mode, Sequence
from services.target.verification import Proposal

NOTHING = Proposal(())


class Link(Protocol):
    """What speculation needs of :class:`services.link.client.DraftLink`."""

    @property
    def state(self) -> LinkState: ...

    def propose(self, updates: Several[ContextUpdate], session_number: int | None = None) -> RoundResult: ...

    def release(self, sequence_ids: Several[int]) -> None: ...


@dataclass
class _Context:
    """What the draft has been told of a sequence in a session, and what it has still to be told."""

    session: int
    tokens: list[int] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)
    opened: bool = False
    refused: common_pb2.FallbackReason = OK
    """Why the draft will not take this sequence any more."""


class Speculation:
    """The target's side of proposing. With no link, every request is decoded standard."""

    def __init__(self, link: Link | None, draft_length: int, off_reason: common_pb2.FallbackReason = OK) -> None:
        """``draft_length``: guesses a round; ``off_reason`` says why there is no link."""
        self._link = link
        self._off_reason = off_reason
        self.draft_length = draft_length
        self._contexts: dict[int, _Context] = {}

    @property
    def state(self) -> LinkState:
        if self._link is None:
            return LinkState(False, self._off_reason)
        return self._link.state

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose outputs the draft wants from every pass."""
        info = self.state.info
        return () if info is None else tuple(info.feature_layers)

    def why_not(self, sequence: Sequence) -> common_pb2.FallbackReason:
        """Why a sequence that may speculate cannot now; unspecified if it can."""
        state = self.state
        if not state.ready:
            return state.reason
        context = self._contexts.get(sequence.id)
        if context is not None and context.session == state.session and context.refused != OK:
            return context.refused
        if state.info is not None and len(sequence.committed) + self.draft_length > state.info.context_limit:
            return common_pb2.FALLBACK_REASON_DRAFT_CONTEXT
        return OK

    def propose(self, scheduled: Several[Scheduled]) -> tuple[dict[int, Proposal], RoundResult]:
        """Proposals for the sequences of a pass by id, and how the round went. No call is made when nobody wants
        one."""
        state = self.state
        updates = []
        for item in scheduled:
            sequence = item.sequence
            if not _may_speculate(sequence):
                continue
            reason = self.why_not(sequence)
            if reason != OK:
                self._give_up(sequence, reason)
                continue
            update = self._update(sequence, state)
            if update is not None:
                updates.append(update)
        if not updates or self._link is None:
            return {}, RoundResult()
        result = self._link.propose(updates, state.session)
        return self._judge(scheduled, updates, result, state), result

    def _give_up(self, sequence: Sequence, reason: common_pb2.FallbackReason) -> None:
        """No proposal this round. What the draft holds is behind from now on, so it starts afresh when it can."""
        context = self._contexts.get(sequence.id)
        if context is None or context.refused == OK:
            self._forget(sequence.id)
        if not sequence.in_prefill and sequence.room > 1:
            sequence.statistics.fallbacks[reason] += 1

    def _update(self, sequence: Sequence, state: LinkState) -> ContextUpdate | None:
        """What is told to the draft, or None if there is nothing to tell and nothing to ask."""
        context = self._context(sequence, state)
        k = 0 if sequence.in_prefill else self._length(sequence, state)
        if not context.tokens or (k == 0 and not sequence.in_prefill):
            return None  # Nothing new, or the last token of an answer: not worth a call.
        sampling = sequence.request.sampling
        drawn = not sampling.greedy and sampling.verification is not Verify.COUPLED
        update = ContextUpdate(
            sequence_id=sequence.id,
            committed_length=sequence.cached + 1,  # during prefill the draft has been told a part of the prompt only
            tokens=context.tokens,
            draft_length=k,
            start=not context.opened,
            sampling=None if context.opened else _sampling_message(sampling),
            features=torch.cat(context.features).view(torch.uint16).numpy() if context.features else None,
            want_distribution=drawn,
            request_id="" if context.opened else sequence.request.request_id,
        )
        context.tokens, context.features, context.opened = [], [], True
        return update

    def _length(self, sequence: Sequence, state: LinkState) -> int:
        longest = state.info.max_draft_length if state.info is not None else 0
        return max(0, min(self.draft_length, sequence.request.draft_length, sequence.room - 1, longest))

    def _judge(
        self, scheduled: Several[Scheduled], updates: Several[ContextUpdate], result: RoundResult, state: LinkState
    ) -> dict[int, Proposal]:
        """The proposals that fit their sequences; fallbacks and stale ones are counted."""
        sequences = {item.sequence.id: item.sequence for item in scheduled}
        proposals = {}
        for update in updates:
            sequence = sequences[update.sequence_id]
            statistics = sequence.statistics
            statistics.stale += 1 if result.stale else 0
            draft = result.drafts.get(update.sequence_id)
            if draft is None:
                if update.draft_length:
                    statistics.fallbacks[result.reason] += 1
            elif draft.refusal != OK:
                self._contexts[sequence.id].refused = draft.refusal
                statistics.fallbacks[draft.refusal] += 1
            elif draft.base_length != len(sequence.committed) and draft.tokens:
                statistics.stale += 1
            elif draft.tokens:
                if state.info is not None and not sequence.drafter:
                    sequence.drafter = state.info.drafters[0]
                    sequence.drafter_fingerprint = state.info.model.weights_fingerprint
                proposals[sequence.id] = Proposal(draft.tokens, draft.q, state.columns)
        return proposals

    def note(self, sequence: Sequence, first: int, features: torch.Tensor | None) -> None:
        """Remember what the draft has not been told: the tokens behind ``first``, committed index of the pass's first
        row.

        ``features`` [kept rows, layers, hidden] bfloat16 belong to the tokens from ``first`` on; each goes with the
        token behind it.
        """
        state = self.state
        wants_features = state.info is not None and len(state.info.feature_layers) > 0
        if not state.ready or not _may_speculate(sequence) or (wants_features and features is None):
            return
        context = self._context(sequence, state)
        if not context.opened and not context.tokens:
            # A feature-fed draft starts with what is known from here on, any other with the whole sequence.
            context.tokens = [sequence.committed[first]] if wants_features else list(sequence.committed[: first + 1])
        context.tokens.extend(sequence.committed[first + 1 : sequence.cached + 1])
        if wants_features and features is not None:
            context.features.append(features)

    def release(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self._forget(sequence.id)

    def _forget(self, sequence_id: int) -> None:
        context = self._contexts.pop(sequence_id, None)
        if context is not None and context.opened and self._link is not None:
            self._link.release([sequence_id])

    def _context(self, sequence: Sequence, state: LinkState) -> _Context:
        context = self._contexts.get(sequence.id)
        if context is None or context.session != state.session:
            context = self._contexts[sequence.id] = _Context(state.session)
        return context


def _may_speculate(sequence: Sequence) -> bool:
    return sequence.request.mode in (Mode.AUTO, Mode.SPECULATIVE) and sequence.request.draft_length > 0


def _sampling_message(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        verification=VERIFICATIONS[sampling.verification],
    )
