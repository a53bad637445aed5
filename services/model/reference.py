"""The reference pass: any causal language model that transformers loads, on torch operators, with a paged cache.

Row-invariant by fixed buckets: the model always runs on the same number of rows (padded), so every linear map has the
same shape whatever rides along, and attention has the shapes of each row's own context. A probe at load holds the model
to it; one that fails (or routes rows to experts) runs a row at a time. The probe also holds the whole pass against
transformers' own, so a model with state that this pass does not know is refused rather than wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from services.model import paged_attention
from services.model.configuration import ModelConfig
from services.model.errors import ModelError, first_line
from services.model.forward import BLOCK_SIZE, PassOutput, SequenceRows
from services.model.kernels.build import cpu_flags
from services.model.paged_attention import Bucket, Layer
from services.model.progress import quiet_transformers
from services.model.row_plan import Row, plan

BUCKET = 16
"""Rows of every run of the model."""

_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FAITHFUL = 0.02
"""KL from transformers' own pass, in nats, that the probe lets through: far above rounding, far below a fault."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class ReferencePass:
    """:class:`~services.model.forward.ForwardPass` through transformers' model code."""

    compute_path = "reference"

    def __init__(self, model: Any, config: ModelConfig, reason: str = "") -> None:
        """Wrap a transformers model, which is then this pass's own. Raises ModelError if it cannot run here."""
        from transformers import AttentionInterface

        AttentionInterface.register(paged_attention.NAME, paged_attention.attend)
        self.vocabulary_size = config.vocabulary_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.context_limit = config.context_limit
        self.compute_path_reason = reason
        self.weight_format = _FORMATS.get(model.dtype, str(model.dtype))
        self._model = model.eval()
        self._device = model.device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._states: dict[int, torch.Tensor] = {}
        self._wanted: frozenset[int] = frozenset()
        self._watch_layers()
        self._cache: dict[int, Layer] = {}
        self._blocks = 2
        self._bucket = 1 if any(getattr(model.config, name, None) for name in _EXPERTS) else BUCKET
        if config.rope_parameters.get("rope_type") in ("dynamic", "longrope"):
            raise ModelError(
                f"{config.architecture} with a rotary embedding that changes with the length of the context is not"
                " supported; use a model with default, linear, llama3 or yarn scaling"
            )
        self._probe()

    @classmethod
    def load(
        cls, folder: Path, config: ModelConfig, weight_format: str = "auto", device: str = "cpu", reason: str = ""
    ) -> ReferencePass:
        """The model of a folder with safetensors. ``weight_format`` is auto, bf16 or fp32.

        Raises ModelError for a model that transformers cannot load or whose attention is not known here.
        """
        import transformers

        dtype = _DTYPES[choose_format(device) if weight_format == "auto" else weight_format]
        try:
            with quiet_transformers():
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    str(folder), dtype=dtype, device_map=device, local_files_only=True
                )
        except (ValueError, OSError, KeyError, RuntimeError, ImportError) as error:
            raise ModelError(f"transformers cannot load {config.architecture}: {first_line(error)}") from error
        return cls(model, config, reason)

    @property
    def rows_per_run(self) -> int:
        """BUCKET, or 1 for a model whose rows see each other's number."""
        return self._bucket

    @property
    def cache_bytes_per_block(self) -> int:
        per_slot = sum(layer.keys[0].nbytes + layer.values[0].nbytes for layer in self._cache.values())
        return per_slot * BLOCK_SIZE

    def allocate_cache(self, num_blocks: int) -> None:
        slots = num_blocks * BLOCK_SIZE
        self._blocks = num_blocks
        for layer in self._cache.values():
            layer.keys = layer.keys.new_zeros(slots, *layer.keys.shape[1:])
            layer.values = layer.values.new_zeros(slots, *layer.values.shape[1:])

    def run(self, batch: Sequence[SequenceRows], feature_layers: Sequence[int] = ()) -> PassOutput:
        if any(not 0 <= layer <= self.num_layers for layer in feature_layers):
            raise ValueError(f"feature layers {list(feature_layers)} are not all in 0 .. {self.num_layers}")
        rows = plan(batch, self._blocks, self.vocabulary_size, self.context_limit)
        logits, features = [], []
        with torch.inference_mode():
            for start in range(0, len(rows), self._bucket):
                bucket = rows[start : start + self._bucket]
                logits.append(self._run_bucket(bucket, frozenset(feature_layers)))
                if feature_layers:
                    states = [self._states[layer][0, : len(bucket)] for layer in feature_layers]
                    features.append(torch.stack(states, 1).bfloat16())
        found = torch.cat(logits) if logits else torch.empty(0, self.vocabulary_size)
        return PassOutput(found.cpu(), torch.cat(features).cpu() if features else None)

    def keep(self, rows: SequenceRows, path: Sequence[int]) -> None:
        def slots(rows_of: Sequence[int]) -> torch.Tensor:
            places = [rows.base + row for row in rows_of]
            return torch.tensor([rows.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places])

        source, target = slots(path).to(self._device), slots(range(len(path))).to(self._device)
        for layer in self._cache.values():
            layer.keys[target] = layer.keys[source]
            layer.values[target] = layer.values[source]

    def _run_bucket(self, rows: Sequence[Row], wanted: frozenset[int]) -> torch.Tensor:
        """Logits [rows that want them, vocabulary] float32; states of the wanted layers are left in ``_states``."""
        self._wanted = wanted
        padding = [0] * (self._bucket - len(rows))
        tokens = torch.tensor([[row.token for row in rows] + padding], device=self._device)
        positions = torch.tensor([[row.position for row in rows] + padding], device=self._device)
        chosen = [i for i, row in enumerate(rows) if row.wants_logits]
        # The head runs on all rows of the bucket or, where nobody asks, on one that is thrown away.
        keep = {"logits_to_keep": 0 if chosen else 1} if self._keeps_logits else {}
        bucket = Bucket(
            written=torch.tensor([int(row.seen[-1]) for row in rows], device=self._device),
            seen=[row.seen.to(self._device) for row in rows],
            cache=self._cache,
        )
        token = paged_attention.current.set(bucket)
        try:
            output = self._model(input_ids=tokens, position_ids=positions, use_cache=False, **keep)
        finally:
            paged_attention.current.reset(token)
        if bucket.calls != list(range(self.num_layers)):
            raise ModelError(f"{type(self._model).__name__}: not all layers attend through transformers' interface")
        logits: torch.Tensor = output.logits[0, chosen] if chosen else output.logits.new_empty(0, self.vocabulary_size)
        return logits.float()

    def _watch_layers(self) -> None:
        """Keep the states that are asked for as the layers hand them on."""
        layers = _decoder_layers(self._model, self.num_layers)

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if 0 in self._wanted:
                self._states[0] = args[0] if args else kwargs["hidden_states"]

        def after(number: int) -> Any:
            def hook(_: Any, __: Any, output: Any) -> None:
                if number in self._wanted:
                    self._states[number] = output[0] if isinstance(output, tuple) else output

            return hook

        layers[0].register_forward_pre_hook(before, with_kwargs=True)
        for number, layer in enumerate(layers, 1):
            layer.register_forward_hook(after(number))

    def _probe(self) -> None:
        """Learn the cache's shape, hold the pass against transformers' own, choose the rows of a run."""
        length = min(BUCKET + 8, self.context_limit)
        tokens = [(7919 * (i + 1)) % self.vocabulary_size for i in range(length)]
        expected = self._plain_logits(tokens)
        self._learn_cache()
        self.allocate_cache(2 + BUCKET)
        whole = self.run([SequenceRows(tokens, 0, (0, 1), logits=length)]).logits
        kl = float(torch.nn.functional.kl_div(
            whole.log_softmax(-1), expected.log_softmax(-1), reduction="batchmean", log_target=True
        ))  # fmt: skip
        if not kl < _FAITHFUL:
            raise ModelError(
                f"{type(self._model).__name__} does not give the same answer on the reference path (KL {kl:.3g});"
                " its attention or its state is not supported"
            )
        if self._bucket > 1 and not self._is_row_invariant(tokens, whole):
            self._bucket = 1

    def _learn_cache(self) -> None:
        rows = plan([SequenceRows([0], 0, (0,))], 1, self.vocabulary_size, self.context_limit)
        with torch.inference_mode():
            self._run_bucket(rows, frozenset())

    def _is_row_invariant(self, tokens: Sequence[int], whole: torch.Tensor) -> bool:
        """Whether the same rows give the same bits at every place of a bucket and beside other rows."""
        alone = [SequenceRows(tokens[:1], 0, (2 + i,)) for i in range(BUCKET)]
        same = self.run(alone).logits
        first = SequenceRows(tokens[:5], 0, (0, 1), logits=5)
        rest = SequenceRows(tokens[5:], 5, (0, 1), logits=len(tokens) - 5)
        pieces = torch.cat([self.run([first]).logits, self.run([alone[0], rest]).logits[1:]])
        return bool((same == whole[0]).all()) and torch.equal(pieces, whole)

    def _plain_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        for implementation in ("sdpa", "eager"):
            try:
                self._model.set_attn_implementation(implementation)
                break
            except (ValueError, ImportError):
                continue
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([tokens], device=self._device), use_cache=False)
        self._model.set_attn_implementation(paged_attention.NAME)
        logits: torch.Tensor = output.logits[0]
        return logits.float().cpu()


def choose_format(device: str) -> str:
    """bf16 where the device computes in it, else fp32."""
    return "bf16" if device != "cpu" or cpu_flags() & {"avx512_bf16", "amx_bf16"} else "fp32"


def _decoder_layers(model: Any, count: int) -> torch.nn.ModuleList:
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(f"{type(model).__name__}: no list of {count} decoder layers; the architecture is not supported")
