"""How the tests of the store prepare a model, and look at what is left."""

from __future__ import annotations

from pathlib import Path

from services.model.progress import Silent
from services.model.store import PreparedModel, prepare


def quietly(source: Path | str, cache: Path) -> PreparedModel:
    return prepare(source, cache, Silent())


def entries(cache: Path) -> list[str]:
    """Everything that lies among the prepared models, half-written things included."""
    return sorted(path.name for path in (cache / "models").glob("*")) if (cache / "models").exists() else []


def cut(path: Path, keep: float) -> None:
    """Keep only the start of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
