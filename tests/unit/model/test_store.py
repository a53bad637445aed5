"""A model is prepared once, whole or not at all."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.model import store
from services.model.errors import ModelError
from services.model.fingerprint import FileHashes
from services.model.gguf_file import GgufFile
from services.model.progress import Silent
from services.model.store import PreparedModel, dense, prepare, read_prepared
from services.model.tokenizer import Tokenizer
from services.model.weights import StoredTensor
from tests.unit.model import toys
from tests.unit.model.preparing import entries, quietly


def test_a_folder_is_prepared_with_links_to_its_weights(folder: Path, cache: Path) -> None:
    prepared = quietly(folder, cache)
    assert prepared.model_id == "toy-model"
    assert prepared.config.architecture == "LlamaForCausalLM"
    assert prepared.tokenizer_fingerprint == Tokenizer.from_folder(folder).fingerprint
    assert prepared.parameters == sum(p.numel() for p in toys.model("llama").parameters())
    assert (prepared.path / "model.safetensors").resolve() == folder / "model.safetensors"
    assert dense(prepared) == prepared.path
    assert Tokenizer.from_folder(prepared.path).has_chat_template
    manifest = json.loads((prepared.path / "manifest.json").read_text())
    assert manifest["weights_fingerprint"] == prepared.weights_fingerprint
    assert "config.json" in manifest["checksums"]
    assert manifest["versions"]["transformers"]


def test_a_second_start_reads_no_file_again(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = quietly(folder, cache)

    def fail(*_: Any) -> str:
        raise AssertionError("was read again")

    monkeypatch.setattr(FileHashes, "_compute", fail)
    monkeypatch.setattr(store, "_write", fail)
    assert quietly(folder, cache) == first
    assert quietly(first.path, cache) == first


def test_other_weights_are_another_model(folder: Path, cache: Path) -> None:
    first = quietly(folder, cache)
    toys.model("llama", initializer_range=0.5).save_pretrained(folder)
    second = quietly(folder, cache)
    assert second.weights_fingerprint != first.weights_fingerprint
    assert second.path != first.path
    with pytest.raises(ModelError, match="prepare the model again"):
        read_prepared(first.path)


def test_another_configuration_is_prepared_anew_but_has_the_same_weights(folder: Path, cache: Path) -> None:
    first = quietly(folder, cache)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 3}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    second = quietly(folder, cache)
    assert second.config.eos_token_ids == (3,)
    assert second.weights_fingerprint == first.weights_fingerprint


def test_several_weight_files_are_one_model(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").unlink()
    toys.model("llama").save_pretrained(folder, max_shard_size="100KB")
    prepared = quietly(folder, cache)
    assert len(list(prepared.path.glob("model-*.safetensors"))) > 1
    assert AutoModelForCausalLM.from_pretrained(prepared.path).dtype == torch.float32


def test_a_tokenizer_of_older_kind_is_converted(folder: Path, cache: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    model = tokenizer["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    prepared = quietly(folder, cache)
    assert Tokenizer.from_folder(prepared.path).encode("the fox") == toys.byte_level().encode("the fox").ids


def test_a_gguf_file_is_prepared_with_its_blocks_as_they_are(gguf: Path, cache: Path) -> None:
    prepared = quietly(gguf, cache)
    assert prepared.model_id == "toy-model"
    assert (prepared.path / gguf.name).read_bytes() == gguf.read_bytes()
    assert not (prepared.path / "model.safetensors").exists()
    assert prepared.config.architecture == "LlamaForCausalLM"
    assert prepared.config.eos_token_ids == (0,)
    text = "the quick 世界 🎉<|end|>"
    expected = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)(text)["input_ids"]
    assert Tokenizer.from_folder(prepared.path).encode(text) == expected


def test_the_dense_twin_of_a_gguf_file_has_its_weights(gguf: Path, cache: Path) -> None:
    prepared = quietly(gguf, cache)
    folder = dense(prepared, Silent())
    assert folder != prepared.path
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, original in toys.model("llama").state_dict().items():
        error = (twin[name] - original).abs().max() / original.abs().max()
        assert error < 0.015, name
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert (dense(prepared, Silent()) / "model.safetensors").stat().st_mtime_ns == written


def test_a_gguf_file_is_known_by_its_content(gguf: Path, cache: Path) -> None:
    first = quietly(gguf, cache)
    moved = gguf.rename(gguf.with_name("renamed.gguf"))
    assert quietly(moved, cache).weights_fingerprint == first.weights_fingerprint


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "F16"])
def test_formats_of_gguf_are_taken(kind: str, tmp_path: Path, cache: Path) -> None:
    path = toys.save_gguf(tmp_path / "toy.gguf", kind)
    assert GgufFile(path).tensors["blk.0.attn_q.weight"] == StoredTensor(kind, (64, 64))
    assert quietly(path, cache).config.num_layers == 3


def test_two_preparers_at_once_do_the_work_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, started, go_on = [], threading.Event(), threading.Event()
    real = store._write

    def slowly(source: Any, target: Path, progress: Any) -> None:
        started.set()
        assert go_on.wait(30)
        written.append(target)
        real(source, target, progress)

    class Listening(Silent):
        """The second preparer says that it waits; only then does the first go on."""

        def say(self, line: str) -> None:
            if "waiting" in line:
                go_on.set()

    monkeypatch.setattr(store, "_write", slowly)
    found: list[PreparedModel] = []

    def work(progress: Silent) -> None:
        found.append(prepare(folder, cache, progress))

    first = threading.Thread(target=work, args=(Silent(),))
    first.start()
    assert started.wait(30)
    second = threading.Thread(target=work, args=(Listening(),))
    second.start()
    for thread in (first, second):
        thread.join(60)
    assert len(written) == 1
    assert found[0] == found[1]


def test_what_a_killed_preparer_left_is_swept(folder: Path, cache: Path) -> None:
    name = quietly(folder, cache).path.name
    store.shutil.rmtree(cache / "models" / name)
    (cache / "models" / f".{name}.abc").mkdir()
    assert quietly(folder, cache).path.name == name
    assert entries(cache) == [name]


def test_a_prepared_model_that_was_damaged_is_made_again(gguf: Path, cache: Path) -> None:
    prepared = quietly(gguf, cache)
    (prepared.path / gguf.name).unlink()
    with pytest.raises(ModelError, match="prepare the model again"):
        read_prepared(prepared.path)
    assert quietly(gguf, cache) == prepared


def test_a_failure_while_writing_leaves_nothing(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_versions", full)
    with pytest.raises(ModelError, match="No space left"):
        quietly(folder, cache)
    assert entries(cache) == []
