"""Attention of the reference path: each row over exactly its own places of a paged cache, in torch operators.

transformers' models call it in place of their own attention. A row's operations have the shapes of its own context,
whatever rides beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from services.model.errors import ModelError

NAME = "slipstream_paged"
"""Under this name transformers knows :func:`attend`."""

_HARMLESS = frozenset({
    "dropout", "scaling", "is_causal", "position_ids", "use_cache", "output_attentions", "output_hidden_states",
    "cache", "cache_position", "position_embeddings", "output_router_logits", "return_dict", "layer_idx",
    "sliding_window", "softcap", "logits_to_keep",
})  # fmt: skip
"""Arguments that models hand to an attention function and that either change nothing here or are honoured."""


class UnknownAttention(ModelError):
    """A model whose attention does more than this one knows."""


@dataclass(slots=True)
class Layer:
    """Keys and values of one layer, [slots, heads, width]; slot = block * BLOCK_SIZE + offset."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class Bucket:
    """The rows of one pass of the model, and where their keys and values go."""

    written: torch.Tensor
    """The slots of its rows; what follows them is padding."""
    seen: Sequence[torch.Tensor]
    """For each row the slots that it sees, in order of position, its own last."""
    cache: dict[int, Layer]
    calls: list[int] = field(default_factory=list)
    """Layers that called, in order."""


current: ContextVar[Bucket] = ContextVar("bucket")
"""The bucket that the model is running on."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function by transformers' interface.

    query [1, heads, rows, width], key and value [1, kv heads, rows, width], already rotated. Returns [1, rows, heads,
    width]. Raises UnknownAttention for an argument that would have to be honoured.
    """
    unknown = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    if unknown or attention_mask is not None:
        raise UnknownAttention(f"attention with {', '.join(unknown) or 'a mask'}")
    bucket, index = current.get(), getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise UnknownAttention("attention without a layer index")
    bucket.calls.append(index)
    layer = _layer(bucket, index, key, value)
    layer.keys[bucket.written] = key[0].transpose(0, 1)[: len(bucket.seen)]
    layer.values[bucket.written] = value[0].transpose(0, 1)[: len(bucket.seen)]
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    for row, slots in enumerate(bucket.seen):
        seen = slots if sliding_window is None else slots[-sliding_window:]
        out[row] = _row(query[0, :, row], layer.keys[seen], layer.values[seen], scale, softcap)
    return out[None], None


def _row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """One row: query [heads, width], keys and values [places, kv heads, width]; sums in float32."""
    kv_heads = keys.shape[1]
    grouped = query.float().reshape(kv_heads, -1, query.shape[-1])
    scores = grouped @ keys.float().permute(1, 2, 0) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    mixed = scores.softmax(-1) @ values.float().transpose(0, 1)
    return mixed.reshape(query.shape[0], -1).to(query.dtype)


def _layer(bucket: Bucket, index: int, key: torch.Tensor, value: torch.Tensor) -> Layer:
    """The layer's cache; in the first pass of all, its shape is learnt here."""
    layer = bucket.cache.get(index)
    if layer is None:
        slots = int(bucket.written.max()) + 1
        layer = bucket.cache[index] = Layer(
            key.new_zeros(slots, key.shape[1], key.shape[3]), value.new_zeros(slots, value.shape[1], value.shape[3])
        )
    return layer
