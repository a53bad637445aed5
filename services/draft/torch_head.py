"""The feature-fed draft in torch, for machines without the fast pass: the same guesses to rounding, slower."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.draft.feature_head import FeatureHead
from services.model.forward import BLOCK_SIZE, SequenceRows


class TorchHead:
    """A :class:`services.draft.chain.Chain` over :class:`FeatureHead`: rows in one go, attention by sequence."""

    def __init__(self, head: FeatureHead, places: int) -> None:
        """``places``: rows that the cache holds, over all blocks."""
        self._head = head
        shape = (places, head.config.num_key_value_heads, head.config.head_dim)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)

    def extend(self, rows: Sequence[SequenceRows], features: Tensor | None) -> tuple[Tensor, Tensor]:
        assert features is not None
        return self._run(rows, self._head.fuse(features))

    def step(self, rows: Sequence[SequenceRows], states: Tensor | None) -> tuple[Tensor, Tensor]:
        assert states is not None
        return self._run(rows, states)

    def _run(self, batch: Sequence[SequenceRows], states: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.tensor([token for rows in batch for token in rows.tokens])
        positions = torch.cat([torch.arange(rows.base, rows.base + len(rows.tokens)) for rows in batch])
        wanted = torch.cat([torch.arange(len(rows.tokens)) >= len(rows.tokens) - rows.logits for rows in batch])

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            parts, first = [], 0
            for rows in batch:
                chosen = slice(first, first + len(rows.tokens))
                parts.append(self._attend(rows, query[chosen], key[chosen], value[chosen]))
                first = chosen.stop
            return torch.cat(parts)

        hidden = self._head.step(self._head.enter(tokens, states), positions, attend)
        return self._head.logits(hidden[wanted]).float(), hidden

    def _attend(self, rows: SequenceRows, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one sequence's rows to its places up to each of them: its blocks are one run of places."""
        first = rows.blocks[0] * BLOCK_SIZE
        start, end = first + rows.base, first + rows.base + len(rows.tokens)
        self._keys[start:end], self._values[start:end] = key, value
        group = query.shape[1] // key.shape[1]
        keys = self._keys[first:end].repeat_interleave(group, 1)
        values = self._values[first:end].repeat_interleave(group, 1)
        scores = torch.einsum("rhd,phd->hrp", query, keys) * query.shape[-1] ** -0.5
        reach = torch.arange(end - first) <= torch.arange(rows.base, rows.base + len(rows.tokens))[:, None]
        weights = scores.masked_fill(~reach, -torch.inf).softmax(-1)
        return torch.einsum("hrp,phd->rhd", weights, values)
