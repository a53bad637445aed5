"""The pass once more in torch: the reference that the tests hold the kernels against, part by part.

It computes what csrc/ computes, quantisation of weights and activations included, in the plainest way; sums run in
torch's order, so results agree to rounding, not bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from services.model.kernels.packing import GROUP, Packed, unpack


def quantise_activations(x: torch.Tensor) -> torch.Tensor:
    """[rows, width] rounded to 8 bits in blocks of 32 and back (csrc/activations.h)."""
    blocks = x.view(x.shape[0], -1, GROUP)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-10)
    return ((blocks / scale).round() * scale).view(x.shape)


def linear(packed: Packed, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """W x for rows [rows, inputs] (csrc/linear.h)."""
    return F.linear(quantise_activations(x), unpack(packed).dequantise(), bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [rows, heads, head_dim] by tables [rows, head_dim / 2] (Su et al. 2021)."""
    a, b = x.chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1)


def ancestors(base: int, parents: Sequence[int], row: int) -> list[int]:
    """Places that a row sees, in order of position: the cache, its ancestors, itself."""
    path = []
    while row >= 0:
        path.append(base + row)
        row = parents[row]
    return [*range(base), *reversed(path)]


def attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Each row over its own places (csrc/attention.h).

    queries [rows, heads, head_dim], not scaled; keys and values [places, kv_heads, head_dim]. Returns [rows, heads,
    head_dim].
    """
    group = queries.shape[1] // keys.shape[1]
    keys = keys.bfloat16().float().repeat_interleave(group, 1)
    values = values.bfloat16().float().repeat_interleave(group, 1)
    out = torch.empty_like(queries)
    for row, seen in enumerate(places):
        scores = torch.einsum("hd,phd->hp", queries[row], keys[list(seen)]) * queries.shape[-1] ** -0.5
        out[row] = torch.einsum("hp,phd->hd", scores.softmax(-1), values[list(seen)])
    return out


def gated(gate_up: Packed, x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, from the interleaved tiles (csrc/pass.h)."""
    both = linear(gate_up, x).view(x.shape[0], -1, 2, GROUP)
    return (F.silu(both[:, :, 0]) * both[:, :, 1]).flatten(1)
