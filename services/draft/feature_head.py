"""The feature-fed draft: one Llama layer that guesses on from the target's hidden states (EAGLE-3, Li et al. 2025).

For the pair (f_t, x_{t+1}) of the target's states at token t and the token that follows it:

    g_t   = W_f · concat(rms(f_t[a]), rms(f_t[b]), ...)           one part for each wanted layer of the target
    x     = W_in · concat(rms(embed(x_{t+1})) * w_e, rms(g_t) * w_g)
    h     = layer(x)                                              one Llama decoder layer, rotary position t
    q     = softmax(head · (rms(h) * w_n))                        over the draft vocabulary

guesses x_{t+2}. The next step of the chain takes h in the place of g, its own guess as token and position t + 1.
Each part of f is normalised by itself, without weights: a few of the target's states are thousands of times larger than
the rest, and would drown the others.

This file is the only place of this mathematics: the trainer and the draft service both import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class FeatureHeadConfig:
    """Sizes of a feature head; all but the last two are the target's own."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    draft_vocabulary_size: int
    """Rows of the target's head that the draft can guess from."""
    feature_layers: tuple[int, ...]
    """Target layers whose outputs are fed in, counted from 1."""


class Attend(Protocol):
    """Attention of queries over whatever keys and values the caller keeps."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``query`` [..., heads, head_dim], ``key`` and ``value`` [..., kv heads, head_dim] of the same rows, rotated;
        returns [..., heads, head_dim]."""
        ...


def rms(x: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation of the last dimension, without weights."""
    return functional.rms_norm(x, (x.shape[-1],), None, eps)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., 1, head_dim] for ``positions`` [...], as Llama rotates (halves, not pairs)."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angles = positions.unsqueeze(-1).float() * inverse
    angles = torch.cat([angles, angles], -1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` [..., heads, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """The projections of one attention block; who attends to what is the caller's."""

    def __init__(self, config: FeatureHeadConfig) -> None:
        super().__init__()
        size, head = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(size, config.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head, size, bias=False)


class Mlp(nn.Module):
    """Llama's gated feed-forward block."""

    def __init__(self, config: FeatureHeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return gated


class Layer(nn.Module):
    """One Llama decoder layer, named as the target names its own so that its weights can be taken over."""

    def __init__(self, config: FeatureHeadConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)


class FeatureHead(nn.Module):
    """The draft's weights, and its steps as separate pieces.

    ``embed`` [V, D] and ``head`` [Vd, D] are the target's own, frozen, and not part of :meth:`own_state`;
    ``vocabulary`` [Vd] int32, ascending, names the token of each row of ``head``.
    """

    embed: Tensor
    head: Tensor
    vocabulary: Tensor

    def __init__(self, config: FeatureHeadConfig, embed: Tensor, head: Tensor, vocabulary: Tensor) -> None:
        """Raises ValueError where the target's rows and the draft's vocabulary don't fit each other."""
        super().__init__()
        if vocabulary.numel() != config.draft_vocabulary_size or head.shape[0] != vocabulary.numel():
            raise ValueError("the draft's vocabulary and the rows of its head differ in number")
        if embed.shape[1] != config.hidden_size or head.shape[1] != config.hidden_size:
            raise ValueError("the target's embedding has another width than the draft")
        self.config = config
        size = config.hidden_size
        self.features = nn.Linear(len(config.feature_layers) * size, size, bias=False)
        self.input = nn.Linear(2 * size, size, bias=False)
        self.embed_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.feature_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.layer = Layer(config)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("vocabulary", vocabulary.to(torch.int32))

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states [..., layers, D] as one state g [..., D]."""
        parts = rms(features.to(self.features.weight.dtype), self.config.rms_norm_eps)
        state: Tensor = self.features(parts.flatten(-2))
        return state

    def enter(self, tokens: Tensor, states: Tensor) -> Tensor:
        """The layer's input [..., D] for ``tokens`` [...] that follow ``states`` [..., D] (g, or the chain's own h)."""
        embedded = self.embed_norm(functional.embedding(tokens, self.embed).to(states.dtype))
        entered: Tensor = self.input(torch.cat([embedded, self.feature_norm(states)], -1))
        return entered

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., kv heads, head_dim] of rows ``x`` [..., D] at ``positions`` [...]."""
        normed = self.layer.input_layernorm(x)
        shape = (*x.shape[:-1], self.config.num_key_value_heads, self.config.head_dim)
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        key = rotate(self.layer.self_attn.k_proj(normed).view(shape), cos, sin)
        return key, self.layer.self_attn.v_proj(normed).view(shape)

    def step(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The layer: rows ``x`` [..., D] at ``positions`` [...] to h [..., D]."""
        attention, cos_sin = self.layer.self_attn, rotary(positions, self.config.head_dim, self.config.rope_theta)
        normed = self.layer.input_layernorm(x)
        rows = x.shape[:-1]
        query = attention.q_proj(normed).view(*rows, self.config.num_attention_heads, self.config.head_dim)
        key = attention.k_proj(normed).view(*rows, self.config.num_key_value_heads, self.config.head_dim)
        value = attention.v_proj(normed).view(*rows, self.config.num_key_value_heads, self.config.head_dim)
        attended = attend(rotate(query, *cos_sin), rotate(key, *cos_sin), value)
        x = x + attention.o_proj(attended.flatten(-2))
        h: Tensor = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        return h

    def logits(self, h: Tensor) -> Tensor:
        """Logits [..., Vd] over the draft vocabulary."""
        return functional.linear(self.norm(h).to(self.head.dtype), self.head)

    def own_state(self) -> dict[str, Tensor]:
        """What is saved beside the card: the trained weights in bfloat16 and the vocabulary."""
        state = self.state_dict()
        return {
            name: (value if name == "vocabulary" else value.to(torch.bfloat16)).contiguous()
            for name, value in state.items()
        }
