"""What a model's weight files hold, read from their headers, and whether it fits the configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.model.configuration import ModelConfig
from services.model.errors import ModelError

SAFETENSORS_TYPES = frozenset({"F32", "F16", "BF16"})

LLAMA_LIKE = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    kind: str
    """Format by the file's own name, e.g. "BF16" or "Q4_1"."""
    shape: tuple[int, ...]


Tensors = Mapping[str, StoredTensor]


def safetensors_files(folder: Path) -> list[Path]:
    """The files of a folder's safetensors checkpoint. Raises ModelError for one that is missing."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index.name} is not an index of safetensors files; fetch it again") from error
        missing = [name for name in names if Path(name).name != name or not (folder / name).exists()]
        if missing:
            raise ModelError(f"{missing[0]} is named in {index.name} but missing; fetch it")
        return [folder / name for name in names]
    if whole.exists():
        return [whole]
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(f"{folder.name} holds pytorch_model.bin only; convert it to model.safetensors")
    raise ModelError(f"{folder.name} holds no model.safetensors; name a folder with weights, or a GGUF file")


def read_safetensors(path: Path) -> Tensors:
    """Tensors by name. Raises ModelError for a file that is damaged, cut short or of unknown tensor types."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError(f"{path.name} is not a whole safetensors file ({size} bytes); fetch it again")
        header = _header(file.read(length), path)
    tensors, end = {}, 0
    for name, entry in header.items():
        try:
            tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]))
            end = max(end, int(entry["data_offsets"][1]))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ModelError(f"{path.name}: the header is damaged at {name}; fetch it again") from error
        if entry["dtype"] not in SAFETENSORS_TYPES:
            known = ", ".join(sorted(SAFETENSORS_TYPES))
            raise ModelError(f"{path.name}: {name} has tensor type {entry['dtype']}; use weights in {known}, or a GGUF")
    if size != 8 + length + end:
        raise ModelError(f"{path.name} has {size} bytes where its header asks for {8 + length + end}; fetch it again")
    return tensors


def _header(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise ModelError(f"{path.name} is not a safetensors file; fetch it again") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path.name} is not a safetensors file; fetch it again")
    header.pop("__metadata__", None)
    return header


def check_shapes(tensors: Tensors, config: ModelConfig, file: str) -> None:
    """Hold a Llama-like model's tensors against its configuration; other architectures are left to transformers.

    Raises ModelError naming the first tensor that is missing or has another shape.
    """
    if config.architecture not in LLAMA_LIKE:
        return
    for name, shape in expected_shapes(config).items():
        found = tensors.get(name)
        if found is None:
            raise ModelError(f"{file}: tensor {name} is missing; fetch the model again or correct config.json")
        if found.shape != shape:
            raise ModelError(
                f"{file}: {name} has shape {list(found.shape)} where the configuration asks for {list(shape)};"
                " correct config.json or fetch the matching weights"
            )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama-like model's matrices by Hugging Face names."""
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocabulary_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary_size, hidden)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}mlp.gate_proj.weight": (wide, hidden),
            f"{prefix}mlp.up_proj.weight": (wide, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, wide),
        }
    return shapes


def parameters(tensors: Tensors) -> int:
    """Values in all tensors together."""
    return sum(math.prod(tensor.shape) for tensor in tensors.values())
