"""A chain without a model, and a drafter on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from slipstream.v1 import common_pb2, draft_pb2

from services.draft.drafter import ChainDrafter
from services.link.round import ContextUpdate
from services.model.forward import BLOCK_SIZE, SequenceRows

VOCABULARY = 16
SAMPLED = common_pb2.SamplingParams(
    temperature=1, top_p=1, repetition_penalty=1, seed=7, verification=common_pb2.VERIFICATION_BLOCK
)
GREEDY = common_pb2.SamplingParams(top_p=1, repetition_penalty=1, verification=common_pb2.VERIFICATION_BLOCK)


class CountingChain:
    """Likes the next number best. Keeps every row by its place, so that a wrong place is seen."""

    def __init__(self, width: int = VOCABULARY, places: int = 4096) -> None:
        self.cache: list[int | None] = [None] * places
        self.logits_of: Callable[[int], np.ndarray] = self._next
        self.width = width
        self.batches: list[list[SequenceRows]] = []
        self.fed: list[torch.Tensor | None] = []
        self.states: list[torch.Tensor | None] = []

    def _next(self, token: int) -> np.ndarray:
        logits = np.zeros(self.width, np.float32)
        logits[(token + 1) % self.width] = 3
        logits[(token + 2) % self.width] = 2
        return logits

    def extend(self, rows: Sequence[SequenceRows], features: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        self.fed.append(features)
        return self._run(rows)

    def step(self, rows: Sequence[SequenceRows], states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        self.states.append(states)
        return self._run(rows)

    def _run(self, rows: Sequence[SequenceRows]) -> tuple[torch.Tensor, torch.Tensor]:
        self.batches.append(list(rows))
        logits = []
        states = []
        for sequence in rows:
            for i, token in enumerate(sequence.tokens):
                place = sequence.base + i
                self.cache[sequence.blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE] = token
                states.append(float(token))
                if i >= len(sequence.tokens) - sequence.logits:
                    logits.append(self.logits_of(token))
        stacked = np.stack(logits) if logits else np.zeros((0, self.width), np.float32)
        return torch.from_numpy(stacked), torch.tensor(states)[:, None]

    def held(self, blocks: range, length: int) -> list[int | None]:
        """What stands in a sequence's places."""
        return [self.cache[blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE] for p in range(length)]


def drafter(
    chain: CountingChain,
    columns: list[int] | None = None,
    *,
    layers: Sequence[int] = (),
    sequences: int = 3,
    context: int = 64,
) -> ChainDrafter:
    info = draft_pb2.DraftServiceGetInfoResponse(
        model=common_pb2.ModelInfo(model_id="toy", vocabulary_size=VOCABULARY, context_limit=context + 8),
        drafters=["toy"],
        max_draft_length=8,
        context_limit=context,
        max_sequences=sequences,
        feature_layers=layers,
    )
    chosen = None if columns is None else np.array(columns, np.int32)
    return ChainDrafter("toy", chain, info, chosen, 4 if layers else 0)


def start(
    sequence_id: int, tokens: Sequence[int], k: int, sampling: common_pb2.SamplingParams = GREEDY, **rest: object
) -> ContextUpdate:
    fields = {"committed_length": len(tokens), "request_id": f"request-{sequence_id}", **rest}
    return ContextUpdate(sequence_id, tokens=tokens, draft_length=k, start=True, sampling=sampling, **fields)


def then(sequence_id: int, length: int, tokens: Sequence[int], k: int, **rest: object) -> ContextUpdate:
    return ContextUpdate(sequence_id, length, tokens, k, **rest)


def features(*rows: int) -> np.ndarray:
    """[rows, 2, 4] with a number that says which row it is."""
    values = torch.tensor(rows, dtype=torch.bfloat16)[:, None, None].expand(-1, 2, 4).contiguous()
    return values.view(torch.uint16).numpy()
