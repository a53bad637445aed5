"""Shared memory: private, allocated, without a name, never read beyond its bounds or its time."""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.link.arena import ALIGNMENT, HEADER, SLOTS, Arena, ArenaError
from services.link.sweep import remove_left_behind


def written(arena: Arena, content: bytes, round_number: int = 1) -> tuple[int, int, int]:
    """Slot, generation and offset of bytes that were written in a round."""
    writer = arena.begin(round_number)
    offset = writer.append(content)
    assert offset is not None
    writer.finish()
    return writer.slot, writer.generation, offset


def test_what_one_side_writes_the_other_reads(tmp_path: Path) -> None:
    ours = Arena.create(tmp_path, 1000)
    theirs = Arena.open(tmp_path, ours.info)
    slot, generation, offset = written(ours, b"a distribution")
    assert theirs.read(slot, generation, offset, 14) == b"a distribution"


def test_an_arena_is_private_and_its_space_is_really_allocated(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 100_000)
    status = (tmp_path / arena.info.name).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == arena.info.size
    assert status.st_blocks * 512 >= arena.info.size


def test_names_are_random_and_never_reused(tmp_path: Path) -> None:
    names = {Arena.create(tmp_path, 64).info.name for _ in range(20)}
    assert len(names) == 20


def test_no_room_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match="cannot allocate"):
        Arena.create(tmp_path, 1000)
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_both_sides_go_on(tmp_path: Path) -> None:
    ours = Arena.create(tmp_path, 1000)
    theirs = Arena.open(tmp_path, ours.info)
    ours.unlink(tmp_path)
    ours.unlink(tmp_path)  # Twice is once.
    assert list(tmp_path.iterdir()) == []
    slot, generation, offset = written(ours, b"q")
    assert theirs.read(slot, generation, offset, 1) == b"q"


def test_a_readers_end_leaves_a_live_arena_alone(tmp_path: Path) -> None:
    ours = Arena.create(tmp_path, 1000)
    Arena.open(tmp_path, ours.info).close()
    assert (tmp_path / ours.info.name).exists()
    slot, generation, offset = written(ours, b"still here")
    assert ours.read(slot, generation, offset, 10) == b"still here"


def test_reading_and_writing_after_close_raises(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 1000)
    slot, generation, offset = written(arena, b"gone")
    arena.close()
    arena.close()
    with pytest.raises(ArenaError, match="closed"):
        arena.read(slot, generation, offset, 4)
    with pytest.raises(ArenaError, match="closed"):
        arena.begin(1)


def test_a_file_that_was_cut_short_is_an_error_and_no_crash(tmp_path: Path) -> None:
    ours = Arena.create(tmp_path, 100_000)
    theirs = Arena.open(tmp_path, ours.info)
    slot, generation, offset = written(ours, bytes(90_000), round_number=2)
    os.truncate(tmp_path / ours.info.name, HEADER + 8)
    with pytest.raises(ArenaError, match="shorter"):
        theirs.read(slot, generation, offset, 90_000)


def test_a_slot_that_was_written_again_is_gone(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 1000)
    slot, generation, offset = written(arena, b"old", round_number=1)
    written(arena, b"new", round_number=1 + SLOTS)
    with pytest.raises(ArenaError, match="generation"):
        arena.read(slot, generation, offset, 3)


def test_the_round_before_is_left_alone(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 1000)
    slot, generation, offset = written(arena, b"round 1", round_number=1)
    written(arena, b"round 2", round_number=2)
    assert arena.read(slot, generation, offset, 7) == b"round 1"


def test_a_half_written_slot_cannot_be_read(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 1000)
    writer = arena.begin(1)
    writer.append(b"half")
    with pytest.raises(ArenaError, match="generation"):
        arena.read(writer.slot, writer.generation, 0, 4)
    with pytest.raises(ArenaError, match="generation"):
        arena.read(writer.slot, 0, 0, 4)


def test_a_slot_written_while_it_is_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Arena.create(tmp_path, 1000)
    theirs = Arena.open(tmp_path, ours.info)
    slot, generation, offset = written(ours, b"content")
    pread, reads = os.pread, []

    def interrupted(fd: int, length: int, place: int) -> bytes:
        content = pread(fd, length, place)
        reads.append(length)
        if len(reads) == 2:  # The generation was read, now the content was.
            ours.begin(slot)
        return content

    monkeypatch.setattr(os, "pread", interrupted)
    with pytest.raises(ArenaError, match="while it was read"):
        theirs.read(slot, generation, offset, 7)


@given(
    slot=st.integers(-(2**40), 2**40) | st.just(0),
    offset=st.integers(-(2**63), 2**64) | st.sampled_from([0, 64, 960, 1024, 2**64 - 64]),
    length=st.integers(-(2**63), 2**64) | st.sampled_from([0, 1, 64, 1024, 1025, 2**64 - 1]),
)
def test_no_region_reaches_beyond_its_slot(
    slot: int, offset: int, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    arena = Arena.create(tmp_path_factory.mktemp("arena"), 1024)
    written(arena, b"x" * 1024, round_number=0)
    inside = slot == 0 and offset >= 0 and length >= 0 and offset % ALIGNMENT == 0 and offset + length <= 1024
    if inside:
        assert arena.read(slot, 1, offset, length) == b"x" * length
    else:
        with pytest.raises(ArenaError):
            arena.read(slot, 1, offset, length)
    arena.close()


def test_what_does_not_fit_a_slot_is_not_written(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 128)
    writer = arena.begin(1)
    assert writer.append(bytes(100)) == 0
    assert writer.append(bytes(1)) is None
    assert writer.append(bytes(0)) == 128


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "slipstream-", "slipstream-" + "g" * 32, "", "a/b"]
)
def test_a_name_that_no_draft_gives_is_never_opened(tmp_path: Path, name: str) -> None:
    arena = Arena.create(tmp_path, 64)
    with pytest.raises(ArenaError, match="name") as error:
        Arena.open(tmp_path, replace(arena.info, name=name))
    assert str(tmp_path) not in str(error.value)
    assert not name or name not in str(error.value)


@pytest.mark.parametrize(("slots", "slot_size"), [(0, 128), (65, 128), (2, 64), (2, 2**31), (2**40, 2**40), (3, 128)])
def test_sizes_that_are_out_of_range_or_not_the_files_own_are_refused(
    tmp_path: Path, slots: int, slot_size: int
) -> None:
    arena = Arena.create(tmp_path, 64)
    with pytest.raises(ArenaError):
        Arena.open(tmp_path, replace(arena.info, slots=slots, slot_size=slot_size))


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 64)
    (tmp_path / arena.info.name).chmod(0o644)
    with pytest.raises(ArenaError, match="mode"):
        Arena.open(tmp_path, arena.info)


def test_a_link_in_the_place_of_an_arena_is_not_followed(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 64)
    path = tmp_path / arena.info.name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArenaError) as error:
        Arena.open(tmp_path, arena.info)
    assert arena.info.name not in str(error.value)


def test_a_missing_arena_is_an_error_that_names_no_path(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 64)
    arena.unlink(tmp_path)
    with pytest.raises(ArenaError) as error:
        Arena.open(tmp_path, arena.info)
    assert arena.info.name not in str(error.value)
    assert str(tmp_path) not in str(error.value)


def test_what_a_dead_draft_left_behind_is_removed_and_nothing_else(tmp_path: Path) -> None:
    dead, live = Arena.create(tmp_path, 64), Arena.create(tmp_path, 64)
    dead.close()
    (tmp_path / "slipstream-notes").write_text("somebody's")
    assert remove_left_behind(tmp_path) == 0  # Too young to judge.
    assert remove_left_behind(tmp_path, older_than_s=0) == 1
    assert {p.name for p in tmp_path.iterdir()} == {live.info.name, "slipstream-notes"}


def test_a_name_that_is_taken_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 32)
    first = Arena.create(tmp_path, 64)
    slot, generation, offset = written(first, b"mine")
    with pytest.raises(ArenaError, match="cannot create") as error:
        Arena.create(tmp_path, 64)
    assert first.info.name not in str(error.value)
    assert Arena.open(tmp_path, first.info).read(slot, generation, offset, 4) == b"mine"


def test_an_arena_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create(tmp_path, 64)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(ArenaError, match="owner"):
        Arena.open(tmp_path, arena.info)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 64)
    path = tmp_path / arena.info.name
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ArenaError, match="owner, mode or size"):
        Arena.open(tmp_path, arena.info)
    path.unlink()
    path.mkdir(0o600)
    with pytest.raises(ArenaError, match="cannot open"):
        Arena.open(tmp_path, arena.info)


def test_a_refused_arena_is_not_held_open(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 64)
    (tmp_path / arena.info.name).chmod(0o644)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ArenaError):
            Arena.open(tmp_path, arena.info)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_was_emptied_is_an_error_and_no_crash(tmp_path: Path) -> None:
    ours = Arena.create(tmp_path, 100_000)
    theirs = Arena.open(tmp_path, ours.info)
    slot, generation, offset = written(ours, bytes(90_000))
    os.truncate(tmp_path / ours.info.name, 0)
    with pytest.raises(ArenaError, match="generation"):
        theirs.read(slot, generation, offset, 90_000)


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 1025),
        (64, 961),
        (960, 65),
        (1024, 1),
        (1024 + HEADER, 1),  # The next slot's generation.
        (1024 + 2 * HEADER, 1024),
        (-64, 64),
        (0, -1),
        (64, -64),
        (2**64 - 64, 64),
        (64, 2**64 - 64),
        (32, 32),
    ],
)
def test_a_region_beyond_its_slot_is_refused_though_the_arena_goes_on(tmp_path: Path, offset: int, length: int) -> None:
    arena = Arena.create(tmp_path, 1024)
    written(arena, b"x" * 1024, round_number=0)
    written(arena, b"y" * 1024, round_number=1)
    with pytest.raises(ArenaError, match="region outside its slot or not aligned"):
        arena.read(0, 1, offset, length)
