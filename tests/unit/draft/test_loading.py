"""From the settings to a drafter: what fits is loaded, what does not is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from safetensors.torch import save_file
from slipstream.v1 import common_pb2

from services.draft import feature_draft
from services.draft.drafter import ChainDrafter
from services.draft.feature_head import FeatureHead, FeatureHeadConfig
from services.draft.loading import load_drafter
from services.draft.settings import DraftSettings
from services.link.round import ContextUpdate
from services.model.errors import ModelError
from services.model.store import PreparedModel, prepare
from tests.unit.model import toys

GREEDY = common_pb2.SamplingParams(top_p=1, repetition_penalty=1, verification=common_pb2.VERIFICATION_BLOCK)
LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    root = tmp_path_factory.mktemp("target")
    return prepare(toys.save_model(root / "toy-model"), root / "cache")


@pytest.fixture
def draft(tmp_path: Path, target: PreparedModel) -> Path:
    """A feature head with random weights, for this target."""
    folder = tmp_path / "draft"
    folder.mkdir()
    sizes = FeatureHeadConfig(64, 4, 2, 16, 96, 1e-5, 10000.0, 40, LAYERS)
    torch.manual_seed(1)
    embed = torch.randn(target.config.vocabulary_size, 64)
    vocabulary = torch.arange(0, 80, 2, dtype=torch.int32)
    save_file(FeatureHead(sizes, embed, embed[vocabulary.long()], vocabulary).own_state(), folder / "draft.safetensors")
    card = {
        "kind": "feature_head",
        "feature_layers": list(LAYERS),
        "target": {
            "model_id": target.model_id,
            "weights_fingerprint": target.weights_fingerprint,
            "tokenizer_fingerprint": target.tokenizer_fingerprint,
        },
        "config": {name: getattr(sizes, name) for name in sizes.__dataclass_fields__},
    }
    (folder / "card.json").write_text(json.dumps(card))
    return folder


def settings(model: object, target: PreparedModel, **changes: Any) -> DraftSettings:
    fields = {"context": 64, "max_sequences": 2, "max_draft_length": 4, "threads": 1, **changes}
    return DraftSettings(model=str(model), target=str(target.path), **fields)


def change(folder: Path, **changes: Any) -> None:
    card = json.loads((folder / "card.json").read_text())
    card.update(changes)
    (folder / "card.json").write_text(json.dumps(card))


def guesses(drafter: ChainDrafter) -> list[int]:
    features = np.random.default_rng(1).normal(size=(2, 3, 64)).astype(np.float32)
    bits = torch.from_numpy(features).bfloat16().view(torch.uint16).numpy()
    update = ContextUpdate(1, 3, [4, 9, 11], 4, True, GREEDY, bits if drafter.info.feature_layers else None)
    return drafter.propose([update])[0].tokens


def test_a_feature_head_says_what_it_is_and_guesses_within_its_vocabulary(draft: Path, target: PreparedModel) -> None:
    drafter = load_drafter(settings(draft, target))
    assert isinstance(drafter, ChainDrafter)
    assert drafter.info.drafters == ["features"]
    assert drafter.info.feature_layers == [1, 2, 3]
    assert drafter.hidden_size == 64
    assert drafter.info.model.tokenizer_fingerprint == target.tokenizer_fingerprint
    assert drafter.info.model.weights_fingerprint != target.weights_fingerprint
    tokens = guesses(drafter)
    assert len(tokens) == 4
    assert all(token % 2 == 0 and token < 80 for token in tokens)


def test_without_the_fast_pass_the_same_head_runs_in_torch(
    draft: Path, target: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_draft.fast, "why_not", lambda config: "no such instructions")
    drafter = load_drafter(settings(draft, target))
    assert isinstance(drafter, ChainDrafter)
    assert drafter.info.model.compute_path == "reference"
    assert drafter.info.model.compute_path_reason == "no such instructions"
    tokens = guesses(drafter)
    assert len(tokens) == 4
    assert all(token % 2 == 0 and token < 80 for token in tokens)


def test_any_model_of_the_same_tokenizer_is_a_draft(tmp_path: Path, target: PreparedModel, monkeypatch: Any) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    drafter = load_drafter(settings(target.path, target))
    assert isinstance(drafter, ChainDrafter)
    assert drafter.info.drafters == ["model"]
    assert drafter.info.feature_layers == []
    assert drafter.columns is None
    assert len(guesses(drafter)) == 4


def test_a_model_draft_guesses_what_its_own_greedy_decoding_says(tmp_path: Path, target: PreparedModel) -> None:
    drafter = load_drafter(settings(target.path, target))
    assert isinstance(drafter, ChainDrafter)
    chain = guesses(drafter)
    tokens = [4, 9, 11]
    for _ in range(4):
        update = ContextUpdate(2, len(tokens), list(tokens), 1, True, GREEDY)
        tokens += drafter.propose([update])[0].tokens
    assert tokens[3:] == chain


def test_a_draft_for_another_tokenizer_is_refused_by_name(draft: Path, target: PreparedModel) -> None:
    change(draft, target={"model_id": "Another", "tokenizer_fingerprint": "sha256:0"})
    with pytest.raises(ModelError, match="'Another', whose tokenizer is not that of"):
        load_drafter(settings(draft, target))


def test_a_draft_for_other_weights_is_loaded_with_a_warning(draft: Path, target: PreparedModel) -> None:
    made_for = json.loads((draft / "card.json").read_text())["target"]
    change(draft, target={**made_for, "weights_fingerprint": "sha256:0"})
    with structlog.testing.capture_logs() as logs:
        load_drafter(settings(draft, target))
    assert [line["log_level"] for line in logs if "other weights" in line["event"]] == ["warning"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"kind": "tree"}, "does not describe a feature head"),
        ({"feature_layers": []}, "says nothing of feature_layers"),
        ({"config": {}}, "says nothing of config"),
        ({"config": {"hidden_size": 64}}, "does not say its sizes"),
        ({"config": {"hidden_size": 32}}, "states of 32 values"),
        ({"feature_layers": [1, 2, 9]}, "layers of 64"),
        ({"feature_layers": [1, 2]}, "features.weight has shape"),
    ],
)
def test_a_card_that_does_not_fit_is_refused_by_name(
    draft: Path, target: PreparedModel, changes: dict[str, Any], what: str
) -> None:
    change(draft, **changes)
    with pytest.raises(ModelError, match=what):
        load_drafter(settings(draft, target))


def test_broken_files_are_refused_by_name(draft: Path, target: PreparedModel) -> None:
    whole = (draft / "draft.safetensors").read_bytes()
    (draft / "draft.safetensors").write_bytes(whole[:1000])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load_drafter(settings(draft, target))
    (draft / "draft.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        load_drafter(settings(draft, target))
    (draft / "card.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_drafter(settings(draft, target))


def test_a_context_without_room_for_guesses_is_refused(draft: Path, tmp_path: Path) -> None:
    small = prepare(toys.save_model(tmp_path / "small", max_position_embeddings=16), tmp_path / "cache")
    with pytest.raises(ModelError, match="leaves nothing beside"):
        load_drafter(settings(small.path, small, max_draft_length=16))


@pytest.mark.parametrize("path", ["nowhere", "nowhere:make", "json:make", ":make", "json:"])
def test_a_drafter_that_cannot_be_imported_is_refused_by_name(target: PreparedModel, path: str) -> None:
    with pytest.raises(ModelError, match="SLIPSTREAM_DRAFT_DRAFTER"):
        load_drafter(settings("default", target, drafter=path))
