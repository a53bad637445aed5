"""How much memory there is, for the check before loading."""

from __future__ import annotations

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_GROUPS = (
    (_CGROUP / "memory.max", _CGROUP / "memory.current", "inactive_file"),
    (
        _CGROUP / "memory/memory.limit_in_bytes",
        _CGROUP / "memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""Version 2 and version 1: limit, use, and the file cache among it."""


def available_bytes(device: str = "cpu") -> int:
    """Bytes that can still be taken: of the device, or of the host within this container's limit."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [left for group in _GROUPS if (left := _left(*group)) is not None]
    return min([_host(), *limits])


def _host() -> int:
    rows = _table(Path("/proc/meminfo"))
    return rows["MemAvailable"] * 1024


def _left(limit: Path, used: Path, reclaimable: str) -> int | None:
    """What a control group leaves; its file cache can be given back. None without a limit."""
    try:
        most, taken = limit.read_text().strip(), int(used.read_text())
        cached = _table(used.parent / "memory.stat").get(reclaimable, 0)
    except (OSError, ValueError):
        return None
    return max(int(most) - taken + cached, 0) if most.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """Lines of a name, a number and perhaps a unit."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}
