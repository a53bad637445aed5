"""The store of prepared models: ``prepare`` turns a source into a folder that either service loads in milliseconds.

A prepared folder holds config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja,
the weights (a GGUF file as it is, or links to the safetensors files) and manifest.json, which is written last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from services.model.atomic import atomically, locked
from services.model.configuration import ModelConfig
from services.model.default_model import is_fetched
from services.model.errors import ModelError
from services.model.fingerprint import FileHashes
from services.model.progress import Progress, Terminal
from services.model.source import Source, open_source
from services.model.weights import parameters

FORMAT = 1
"""Counts up whenever preparation changes: older folders are prepared anew."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model in the store."""

    path: Path
    """The prepared folder."""
    model_id: str
    """Name for people."""
    weights_fingerprint: str
    """ "sha256:" and 64 hex digits of the weight files."""
    tokenizer_fingerprint: str
    """Of token strings by id and the rules, see :attr:`services.model.tokenizer.Tokenizer.fingerprint`."""
    parameters: int
    """Values in the weight files."""
    weight_bytes: int
    """Bytes of the weight files."""
    config: ModelConfig


@dataclass(frozen=True, slots=True)
class Manifest:
    """What manifest.json says."""

    format: int
    model_id: str
    source: str
    """The file or folder that was prepared."""
    weights_fingerprint: str
    tokenizer_fingerprint: str
    parameters: int
    files: Mapping[str, list[int]]
    """Weight files, each with its bytes and its time of change in nanoseconds."""
    checksums: Mapping[str, str]
    """Of every file of the source."""
    versions: Mapping[str, str]
    """Of the libraries that did it."""


def cache_folder() -> Path:
    """Where everything prepared is kept: SLIPSTREAM_CACHE, or ``slipstream`` in the user's cache folder."""
    root = os.environ.get("SLIPSTREAM_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def prepare(source: str | Path, cache_dir: Path | None = None, progress: Progress | None = None) -> PreparedModel:
    """Prepare a model, or find it prepared.

    ``source`` is "default" (fetched once), a GGUF file, a Hugging Face folder, or a prepared folder. Two processes may
    prepare the same model at once: one works, the other waits. Raises ModelError, one line that says what to change,
    and leaves nothing half-written.
    """
    cache, progress = cache_dir or cache_folder(), progress or Terminal()
    if (Path(source) / "manifest.json").exists():
        return read_prepared(Path(source))
    try:
        fetching = str(source) == "default" and not is_fetched(cache / "sources")
        with locked(cache / "locks" / "default" if fetching else None, progress):
            opened = open_source(source, cache / "sources", FileHashes(cache / "hashes.json", progress), progress)
        folder = cache / "models" / f"{FORMAT}-{opened.fingerprint.removeprefix('sha256:')[:32]}"
        if not _intact(folder):
            with locked(cache / "locks" / folder.name, progress):
                if not _intact(folder):  # another process may have done it meanwhile
                    shutil.rmtree(folder, ignore_errors=True)
                    _write(opened, folder, progress)
        return read_prepared(folder)
    except OSError as error:
        raise ModelError(f"{source}: {error.strerror or error}") from error


def read_prepared(folder: Path) -> PreparedModel:
    """A folder that :func:`prepare` made. Raises ModelError if it is damaged."""
    manifest = _manifest(folder)
    if manifest is None or not _intact(folder):
        raise ModelError(f"{folder}: the prepared model's weights are gone or have changed; prepare the model again")
    return PreparedModel(
        path=folder,
        model_id=manifest.model_id,
        weights_fingerprint=manifest.weights_fingerprint,
        tokenizer_fingerprint=manifest.tokenizer_fingerprint,
        parameters=manifest.parameters,
        weight_bytes=sum(size for size, _ in manifest.files.values()),
        config=ModelConfig.from_folder(folder),
    )


def dense(prepared: PreparedModel, progress: Progress | None = None) -> Path:
    """A folder with safetensors that transformers reads: the prepared one, or for a GGUF file its bfloat16 twin.

    The twin is made when first asked for: the fast pass never needs it. Raises ModelError.
    """
    gguf = next(iter(sorted(prepared.path.glob("*.gguf"))), None)
    if gguf is None:
        return prepared.path
    from services.model.gguf_file import write_dense

    progress, folder = progress or Terminal(), prepared.path / "dense"
    with locked(prepared.path / "dense.lock", progress):
        if not (folder / "config.json").exists():
            progress.say(f"writing the weights of {prepared.model_id} in bfloat16 for the reference path")
            with atomically(folder) as partial:
                shutil.copy(prepared.path / "config.json", partial)
                write_dense(gguf, partial)
    return folder


def _write(source: Source, folder: Path, progress: Progress) -> None:
    from services.model.tokenizer import Tokenizer

    progress.say(f"preparing {source.model_id}")
    with atomically(folder) as partial:
        source.write(partial)
        source.check(ModelConfig.from_folder(partial))
        manifest = Manifest(
            format=FORMAT,
            model_id=source.model_id,
            source=str(source.path),
            weights_fingerprint=source.weights_fingerprint,
            tokenizer_fingerprint=Tokenizer.from_folder(partial).fingerprint,
            parameters=parameters(source.tensors),
            files={file.name: _mark(partial / file.name) for file in source.weight_files},
            checksums=dict(source.checksums),
            versions=_versions(),
        )
        (partial / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2))


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "tokenizers", "gguf", "safetensors")}


def _manifest(folder: Path) -> Manifest | None:
    try:
        manifest = Manifest(**json.loads((folder / "manifest.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return manifest if manifest.format == FORMAT else None


def _intact(folder: Path) -> bool:
    """Whether a prepared folder is there and its weight files are untouched (they are links where that is possible)."""
    manifest = _manifest(folder)
    if manifest is None:
        return False
    marks = manifest.files.items()
    return all((folder / name).exists() and _mark(folder / name) == mark for name, mark in marks)


def _mark(file: Path) -> list[int]:
    seen = file.stat()
    return [seen.st_size, seen.st_mtime_ns]


def main(arguments: list[str]) -> int:
    """``python -m services.model.store prepare SOURCE``: prints the prepared folder; 2 for a model that is no good."""
    import argparse
    import sys

    parser = argparse.ArgumentParser(prog="python -m services.model.store", description="The store of prepared models.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="fetch, check and convert a model; prints its folder")
    command.add_argument("source", help='"default", a GGUF file or a Hugging Face folder')
    command.add_argument("--cache", type=Path, help="folder to keep it in (default: the user's cache folder)")
    command.add_argument("--dense", action="store_true", help="also write a GGUF file's weights as bf16 safetensors")
    parsed = parser.parse_args(arguments)
    try:
        prepared = prepare(parsed.source, parsed.cache)
        if parsed.dense:
            dense(prepared)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(prepared.path)
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
