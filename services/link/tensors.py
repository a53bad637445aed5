"""Tensors on the link: a descriptor in the message, the bytes in the arena, or inline without room or arena.

Everything that a descriptor says is checked with plain integers before a byte is touched, and what was copied out is
checked before it is used. Neither side trusts the other: a bug there must not become a wrong answer here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from slipstream.v1 import draft_pb2

from services.link import metrics
from services.link.arena import Arena, ArenaError, SlotWriter

FLOAT32 = draft_pb2.DATA_TYPE_FLOAT32
BFLOAT16 = draft_pb2.DATA_TYPE_BFLOAT16

_DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), BFLOAT16: np.dtype("<u2")}
"""bfloat16 travels as its 16 bits."""


class TensorError(Exception):
    """A descriptor or its content that did not pass the checks. The text names no path, no address."""


def write(array: NDArray[Any], dtype: draft_pb2.DataType, slot: SlotWriter | None) -> draft_pb2.Tensor:
    """Describe an array; its bytes go to the slot if there is one with room, else inline."""
    if array.dtype != _DTYPES[dtype]:
        raise ValueError(f"expected {_DTYPES[dtype]}, got {array.dtype}")
    content = np.ascontiguousarray(array).tobytes()
    tensor = draft_pb2.Tensor(dtype=dtype, shape=array.shape)
    offset = None if slot is None else slot.append(content)
    if slot is None or offset is None:
        tensor.inline = content
        metrics.INLINE.inc()
    else:
        tensor.region.epoch = slot.epoch
        tensor.region.slot, tensor.region.generation = slot.slot, slot.generation
        tensor.region.offset, tensor.region.length = offset, len(content)
    return tensor


def read(
    tensor: draft_pb2.Tensor, dtype: draft_pb2.DataType, shape: Sequence[int], arena: Arena | None
) -> NDArray[Any]:
    """A copy of the tensor, which must have this dtype and shape.

    Raises TensorError naming the check that failed.
    """
    if tensor.dtype != dtype:
        raise TensorError("dtype is not the one that belongs here")
    if tuple(tensor.shape) != tuple(shape):
        raise TensorError(f"shape is {list(tensor.shape)[:8]}, expected {list(shape)}")
    length = math.prod(int(n) for n in shape) * _DTYPES[dtype].itemsize
    in_arena = tensor.WhichOneof("place") == "region"
    content = _from_arena(tensor.region, length, arena) if in_arena else tensor.inline
    if len(content) != length:
        raise TensorError(f"{len(content)} bytes do not make the shape")
    return np.frombuffer(content, _DTYPES[dtype]).reshape(shape)


def _from_arena(region: draft_pb2.ArenaRegion, length: int, arena: Arena | None) -> bytes:
    if arena is None:
        raise TensorError("a region without an arena")
    if region.epoch != arena.info.epoch:
        raise TensorError("the region belongs to another session's arena")
    if region.length != length:
        raise TensorError("the region's length does not fit its shape")
    try:
        return arena.read(region.slot, region.generation, region.offset, region.length)
    except ArenaError as error:
        raise TensorError(str(error)) from None


def check_distribution(q: NDArray[np.float32]) -> None:
    """Raises TensorError unless each row of [k, columns] is finite, non-negative and sums to 1 within a thousandth."""
    sums = q.sum(-1, dtype=np.float64)
    if q.min(initial=0) >= 0 and (np.abs(sums - 1) <= 1e-3).all():
        return  # Neither holds with a value that is not finite.
    if not np.isfinite(q).all():
        raise TensorError("the distribution has values that are not finite")
    if (q < 0).any():
        raise TensorError("the distribution has negative values")
    raise TensorError("the distribution does not sum to 1")
