"""The draft that comes with the repository: small enough to commit, whole, and above the floor on unseen questions."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import recipes
from recipes.distil.card import CARD_FILE, KIND, WEIGHTS_FILE, read_card
from recipes.distil.unseen import UNSEEN

DRAFTS = sorted((Path(recipes.__file__).parents[1] / "drafts").glob(f"*/{CARD_FILE}"))


def test_there_is_one() -> None:
    assert DRAFTS


@pytest.mark.parametrize("folder", [path.parent for path in DRAFTS], ids=lambda folder: folder.name)
class TestCommittedDraft:
    def test_it_takes_at_most_16_mb(self, folder: Path) -> None:
        assert (folder / WEIGHTS_FILE).stat().st_size <= 16_000_000

    def test_its_weights_are_those_that_the_card_describes(self, folder: Path) -> None:
        card, state = read_card(folder), load_file(folder / WEIGHTS_FILE)
        assert card["kind"] == KIND
        assert sum(value.numel() for name, value in state.items() if name != "vocabulary") == card["parameters"]
        assert state["features.weight"].shape[1] == len(card["feature_layers"]) * card["config"]["hidden_size"]
        vocabulary = state["vocabulary"]
        assert len(vocabulary) == card["config"]["draft_vocabulary_size"]
        assert bool((vocabulary[1:] > vocabulary[:-1]).all())
        assert all(bool(value.isfinite().all()) for value in state.values())

    def test_its_target_is_named_by_fingerprints(self, folder: Path) -> None:
        target = read_card(folder)["target"]
        for name in ("weights_fingerprint", "tokenizer_fingerprint"):
            assert target[name].startswith("sha256:")
            assert len(target[name]) == len("sha256:") + 64

    def test_it_was_measured_above_the_floor_on_unseen_questions(self, folder: Path) -> None:
        measured = read_card(folder)["measured"]
        assert measured["prompts"] == len(UNSEEN)
        assert measured["draft_length"] == 4
        assert measured["acceptance_by_position"][0] >= 0.40
        assert measured["mean_acceptance_length"] >= 1.6
        accepted = sum(i * count for i, count in enumerate(measured["acceptance_histogram"]))
        assert measured["mean_acceptance_length"] == pytest.approx(1 + accepted / measured["rounds"], abs=1e-4)
