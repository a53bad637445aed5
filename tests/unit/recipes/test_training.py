"""Training: the loss is the distillation it claims to be, and a killed run ends as an uninterrupted one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.distil.batches import Batches, epoch_order
from recipes.distil.corpus import Corpus
from recipes.distil.loss import distribution_loss
from recipes.distil.training import StepReport, Trainer, TrainingPlan
from tests.unit.recipes import toy

PLAN = TrainingPlan(seed=3, steps=12, batch=3, chains=24, unrolled=3, warm_up=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    toy.shard(folder / "shard-00000.safetensors", [24, 30, 18, 26], seed=1)
    toy.shard(folder / "shard-00001.safetensors", [20, 28, 22], seed=9)
    return Corpus(folder)


def trainer(corpus: Corpus, plan: TrainingPlan = PLAN) -> Trainer:
    return Trainer(
        toy.draft(), torch.ones(32), Batches(corpus, plan.batch, plan.chains, plan.unrolled, plan.seed), plan
    )


def ignore(_: StepReport) -> None:
    pass


def test_the_gradient_is_that_of_the_cross_entropy_against_the_whole_distribution() -> None:
    torch.manual_seed(0)
    rows = torch.randn(600, 16, requires_grad=True)
    head, teacher = torch.randn(10, 16), torch.randn(600, 10).softmax(-1)
    weights = torch.rand(600)
    loss, guesses = distribution_loss(rows, head, teacher, teacher.argmax(-1), weights)
    (ours,) = torch.autograd.grad(loss, rows)
    full = -(teacher * (rows @ head.T).log_softmax(-1)).sum(-1)
    (expected,) = torch.autograd.grad((full * weights).sum(), rows)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(guesses, (rows @ head.T).argmax(-1))


def test_training_lowers_the_loss(corpus: Corpus) -> None:
    losses: list[float] = []
    trainer(corpus, replace(PLAN, steps=40)).run(40, lambda report: losses.append(report.loss))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_a_killed_run_resumes_to_the_same_weights(corpus: Corpus, tmp_path: Path) -> None:
    whole = trainer(corpus)
    whole.run(PLAN.steps, ignore)
    first = trainer(corpus)
    first.run(5, ignore)
    first.save(tmp_path / "checkpoint.pt")
    second = trainer(corpus)
    second.load(tmp_path / "checkpoint.pt")
    second.run(PLAN.steps, ignore)
    assert second.step == PLAN.steps
    for name, value in whole.draft.state_dict().items():
        assert torch.equal(value, second.draft.state_dict()[name]), name


def test_a_checkpoint_of_another_plan_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    trainer(corpus).save(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="another plan"):
        trainer(corpus, replace(PLAN, steps=99)).load(tmp_path / "checkpoint.pt")


def test_the_target_s_own_rows_stay_as_they_are(corpus: Corpus) -> None:
    training = trainer(corpus)
    embed, head = training.draft.embed.clone(), training.draft.head.clone()
    training.run(3, ignore)
    assert torch.equal(training.draft.embed, embed)
    assert torch.equal(training.draft.head, head)


def test_padding_changes_nothing(corpus: Corpus) -> None:
    batches = Batches(corpus, 3, 24, 3, seed=3)
    batch = batches.at(0)
    padding = torch.arange(batch.tokens.shape[1]) >= batch.length.unsqueeze(-1)
    assert padding.any()
    poisoned = replace(batch, features=batch.features.masked_fill(padding[..., None, None], 50.0))
    losses = [trainer(corpus)._loss(b)[0] for b in (batch, poisoned)]
    assert torch.equal(losses[0], losses[1])


def test_an_epoch_visits_every_sequence_at_most_once_and_nearly_all(corpus: Corpus) -> None:
    order = [i for batch in epoch_order(corpus.sequences, 3, seed=1, epoch=0) for i in batch]
    assert len(order) == len(set(order)) == 6


def test_a_batch_depends_on_its_step_alone(corpus: Corpus) -> None:
    forward, fresh = Batches(corpus, 3, 24, 3, seed=3), Batches(corpus, 3, 24, 3, seed=3)
    for step in range(7):
        late = forward.at(step)
    assert torch.equal(late.tokens, fresh.at(6).tokens)
    assert torch.equal(late.starts, fresh.at(6).starts)
    assert torch.equal(forward.at(1).tokens, Batches(corpus, 3, 24, 3, seed=3).at(1).tokens)


def test_the_rate_rises_holds_and_falls_to_nothing() -> None:
    plan = TrainingPlan(seed=0, steps=100, warm_up=10, decay_from=0.4)
    assert plan.rate(0) == pytest.approx(0.1)
    assert plan.rate(10) == plan.rate(39) == 1.0
    assert plan.rate(70) == pytest.approx(0.5)
    assert plan.rate(100) == 0.0
