"""The pass: rows in, logits out. What every implementation of it promises, and the data it takes and gives.

Two implementations exist: :mod:`services.model.kernels` (C++, any Llama-like model) and :mod:`services.model.reference`
(transformers' own model code, anything else). Both are *row-invariant*: the bits of a row's logits, features and cached
keys and values depend on that row and its context alone, never on the rows that ride beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

BLOCK_SIZE = 16
"""Tokens whose keys and values share one block of the cache."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence in a pass.

    Row ``i`` is token ``tokens[i]``. Its keys and values are written at place ``base + i``; place ``p`` lies in block
    ``blocks[p // BLOCK_SIZE]`` at offset ``p % BLOCK_SIZE``. It attends to places ``0 .. base - 1``, to its ancestors
    and to itself. As a chain (``parents`` is None) the ancestors of row ``i`` are rows ``0 .. i - 1``; in a tree
    ``parents[i]`` is the row that row ``i`` follows, or -1, and must be less than ``i``. Its position is ``base`` plus
    its depth.
    """

    tokens: Sequence[int]
    base: int
    blocks: Sequence[int]
    logits: int = 1
    """How many of the last rows want logits."""
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class PassOutput:
    logits: torch.Tensor
    """[sum of wanted logits, vocabulary], float32, in the order of sequences and rows."""
    features: torch.Tensor | None
    """[rows, wanted layers, hidden size], bfloat16; None when no layer was wanted."""


class ForwardPass(Protocol):
    """A model and its cache of keys and values. Not thread-safe: one thread calls ``run``."""

    vocabulary_size: int
    hidden_size: int
    num_layers: int
    context_limit: int
    compute_path: str
    """"fast" or "reference"."""
    compute_path_reason: str
    weight_format: str

    @property
    def cache_bytes_per_block(self) -> int:
        """Bytes of keys and values that one block of BLOCK_SIZE tokens takes over all layers."""
        ...

    def allocate_cache(self, num_blocks: int) -> None:
        """Make room for ``num_blocks`` blocks; forgets what was cached."""
        ...

    def run(self, batch: Sequence[SequenceRows], feature_layers: Sequence[int] = ()) -> PassOutput:
        """Run all rows through the model, writing their keys and values.

        ``feature_layers`` asks for outputs of layers, counted from 1 (0 is the embedding).

        Raises ValueError for a row outside its block table, a token outside the vocabulary or a position outside the
        context.
        """
        ...

    def keep(self, rows: SequenceRows, path: Sequence[int]) -> None:
        """After a tree: move keys and values of the rows of ``path`` (root first) to places ``base, base + 1, ...``.

        A chain needs no call: what lies behind the kept rows is overwritten by the next pass.
        """
        ...
