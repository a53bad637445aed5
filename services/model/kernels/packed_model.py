"""All weights of a model as the kernels read them, and the file that keeps them packed between starts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from services.model.configuration import ModelConfig
from services.model.kernels.checkpoint import Checkpoint, SafetensorsCheckpoint
from services.model.kernels.packing import Packed, Quantised, concatenate, interleave_gate_up, pack, quantise

LAYOUT = 1
"""Counts up whenever the layout of csrc/linear.h or of this file changes: older files are packed anew."""

MAPS = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class PackedLayer:
    norms: tuple[torch.Tensor, torch.Tensor]
    """Before attention, before the feed-forward block."""
    maps: tuple[Packed, Packed, Packed, Packed]
    """In the order of MAPS."""
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    """Of queries and keys (Qwen3)."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    layers: list[PackedLayer]
    norm: torch.Tensor
    head: Packed
    embedding: torch.Tensor | None
    """[vocabulary, hidden] bfloat16; None where the head's rows are the embedding."""
    weight_format: str

    @classmethod
    def read(cls, checkpoint: Checkpoint, config: ModelConfig) -> PackedModel:
        """Pack a checkpoint's weights. Raises CheckpointError for tensors that are missing or do not fit."""
        layers = [read_layer(checkpoint, config, f"model.layers.{i}.") for i in range(config.num_layers)]
        shape = (config.vocabulary_size, config.hidden_size)
        embedding = "model.embed_tokens.weight"
        tied = config.tied_embeddings or not checkpoint.has("lm_head.weight")
        head = checkpoint.matrix(embedding if tied else "lm_head.weight", shape)
        if head.bits == 4:  # A 4-bit head costs more faithfulness than it saves time (docs/decisions.md).
            head = quantise(head.dequantise())
        stored = checkpoint.format("model.layers.0.self_attn.q_proj.weight")
        return cls(
            layers,
            checkpoint.tensor("model.norm.weight", (config.hidden_size,)),
            pack(head),
            None if tied else checkpoint.tensor(embedding, shape).bfloat16(),
            stored if stored in ("q4_0", "q4_1", "q8_0") else "int8",
        )

    def save(self, path: Path) -> None:
        """Write the file, all of it or nothing."""
        from safetensors.torch import save_file

        metadata = {"layout": str(LAYOUT), "layers": str(len(self.layers)), "weight_format": self.weight_format}
        tensors: dict[str, torch.Tensor] = {"norm": self.norm}
        for name, packed in self._maps():
            tensors[f"{name}.weights"], tensors[f"{name}.scales"] = packed.weights, packed.scales
            metadata[name] = json.dumps([packed.bits, packed.outputs, packed.inputs])
        if self.embedding is not None:
            tensors["embedding"] = self.embedding
        for i, layer in enumerate(self.layers):
            tensors[f"{i}.norms"] = torch.stack(layer.norms)
            if layer.qkv_bias is not None:
                tensors[f"{i}.bias"] = layer.qkv_bias
            if layer.head_norms is not None:
                tensors[f"{i}.head_norms"] = torch.stack(layer.head_norms)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            save_file(tensors, partial, metadata)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _maps(self) -> Iterator[tuple[str, Packed]]:
        yield "head", self.head
        for i, layer in enumerate(self.layers):
            for name, packed in zip(MAPS, layer.maps, strict=True):
                yield f"{i}.{name}", packed

    @classmethod
    def open(cls, path: Path) -> PackedModel | None:
        """Map a file that :meth:`save` wrote; None if there is none, or one of another layout.

        Raises CheckpointError if it is broken.
        """
        if not path.exists():
            return None
        file = SafetensorsCheckpoint(path.parent, path.name)
        metadata = file.metadata()
        if metadata.get("layout") != str(LAYOUT):
            return None

        def packed(name: str) -> Packed:
            return Packed(file.whole(f"{name}.weights"), file.whole(f"{name}.scales"), *json.loads(metadata[name]))

        def layer(i: int) -> PackedLayer:
            qkv, output, gate_up, down = (packed(f"{i}.{name}") for name in MAPS)
            norms, head_norms = file.whole(f"{i}.norms"), f"{i}.head_norms"
            return PackedLayer(
                (norms[0], norms[1]),
                (qkv, output, gate_up, down),
                file.whole(f"{i}.bias") if file.has(f"{i}.bias") else None,
                (file.whole(head_norms)[0], file.whole(head_norms)[1]) if file.has(head_norms) else None,
            )

        return cls(
            [layer(i) for i in range(int(metadata["layers"]))],
            file.whole("norm"),
            packed("head"),
            file.whole("embedding") if file.has("embedding") else None,
            metadata["weight_format"],
        )


def read_layer(checkpoint: Checkpoint, config: ModelConfig, prefix: str) -> PackedLayer:
    """Read and pack one decoder layer whose tensors' names begin with ``prefix`` ("model.layers.0.")."""
    hidden, queries, keys = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )

    def matrix(name: str, outputs: int, inputs: int) -> Quantised:
        return checkpoint.matrix(f"{prefix}{name}.weight", (outputs, inputs))

    def vector(name: str, size: int) -> torch.Tensor:
        return checkpoint.tensor(f"{prefix}{name}", (size,))

    projections = (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys))
    bias = None
    if checkpoint.has(f"{prefix}self_attn.q_proj.bias"):
        bias = torch.cat([vector(f"{name}.bias", size) for name, size in projections])
    head_norms = None
    if checkpoint.has(f"{prefix}self_attn.q_norm.weight"):
        head_norms = (
            vector("self_attn.q_norm.weight", config.head_dim),
            vector("self_attn.k_norm.weight", config.head_dim),
        )
    return PackedLayer(
        norms=(vector("input_layernorm.weight", hidden), vector("post_attention_layernorm.weight", hidden)),
        maps=(
            pack(concatenate([matrix(name, size, hidden) for name, size in projections])),
            pack(matrix("self_attn.o_proj", hidden, queries)),
            pack(
                interleave_gate_up(
                    matrix("mlp.gate_proj", config.intermediate_size, hidden),
                    matrix("mlp.up_proj", config.intermediate_size, hidden),
                )
            ),
            pack(matrix("mlp.down_proj", hidden, config.intermediate_size)),
        ),
        qkv_bias=bias,
        head_norms=head_norms,
    )
