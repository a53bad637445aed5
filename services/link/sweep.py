"""Removal of arenas that a killed draft left behind while a target was attaching."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from services.link.arena import NAME

LEFT_BEHIND_S = 10.0
"""Names of this age whose creator is dead are removed; a younger one may be about to get its lock."""


def remove_left_behind(folder: Path, older_than_s: float = LEFT_BEHIND_S) -> int:
    """Remove arenas of ours whose creator was killed before they lost their name. Returns how many."""
    removed = 0
    for path in folder.glob("slipstream-*"):
        if NAME.fullmatch(path.name) and _is_left_behind(path, older_than_s):
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def _is_left_behind(path: Path, older_than_s: float) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or time.time() - status.st_ctime < older_than_s:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
