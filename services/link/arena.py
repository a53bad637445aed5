"""Shared memory between draft and target: one writer, one reader, slots with generations.

An arena is a file in memory that the draft creates, the target opens, and whose name is then removed: it lives as long
as one of the two holds it open. Both sides use pread and pwrite, never a mapping: a file that is cut short gives a
short read instead of a SIGBUS, a read after close raises instead of crashing, and 200 KB cost tens of microseconds
either way.

    slot 0                                   slot 1
    | generation (8 bytes) | 56 unused | payload ... | generation | ...

A slot's generation is 0 while it is written. The reader compares it with the message's before and after it copies out.

The name exists from `create` until the target says that it has opened the file. A draft that is killed in between
leaves it behind; the next draft finds nobody's lock on it and removes it (:mod:`services.link.sweep`).
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

SLOTS = 2
"""One round is outstanding at most; the other slot may still be read by whoever gave that round up."""
HEADER = 64
ALIGNMENT = 64
NAME = re.compile(r"slipstream-[0-9a-f]{32}")


class ArenaError(Exception):
    """Shared memory that cannot be used. The text names no path, no address."""


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """What the other side needs to open an arena."""

    name: str
    epoch: int
    slots: int
    slot_size: int
    """Bytes, header included."""

    @property
    def size(self) -> int:
        return self.slots * self.slot_size


class Arena:
    """An open arena. Closed by :meth:`close`, or with the process; using it after that raises ArenaError."""

    def __init__(self, fd: int, info: ArenaInfo) -> None:
        self.info = info
        self._fd: int | None = fd
        self._generation = 0
        # A descriptor's number is given to the next file that is opened: no close may come between a check and a write.
        self._lock = threading.Lock()

    @classmethod
    def create(cls, folder: Path, payload: int) -> Arena:
        """A new arena of two slots for ``payload`` bytes each, really allocated.

        Raises ArenaError if there is no room or no such folder.
        """
        slot_size = HEADER + -(-payload // ALIGNMENT) * ALIGNMENT
        info = ArenaInfo(f"slipstream-{secrets.token_hex(16)}", secrets.randbits(63), SLOTS, slot_size)
        path = folder / info.name
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ArenaError(f"cannot create shared memory: {os.strerror(error.errno or 0)}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Says that the creator lives; see services.link.sweep.
            os.posix_fallocate(fd, 0, info.size)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise ArenaError(
                f"cannot allocate {info.size} bytes of shared memory: {os.strerror(error.errno or 0)}"
            ) from None
        return cls(fd, info)

    @classmethod
    def open(cls, folder: Path, info: ArenaInfo) -> Arena:
        """The other side's arena. Raises ArenaError unless it is a private file of ours, of the size that it claims."""
        if not NAME.fullmatch(info.name):
            raise ArenaError("the arena's name is not one that a draft gives")
        if not (0 < info.slots <= 64 and HEADER < info.slot_size <= 1 << 30):
            raise ArenaError("the arena's slots are out of range")
        try:
            fd = os.open(folder / info.name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"cannot open shared memory: {os.strerror(error.errno or 0)}") from None
        status = os.fstat(fd)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o600
        if not ours or status.st_size != info.size:
            os.close(fd)
            raise ArenaError("the arena has another owner, mode or size than it should")
        return cls(fd, info)

    def unlink(self, folder: Path) -> None:
        """Remove the name; who has the arena open keeps it. Idempotent."""
        (folder / self.info.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None

    @property
    def payload(self) -> int:
        """Bytes that a slot holds."""
        return self.info.slot_size - HEADER

    def begin(self, round_number: int) -> SlotWriter:
        """Start to fill the slot of a round with its tensors: rounds take turns, so the slot before is left alone."""
        slot = round_number % self.info.slots
        self._generation += 1
        return SlotWriter(self, slot, self._generation)

    def read(self, slot: int, generation: int, offset: int, length: int) -> bytes:
        """Copy bytes of a slot's payload out. Raises ArenaError for anything but exactly what was written."""
        if not 0 <= slot < self.info.slots:
            raise ArenaError("slot out of range")
        if offset < 0 or length < 0 or offset % ALIGNMENT or offset + length > self.payload:
            raise ArenaError("region outside its slot or not aligned")
        if generation <= 0 or self._read_generation(slot) != generation:
            raise ArenaError("the slot has another generation: its content is gone")
        content = self._pread(length, slot * self.info.slot_size + HEADER + offset)
        if len(content) != length:
            raise ArenaError("the shared memory is shorter than it was")
        if self._read_generation(slot) != generation:
            raise ArenaError("the slot was written while it was read")
        return content

    def _read_generation(self, slot: int) -> int:
        return int.from_bytes(self._pread(8, slot * self.info.slot_size), "little")

    def _pread(self, length: int, offset: int) -> bytes:
        with self._lock:
            try:
                return os.pread(self._open_fd(), length, offset)
            except OSError as error:
                raise ArenaError(f"cannot read shared memory: {os.strerror(error.errno or 0)}") from None

    def write_at(self, slot: int, offset: int, content: bytes | memoryview) -> None:
        """Write raw bytes of a slot; for :class:`SlotWriter`."""
        with self._lock:
            try:
                written = os.pwrite(self._open_fd(), content, slot * self.info.slot_size + offset)
            except OSError as error:
                raise ArenaError(f"cannot write shared memory: {os.strerror(error.errno or 0)}") from None
        if written != len(content):
            raise ArenaError("the shared memory is full")

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ArenaError("the arena is closed")
        return self._fd


class SlotWriter:
    """Fills one slot: tensors one after the other, then :meth:`finish`. The slot reads as empty until then."""

    def __init__(self, arena: Arena, slot: int, generation: int) -> None:
        self._arena, self.slot, self.generation = arena, slot, generation
        self.epoch = arena.info.epoch
        self._end = 0
        arena.write_at(slot, 0, bytes(8))

    def append(self, content: bytes | memoryview) -> int | None:
        """Write bytes; returns their offset in the payload, or None if the slot has no room for them."""
        offset = self._end
        if offset + len(content) > self._arena.payload:
            return None
        self._arena.write_at(self.slot, HEADER + offset, content)
        self._end = -(-(offset + len(content)) // ALIGNMENT) * ALIGNMENT
        return offset

    def finish(self) -> None:
        """Give the slot its generation: from now on it can be read."""
        self._arena.write_at(self.slot, 0, self.generation.to_bytes(8, "little"))
