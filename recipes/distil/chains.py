"""Chains of guesses from many places of known text at once, with attention exactly as at run time.

A chain that starts at pair t sees, at each of its steps, the keys of the true pairs up to t and those that its own
earlier steps made from its own outputs: never a true state behind t, which the target has not computed yet when the
draft guesses (training-time test of EAGLE-3, harmonised context of HASS).
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.draft.feature_head import FeatureHead


class ChainAttention:
    """Attention of the chains of one step after another.

    ``keys`` and ``values`` [B, T, kv heads, head_dim] are those of the true pairs, ``starts`` [B, P] the chains' first
    pairs. Called once a step, in order, by :meth:`FeatureHead.step` on rows [B, P].
    """

    def __init__(self, keys: Tensor, values: Tensor, starts: Tensor) -> None:
        self.keys = keys.permute(0, 2, 3, 1)
        self.values = values.transpose(1, 2)
        places = torch.arange(keys.shape[1])
        hidden = places > starts.unsqueeze(-1)
        self.mask = torch.zeros(hidden.shape, dtype=keys.dtype).masked_fill(hidden, float("-inf"))
        self.own: list[tuple[Tensor, Tensor]] = []
        self.first = True

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query [B, P, heads, head_dim] to the same shape. The first step's own pair is among the true ones."""
        if not self.first:
            self.own.append((key, value))
        self.first = False
        batch, chains, heads, size = query.shape
        kv_heads, groups, places = key.shape[2], heads // key.shape[2], self.keys.shape[-1]
        grouped = query.view(batch, chains, kv_heads, groups, size) * size**-0.5
        rows = grouped.transpose(1, 2).reshape(batch, kv_heads, chains * groups, size)
        scores = (rows @ self.keys).view(batch, kv_heads, chains, groups, places)
        scores = scores + self.mask[:, None, :, None, :]
        own = [(grouped * k.unsqueeze(3)).sum(-1).transpose(1, 2).unsqueeze(-1) for k, _ in self.own]
        weights = torch.cat([scores, *(score.to(scores.dtype) for score in own)], -1).softmax(-1).to(value.dtype)
        true = weights[..., :places].reshape(batch, kv_heads, chains * groups, places) @ self.values
        mixed = true.view(batch, kv_heads, chains, groups, size)
        for i, (_, v) in enumerate(self.own):
            mixed = mixed + weights[..., places + i, None] * v.transpose(1, 2).unsqueeze(3)
        return mixed.transpose(1, 2).reshape(batch, chains, heads, size)

    def keep(self, chosen: Tensor) -> None:
        """Go on with the ``chosen`` [B, P'] chains alone."""
        self.mask = pick(self.mask, chosen)
        self.own = [(pick(k, chosen), pick(v, chosen)) for k, v in self.own]


def pick(rows: Tensor, chosen: Tensor) -> Tensor:
    """``rows`` [B, P, ...] at ``chosen`` [B, P'], as [B, P', ...]."""
    return rows[torch.arange(len(rows)).unsqueeze(-1), chosen]


class Chains:
    """The draft on known text: its true pairs, and chains that start at some of them.

    ``tokens`` [B, T + 1] and ``features`` [B, T, layers, D]: pair t is (features[t], tokens[t + 1]).
    """

    def __init__(self, draft: FeatureHead, tokens: Tensor, features: Tensor, starts: Tensor) -> None:
        self.draft, self.starts = draft, starts
        entered = draft.enter(tokens[:, 1:], draft.fuse(features))
        positions = torch.arange(entered.shape[1]).expand(entered.shape[:2])
        self.attention = ChainAttention(*draft.keys_values(entered, positions), starts)
        self.entered = entered.gather(1, starts.unsqueeze(-1).expand(-1, -1, entered.shape[-1]))
        self.depth = 0

    def first(self) -> Tensor:
        """h [B, P, D] of the first step, which guesses tokens[start + 2]."""
        return self._step(self.entered)

    def next(self, h: Tensor, tokens: Tensor) -> Tensor:
        """h [B, P, D] of the next step, from the last one's h and the ``tokens`` [B, P] that the chain goes on with."""
        return self._step(self.draft.enter(tokens, h))

    def keep(self, chosen: Tensor) -> None:
        """Go on with the ``chosen`` [B, P'] of the chains alone; h must be picked alike."""
        self.starts = pick(self.starts, chosen)
        self.attention.keep(chosen)

    def _step(self, entered: Tensor) -> Tensor:
        h = self.draft.step(entered, self.starts + self.depth, self.attention)
        self.depth += 1
        return h
