"""``python -m recipes.distil TARGET --out DIR --minutes N``: make a feature-fed draft for a target."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import click
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from recipes.distil.corpus import CorpusError, CorpusPlan
from recipes.distil.opening import open_target
from recipes.distil.request import Request
from recipes.distil.run import distil
from recipes.distil.training import TrainingPlan
from services.model.errors import ModelError
from services.model.kernels.checkpoint import CheckpointError


class ConsoleReport:
    """Progress on a terminal: a bar for each stage, and lines that stay."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description:<12}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=Console())
        self._task: TaskID | None = None

    def __enter__(self) -> ConsoleReport:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int | None) -> None:
        self._task = self._progress.add_task(name, total=total, note="")

    def advance(self, count: int, note: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, advance=count, note=note)

    def say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False)


@click.command()
@click.argument("target")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder for draft.safetensors and card.json."
)
@click.option("--work", type=click.Path(path_type=Path), help="Corpus and checkpoints; default: OUT.work.")
@click.option("--minutes", type=float, default=40.0, show_default=True, help="Wall time of the training itself.")
@click.option("--steps", type=int, default=0, help="Training steps, instead of --minutes.")
@click.option("--prompts", type=int, default=4000, show_default=True, help="User turns to write answers to.")
@click.option("--sampled-share", default=0.75, show_default=True, help="Share of user turns that the target writes.")
@click.option("--slots", type=int, default=48, show_default=True, help="Sequences written at once.")
@click.option("--seed", type=int, default=7, show_default=True)
@click.option("--layers", help="Target layers to feed in, e.g. 5,16,30; default: an early, a middle and the last.")
@click.option("--vocabulary", type=int, default=12288, show_default=True, help="Rows of the target's head.")
@click.option("--check-minutes", type=float, default=4.0, show_default=True, help="Time between checkpoints.")
@click.option("--threads", type=int, default=2, show_default=True)
def main(
    *,
    target: str, out: Path, work: Path | None, minutes: float, steps: int, prompts: int, slots: int, seed: int,
    sampled_share: float, layers: str | None, vocabulary: int, check_minutes: float, threads: int,
) -> None:  # fmt: skip
    """Distil a feature-fed draft from TARGET, a model folder, a GGUF file, or "default".

    A run that was stopped goes on where it was when the same command is given again.
    """
    torch.set_num_threads(threads)
    chosen = tuple(int(number) for number in layers.split(",")) if layers else None
    request = Request(
        out=out, work=work or out.with_name(out.name + ".work"), minutes=minutes, prompts=prompts, slots=slots,
        text=CorpusPlan(seed=seed, sampled_share=sampled_share), training=TrainingPlan(seed=seed, steps=steps),
        feature_layers=chosen, vocabulary=vocabulary, check_minutes=check_minutes,
    )  # fmt: skip
    try:
        opened = open_target(target, threads)
        with ConsoleReport() as report:
            acceptance = distil(opened, request, report)
    except (ModelError, CheckpointError, CorpusError) as error:
        raise click.ClickException(str(error)) from error
    shares = ", ".join(f"{share:.3f}" for share in acceptance.by_position)
    click.echo(f"accepted by position {shares}; {acceptance.mean_acceptance_length:.3f} tokens a round")


if __name__ == "__main__":
    main()
