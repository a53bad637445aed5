"""What is exported is what was trained, and the card says where it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes.distil import card
from recipes.distil.card import WEIGHTS_FILE, export, load_draft, read_card
from recipes.distil.evaluation import Acceptance
from recipes.distil.start import draft_vocabulary, untrained
from recipes.distil.target import Origin, TargetWeights
from recipes.distil.training import TrainingPlan
from services.draft.feature_head import FeatureHead
from services.model.configuration import ModelConfig
from tests.unit.recipes import toy

ORIGIN = Origin("toy", "weights-print", "tokenizer-print", "toy pass")
NAMES = {
    "features.weight", "input.weight", "embed_norm.weight", "feature_norm.weight", "layer.self_attn.q_proj.weight",
    "layer.self_attn.k_proj.weight", "layer.self_attn.v_proj.weight", "layer.self_attn.o_proj.weight",
    "layer.mlp.gate_proj.weight", "layer.mlp.up_proj.weight", "layer.mlp.down_proj.weight",
    "layer.input_layernorm.weight", "layer.post_attention_layernorm.weight", "norm.weight", "vocabulary",
}  # fmt: skip


def exported(folder: Path) -> FeatureHead:
    draft = toy.draft()
    acceptance = card.measured(Acceptance(2, 4, (2, 1, 1)), prompts=3, how="toys")
    export(folder, draft, ORIGIN, plan=TrainingPlan(seed=1, steps=9), steps=9, training_seconds=61.2,
           data={"tokens": 5}, unseen=acceptance,
        held_out={})  # fmt: skip
    return draft


def test_an_exported_draft_is_read_back_as_it_was_rounded(tmp_path: Path) -> None:
    draft = exported(tmp_path)
    full_head = torch.zeros(toy.VOCABULARY_SIZE, 32, dtype=torch.bfloat16)
    full_head[draft.vocabulary.long()] = draft.head
    read = load_draft(tmp_path, draft.embed, full_head)
    assert torch.equal(read.head, draft.head)
    assert read.config == draft.config
    for name, value in draft.own_state().items():
        assert torch.equal(value.float(), read.state_dict()[name].float()), name


def test_the_file_holds_the_trained_weights_alone(tmp_path: Path) -> None:
    exported(tmp_path)
    from safetensors.torch import load_file

    state = load_file(tmp_path / WEIGHTS_FILE)
    assert set(state) == NAMES
    assert state["vocabulary"].dtype == torch.int32
    assert all(value.dtype == torch.bfloat16 for name, value in state.items() if name != "vocabulary")


def test_the_card_names_target_seed_data_and_what_was_measured(tmp_path: Path) -> None:
    exported(tmp_path)
    read = read_card(tmp_path)
    assert read["kind"] == "feature_head"
    assert read["target"]["weights_fingerprint"] == "weights-print"
    assert read["target"]["tokenizer_fingerprint"] == "tokenizer-print"
    assert read["feature_layers"] == [1, 2, 3]
    assert read["seed"] == 1
    assert read["training"]["steps_done"] == 9
    assert read["data"] == {"tokens": 5}
    assert read["measured"]["acceptance_by_position"] == [0.5, 0.25]
    assert read["measured"]["mean_acceptance_length"] == 1.75
    assert read["versions"]["torch"]


def test_nothing_partial_stays_behind(tmp_path: Path) -> None:
    exported(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"draft.safetensors", "card.json"}


def test_a_draft_of_another_width_is_refused(tmp_path: Path) -> None:
    exported(tmp_path)
    with pytest.raises(ValueError, match="another width"):
        load_draft(tmp_path, torch.zeros(40, 16), torch.zeros(40, 16))


def test_the_vocabulary_is_the_most_frequent_tokens_in_ascending_order() -> None:
    counts = torch.tensor([5, 0, 9, 1, 7, 0])
    assert draft_vocabulary(counts, 3).tolist() == [0, 2, 4]
    assert draft_vocabulary(counts, 3, always=[5]).tolist() == [2, 4, 5]


def test_the_untrained_draft_starts_from_the_target_s_last_layer_and_head() -> None:
    config = ModelConfig("LlamaForCausalLM", 40, 32, 3, 4, 2, 8, 48, 1e-5, 64)
    torch.manual_seed(0)
    last = {name.removeprefix("layer."): torch.randn_like(value) for name, value in toy.draft().state_dict().items()
            if name.startswith("layer.")}  # fmt: skip
    target = TargetWeights(config, torch.randn(40, 32), torch.randn(40, 32), torch.rand(32), last)
    vocabulary = torch.tensor([1, 5, 8], dtype=torch.int32)
    draft = untrained(target, (1, 2, 3), vocabulary, seed=0)
    assert torch.equal(draft.layer.self_attn.q_proj.weight, last["self_attn.q_proj.weight"])
    assert torch.equal(draft.norm.weight, target.norm)
    assert torch.equal(draft.head, target.head[[1, 5, 8]])
    again = untrained(target, (1, 2, 3), vocabulary, seed=0)
    assert torch.equal(draft.input.weight, again.input.weight)
