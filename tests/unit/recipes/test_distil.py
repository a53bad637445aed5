"""One command from a target to a draft with its card; what was done before a kill is not done again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.distil.card import load_draft, read_card
from recipes.distil.corpus import CorpusError, CorpusPlan
from recipes.distil.request import Request, default_layers
from recipes.distil.run import distil
from recipes.distil.target import Origin, Target, TargetWeights
from recipes.distil.training import TrainingPlan
from services.model.configuration import ModelConfig
from services.model.forward import PassOutput, SequenceRows
from tests.unit.recipes import toy

END = 0


class ToyPass:
    """A target of three layers whose next token depends on the last one."""

    num_layers = 3

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(toy.VOCABULARY_SIZE, toy.VOCABULARY_SIZE, generator=generator) * 2
        self.states = torch.randn(toy.VOCABULARY_SIZE, 3, 32, generator=generator).bfloat16()
        self.rows = 0

    def allocate_cache(self, num_blocks: int) -> None:
        pass

    def run(self, batch: Sequence[SequenceRows], feature_layers: Sequence[int] = ()) -> PassOutput:
        tokens = torch.tensor([token for rows in batch for token in rows.tokens])
        self.rows += len(tokens)
        logits = torch.stack([self.table[rows.tokens[-1]] for rows in batch])
        return PassOutput(logits, self.states[tokens] if feature_layers else None)


class ToyTokenizer:
    """Words are tokens."""

    def prompt(self, user_turn: str) -> list[int]:
        return [1, *(1 + sum(word.encode()) % 38 for word in user_turn.split()[:6]), 2]

    def user_turn_opened(self) -> list[int]:
        return [1]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(f"word{token}" for token in tokens)


@dataclass
class Heard:
    """A report that remembers."""

    lines: list[str] = field(default_factory=list)
    kill_at_step: int = -1
    training: bool = False
    steps: int = 0

    def stage(self, name: str, total: int | None) -> None:
        self.training = name == "training"

    def advance(self, count: int, note: str) -> None:
        if self.training and note:
            self.steps += 1
            if self.steps == self.kill_at_step:
                raise KeyboardInterrupt

    def say(self, line: str) -> None:
        self.lines.append(line)


def toy_target() -> Target:
    config = ModelConfig("LlamaForCausalLM", toy.VOCABULARY_SIZE, 32, 3, 4, 2, 8, 48, 1e-5, 512)
    state = {name.removeprefix("layer."): value.clone() for name, value in toy.draft().state_dict().items()
             if name.startswith("layer.")}  # fmt: skip
    embed = toy.draft().embed
    weights = TargetWeights(config, embed, embed, torch.ones(32), state)
    forward: Any = ToyPass()
    tokenizer: Any = ToyTokenizer()
    return Target(forward, tokenizer, weights, frozenset([END]), Origin("toy", "w", "t", "toy pass"))


def request(folder: Path) -> Request:
    return Request(
        out=folder / "draft", work=folder / "work", minutes=0, prompts=150, slots=16,
        text=CorpusPlan(seed=1, max_new=24, max_prompt=32), feature_layers=None, vocabulary=24, check_minutes=0,
        training=TrainingPlan(seed=1, steps=12, batch=4, chains=32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Request:
    asked = request(tmp_path_factory.mktemp("whole"))
    distil(toy_target(), asked, Heard())
    return asked


def test_a_draft_and_its_card_come_out(made: Request) -> None:
    target = toy_target()
    card = read_card(made.out)
    draft = load_draft(made.out, target.weights.embed, target.weights.head)
    assert draft.config.feature_layers == tuple(card["feature_layers"]) == default_layers(3)
    assert END in draft.vocabulary
    assert card["data"]["sequences"] > 100
    assert sum(card["measured"]["acceptance_histogram"]) == card["measured"]["rounds"] > 0


def test_a_run_killed_in_training_ends_with_the_same_draft(made: Request, tmp_path: Path) -> None:
    asked = request(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        distil(toy_target(), asked, Heard(kill_at_step=8))
    heard, target = Heard(), toy_target()
    distil(target, asked, heard)
    assert heard.lines[0] == "resuming at step 5 of 12"
    assert target.forward.rows == 0, "the corpus was written again"  # type: ignore[attr-defined]
    assert (asked.out / "draft.safetensors").read_bytes() == (made.out / "draft.safetensors").read_bytes()


def test_a_finished_run_given_again_changes_nothing(made: Request) -> None:
    before = {path.name: path.read_bytes() for path in made.out.iterdir()}
    distil(toy_target(), made, Heard())
    assert {path.name: path.read_bytes() for path in made.out.iterdir()} == before


def test_minutes_become_steps_once(tmp_path: Path) -> None:
    asked = request(tmp_path)
    asked = replace(asked, minutes=1e-6, training=replace(asked.training, steps=0))
    heard = Heard()
    distil(toy_target(), asked, heard)
    assert "20 steps" in heard.lines[0]
    assert read_card(asked.out)["training"]["steps"] == 20


def test_layers_are_early_middle_and_last() -> None:
    assert default_layers(30) == (5, 16, 30)


def test_too_few_prompts_are_refused_with_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="ask for more prompts"):
        distil(toy_target(), replace(request(tmp_path), prompts=1), Heard())
