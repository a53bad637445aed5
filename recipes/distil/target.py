"""The target as the recipe sees it: its pass, its chat format, and the weights that the draft starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.model.configuration import ModelConfig
from services.model.forward import ForwardPass
from services.model.kernels.checkpoint import Checkpoint, open_checkpoint
from services.model.tokenizer import Tokenizer


class ChatTokenizer:
    """Chat prompts as token ids, by the target's own template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, user_turn: str) -> list[int]:
        """The conversation up to the place where the answer starts."""
        return self._tokenizer.encode_chat([{"role": "user", "content": user_turn}])

    def user_turn_opened(self) -> list[int]:
        """The conversation up to the place where the user's words start."""
        mark = "user's words"
        rendered = self._tokenizer.render_chat([{"role": "user", "content": mark}], add_generation_prompt=False)
        return self._tokenizer.encode(rendered.split(mark)[0], add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, without special tokens."""
        return self._tokenizer.decode(tokens)


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What of a Llama-like target's weights the draft starts from."""

    config: ModelConfig
    embed: Tensor
    """[V, D] bfloat16"""
    head: Tensor
    """[V, D] bfloat16; the embedding itself where they are tied."""
    norm: Tensor
    """[D] float32, of the final norm."""
    last_layer: dict[str, Tensor]
    """float32; names as in :class:`services.draft.feature_head.Layer`."""

    @classmethod
    def read(cls, folder: Path, config: ModelConfig) -> TargetWeights:
        """From a prepared model's folder, GGUF or safetensors.

        Raises services.model.kernels.checkpoint.CheckpointError where it is not Llama-like.
        """
        checkpoint = open_checkpoint(folder, config.num_heads, config.num_kv_heads)
        shape = (config.vocabulary_size, config.hidden_size)
        embed = checkpoint.tensor("model.embed_tokens.weight", shape).to(torch.bfloat16)
        tied = config.tied_embeddings or not checkpoint.has("lm_head.weight")
        head = embed if tied else checkpoint.tensor("lm_head.weight", shape).to(torch.bfloat16)
        norm = checkpoint.tensor("model.norm.weight", (config.hidden_size,))
        return cls(config, embed, head, norm, _last_layer(checkpoint, config))


def _last_layer(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Tensor]:
    size, wide, head = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (size,),
        "self_attn.q_proj": (heads, size),
        "self_attn.k_proj": (kv_heads, size),
        "self_attn.v_proj": (kv_heads, size),
        "self_attn.o_proj": (size, heads),
        "post_attention_layernorm": (size,),
        "mlp.gate_proj": (wide, size),
        "mlp.up_proj": (wide, size),
        "mlp.down_proj": (size, wide),
    }
    prefix = f"model.layers.{config.num_layers - 1}."
    return {f"{name}.weight": checkpoint.tensor(f"{prefix}{name}.weight", shape) for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True)
class Origin:
    """The target that a draft belongs to."""

    model_id: str
    weights_fingerprint: str
    tokenizer_fingerprint: str
    compute_path: str
    """The pass that wrote the corpus."""


@dataclass(frozen=True)
class Target:
    """A target opened for distillation."""

    forward: ForwardPass
    tokenizer: ChatTokenizer
    weights: TargetWeights
    end_tokens: frozenset[int]
    origin: Origin
