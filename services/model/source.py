"""Where a model comes from: a GGUF file, a Hugging Face folder, or the default model's download."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from services.model import default_model
from services.model.configuration import ModelConfig
from services.model.errors import ModelError
from services.model.fingerprint import FileHashes, combined
from services.model.gguf_file import GgufFile
from services.model.progress import Progress
from services.model.weights import StoredTensor, Tensors, check_shapes, read_safetensors, safetensors_files

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)

_FORMAT_SUFFIX = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)


class Source(Protocol):
    """A model that has been found and whose weight files have been checked."""

    path: Path
    model_id: str
    weight_files: list[Path]
    checksums: Mapping[str, str]
    weights_fingerprint: str
    fingerprint: str
    """Of everything that decides what is prepared."""

    @property
    def tensors(self) -> Tensors:
        """All tensors, by the names of the files."""
        ...

    def write(self, folder: Path) -> None:
        """Write the prepared folder's files, but for the manifest."""
        ...

    def check(self, config: ModelConfig) -> None:
        """Hold the weights against the configuration. Raises ModelError."""
        ...


def open_source(source: str | Path, downloads: Path, hashes: FileHashes, progress: Progress) -> Source:
    """Find a source, fetching the default one. Raises ModelError for what is missing, damaged or unknown."""
    if str(source) == "default":
        file = default_model.fetch(downloads, progress)
        return GgufSource(file, default_model.MODEL_ID, hashes, default_model.GGUF_SHA256)
    path = Path(source).expanduser().absolute()
    if path.is_file():
        return GgufSource(path, _FORMAT_SUFFIX.sub("", path.stem), hashes)
    if not path.is_dir():
        raise ModelError(f'{path} does not exist; name a GGUF file, a model folder, or "default"')
    files = sorted(path.glob("*.gguf"))
    if not (path / "config.json").exists() and files:
        if len(files) > 1:
            raise ModelError(f"{path.name} holds {len(files)} GGUF files; name one of them")
        return GgufSource(files[0], _FORMAT_SUFFIX.sub("", files[0].stem), hashes)
    return FolderSource(path, hashes)


class GgufSource:
    """One GGUF file, whose blocks the kernels take as they are."""

    def __init__(self, path: Path, model_id: str, hashes: FileHashes, sha256: str | None = None) -> None:
        self.path, self.model_id, self.weight_files = path, model_id, [path]
        self._file: GgufFile | None = None
        found = hashes.of(path)
        if sha256 is not None and found != f"sha256:{sha256}":
            raise ModelError(f"{path} has another checksum than the default model; delete it to fetch it again")
        self.weights_fingerprint = self.fingerprint = found
        self.checksums: Mapping[str, str] = {path.name: found}

    @property
    def file(self) -> GgufFile:
        """The header, read when first asked for: a prepared model needs it no more."""
        if self._file is None:
            self._file = GgufFile(self.path)
        return self._file

    @property
    def tensors(self) -> Tensors:
        return self.file.tensors

    def write(self, folder: Path) -> None:
        self.file.write_folder(folder)
        _link_or_copy(self.path, folder / self.path.name)

    def check(self, config: ModelConfig) -> None:
        self.file.check(config)


class FolderSource:
    """A Hugging Face folder with safetensors; the weights stay where they are."""

    def __init__(self, path: Path, hashes: FileHashes) -> None:
        self.path, self.model_id = path, _folder_name(path)
        self.weight_files = safetensors_files(path)
        tensors: dict[str, StoredTensor] = {}
        for file in self.weight_files:
            tensors |= read_safetensors(file)
        self.tensors: Tensors = tensors
        small = [path / name for name in SMALL_FILES if (path / name).exists()]
        weights = {file.name: hashes.of(file) for file in self.weight_files}
        self.checksums: Mapping[str, str] = weights | {file.name: hashes.of(file) for file in small}
        self.weights_fingerprint = combined(weights)
        # The place has part in it because the prepared folder links to it.
        self.fingerprint = combined({**self.checksums, "place": str(path.resolve())})
        _refuse_quantised(path)

    def write(self, folder: Path) -> None:
        for name in SMALL_FILES:
            if (self.path / name).exists():
                shutil.copyfile(self.path / name, folder / name)
        if not (folder / "tokenizer.json").exists():
            self._convert_tokenizer(folder)
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            shutil.copyfile(index, folder / index.name)
        for file in self.weight_files:
            (folder / file.name).symlink_to(file.resolve())

    def check(self, config: ModelConfig) -> None:
        check_shapes(self.tensors, config, self.path.name)

    def _convert_tokenizer(self, folder: Path) -> None:
        """An older checkpoint's tokenizer (sentencepiece, vocabulary and merges) through transformers."""
        import transformers

        try:
            transformers.AutoTokenizer.from_pretrained(str(self.path), local_files_only=True).save_pretrained(folder)
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise ModelError(f"{self.path.name} holds no tokenizer.json, nor one that can be converted") from error
        if not (folder / "tokenizer.json").exists():
            raise ModelError(f"{self.path.name} holds no tokenizer.json, nor one that can be converted")


def _refuse_quantised(path: Path) -> None:
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return  # ModelConfig says what is wrong with it
    method = config.get("quantization_config") if isinstance(config, dict) else None
    if method:
        kind = method.get("quant_method", "unknown")
        raise ModelError(f"{path.name} is quantised by {kind}; use the model in bf16, or as a GGUF file")


def _folder_name(path: Path) -> str:
    """The folder's name; for a snapshot of the hub's cache, the repository's."""
    for parent in path.parents:
        if parent.name.startswith("models--"):
            return parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
