"""What a model is: the numbers of its config.json that either path needs, and the tables of its rotary embedding."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.model.errors import ModelError


class ConfigurationError(ModelError):
    """A config.json that does not describe a model Slipstream can run, and the field that is wrong."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A causal language model's shape, by the names of this code base."""

    architecture: str
    vocabulary_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    context_limit: int
    activation: str = "silu"
    tied_embeddings: bool = False
    attention_bias: bool = False
    """Whether queries, keys and values have biases (for Llama and Qwen3 the output map too)."""
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json, and the end tokens of generation_config.json where there is one.

        Raises ConfigurationError for a file that is missing or broken.
        """
        raw = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.exists():
            eos = _read_json(generation).get("eos_token_id")
            raw = {**raw, "eos_token_id": eos if eos is not None else raw.get("eos_token_id")}
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From the content of a Hugging Face config.json. Raises ConfigurationError naming the field."""
        architectures = raw.get("architectures") or [raw.get("model_type", "unknown")]
        architecture = architectures[0] if isinstance(architectures, list) else str(architectures)
        hidden, heads = _positive(raw, "hidden_size", "n_embd"), _positive(raw, "num_attention_heads", "n_head")
        kv_heads = _positive({"num_key_value_heads": heads} | _given(raw), "num_key_value_heads")
        if heads % kv_heads:
            raise ConfigurationError(f"config.json: {heads} attention heads are no multiple of {kv_heads} kv heads")
        rope = _rope(raw)
        # Qwen's files name a window even where they do not use it.
        windowed = raw.get("use_sliding_window", not architecture.startswith("Qwen"))
        return cls(
            architecture=architecture,
            vocabulary_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            num_layers=_positive(raw, "num_hidden_layers", "n_layer"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_positive({"head_dim": _head_dim(architecture, hidden, heads)} | _given(raw), "head_dim"),
            intermediate_size=_positive({"n_inner": 4 * hidden} | _given(raw), "intermediate_size", "n_inner"),
            norm_eps=_number(raw, 1e-5, "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
            context_limit=_positive(raw, "max_position_embeddings", "n_positions"),
            activation=str(raw.get("hidden_act", raw.get("activation_function", "silu"))),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", architecture == "Qwen2ForCausalLM")),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_given(raw).get("sliding_window") if windowed else None,
            eos_token_ids=_token_ids(raw, "eos_token_id"),
            rope_theta=rope["rope_theta"],
            rope_parameters=rope,
        )

    def rope_tables(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [positions, head_dim / 2], float64; scaling by rope_type default, linear, llama3 or yarn.

        Raises ConfigurationError for another rope_type, a part of the head that is not rotated, or a missing number.
        """
        kind = self.rope_parameters.get("rope_type", "default")
        scalings = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
        if kind not in scalings:
            raise ConfigurationError(f"rope_type {kind!r} is not one of {', '.join(scalings)}")
        if self.rope_parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ConfigurationError("config.json: partial_rotary_factor is not supported by this rotary embedding")
        try:
            frequencies, factor = scalings[kind](self)
        except KeyError as error:
            raise ConfigurationError(f"config.json: rope_parameters of type {kind} lack {error}") from error
        angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
        return angles.cos() * factor, angles.sin() * factor


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path.name} is missing in the model folder") from error
    except ValueError as error:
        raise ConfigurationError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path.name} must hold one JSON object")
    return content


def _given(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is null, which stands for what is left out."""
    return {name: value for name, value in raw.items() if value is not None}


def _positive(raw: Mapping[str, Any], *names: str) -> int:
    value = next((raw[name] for name in names if raw.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigurationError(f"config.json: {names[0]} must be a positive integer, got {value!r}")
    return value


def _number(raw: Mapping[str, Any], default: float, *names: str) -> float:
    value = next((raw[name] for name in names if raw.get(name) is not None), default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ConfigurationError(f"config.json: {names[0]} must be a positive number, got {value!r}")
    return float(value)


def _token_ids(raw: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = raw.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ConfigurationError(f"config.json: {name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _head_dim(architecture: str, hidden: int, heads: int) -> int:
    """Where config.json leaves it out: Qwen3's own default, else the even split."""
    return 128 if architecture == "Qwen3ForCausalLM" else hidden // heads


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 keeps everything in rope_parameters, earlier ones in rope_theta and rope_scaling."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigurationError(f"config.json: rope_parameters must be an object, got {rope!r}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    original = rope.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    found = {
        **rope,
        "rope_type": kind,
        "rope_theta": _number({**raw, **_given(rope)}, 10000.0, "rope_theta"),
        "original_max_position_embeddings": original,
        "partial_rotary_factor": partial,
    }
    return _given(found)


def _exponents(config: ModelConfig) -> torch.Tensor:
    return torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim


def _default(config: ModelConfig) -> tuple[torch.Tensor, float]:
    return config.rope_theta ** -_exponents(config), 1.0


def _linear(config: ModelConfig) -> tuple[torch.Tensor, float]:
    return _default(config)[0] / config.rope_parameters["factor"], 1.0


def _llama3(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    return _default(config)[0] / llama3_factors(config.rope_parameters, config.head_dim), 1.0


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """What llama3 scaling divides each frequency by, [head_dim / 2], float64."""
    frequencies = float(rope["rope_theta"]) ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    kept: torch.Tensor = keep + (1 - keep) / rope["factor"]
    return 1 / kept


def _yarn(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, warm the attention up."""
    p = config.rope_parameters
    original = p.get("original_max_position_embeddings") or config.context_limit
    factor = p["factor"]

    def dimension(turns: float) -> float:
        return config.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = ((torch.arange(config.head_dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies, _ = _default(config)
    return frequencies / factor * ramp + frequencies * (1 - ramp), _yarn_warmth(p, factor)


def _yarn_warmth(p: Mapping[str, Any], factor: float) -> float:
    def warmth(scale: float, strength: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * strength * math.log(scale) + 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return warmth(factor, p["mscale"]) / warmth(factor, p["mscale_all_dim"])
    return warmth(factor)
