"""A GGUF file: its tensors, and what transformers makes of its configuration and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.model.configuration import ModelConfig, llama3_factors
from services.model.errors import ModelError, first_line
from services.model.kernels.checkpoint import gguf_name
from services.model.progress import quiet_transformers
from services.model.weights import LLAMA_LIKE, StoredTensor, Tensors, check_shapes, expected_shapes

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufFile:
    """The header of a GGUF file. Raises ModelError for a file that is damaged, cut short or of unknown tensor types."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self.tensors: Tensors = {
            t.name: StoredTensor(t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)))
            for t in self._reader.tensors
        }
        self._check_types()
        if (self.value("split.count") or 1) > 1:
            raise ModelError(f"{path.name} is one of several parts; merge them into one GGUF file")

    def value(self, name: str) -> Any:
        """A metadata value, or None."""
        field = self._reader.get_field(name)
        return None if field is None else field.contents()

    def write_folder(self, folder: Path) -> None:
        """Write configuration and tokenizer as a Hugging Face folder has them. Raises ModelError."""
        import transformers

        place = {"pretrained_model_name_or_path": str(self.path.parent), "gguf_file": self.path.name}
        with quiet_transformers():
            try:
                config = transformers.AutoConfig.from_pretrained(**place)
                tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
            except Exception as error:  # of any kind, for a file that is damaged
                raise _unreadable(self.path, error) from error
            config.architectures = [_architecture(config.model_type)]
            config.dtype = "bfloat16"
            config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        _correct(folder / "config.json", self._corrections())
        ends = {name: self.value(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")}
        (folder / "generation_config.json").write_text(json.dumps(ends, indent=2))

    def check(self, config: ModelConfig) -> None:
        """Hold the tensors against a configuration. Raises ModelError naming the first that does not fit."""
        if config.architecture in LLAMA_LIKE:
            names = {gguf_name(name): name for name in expected_shapes(config)}
            renamed = {names.get(name, name): tensor for name, tensor in self.tensors.items()}
            check_shapes(renamed, config, self.path.name)

    def _check_types(self) -> None:
        import gguf

        probed: set[str] = set()
        for tensor in self._reader.tensors:
            kind = tensor.tensor_type.name
            if kind in probed:
                continue
            try:
                gguf.dequantize(tensor.data[:1], tensor.tensor_type)
            except NotImplementedError as error:
                known = "Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, K-quants, F16, BF16 or F32"
                message = f"{self.path.name}: {tensor.name} has tensor type {kind}; use a file in {known}"
                raise ModelError(message) from error
            probed.add(kind)

    def _corrections(self) -> dict[str, Any]:
        """What transformers leaves out: the width of a head, and the scaling of the rotary embedding."""
        prefix = self.value("general.architecture")
        found: dict[str, Any] = {}
        if (width := self.value(f"{prefix}.attention.key_length")) is not None:
            found["head_dim"] = int(width)
        theta = float(self.value(f"{prefix}.rope.freq_base") or 10000.0)
        kind, factor = self.value(f"{prefix}.rope.scaling.type"), self.value(f"{prefix}.rope.scaling.factor")
        if kind in ("linear", "yarn") and factor:
            original = self.value(f"{prefix}.rope.scaling.original_context_length")
            scaling = {"rope_type": kind, "rope_theta": theta, "factor": float(factor)}
            if original is not None:
                scaling["original_max_position_embeddings"] = int(original)
            found["rope_parameters"] = scaling
        if "rope_freqs.weight" in self.tensors:
            found["rope_parameters"] = self._llama3(theta)
        return found

    def _llama3(self, theta: float) -> dict[str, Any]:
        """llama.cpp stores the divisor of each frequency: find the scaling that it was made from."""
        stored = next(t for t in self._reader.tensors if t.name == "rope_freqs.weight").data.reshape(-1)
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": float(stored.max()), **_LLAMA3}
        made = llama3_factors(rope, 2 * len(stored)).numpy()
        if abs(made / stored - 1).max() > 1e-3:
            raise ModelError(f"{self.path.name}: rope_freqs.weight is no llama3 scaling; use the model's safetensors")
        return rope


def write_dense(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's weights as bfloat16 safetensors, with the configuration that transformers needs.

    ``folder`` already holds the corrected config.json. Raises ModelError.
    """
    import torch
    import transformers

    with quiet_transformers():
        try:
            config = transformers.AutoConfig.from_pretrained(str(folder))
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                gguf_file=gguf.name,
                config=config,
                dtype=torch.float32,
                quantization_config=transformers.GgufConfig(dequantize=True),
            )
        except Exception as error:  # of any kind, for a file that is damaged
            raise _unreadable(gguf, error) from error
        # What was dequantised must not be saved as quantised.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.bfloat16().save_pretrained(folder)


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path.name} is not a GGUF file; name a GGUF file or a model folder")
    try:
        return GGUFReader(path)
    except Exception as error:  # of any kind, for a file that is damaged
        if "GGMLQuantizationType" in str(error):
            raise ModelError(f"{path.name}: unknown tensor type ({error}); use a file in Q4_0, Q4_1 or Q8_0") from error
        raise ModelError(f"{path.name} is cut short or damaged; fetch it again ({first_line(error)})") from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{path.name}: transformers cannot read this GGUF file ({first_line(error)});"
        " fetch it again, or use the model's safetensors"
    )


def _architecture(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if name is None:
        raise ModelError(f"architecture {model_type} is not a causal language model")
    return str(name)


def _correct(path: Path, corrections: dict[str, Any]) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | corrections, indent=2))
