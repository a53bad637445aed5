"""The training of one draft from its first step to its card: plan, checkpoints, and what is kept."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from recipes.distil import card
from recipes.distil.batches import Batches
from recipes.distil.corpus import Corpus, CorpusSequence
from recipes.distil.evaluation import Acceptance, evaluate
from recipes.distil.request import Material
from recipes.distil.start import draft_vocabulary, untrained
from recipes.distil.training import StepReport, Trainer, TrainingPlan

PROBE_STEPS = 4
"""Steps that are timed, and thrown away, to turn minutes into a number of steps."""

CHOOSING = 60
"""Held-out answers that choose which checkpoint is kept."""


def prepare(material: Material) -> Trainer:
    """The trainer of this run: a new one, or where the last checkpoint was written.

    The plan is kept beside the checkpoint: the minutes asked for become steps once, so that a resumed run ends as an
    uninterrupted one.
    """
    request, report = material.request, material.report
    counts = material.train.token_counts(material.target.weights.embed.shape[0])
    size = min(request.vocabulary, counts.numel())
    vocabulary = draft_vocabulary(counts, size, sorted(material.target.end_tokens))
    plan_path = request.work / "training.json"
    if plan_path.exists():
        plan = TrainingPlan(**json.loads(plan_path.read_text(encoding="utf-8")))
    else:
        plan = request.training
        if plan.steps == 0:
            plan = replace(plan, steps=_steps_in(material, vocabulary))
        plan_path.write_text(json.dumps(asdict(plan)), encoding="utf-8")
    trainer = _trainer(material, vocabulary, plan)
    if (request.work / "checkpoint.pt").exists():
        trainer.load(request.work / "checkpoint.pt")
        report.say(f"resuming at step {trainer.step} of {plan.steps}")
    return trainer


def _trainer(material: Material, vocabulary: Tensor, plan: TrainingPlan) -> Trainer:
    draft = untrained(material.target.weights, material.layers, vocabulary, plan.seed)
    batches = Batches(material.train, plan.batch, plan.chains, plan.unrolled, plan.seed)
    return Trainer(draft, material.target.weights.norm, batches, plan)


def _steps_in(material: Material, vocabulary: Tensor) -> int:
    """How many steps fit into the minutes asked for, on this machine now."""
    probe = _trainer(material, vocabulary, replace(material.request.training, steps=1000))
    probe.run(1, lambda _: None)
    began = time.monotonic()
    probe.run(1 + PROBE_STEPS, lambda _: None)
    seconds = (time.monotonic() - began) / PROBE_STEPS
    steps = max(20, int(material.request.minutes * 60 / seconds))
    material.report.say(f"{seconds:.2f} s a step: {steps} steps in {material.request.minutes:g} minutes")
    return steps


class Schooling:
    """Stretches of training, each followed by a checkpoint and a look at what the draft is worth."""

    def __init__(self, material: Material, trainer: Trainer) -> None:
        self.material, self.trainer = material, trainer
        self.weights, self.report = material.target.weights, material.report
        self.state_path = material.request.work / "best.json"
        self.seconds, self.best, self.checked = 0.0, 0.0, 0
        if self.state_path.exists():
            state = json.loads(self.state_path.read_text(encoding="utf-8"))
            self.seconds, self.best, self.checked = state["seconds"], state["best"], state["checked"]

    def run(self) -> Acceptance:
        """Train to the end of the plan; returns the acceptance of the draft that was kept."""
        plan = self.trainer.plan
        self.report.stage("training", plan.steps)
        self.report.advance(self.trainer.step, "")
        while True:
            if self.checked < self.trainer.step:
                self._keep_if_better()
            if self.trainer.step >= plan.steps:
                break
            self._stretch()
            # Saved before it is looked at: looking takes a while, and a kill then costs the look alone.
            self.trainer.save(self.material.request.work / "checkpoint.pt")
        kept = card.load_draft(self.material.request.out, self.weights.embed, self.weights.head)
        return evaluate(kept, self.material.unseen, self.material.unseen.sequences)

    def _stretch(self) -> None:
        """Train until the next checkpoint is due."""
        began, due = time.monotonic(), 60 * self.material.request.check_minutes
        while True:
            self.trainer.run(self.trainer.step + 5, self._tell)
            if self.trainer.step >= self.trainer.plan.steps or time.monotonic() - began >= due:
                break
        self.seconds += time.monotonic() - began

    def _tell(self, step: StepReport) -> None:
        agreed = " ".join(f"{share:.2f}" for share in step.agreement)
        self.report.advance(1, f"loss {step.loss:.3f}, agreement {agreed}")

    def _keep_if_better(self) -> None:
        few = self.material.held.sequences[:CHOOSING]
        chosen = self._evaluate(self.material.held, few)
        positions = " ".join(f"{share:.3f}" for share in chosen.by_position)
        length = chosen.mean_acceptance_length
        self.report.say(f"step {self.trainer.step}: {length:.3f} tokens a round, by position {positions}")
        if length > self.best:
            self.best = length
            self._export(card.measured(chosen, len(few), "held-out prompts, which chose the checkpoint"))
        self.checked = self.trainer.step
        state = {"seconds": self.seconds, "best": self.best, "checked": self.checked}
        self.state_path.write_text(json.dumps(state), encoding="utf-8")

    def _export(self, held_out: dict[str, Any]) -> None:
        draft, material = self.trainer.draft, self.material
        counts = material.train.token_counts(draft.embed.shape[0])
        coverage = float(counts[draft.vocabulary.long()].sum() / counts.sum())
        card.export(
            material.request.out,
            draft,
            material.target.origin,
            plan=self.trainer.plan,
            steps=self.trainer.step,
            training_seconds=self.seconds,
            data=card.data_description(material.train, material.request.text, coverage),
            unseen=card.measured(
                self._evaluate(material.unseen, material.unseen.sequences),
                len(material.unseen.sequences),
                "questions written by hand, unlike those trained on",
            ),
            held_out=held_out,
        )

    def _evaluate(self, corpus: Corpus, sequences: Sequence[CorpusSequence]) -> Acceptance:
        """Of the weights as they are shipped, rounded to bfloat16."""
        draft = self.trainer.draft
        shipped = untrained(self.weights, draft.config.feature_layers, draft.vocabulary, 0)
        shipped.load_state_dict(draft.own_state())
        with torch.inference_mode():
            return evaluate(shipped, corpus, sequences)
