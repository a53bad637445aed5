"""The loss of a step of the chains: the target's whole distribution, and its next state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.draft.feature_head import rms

CHUNK = 256
"""Rows of logits alive at a time: what is a few MB stays in the cache between its three uses."""


class _CrossEntropy(torch.autograd.Function):
    """Weighted sum of the cross-entropies of softmax(rows · headᵀ) against ``teacher``.

    Its gradient is (q - p) · head, so it is taken right away, chunk by chunk, and no logits are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, head: Tensor, teacher: Tensor, choice: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(rows)
        guesses = torch.empty(rows.shape[0], dtype=torch.long)
        loss = torch.zeros((), dtype=torch.float32)
        for i in range(0, rows.shape[0], CHUNK):
            q = functional.linear(rows[i : i + CHUNK], head).softmax(-1)
            guesses[i : i + CHUNK] = q.max(-1).indices  # max is several times faster here than argmax
            q_chosen = q.gather(-1, choice[i : i + CHUNK, None]).squeeze(-1).float()
            loss -= (weights[i : i + CHUNK] * q_chosen.clamp(min=1e-6).log()).sum()
            difference = q.sub_(teacher[i : i + CHUNK])
            gradient[i : i + CHUNK] = (difference @ head) * weights[i : i + CHUNK, None].to(rows.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(guesses)
        return loss, guesses

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None, None


def distribution_loss(
    rows: Tensor, head: Tensor, teacher: Tensor, choice: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Distillation of ``teacher`` [N, Vd] into softmax(rows · headᵀ), ``rows`` [N, D], weighted by ``weights`` [N].

    Returns the loss and the draft's first choices [N], as rows of the head. The gradient is that of the cross-entropy
    against the whole distribution; the value is the one against the teacher's first ``choice`` [N] alone, which is all
    that a log line needs and spares a pass over the vocabulary.
    """
    loss, guesses = _CrossEntropy.apply(rows, head, teacher, choice, weights)  # type: ignore[no-untyped-call]
    return loss, guesses


def state_loss(h: Tensor, state: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Regression of the draft's h [N, D] on the target's next ``state`` [N, D], both normalised; weighted sum."""
    distance = functional.smooth_l1_loss(rms(h.float(), eps), rms(state.float(), eps), reduction="none").mean(-1)
    return (distance * weights).sum()


def teacher_distribution(states: Tensor, norm: Tensor, head: Tensor, eps: float) -> Tensor:
    """The target's distribution over the draft vocabulary from its last layer's ``states`` [N, D]; [N, Vd] bfloat16."""
    rows = (rms(states.float(), eps) * norm).to(head.dtype)
    distribution = torch.empty(rows.shape[0], head.shape[0], dtype=head.dtype)
    for i in range(0, rows.shape[0], CHUNK):
        distribution[i : i + CHUNK] = functional.linear(rows[i : i + CHUNK], head).softmax(-1)
    return distribution
