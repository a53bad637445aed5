"""A prepared model is loaded on the pass that fits it, the reason is kept, and memory is counted first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from services.model import loading
from services.model.errors import ModelError
from services.model.forward import SequenceRows
from services.model.kernels import build, fast
from services.model.loading import LoadedModel, LoadSettings, load
from services.model.progress import Silent
from services.model.store import PreparedModel, prepare
from tests.unit.model import toys

with_fast_pass = pytest.mark.skipif(build.why_not_here() is not None, reason="no fast pass on this machine")
TOKENS = [(37 * i + 11) % toys.VOCABULARY for i in range(40)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def prepared(kind: str, cache: Path, **changes: Any) -> PreparedModel:
    folder = cache / "-".join([kind, *changes])
    if not folder.exists():
        toys.save_model(folder, kind, **changes)
    return prepare(folder, cache, Silent())


@pytest.fixture
def llama(cache: Path) -> PreparedModel:
    return prepared("llama", cache, head_dim=32)


def logits(model: LoadedModel) -> torch.Tensor:
    model.forward_pass.allocate_cache(model.cache_blocks)
    return model.forward_pass.run([SequenceRows(TOKENS, 0, (0, 1, 2), logits=len(TOKENS))]).logits


def quick(path: Any = "auto", **changes: Any) -> LoadSettings:
    return LoadSettings(path, threads=1, cache_tokens=100, **changes)


@with_fast_pass
def test_auto_takes_the_fast_pass_for_a_llama_like_model(llama: PreparedModel) -> None:
    info = load(llama, quick()).info()
    assert info["compute_path"] == "fast"
    assert info["compute_path_reason"]
    assert info["weight_format"] == "int8"


def test_auto_takes_the_reference_pass_for_what_the_fast_one_does_not_know(cache: Path) -> None:
    info = load(prepared("gpt2", cache), quick()).info()
    assert info["compute_path"] == "reference"
    assert "GPT2LMHeadModel" in str(info["compute_path_reason"])


@with_fast_pass
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "biases"),
        ({"mlp_bias": True}, "biases"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_the_fast_pass_would_leave_out_keeps_it_from_being_chosen(
    changes: dict[str, Any], named: str, cache: Path
) -> None:
    model = prepared("llama", cache, head_dim=32, **changes)
    path, reason = loading.choose_path(model, quick())
    assert path == "reference"
    assert named in reason


def test_the_reference_pass_can_be_asked_for(llama: PreparedModel) -> None:
    info = load(llama, quick("reference", weight_format="fp32")).info()
    assert (info["compute_path"], info["weight_format"]) == ("reference", "fp32")
    assert info["compute_path_reason"] == "asked for by the settings"


def test_the_fast_pass_is_not_forced_where_it_cannot_run(cache: Path) -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel"):
        load(prepared("gpt2", cache), quick("fast"))


def test_the_fast_pass_is_not_forced_onto_another_device_or_format(llama: PreparedModel) -> None:
    with pytest.raises(ModelError, match="cuda"):
        load(llama, quick("fast", device="cuda"))
    with pytest.raises(ModelError, match="bf16"):
        load(llama, quick("fast", weight_format="bf16"))


@with_fast_pass
def test_a_build_that_fails_falls_back_with_its_reason(llama: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise build.BuildError("the build failed: no space")

    monkeypatch.setattr(fast.FastPass, "load", fail)
    info = load(llama, quick()).info()
    assert info["compute_path"] == "reference"
    assert "the build failed" in str(info["compute_path_reason"])
    with pytest.raises(ModelError, match="cannot be built"):
        load(llama, quick("fast"))


@with_fast_pass
@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_both_passes_give_nearly_the_same_distribution(source: str, cache: Path, tmp_path: Path) -> None:
    if source == "gguf":
        model = prepare(toys.save_gguf(tmp_path / "toy.gguf", "Q8_0", head_dim=32), cache, Silent())
    else:
        model = prepared("llama", cache, head_dim=32)
    exact = logits(load(model, quick("reference", weight_format="fp32"))).log_softmax(-1)
    quantised = logits(load(model, quick("fast"))).log_softmax(-1)
    kl = torch.nn.functional.kl_div(quantised, exact, reduction="batchmean", log_target=True)
    assert kl < 0.01
    shuffled = quantised[torch.randperm(len(TOKENS), generator=torch.Generator().manual_seed(1))]
    assert torch.nn.functional.kl_div(shuffled, exact, reduction="batchmean", log_target=True) > 10 * kl


@with_fast_pass
def test_a_second_load_maps_the_packed_weights(llama: PreparedModel) -> None:
    first = logits(load(llama, quick()))
    written = (llama.path / "packed.safetensors").stat().st_mtime_ns
    assert torch.equal(logits(load(llama, quick())), first)
    assert (llama.path / "packed.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_too_little_memory_is_said_before_anything_is_loaded(
    path: str, llama: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("was loaded")

    monkeypatch.setattr(fast.FastPass, "load", fail)
    monkeypatch.setattr(loading.reference.ReferencePass, "load", fail)
    monkeypatch.setattr(loading, "available_bytes", lambda _: 1000)
    with pytest.raises(ModelError, match=r"not enough memory for llama-head_dim: .* lower the cache tokens"):
        load(llama, quick(path))


def test_cache_and_the_other_process_are_counted(llama: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_bytes", lambda _: 10_000_000)
    per_token = 2 * 2 * 3 * 2 * 32
    assert loading.cache_bytes_per_token(llama, 2) == per_token
    fits = LoadSettings(cache_tokens=9_000_000 // per_token)
    loading.check_memory(llama, fits, 500_000, per_token)
    for changed, weights in (
        (LoadSettings(cache_tokens=9_000_000 // per_token, reserved_bytes=2_000_000), 500_000),
        (LoadSettings(cache_tokens=11_000_000 // per_token), 500_000),
        (fits, 2_000_000),
    ):
        with pytest.raises(ModelError, match="not enough memory"):
            loading.check_memory(llama, changed, weights, per_token)


def test_the_cache_holds_the_tokens_asked_for(llama: PreparedModel) -> None:
    assert load(llama, quick("reference")).cache_blocks == 7


def test_info_has_the_fields_of_the_contract(llama: PreparedModel) -> None:
    from slipstream.v1 import common_pb2

    info = load(llama, quick("reference")).info()
    message = common_pb2.ModelInfo(**info)  # type: ignore[arg-type]
    assert {field.name for field, _ in message.ListFields()} == set(common_pb2.ModelInfo.DESCRIPTOR.fields_by_name)


def test_memory_of_this_machine_is_read() -> None:
    assert 1_000_000 < loading.available_bytes("cpu") < 1 << 50


def test_the_fast_path_starts_without_transformers() -> None:
    code = "import sys, services.model.loading, services.model.store; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
