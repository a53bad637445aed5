"""The draft's Unix socket: one server a path, in a folder that is private to the user."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

LONGEST_PATH = 107
"""Bytes of a Unix socket's path, by the system."""


class SocketError(Exception):
    """The socket cannot be served, and what to change."""


def private_folder(folder: Path) -> None:
    """Make the folder, or check that it is ours and closed to others. Raises SocketError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise SocketError(f"cannot make the socket's folder: {os.strerror(error.errno or 0)}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise SocketError("the socket's folder is not a folder, or a link to one")
    if status.st_uid != os.geteuid():
        raise SocketError("the socket's folder belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SocketError("the socket's folder is open to other users; its mode must be 0700")


class SocketLock:
    """Held for as long as the server lives; the system lets go of it when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Take the socket's path over. Raises SocketError if another server holds it."""
        path = path.absolute()
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise SocketError(f"the socket's path is longer than {LONGEST_PATH} bytes; choose a shorter one")
        private_folder(path.parent)
        self.path = path
        self._fd = _open_lock(path.with_name(path.name + ".lock"))
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise SocketError("another draft serves this socket; stop it or choose another path") from None
        path.unlink(missing_ok=True)  # Left behind by a server that was killed: the lock says that it is dead.

    @property
    def address(self) -> str:
        """The gRPC address."""
        return f"unix:{self.path}"

    def release(self) -> None:
        """Remove the socket and let go of the path."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SocketError(f"cannot open the socket's lock: {os.strerror(error.errno or 0)}") from error
