"""Training of the draft: unrolled chains, Muon for the matrices, checkpoints that resume to the same result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.distil.batches import Batch, Batches
from recipes.distil.chains import Chains, pick
from recipes.distil.loss import distribution_loss, state_loss, teacher_distribution
from services.draft.feature_head import FeatureHead


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How the draft is trained; a run that resumes must have the same plan."""

    seed: int
    steps: int
    """0: as many as fit into the time asked for."""
    batch: int = 12
    """Sequences a step."""
    chains: int = 1920
    """Chain starts a step, over all sequences."""
    unrolled: int = 4
    """Steps of a chain, as many as are drafted at run time."""
    decay: float = 0.8
    """A step of a chain weighs so much less than the one before it, which it depends on."""
    missed: float = 0.3
    """Weight of what follows a wrong guess: it is rejected with it at run time."""
    kept: float = 0.65
    """Share of the chains that goes on after each step, those whose guesses were all right first."""
    regression: float = 0.1
    muon_rate: float = 0.003
    norm_rate: float = 0.001
    weight_decay: float = 0.01
    warm_up: int = 20
    decay_from: float = 0.4
    """Share of the steps after which the rates fall, linearly to 0."""

    def rate(self, step: int) -> float:
        """Factor of the learning rates at ``step``."""
        rising = (step + 1) / self.warm_up
        falling = (self.steps - step) / max(1.0, self.steps * (1 - self.decay_from))
        return max(0.0, min(1.0, rising, falling))


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step saw."""

    step: int
    loss: float
    agreement: tuple[float, ...]
    """Share of right first choices at each unrolled step, the text before it given."""


@dataclass(frozen=True, slots=True)
class _Truth:
    """The target along the stretches of a batch: place i of sequence b is row b * places + i."""

    tokens: Tensor
    """[B, places]"""
    valid: Tensor
    """[B, places] float32; 0 marks padding."""
    states: Tensor
    """[B * places, D]"""
    teacher: Tensor
    """[B * places, Vd]"""
    choice: Tensor
    """[B * places], as rows of the draft's head."""


class Trainer:
    """One draft in training.

    ``target_norm`` [D] is the weight of the target's final norm.
    """

    def __init__(self, draft: FeatureHead, target_norm: Tensor, batches: Batches, plan: TrainingPlan) -> None:
        self.draft, self.target_norm, self.batches, self.plan = draft, target_norm, batches, plan
        self.step = 0
        matrices = [p for p in draft.parameters() if p.ndim == 2]
        vectors = [p for p in draft.parameters() if p.ndim == 1]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=plan.muon_rate, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(vectors, lr=plan.norm_rate, weight_decay=0.0),
        ]
        self.rates = (plan.muon_rate, plan.norm_rate)

    def run(self, until: int, report: Callable[[StepReport], None]) -> None:
        """Train up to step ``until`` or the plan's last."""
        while self.step < min(until, self.plan.steps):
            report(self._one())

    def _one(self) -> StepReport:
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * self.plan.rate(self.step)
            optimizer.zero_grad(set_to_none=True)
        loss, agreement = self._loss(self.batches.at(self.step))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return StepReport(self.step, loss.item(), agreement)

    def _loss(self, batch: Batch) -> tuple[Tensor, tuple[float, ...]]:
        """Loss of one batch, and the agreement at each unrolled step."""
        draft, plan = self.draft, self.plan
        truth = self._truth(batch)
        last = batch.tokens.shape[1] - 1
        luck = torch.rand(batch.starts.shape, generator=torch.Generator().manual_seed(plan.seed * 31 + self.step))
        offsets = torch.arange(batch.starts.shape[1]).expand(batch.starts.shape)
        weight, alive = torch.ones(offsets.shape), torch.ones(offsets.shape)
        total, agreement = torch.zeros(()), []
        with torch.autocast("cpu", torch.bfloat16):
            # Starts behind a sequence's end are padding: they read clamped places and weigh nothing.
            chains = Chains(draft, batch.tokens, batch.features[:, :-1], batch.starts.clamp(max=last - 1))
            h = chains.first()
            for step in range(plan.unrolled):
                if step > 0:
                    chosen = (alive + luck).topk(self._chains_at(step), dim=1).indices
                    chains.keep(chosen)
                    h, offsets, weight, alive, luck = (pick(x, chosen) for x in (h, offsets, weight, alive, luck))
                    # The text's own token goes on, whether it was guessed or not.
                    h = chains.next(h, truth.tokens.gather(1, offsets + step))
                loss, right, valid = self._step_loss(h, truth, offsets + step, weight)
                total = total + loss
                agreement.append(float((right * valid).sum() / valid.sum().clamp(min=1.0)))
                weight = weight * plan.decay * (plan.missed + (1 - plan.missed) * right)
                alive = alive * right * valid
        return total, tuple(agreement)

    def _chains_at(self, step: int) -> int:
        """Chains of a sequence that are still followed at ``step``."""
        return max(1, round(self.plan.chains // self.plan.batch * self.plan.kept**step))

    def _step_loss(self, h: Tensor, truth: _Truth, places: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of one step of the chains; whether each guess is the target's choice; which are no padding. [B, P]"""
        draft = self.draft
        rows = (places + torch.arange(len(places)).unsqueeze(-1) * truth.valid.shape[1]).flatten()
        valid = truth.valid.flatten()[rows].view(places.shape)
        weights = (weight * valid / valid.sum().clamp(min=1.0)).flatten()
        state, choice = h.flatten(0, 1), truth.choice[rows]
        normed = draft.norm(state).to(draft.head.dtype)
        divergence, guesses = distribution_loss(normed, draft.head, truth.teacher[rows], choice, weights)
        distance = state_loss(state, truth.states[rows], weights, draft.config.rms_norm_eps)
        right = (guesses == choice).float().view(places.shape)
        return divergence + self.plan.regression * distance, right, valid

    @torch.no_grad()
    def _truth(self, batch: Batch) -> _Truth:
        """What the target says along the stretch of each sequence."""
        draft, last = self.draft, batch.tokens.shape[1] - 1
        stretch = batch.starts[:, :1] + torch.arange(1, batch.starts.shape[1] + self.plan.unrolled)
        valid = (stretch < batch.length.unsqueeze(-1)).float()
        stretch = stretch.clamp(max=last)
        states = pick(batch.features[:, :, -1], stretch).flatten(0, 1)
        teacher = teacher_distribution(states, self.target_norm, draft.head, draft.config.rms_norm_eps)
        return _Truth(pick(batch.tokens, stretch), valid, states, teacher, teacher.max(-1).indices)

    def save(self, path: Path) -> None:
        """All that a resumed run needs, written whole and renamed into place."""
        partial = path.with_suffix(".partial")
        state = {
            "plan": asdict(self.plan),
            "step": self.step,
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on where a checkpoint was written.

        Raises ValueError if it belongs to another plan.
        """
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if state["plan"] != asdict(self.plan):
            raise ValueError("the checkpoint was written by a run with another plan")
        self.draft.load_state_dict(state["draft"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
