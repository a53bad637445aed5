"""Chains of guesses for many sequences at once: what is held of each, and the rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from slipstream.v1 import common_pb2, draft_pb2

from services.draft.chain import Chain
from services.draft.guessing import Guessing, Held, choose, read_sampling
from services.link.round import OK, ContextUpdate, RoundError, SequenceDraft
from services.model.forward import BLOCK_SIZE, SequenceRows
from services.model.sampling import DistributionError, Ints

log = structlog.get_logger()


class ChainDrafter:
    """Implements :class:`services.link.server.Drafter` on a :class:`Chain`."""

    def __init__(
        self,
        name: str,
        chain: Chain,
        info: draft_pb2.DraftServiceGetInfoResponse,
        columns: NDArray[np.int32] | None,
        hidden_size: int = 0,
    ) -> None:
        """``columns`` names the token of each column of the chain's logits, ascending (None: column i is token i);
        ``hidden_size`` is the width of the target's states, for a chain that is fed with them.

        Each of ``info.max_sequences`` sequences has room for ``info.context_limit`` tokens and one round of guesses.
        """
        self.name = name
        self.info = info
        self.columns = columns
        self.hidden_size = hidden_size
        self.passes = 0
        self._chain = chain
        self._ids: Ints | None = None if columns is None else columns.astype(np.int64)
        self._held: dict[int, Held] = {}
        self._refused: dict[int, common_pb2.FallbackReason] = {}
        """Sequences that have no place, and why: until they are started again or released."""
        per_sequence = blocks_per_sequence(info)
        self._free = [range(i * per_sequence, (i + 1) * per_sequence) for i in range(info.max_sequences)]

    @property
    def held(self) -> int:
        """Sequences held now."""
        return len(self._held)

    def release(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._free_place(sequence_id)
            self._refused.pop(sequence_id, None)

    @torch.inference_mode()
    def propose(self, updates: Sequence[ContextUpdate]) -> list[SequenceDraft]:
        """One round. A sequence that cannot be held is refused by itself, the others go on.

        Raises services.link.round.RoundError for an update that cannot be meant.
        """
        guessing: dict[int, Guessing] = {}
        for update in updates:
            held = self._take_in(update)
            if held is not None:
                guessing[update.sequence_id] = Guessing(held, update)
        self._guess(list(guessing.values()))
        return [self._answer(update, guessing.get(update.sequence_id)) for update in updates]

    # --- places ---

    def _take_in(self, update: ContextUpdate) -> Held | None:
        """The sequence's place, with the round's tokens counted; None if it is refused."""
        if update.start:
            self._start(update)
        held = self._held.get(update.sequence_id)
        if held is None:
            self._refused.setdefault(update.sequence_id, common_pb2.FALLBACK_REASON_DRAFT_INVALID)
            return None
        held.committed += len(update.tokens)
        if held.committed != update.committed_length:
            self._refuse(update.sequence_id, common_pb2.FALLBACK_REASON_DRAFT_INVALID)
            return None
        if held.length + len(update.tokens) + update.draft_length > self.info.context_limit:
            self._refuse(update.sequence_id, common_pb2.FALLBACK_REASON_DRAFT_CONTEXT)
            return None
        if held.sampling.penalised:
            for token in update.tokens:
                held.history.push(token)
        return held

    def _start(self, update: ContextUpdate) -> None:
        self.release([update.sequence_id])
        sampling = read_sampling(update.sampling)
        if not self._free:
            log.info("sequence refused", request_id=update.request_id, reason="draft_full")
            self._refused[update.sequence_id] = common_pb2.FALLBACK_REASON_DRAFT_FULL
            return
        committed = update.committed_length - len(update.tokens)
        self._held[update.sequence_id] = Held(self._free.pop(), sampling, update.request_id, committed)
        log.info("sequence started", request_id=update.request_id, from_token=committed)

    def _refuse(self, sequence_id: int, reason: common_pb2.FallbackReason) -> None:
        """Give the place up, and remember why."""
        held = self._held[sequence_id]
        name = common_pb2.FallbackReason.Name(reason).removeprefix("FALLBACK_REASON_").lower()
        log.info("sequence refused", request_id=held.request_id, reason=name, committed=held.committed)
        self._free_place(sequence_id)
        self._refused[sequence_id] = reason

    def _free_place(self, sequence_id: int) -> None:
        held = self._held.pop(sequence_id, None)
        if held is not None:
            self._free.append(held.blocks)
            log.info("sequence over", request_id=held.request_id, rounds=held.rounds, proposed=held.proposed)

    # --- guesses ---

    def _guess(self, guessing: list[Guessing]) -> None:
        """Committed tokens first, all sequences in one pass; then a pass for each further guess."""
        fed = [(g, tokens) for g in guessing if (tokens := self._new_tokens(g))]
        if not fed:
            return
        features = self._features([g for g, _ in fed])
        rows = [
            SequenceRows(tokens, g.held.length, g.held.blocks, 1 if g.update.draft_length else 0) for g, tokens in fed
        ]
        logits, states = self._chain.extend(rows, features)
        self.passes += 1
        for g, tokens in fed:
            g.held.length += len(tokens)
        ends = np.cumsum([len(row.tokens) for row in rows]) - 1
        asked = [g for g, _ in fed if g.update.draft_length]
        states = (
            None if states is None else states[[int(end) for end, row in zip(ends, rows, strict=True) if row.logits]]
        )
        self._choose(asked, logits)
        while keep := [i for i, g in enumerate(asked) if g.more]:
            asked = [asked[i] for i in keep]
            step = [SequenceRows([g.tokens[-1]], g.held.length + len(g.tokens) - 1, g.held.blocks) for g in asked]
            logits, states = self._chain.step(step, None if states is None else states[keep])
            self.passes += 1
            self._choose(asked, logits)

    def _choose(self, asked: list[Guessing], logits: torch.Tensor) -> None:
        for g, row in zip(asked, logits.numpy(), strict=True):
            try:
                choose(g, row, self._ids, self.info.model.vocabulary_size)
            except DistributionError as error:
                log.warning("no guess", request_id=g.held.request_id, detail=str(error))
                g.over = True

    def _new_tokens(self, g: Guessing) -> Sequence[int]:
        """The tokens to take in. A chain that is fed with states takes each with the state before it: not the first."""
        tokens = g.update.tokens
        if not self.info.feature_layers:
            return tokens
        if g.update.start:
            tokens = tokens[1:]
        if tokens and g.update.features is None:
            raise RoundError("features are missing")
        return tokens

    def _features(self, guessing: list[Guessing]) -> torch.Tensor | None:
        if not self.info.feature_layers:
            return None
        # A copy: what came out of a message cannot be written to, and torch warns of that.
        bits = np.concatenate([g.update.features for g in guessing if g.update.features is not None])
        return torch.from_numpy(bits).view(torch.bfloat16)

    def _answer(self, update: ContextUpdate, g: Guessing | None) -> SequenceDraft:
        if g is None:
            return SequenceDraft(update.committed_length, [], None, self._refused.get(update.sequence_id, OK))
        g.held.rounds += 1 if update.draft_length else 0
        g.held.proposed += len(g.tokens)
        q = np.stack(g.q) if g.q and update.want_distribution else None
        return SequenceDraft(update.committed_length, g.tokens, q)


def blocks_per_sequence(info: draft_pb2.DraftServiceGetInfoResponse) -> int:
    """Blocks that one sequence's context and a round of guesses take."""
    return -(-(info.context_limit + info.max_draft_length) // BLOCK_SIZE)
