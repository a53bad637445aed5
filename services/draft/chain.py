"""What guesses one token further each step: the mathematics of a drafter, without the bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from services.model.forward import SequenceRows

Output = tuple[torch.Tensor, torch.Tensor | None]
"""Logits, and states to go on from."""


class Chain(Protocol):
    """A whole model (:mod:`services.draft.model_chain`), or one layer fed with the target's states
    (:mod:`services.draft.fast_head`, and :mod:`services.draft.torch_head` without the fast pass).

    Rows are those of :mod:`services.model.forward`; the blocks of a sequence follow each other.
    """

    def extend(self, rows: Sequence[SequenceRows], features: torch.Tensor | None) -> Output:
        """Take in committed tokens, with features [rows, layers, hidden] bfloat16 where the chain is fed with them.

        Returns logits [wanted rows, columns] float32, and the state of each row [rows, ...] if a chain goes on from it.
        """
        ...

    def step(self, rows: Sequence[SequenceRows], states: torch.Tensor | None) -> Output:
        """One guess further: a row for each chain, its last guess, with the state that made that guess."""
        ...
