"""Descriptors: what the other side says is checked before a byte is touched, and what was read before it is used."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.v1 import draft_pb2

from services.link import metrics, tensors
from services.link.arena import Arena
from services.link.tensors import BFLOAT16, FLOAT32, TensorError

Q = np.full((2, 8), 0.125, np.float32)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.create(tmp_path, 4096)


def in_arena(arena: Arena, array: np.ndarray = Q, dtype: draft_pb2.DataType = FLOAT32) -> draft_pb2.Tensor:
    writer = arena.begin(1)
    tensor = tensors.write(array, dtype, writer)
    writer.finish()
    assert tensor.HasField("region")
    return tensor


def test_a_tensor_comes_back_bit_for_bit_from_the_arena_and_from_the_message(arena: Arena) -> None:
    bits = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    for tensor in (in_arena(arena, bits, BFLOAT16), tensors.write(bits, BFLOAT16, None)):
        assert np.array_equal(tensors.read(tensor, BFLOAT16, (2, 3, 4), arena), bits)


def test_several_tensors_of_a_round_share_its_slot(arena: Arena) -> None:
    writer = arena.begin(1)
    written = [tensors.write(Q * (i + 1), FLOAT32, writer) for i in range(3)]
    writer.finish()
    assert len({tensor.region.offset for tensor in written}) == 3
    for i, tensor in enumerate(written):
        assert np.array_equal(tensors.read(tensor, FLOAT32, (2, 8), arena), Q * (i + 1))


def test_what_finds_no_room_rides_inline_and_is_counted(arena: Arena) -> None:
    large = np.zeros((2, 4096), np.float32)
    before = metrics.INLINE._value.get()
    tensor = tensors.write(large, FLOAT32, arena.begin(1))
    assert tensor.HasField("inline")
    assert metrics.INLINE._value.get() == before + 1
    assert np.array_equal(tensors.read(tensor, FLOAT32, large.shape, arena), large)


def test_what_was_read_is_a_copy(arena: Arena) -> None:
    read = tensors.read(in_arena(arena), FLOAT32, (2, 8), arena)
    in_arena(arena, Q * 0)
    assert np.array_equal(read, Q)


def hostile(tensor: draft_pb2.Tensor, field: str, value: int) -> draft_pb2.Tensor:
    changed = draft_pb2.Tensor()
    changed.CopyFrom(tensor)
    if field == "dtype":
        changed.dtype = value
    else:
        setattr(changed.region, field, value)
    return changed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", 0),
        ("dtype", BFLOAT16),
        ("dtype", 99),
        ("epoch", 1),
        ("slot", 0),
        ("slot", 2),
        ("slot", 2**32 - 1),
        ("generation", 0),
        ("generation", 7),
        ("generation", 2**64 - 1),
        ("offset", 1),
        ("offset", 4096),
        ("offset", 2**64 - 64),
        ("length", 0),
        ("length", 63),
        ("length", 65),
        ("length", 2**64 - 1),
    ],
)
def test_a_descriptor_with_one_wrong_number_is_refused(arena: Arena, field: str, value: int) -> None:
    with pytest.raises(TensorError):
        tensors.read(hostile(in_arena(arena), field, value), FLOAT32, (2, 8), arena)


@pytest.mark.parametrize("shape", [(), (16,), (8, 2), (2, 8, 1), (2**63, 2), (0, 8), (2**32, 2**32)])
def test_another_shape_than_the_one_that_belongs_here_is_refused(arena: Arena, shape: tuple[int, ...]) -> None:
    tensor = in_arena(arena)
    del tensor.shape[:]
    tensor.shape.extend(shape)
    with pytest.raises(TensorError, match="shape"):
        tensors.read(tensor, FLOAT32, (2, 8), arena)


@given(
    epoch=st.integers(0, 2**64 - 1),
    slot=st.integers(0, 2**32 - 1) | st.integers(0, 2),
    generation=st.integers(0, 2**64 - 1) | st.integers(0, 3),
    offset=st.integers(0, 2**64 - 1) | st.sampled_from([0, 64, 4096]),
    length=st.integers(0, 2**64 - 1) | st.just(64),
    own_epoch=st.booleans(),
)
def test_any_descriptor_gives_the_tensor_or_an_error(
    tmp_path_factory: pytest.TempPathFactory,
    epoch: int,
    slot: int,
    generation: int,
    offset: int,
    length: int,
    own_epoch: bool,
) -> None:
    arena = Arena.create(tmp_path_factory.mktemp("arena"), 4096)
    genuine = in_arena(arena)
    tensor = draft_pb2.Tensor(dtype=FLOAT32, shape=[2, 8])
    tensor.region.epoch = arena.info.epoch if own_epoch else epoch
    tensor.region.slot, tensor.region.generation = slot, generation
    tensor.region.offset, tensor.region.length = offset, length
    try:
        tensors.read(tensor, FLOAT32, (2, 8), arena)
    except TensorError:
        return
    finally:
        arena.close()
    region = genuine.region
    assert (tensor.region.epoch, slot, generation, length) == (region.epoch, region.slot, region.generation, 64)
    assert offset % 64 == 0
    assert offset + 64 <= 4096


def test_a_region_without_an_arena_is_refused(arena: Arena) -> None:
    with pytest.raises(TensorError, match="without an arena"):
        tensors.read(in_arena(arena), FLOAT32, (2, 8), None)


@pytest.mark.parametrize("content", [b"", bytes(63), bytes(65)])
def test_inline_bytes_must_make_the_shape(content: bytes) -> None:
    tensor = draft_pb2.Tensor(dtype=FLOAT32, shape=[2, 8], inline=content)
    with pytest.raises(TensorError, match="bytes"):
        tensors.read(tensor, FLOAT32, (2, 8), None)


def test_a_tensor_of_another_session_is_refused(arena: Arena, tmp_path: Path) -> None:
    other = Arena.create(tmp_path, 4096)
    in_arena(other)
    with pytest.raises(TensorError, match="another session"):
        tensors.read(in_arena(arena), FLOAT32, (2, 8), other)


def test_no_error_text_names_the_arena(arena: Arena, tmp_path: Path) -> None:
    genuine = in_arena(arena)
    for field in ("epoch", "slot", "generation", "offset", "length"):
        with pytest.raises(TensorError) as error:
            tensors.read(hostile(genuine, field, 2**32 - 1), FLOAT32, (2, 8), arena)
        assert arena.info.name not in str(error.value)
        assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize(
    ("value", "what"),
    [(np.nan, "finite"), (np.inf, "finite"), (-np.inf, "finite"), (-0.125, "negative"), (0.5, "sum"), (0.0, "sum")],
)
def test_what_is_no_distribution_is_refused(value: float, what: str) -> None:
    q = Q.copy()
    q[1, 3] = value
    with pytest.raises(TensorError, match=what):
        tensors.check_distribution(q)


def test_a_distribution_may_be_off_by_rounding() -> None:
    tensors.check_distribution(Q * np.float32(1.0005))


def test_negative_values_are_refused_though_the_sum_is_one() -> None:
    with pytest.raises(TensorError, match="negative"):
        tensors.check_distribution(np.array([[0.5, 0.5, 0.0], [1.5, -0.5, 0.0]], np.float32))


@pytest.mark.parametrize("factor", [0.998, 1.002])
def test_a_distribution_that_is_off_by_more_than_rounding_is_refused(factor: float) -> None:
    with pytest.raises(TensorError, match="sum"):
        tensors.check_distribution(Q * np.float32(factor))


@pytest.mark.parametrize("length", [0, 63, 65, 128, 2**64 - 1])
def test_a_region_of_another_length_is_refused_before_it_is_read(
    arena: Arena, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = hostile(in_arena(arena), "length", length)
    reads: list[object] = []
    monkeypatch.setattr(os, "pread", lambda *place: reads.append(place) or b"")
    with pytest.raises(TensorError, match="length does not fit its shape"):
        tensors.read(tensor, FLOAT32, (2, 8), arena)
    assert reads == []
