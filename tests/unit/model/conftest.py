"""Sources of models for the tests of the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.model import toys


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return toys.save_model(tmp_path / "toy-model")


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return toys.save_gguf(tmp_path_factory.mktemp("gguf") / "toy.gguf").read_bytes()


@pytest.fixture
def gguf(tmp_path: Path, gguf_bytes: bytes) -> Path:
    path = tmp_path / "toy-model.Q8_0.gguf"
    path.write_bytes(gguf_bytes)
    return path
