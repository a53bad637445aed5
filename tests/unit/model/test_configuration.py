"""A config.json is read as transformers reads it, and what is wrong with one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.model.configuration import ConfigurationError, ModelConfig
from tests.unit.model import toys

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 50000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with mscale": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 32,
        "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
}  # fmt: skip

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_tables_are_those_of_transformers(kind: str) -> None:
    theirs = toys.configuration("llama", rope_parameters=dict(ROPES[kind]))
    cosines, sines = ModelConfig.from_dict(json.loads(theirs.to_json_string(use_diff=False))).rope_tables(100)
    expected = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(100)[None])
    for ours, wanted in zip((cosines, sines), expected, strict=True):
        torch.testing.assert_close(ours.float(), wanted[0, :, :8], atol=2e-5, rtol=0)


def test_scaling_is_read_from_older_files_too() -> None:
    new = ModelConfig.from_dict({**MINIMAL, "rope_parameters": ROPES["linear"]})
    old = ModelConfig.from_dict({**MINIMAL, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert all(torch.equal(a, b) for a, b in zip(new.rope_tables(50), old.rope_tables(50), strict=True))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_a_folder_that_transformers_saved_is_understood(kind: str, tmp_path: Path) -> None:
    theirs = toys.model(kind)
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_folder(tmp_path)
    assert ours.architecture == type(theirs).__name__
    assert (ours.vocabulary_size, ours.hidden_size, ours.num_layers, ours.num_heads) == (320, 64, 3, 4)
    assert ours.num_kv_heads == getattr(theirs.config, "num_key_value_heads", 4)
    assert ours.head_dim == (getattr(theirs.config, "head_dim", None) or 16)
    assert ours.context_limit == 128
    assert ours.eos_token_ids == (0,)
    assert ours.sliding_window == getattr(theirs.config, "sliding_window", None)


def test_end_tokens_of_the_generation_config_come_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MINIMAL, "eos_token_id": 5}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (7, 8)


def test_a_window_that_qwen_names_but_does_not_use_is_none() -> None:
    qwen = {**MINIMAL, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
    assert ModelConfig.from_dict(qwen).sliding_window is None
    assert ModelConfig.from_dict({**qwen, "use_sliding_window": True}).sliding_window == 32


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3"),
        ({"num_key_value_heads": -1}, "num_key_value_heads"),
        ({"head_dim": "wide"}, "head_dim"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_parameters": "yarn"}, "rope_parameters"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ModelConfig.from_dict({**MINIMAL, **change})


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rotary_embeddings_that_are_not_known_are_refused(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ModelConfig.from_dict({**MINIMAL, "rope_parameters": rope}).rope_tables(1)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": "\xff"}', None])
def test_a_file_that_is_missing_or_broken_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
