"""A model that is no good is refused in one line that names what to change, and leaves nothing behind."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.model import store
from services.model.errors import ModelError
from tests.unit.model.preparing import cut, entries, quietly


def _rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
    save_file(dict(change(load_file(path))), path)


def _narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "model.layers.1.self_attn.k_proj.weight"
    return {**tensors, name: tensors[name][:16].contiguous()}


FOLDER_FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), "model.safetensors.*fetch it again"),
    "weights cut in the header": (lambda f: cut(f / "model.safetensors", 0.005), "model.safetensors.*fetch it again"),
    "weights cut at the end": (lambda f: cut(f / "model.safetensors", 0.99), "model.safetensors has .* bytes"),
    "garbage for weights": (lambda f: (f / "model.safetensors").write_bytes(b"\x10" + b"\0" * 99), "fetch it again"),
    "a wrong shape": (
        lambda f: _rewrite(f / "model.safetensors", _narrow),
        r"layers.1.self_attn.k_proj.weight has shape \[16, 64\] .* \[32, 64\]",
    ),
    "a missing tensor": (
        lambda f: _rewrite(f / "model.safetensors", lambda t: {n: v for n, v in t.items() if "norm" not in n}),
        "tensor model.norm.weight is missing",
    ),
    "an unknown tensor type": (
        lambda f: _rewrite(f / "model.safetensors", lambda t: {n: v.to(torch.int32) for n, v in t.items()}),
        "tensor type I32",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
    "a pickle": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "convert it to model.safetensors",
    ),
    "a part that is missing": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
        "model-2.safetensors",
    ),
    "an index that points outside": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}'),
        "missing",
    ),
    "no configuration": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "a broken configuration": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "a quantised checkpoint": (
        lambda f: (f / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}'),
        "quantised by gptq",
    ),
    "no tokenizer": (
        lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
        "no tokenizer.json",
    ),
    "a broken tokenizer": (lambda f: cut(f / "tokenizer.json", 0.5), "tokenizer.json"),
}


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_a_folder_that_is_no_good_is_refused_by_name(fault: str, folder: Path, cache: Path) -> None:
    damage, named = FOLDER_FAULTS[fault]
    damage(folder)
    with pytest.raises(ModelError, match=named) as caught:
        quietly(folder, cache)
    assert "\n" not in str(caught.value)
    assert entries(cache) == []


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.02, 0.1, 0.5, 0.9, 0.999])
def test_a_gguf_file_that_is_cut_short_is_refused(keep: float, gguf: Path, cache: Path) -> None:
    cut(gguf, keep)
    with pytest.raises(ModelError, match=gguf.name) as caught:
        quietly(gguf, cache)
    assert "\n" not in str(caught.value)
    assert entries(cache) == []


def _type_of(content: bytes, tensor: str, kind: int) -> bytes:
    """The file with another type for a tensor of two dimensions."""
    at = content.index(struct.pack("<Q", len(tensor)) + tensor.encode()) + 8 + len(tensor) + 4 + 16
    return content[:at] + struct.pack("<I", kind) + content[at + 4 :]


@pytest.mark.parametrize(("kind", "named"), [(99, "unknown tensor type"), (24, "tensor type I8")])
def test_a_tensor_type_that_is_not_known_is_named(kind: int, named: str, gguf: Path, cache: Path) -> None:
    gguf.write_bytes(_type_of(gguf.read_bytes(), "blk.0.attn_q.weight", kind))
    with pytest.raises(ModelError, match=named):
        quietly(gguf, cache)
    assert entries(cache) == []


def test_a_gguf_file_whose_shapes_do_not_fit_is_refused(gguf: Path, cache: Path) -> None:
    content, key = gguf.read_bytes(), b"llama.feed_forward_length"
    at = content.index(key) + len(key) + 4
    gguf.write_bytes(content[:at] + struct.pack("<I", 128) + content[at + 4 :])
    with pytest.raises(ModelError, match=r"mlp.gate_proj.weight has shape \[96, 64\] .* \[128, 64\]"):
        quietly(gguf, cache)
    assert entries(cache) == []


def test_a_source_that_does_not_exist_is_named(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        quietly(tmp_path / "nowhere", cache)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt is not a GGUF file"):
        quietly(tmp_path / "notes.txt", cache)


def test_the_command_says_one_line_and_exits_with_2(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert store.main(["prepare", str(folder), "--cache", str(cache)]) == 0
    assert Path(capsys.readouterr().out.strip()).parent == cache / "models"
    cut(folder / "model.safetensors", 0.5)
    assert store.main(["prepare", str(folder), "--cache", str(cache)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: model.safetensors")
    assert said.err.count("\n") == 1
