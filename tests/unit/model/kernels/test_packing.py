"""Packing loses nothing, and each part of the pass computes what its torch reference computes."""

from __future__ import annotations

import pytest
import torch

from services.model.kernels.packing import Quantised, concatenate, interleave_gate_up, pack, quantise, unpack


def four_bit(outputs: int, inputs: int, seed: int = 0) -> Quantised:
    generator = torch.Generator().manual_seed(seed)
    return Quantised(
        torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator),
        (torch.rand(outputs, inputs // 32, generator=generator) * 0.01).half(),
        (torch.randn(outputs, inputs // 32, generator=generator) * 0.05).half(),
    )


def eight_bit(outputs: int, inputs: int, seed: int = 0) -> Quantised:
    return quantise(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("make", [four_bit, eight_bit])
def test_unpacking_gives_back_what_was_packed(make) -> None:
    matrix = make(48, 96)
    back = unpack(pack(matrix))
    assert torch.equal(back.values, matrix.values)
    assert torch.equal(back.scales, matrix.scales)
    assert (back.minima is None) if matrix.minima is None else torch.equal(back.minima, matrix.minima)


def test_a_height_that_is_no_multiple_of_16_is_filled_with_zeros() -> None:
    back = unpack(pack(eight_bit(20, 32))).dequantise()
    assert back.shape == (32, 32)
    assert not back[20:].any()


def test_eight_bits_are_within_half_a_step_of_the_weights() -> None:
    weight = torch.randn(16, 64)
    error = (quantise(weight).dequantise() - weight).abs().view(16, 2, 32)
    step = weight.abs().view(16, 2, 32).amax(-1, keepdim=True) / 127
    assert bool((error <= step * 0.51 + 127 * step * 2**-11).all())


def test_a_group_of_zeros_stays_zero() -> None:
    assert not quantise(torch.zeros(16, 32)).dequantise().any()


def test_inputs_that_are_no_multiple_of_32_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantise(torch.randn(16, 40))


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        quantise(torch.full((16, 32), float("inf")))


def test_matrices_of_mixed_widths_meet_at_eight_bits() -> None:
    both = concatenate([four_bit(16, 32), eight_bit(16, 32)])
    assert both.bits == 8
    assert torch.allclose(both.dequantise()[:16], four_bit(16, 32).dequantise(), atol=2e-3)


def test_gate_and_up_lie_side_by_side_in_runs_of_32_channels() -> None:
    gate, up = eight_bit(64, 32, 1), eight_bit(64, 32, 2)
    both = interleave_gate_up(gate, up).values.view(2, 2, 32, 32)
    assert torch.equal(both[:, 0].reshape(64, 32), gate.values)
    assert torch.equal(both[:, 1].reshape(64, 32), up.values)
