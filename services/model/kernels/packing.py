"""Weights of the fast pass: quantised in groups of 32 inputs, then laid out as csrc/linear.h draws it.

:func:`pack` and :func:`unpack` are each other's inverse; :meth:`Quantised.dequantise` is the reference of the
arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32
TILE = 16


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix [outputs, inputs] in groups of 32 inputs: ``w = scale * q + minimum``."""

    values: torch.Tensor
    """[outputs, inputs]: uint8 in 0..15 (4 bit), or int8 (8 bit)."""
    scales: torch.Tensor
    """[outputs, inputs / 32], float16."""
    minima: torch.Tensor | None
    """[outputs, inputs / 32], float16, with 4 bits; None with 8."""

    @property
    def bits(self) -> int:
        return 8 if self.minima is None else 4

    @property
    def outputs(self) -> int:
        return int(self.values.shape[0])

    @property
    def inputs(self) -> int:
        return int(self.values.shape[1])

    def dequantise(self) -> torch.Tensor:
        """The matrix as float32 [outputs, inputs]."""
        grouped = self.values.float().view(self.outputs, -1, GROUP) * self.scales.float()[..., None]
        if self.minima is not None:
            grouped = grouped + self.minima.float()[..., None]
        return grouped.view(self.outputs, self.inputs)

    def rows(self, index: torch.Tensor) -> Quantised:
        """The rows named by ``index``, in its order."""
        minima = None if self.minima is None else self.minima[index]
        return Quantised(self.values[index], self.scales[index], minima)


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantised matrix as the kernels read it; ``outputs`` is padded to a multiple of 16."""

    weights: torch.Tensor
    scales: torch.Tensor
    bits: int
    outputs: int
    inputs: int


def quantise(weight: torch.Tensor) -> Quantised:
    """Round [outputs, inputs] to 8 bits with one scale a group, ``max|w| / 127``.

    Raises ValueError if inputs is not a multiple of 32 or a value does not fit.
    """
    if weight.shape[1] % GROUP:
        raise ValueError(f"inputs must be a multiple of {GROUP}, got {weight.shape[1]}")
    grouped = weight.float().view(weight.shape[0], -1, GROUP)
    scales = (grouped.abs().amax(-1) / 127).half()
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("a weight is not finite or too large for 8 bits with a half-precision scale")
    # Scales below half precision's smallest number stand for groups of zeros.
    divisor = torch.where(scales == 0, 1, scales.float())
    values = (grouped / divisor[..., None]).round().clamp(-127, 127).to(torch.int8)
    return Quantised(values.view(weight.shape), scales, None)


def concatenate(parts: list[Quantised]) -> Quantised:
    """Stack matrices of the same inputs; with mixed widths, the 4-bit ones are re-rounded to 8."""
    if len({p.bits for p in parts}) > 1:
        parts = [p if p.bits == 8 else quantise(p.dequantise()) for p in parts]
    minima = [p.minima for p in parts if p.minima is not None]
    return Quantised(
        torch.cat([p.values for p in parts]),
        torch.cat([p.scales for p in parts]),
        torch.cat(minima) if minima else None,
    )


def interleave_gate_up(gate: Quantised, up: Quantised) -> Quantised:
    """Two tiles of gate, two of up, and so on: 32 channels of both side by side."""
    both = concatenate([gate, up])
    order = torch.arange(both.outputs).view(2, -1, 2 * TILE).transpose(0, 1).reshape(-1)
    return both.rows(order)


def pack(matrix: Quantised) -> Packed:
    """Lay a matrix out in tiles; rows of zeros fill the last tile."""
    padding = -matrix.outputs % TILE
    values, scales, minima = matrix.values, matrix.scales, matrix.minima
    if padding:
        values = torch.cat([values, values.new_zeros(padding, matrix.inputs)])
        scales = torch.cat([scales, scales.new_zeros(padding, scales.shape[1])])
        minima = None if minima is None else torch.cat([minima, minima.new_zeros(padding, minima.shape[1])])
    tiles, inputs = values.shape[0] // TILE, matrix.inputs
    if minima is None:
        signed = values.view(tiles, TILE, inputs // 4, 4).permute(0, 2, 1, 3)
        weights = (signed.to(torch.int16) + 128).to(torch.uint8).contiguous()
        return Packed(weights.view(-1), _tiled(scales, tiles).view(-1), 8, values.shape[0], inputs)
    pairs = values.view(tiles, TILE, inputs // 8, 2, 4).permute(0, 2, 1, 3, 4)
    weights = (pairs[:, :, :, 0] | (pairs[:, :, :, 1] << 4)).contiguous()
    both = torch.stack([_tiled(scales, tiles), _tiled(minima, tiles)], 2).contiguous()
    return Packed(weights.view(-1), both.view(-1), 4, values.shape[0], inputs)


def _tiled(scales: torch.Tensor, tiles: int) -> torch.Tensor:
    return scales.view(tiles, TILE, -1).permute(0, 2, 1).contiguous()


def unpack(packed: Packed) -> Quantised:
    """The inverse of :func:`pack`, padding included."""
    tiles, groups = packed.outputs // TILE, packed.inputs // GROUP
    shape = (packed.outputs, packed.inputs)
    if packed.bits == 8:
        chunks = packed.weights.view(tiles, packed.inputs // 4, TILE, 4)
        values = (chunks.to(torch.int16) - 128).to(torch.int8).permute(0, 2, 1, 3).reshape(shape)
        scales = packed.scales.view(tiles, groups, TILE).permute(0, 2, 1).reshape(packed.outputs, groups)
        return Quantised(values, scales, None)
    chunks = packed.weights.view(tiles, packed.inputs // 8, TILE, 1, 4)
    values = torch.cat([chunks & 15, chunks >> 4], 3).permute(0, 2, 1, 3, 4).reshape(shape)
    both = packed.scales.view(tiles, groups, 2, TILE).permute(2, 0, 3, 1).reshape(2, packed.outputs, groups)
    return Quantised(values, both[0], both[1])
