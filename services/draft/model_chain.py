"""A whole model as draft: any that shares the target's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.model.forward import ForwardPass, SequenceRows


class ModelChain:
    """:class:`services.draft.drafter.Chain` on a pass of its own. It needs tokens only."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        self._pass = forward_pass

    def extend(self, rows: Sequence[SequenceRows], features: torch.Tensor | None) -> tuple[torch.Tensor, None]:  # noqa: ARG002
        return self._pass.run(rows).logits, None

    def step(self, rows: Sequence[SequenceRows], states: torch.Tensor | None) -> tuple[torch.Tensor, None]:  # noqa: ARG002
        return self._pass.run(rows).logits, None
