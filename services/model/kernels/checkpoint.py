"""Where weights come from: GGUF blocks taken as they are, or safetensors quantised to 8 bits.

Both sources answer to the names of a Hugging Face checkpoint (``model.layers.0.self_attn.q_proj.weight``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.model.kernels.packing import GROUP, Quantised, quantise


class CheckpointError(ValueError):
    """A model file that cannot be read as what its configuration says, and what to change."""


class Checkpoint(Protocol):
    def has(self, name: str) -> bool:
        """Whether a tensor of this name is stored."""
        ...

    def matrix(self, name: str, shape: tuple[int, int]) -> Quantised:
        """A linear map [outputs, inputs]. Raises CheckpointError if it is missing or has another shape."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor as float32. Raises CheckpointError if it is missing or has another shape."""
        ...

    def format(self, name: str) -> str:
        """The stored format of a tensor, e.g. "q4_1" or "bf16"."""
        ...


def open_checkpoint(folder: Path, num_heads: int, num_kv_heads: int) -> Checkpoint:
    """The GGUF file of a prepared folder if there is one, else its safetensors. Raises CheckpointError."""
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return GgufCheckpoint(gguf[0], num_heads, num_kv_heads)
    return SafetensorsCheckpoint(folder)


class SafetensorsCheckpoint:
    """One or several safetensors files of a folder, mapped, not read."""

    def __init__(self, folder: Path, name: str = "model.safetensors") -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / f"{name}.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [name]
        self._files: dict[str, Any] = {}
        for part in names:
            if not (folder / part).exists():
                raise CheckpointError(f"{part} is missing in the model folder")
            try:
                opened: Any = safe_open(folder / part, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{part} is not a whole safetensors file ({error}); fetch it again") from error
            self._files.update(dict.fromkeys(opened.keys(), opened))
            self._metadata: dict[str, str] = opened.metadata() or {}

    def metadata(self) -> dict[str, str]:
        """What the (last) file says of itself."""
        return self._metadata

    def has(self, name: str) -> bool:
        return name in self._files

    def matrix(self, name: str, shape: tuple[int, int]) -> Quantised:
        return quantise(self.tensor(name, shape))

    def whole(self, name: str) -> torch.Tensor:
        """A tensor as it is stored, of any shape. Raises CheckpointError if it is missing."""
        if name not in self._files:
            raise CheckpointError(f"tensor {name} is missing")
        stored: torch.Tensor = self._files[name].get_tensor(name)
        return stored

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        loaded = self.whole(name)
        _check_shape(name, tuple(loaded.shape), shape)
        return loaded.float().contiguous()

    def format(self, name: str) -> str:
        return str(self._files[name].get_slice(name).get_dtype()).lower()


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor: model.layers.3.mlp.up_proj.weight is blk.3.ffn_up.weight."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"
    return f"{_GGUF_NAMES[module]}.{kind}"


class GgufCheckpoint:
    """A GGUF file, mapped. Q4_0, Q4_1 and Q8_0 keep their numbers exactly; other kinds are re-rounded to 8 bits."""

    def __init__(self, path: Path, num_heads: int, num_kv_heads: int) -> None:
        from gguf import GGUFReader

        try:
            reader = GGUFReader(path)
        except (ValueError, OSError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path.name} is not a whole GGUF file ({error}); fetch it again") from error
        self._tensors = {t.name: t for t in reader.tensors}
        architecture = reader.get_field("general.architecture")
        # llama.cpp interleaves the halves of each query and key head of this architecture for its rotary embedding.
        self._interleaved = architecture is not None and architecture.contents() == "llama"
        self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads}

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._tensors

    def matrix(self, name: str, shape: tuple[int, int]) -> Quantised:
        stored = self._find(name, shape)
        matrix = _quantised(stored.tensor_type.name, stored.data, shape, gguf_name(name))
        order = self._row_order(name, shape[0])
        return matrix if order is None else matrix.rows(order)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        import gguf

        stored = self._find(name, shape)
        try:
            dense = gguf.dequantize(stored.data, stored.tensor_type).reshape(shape)
        except NotImplementedError as error:
            raise CheckpointError(f"{stored.name}: unknown tensor type {stored.tensor_type.name}") from error
        tensor = torch.from_numpy(np.array(dense, dtype=np.float32))
        order = self._row_order(name, shape[0])
        return tensor if order is None else tensor[order].contiguous()

    def format(self, name: str) -> str:
        return str(self._tensors[gguf_name(name)].tensor_type.name).lower()

    def _find(self, name: str, shape: tuple[int, ...]) -> Any:
        stored = self._tensors.get(gguf_name(name))
        if stored is None:
            raise CheckpointError(f"tensor {gguf_name(name)} is missing")
        _check_shape(stored.name, tuple(int(n) for n in reversed(stored.shape)), shape)
        return stored

    def _row_order(self, name: str, rows: int) -> torch.Tensor | None:
        heads = self._heads.get(gguf_name(name).split(".")[-2])
        if heads is None or not self._interleaved:
            return None
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(f"{name} has shape {list(found)}, the configuration asks for {list(expected)}")


def _quantised(kind: str, data: NDArray[Any], shape: tuple[int, int], name: str) -> Quantised:
    """Blocks of a GGUF tensor as they are (layouts: ggml's block_q4_0, block_q4_1, block_q8_0)."""
    groups = shape[1] // GROUP
    if kind == "Q8_0":
        blocks = np.asarray(data).reshape(shape[0], groups, 34)
        values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(shape)
        return Quantised(torch.from_numpy(values), _halves(blocks[..., :2]), None)
    if kind in ("Q4_0", "Q4_1"):
        header = 2 if kind == "Q4_0" else 4
        blocks = np.asarray(data).reshape(shape[0], groups, header + 16)
        nibbles = blocks[..., header:]
        values = np.concatenate([nibbles & 15, nibbles >> 4], -1).reshape(shape)
        scales = _halves(blocks[..., :2])
        # Q4_0 is s (q - 8).
        minima = scales * -8 if kind == "Q4_0" else _halves(blocks[..., 2:4])
        return Quantised(torch.from_numpy(values), scales, minima)
    import gguf

    try:
        dense = gguf.dequantize(np.asarray(data), gguf.GGMLQuantizationType[kind]).reshape(shape)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{name}: unknown tensor type {kind}; Q4_0, Q4_1, Q8_0, K-quants, F16, BF16 and F32 work"
        ) from error
    return quantise(torch.from_numpy(np.array(dense, dtype=np.float32)))


def _halves(raw: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(raw).view(np.float16).squeeze(-1).copy())
