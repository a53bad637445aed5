"""Folders of a cache that several processes share: one writer at a time, whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.model.progress import Progress


@contextmanager
def locked(path: Path | None, progress: Progress) -> Iterator[None]:
    """Hold a lock file; None holds nothing. The kernel lets go of it however the process ends."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("another process is preparing this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def atomically(folder: Path) -> Iterator[Path]:
    """A folder that appears whole or not at all. The caller holds the lock, so leftovers of a kill are swept."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}."
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
