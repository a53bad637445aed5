"""Fingerprints of files: SHA-256, remembered by path, size and time so that a second start takes milliseconds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from services.model.progress import Progress

_PIECE = 1 << 22


def combined(parts: Mapping[str, str]) -> str:
    """One "sha256:..." of several named ones, whatever their order."""
    lines = "".join(f"{name} {parts[name]}\n" for name in sorted(parts))
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


class FileHashes:
    """Fingerprints of files, kept in a file of the cache; losing it costs time only."""

    def __init__(self, memory: Path, progress: Progress) -> None:
        self._memory = memory
        self._progress = progress
        self._known = _read(memory)

    def of(self, path: Path) -> str:
        """ "sha256:" and 64 hex digits of the file's content."""
        path = path.resolve()
        seen = path.stat()
        mark = [seen.st_size, seen.st_mtime_ns, seen.st_ino]
        known = self._known.get(str(path))
        if isinstance(known, list) and known[:3] == mark and isinstance(known[3], str):
            return known[3]
        fingerprint = self._compute(path, seen.st_size)
        self._known[str(path)] = [*mark, fingerprint]
        self._save()
        return fingerprint

    def _compute(self, path: Path, size: int) -> str:
        digest = hashlib.sha256()
        with path.open("rb") as file, self._progress.bytes(f"reading {path.name}", size) as advance:
            while piece := file.read(_PIECE):
                digest.update(piece)
                advance(len(piece))
        return f"sha256:{digest.hexdigest()}"

    def _save(self) -> None:
        partial = self._memory.with_name(f"{self._memory.name}.{os.getpid()}")
        # In a cache that is mounted read-only, files are read again at the next start.
        with suppress(OSError):
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self._known, indent=1))
            os.replace(partial, self._memory)


def _read(memory: Path) -> dict[str, object]:
    try:
        content = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
