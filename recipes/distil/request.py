"""What a distillation is asked to do, and where its progress goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recipes.distil.corpus import Corpus, CorpusPlan
from recipes.distil.target import Target
from recipes.distil.training import TrainingPlan


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    out: Path
    work: Path
    """Corpus and checkpoints; may be deleted afterwards."""
    minutes: float
    """Wall time for training alone, where the training plan names no steps."""
    prompts: int
    """User turns, held-out ones included."""
    slots: int
    """Sequences written at once."""
    text: CorpusPlan
    training: TrainingPlan
    feature_layers: tuple[int, ...] | None
    """Counted from 1; None: :func:`default_layers`."""
    vocabulary: int
    """Rows of the draft's head."""
    check_minutes: float
    """Time between checkpoints."""

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The target's layers to feed in."""
        return self.feature_layers or default_layers(num_layers)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and the last layer: 5, 16 and 30 of 30."""
    return (max(1, num_layers // 6), (num_layers + 2) // 2, num_layers)


class Report(Protocol):
    """Where progress goes."""

    def stage(self, name: str, total: int | None) -> None:
        """A new stage of ``total`` units begins."""

    def advance(self, count: int, note: str) -> None:
        """``count`` units of the stage are done."""

    def say(self, line: str) -> None:
        """Something worth a line of its own."""


@dataclass(frozen=True, slots=True)
class Material:
    """All that training works with."""

    target: Target
    request: Request
    layers: Sequence[int]
    train: Corpus
    held: Corpus
    """Greedy answers to held-out prompts: they choose which checkpoint is kept."""
    unseen: Corpus
    """Greedy answers to :data:`recipes.distil.unseen.UNSEEN`: what the card tells."""
    report: Report
