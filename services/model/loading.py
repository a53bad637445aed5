"""From a prepared model to one that runs: choose the pass, check the memory, load."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from services.model import reference, store
from services.model.configuration import ConfigurationError, ModelConfig
from services.model.errors import ModelError
from services.model.forward import BLOCK_SIZE, ForwardPass
from services.model.kernels import fast
from services.model.kernels.build import BuildError
from services.model.kernels.checkpoint import CheckpointError
from services.model.memory import available_bytes
from services.model.progress import Progress
from services.model.store import PreparedModel
from services.model.tokenizer import Tokenizer

_BIASED_QKV_ONLY = frozenset({"Qwen2ForCausalLM"})


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How a service wants its model."""

    compute_path: Literal["auto", "fast", "reference"] = "auto"
    """auto takes the fast pass where it can run, and says why where it cannot."""
    weight_format: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: the fast pass keeps 4- and 8-bit weights; the reference pass takes what the device computes in."""
    device: str = "cpu"
    """Of the reference pass; the fast pass is for CPUs."""
    threads: int = 2
    cache_tokens: int = 16384
    """Tokens of key-value cache that the service is going to allocate; counted in the memory check."""
    reserved_bytes: int = 0
    """Memory that another process of this machine is about to take, such as the draft's."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that runs. Its cache is allocated by whoever runs it."""

    prepared: PreparedModel
    tokenizer: Tokenizer
    forward_pass: ForwardPass
    cache_blocks: int
    """Blocks that hold LoadSettings.cache_tokens."""

    def info(self) -> dict[str, Any]:
        """What the model is, by the field names of ``slipstream.v1.ModelInfo``."""
        return {
            "model_id": self.prepared.model_id,
            "weights_fingerprint": self.prepared.weights_fingerprint,
            "tokenizer_fingerprint": self.prepared.tokenizer_fingerprint,
            "vocabulary_size": self.forward_pass.vocabulary_size,
            "context_limit": self.forward_pass.context_limit,
            "compute_path": self.forward_pass.compute_path,
            "compute_path_reason": self.forward_pass.compute_path_reason,
            "weight_format": self.forward_pass.weight_format,
        }


def load(prepared: PreparedModel, settings: LoadSettings, progress: Progress | None = None) -> LoadedModel:
    """Load a prepared model. Raises ModelError, one line that says what to change."""
    torch.set_num_threads(settings.threads)
    path, reason = choose_path(prepared, settings)
    if path == "fast":
        try:
            forward: ForwardPass = _load_fast(prepared, settings, reason)
        except BuildError as error:
            if settings.compute_path == "fast":
                raise ModelError(f"the fast pass cannot be built here: {error}") from error
            path, reason = "reference", str(error)
    if path == "reference":
        forward = _load_reference(prepared, settings, reason, progress)
    blocks = math.ceil(settings.cache_tokens / BLOCK_SIZE)
    return LoadedModel(prepared, Tokenizer.from_folder(prepared.path), forward, blocks)


def choose_path(prepared: PreparedModel, settings: LoadSettings) -> tuple[str, str]:
    """ "fast" or "reference", and why. Raises ModelError if the fast pass is asked for and cannot be had."""
    if settings.compute_path == "reference":
        return "reference", "asked for by the settings"
    obstacle = _obstacle(prepared, settings)
    if obstacle is None:
        forced = settings.compute_path == "fast"
        return "fast", "asked for by the settings" if forced else ""
    if settings.compute_path == "fast":
        raise ModelError(f"the fast pass cannot run {prepared.model_id} here: {obstacle}; ask for auto or reference")
    return "reference", obstacle


def _obstacle(prepared: PreparedModel, settings: LoadSettings) -> str | None:
    if settings.device != "cpu":
        return f"the device is {settings.device}"
    if settings.weight_format != "auto":
        return f"weights in {settings.weight_format} were asked for"
    return fast.why_not(prepared.config) or _beyond_fast(prepared.config)


def _beyond_fast(config: ModelConfig) -> str | None:
    """What the fast pass would leave out."""
    if config.mlp_bias or (config.attention_bias and config.architecture not in _BIASED_QKV_ONLY):
        return "maps with biases other than those of queries, keys and values"
    try:
        config.rope_tables(1)
    except ConfigurationError as error:
        return str(error)
    return None


def _load_fast(prepared: PreparedModel, settings: LoadSettings, reason: str) -> ForwardPass:
    packed = prepared.path / "packed.safetensors"
    check_memory(prepared, settings, fast_bytes(prepared, packed), cache_bytes_per_token(prepared, 2))
    # Packed weights are kept unless the store is mounted read-only.
    keep = packed if packed.exists() or os.access(prepared.path, os.W_OK) else None
    try:
        forward = fast.FastPass.load(prepared.path, prepared.config, settings.threads, packed=keep)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    if reason:
        forward.compute_path_reason = reason
    return forward


def _load_reference(
    prepared: PreparedModel, settings: LoadSettings, reason: str, progress: Progress | None
) -> ForwardPass:
    chosen = settings.weight_format
    weights = reference.choose_format(settings.device) if chosen == "auto" else chosen
    size = 4 if weights == "fp32" else 2
    check_memory(prepared, settings, prepared.parameters * size, cache_bytes_per_token(prepared, size))
    folder = store.dense(prepared, progress)
    return reference.ReferencePass.load(folder, prepared.config, weights, settings.device, reason)


def fast_bytes(prepared: PreparedModel, packed: Path) -> int:
    """Bytes that the fast pass's weights take, twice as many while they are packed for the first time."""
    if packed.exists():
        return packed.stat().st_size
    # 8 bits a value and a scale of 16 for 32 of them; a GGUF file's blocks are taken as they are.
    kept = prepared.weight_bytes if any(prepared.path.glob("*.gguf")) else prepared.parameters * 34 // 32
    return 2 * kept


def cache_bytes_per_token(prepared: PreparedModel, size: int) -> int:
    """Keys and values of one token over all layers, at ``size`` bytes a value."""
    config = prepared.config
    return 2 * size * config.num_layers * config.num_kv_heads * config.head_dim


def check_memory(prepared: PreparedModel, settings: LoadSettings, weights: int, per_token: int) -> None:
    """Raises ModelError if weights and cache do not fit into what is free now."""
    cache = settings.cache_tokens * per_token
    free = available_bytes(settings.device) - settings.reserved_bytes
    if weights + cache > free:
        raise ModelError(
            f"not enough memory for {prepared.model_id}: weights take {_size(weights)}, a cache of"
            f" {settings.cache_tokens} tokens {_size(cache)}, and {_size(max(free, 0))} are free;"
            " lower the cache tokens, or take a smaller model or weight format"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
