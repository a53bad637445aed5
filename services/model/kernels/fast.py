"""The fast pass: any Llama-like model in C++ with 4- or 8-bit weights, 8-bit activations and a paged cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from services.model.configuration import ModelConfig
from services.model.forward import BLOCK_SIZE, PassOutput, SequenceRows
from services.model.kernels import build
from services.model.kernels.checkpoint import open_checkpoint
from services.model.kernels.packed_model import PackedLayer, PackedModel
from services.model.kernels.packing import Packed

ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


def why_not(config: ModelConfig) -> str | None:
    """Why the fast pass cannot run this model on this machine, or None if it can."""
    if config.architecture not in ARCHITECTURES:
        return f"architecture {config.architecture} is not one of {', '.join(sorted(ARCHITECTURES))}"
    if config.activation != "silu":
        return f"activation {config.activation} is not silu"
    if config.sliding_window is not None and config.sliding_window < config.context_limit:
        return "sliding-window attention"
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % 32:
            return f"{name} is not a multiple of 32"
    return build.why_not_here()


class FastPass:
    """:class:`~services.model.forward.ForwardPass` on AVX-512 VNNI."""

    compute_path = "fast"

    def __init__(self, config: ModelConfig, threads: int, context: int | None = None) -> None:
        """An empty model: add layers and a head. ``context`` bounds the rotary tables (default: the model's limit)."""
        self.vocabulary_size = config.vocabulary_size
        self.hidden_size = config.hidden_size
        self.num_layers = 0
        self.context_limit = context or config.context_limit
        self.compute_path_reason = "Llama-like model on a CPU with AVX-512 VNNI"
        self.weight_format = ""
        self._config = config
        self._model = build.load().FastModel(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
            config.vocabulary_size,
            config.norm_eps,
            threads,
        )
        cosines, sines = config.rope_tables(self.context_limit)
        self._model.set_tables(cosines.float().contiguous(), sines.float().contiguous())
        self._head_rows = 0
        self._cache: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def load(
        cls,
        folder: Path | str,
        config: ModelConfig,
        threads: int = 2,
        context: int | None = None,
        packed: Path | None = None,
    ) -> FastPass:
        """The model of a folder with weights; ``packed`` names a file that keeps them packed, written if it is not
        there.

        Raises CheckpointError for a broken or misfitting file, BuildError if the pass cannot be built here.
        """
        weights = None if packed is None else PackedModel.open(packed)
        if weights is None:
            weights = PackedModel.read(open_checkpoint(Path(folder), config.num_heads, config.num_kv_heads), config)
            if packed is not None:
                weights.save(packed)
                weights = PackedModel.open(packed) or weights  # mapped: shared with other processes, and not held twice
        model = cls(config, threads, context)
        for layer in weights.layers:
            model.add_layer(layer)
        model.set_head(weights.norm, weights.head, config.vocabulary_size)
        if weights.embedding is None:
            model.set_embedding_rows(weights.head)
        else:
            model.set_embedding(weights.embedding)
        model.weight_format = weights.weight_format
        return model

    def add_layer(self, layer: PackedLayer) -> None:
        queries, keys = layer.head_norms or (None, None)
        self._model.add_layer(
            *layer.norms,
            [m.weights for m in layer.maps],
            [m.scales for m in layer.maps],
            [m.bits for m in layer.maps],
            layer.qkv_bias,
            queries,
            keys,
        )
        self.num_layers += 1

    def set_head(self, norm: torch.Tensor, head: Packed, rows: int) -> None:
        """The final norm and the head; ``rows`` is the head's height without padding."""
        self._model.set_head(norm, head.weights, head.scales, head.bits, head.outputs)
        self._head_rows = rows

    def set_embedding(self, table: torch.Tensor) -> None:
        """The embedding as a table, [vocabulary, hidden], kept in bfloat16."""
        self._model.set_embedding(table.bfloat16().contiguous())

    def set_embedding_rows(self, matrix: Packed) -> None:
        """The embedding as rows of a packed matrix: exact for a head that it shares, and half the memory of a table."""
        self._model.set_embedding_rows(matrix.weights, matrix.scales, matrix.bits, matrix.outputs)

    def set_fusion(self, norms: tuple[torch.Tensor, torch.Tensor], features: Packed, entry: Packed) -> None:
        """Make this the layer of a feature-fed draft: norms of embedding and state, and the maps that csrc/model.h
        names features and input.
        """
        maps = (features, entry)
        self._model.set_fusion(
            *norms,
            features.inputs // self.hidden_size,
            [m.weights for m in maps],
            [m.scales for m in maps],
            [m.bits for m in maps],
        )

    @property
    def cache_bytes_per_block(self) -> int:
        return 2 * 2 * self.num_layers * self._config.num_kv_heads * self._config.head_dim * BLOCK_SIZE

    def allocate_cache(self, num_blocks: int) -> None:
        shape = (self.num_layers, num_blocks, self._config.num_kv_heads, BLOCK_SIZE * self._config.head_dim)
        self._cache = (torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16))
        self._model.set_cache(*self._cache)

    def run(self, batch: Sequence[SequenceRows], feature_layers: Sequence[int] = ()) -> PassOutput:
        logits, features, _ = self.run_layers(batch, feature_layers=feature_layers)
        return PassOutput(logits, features)

    def run_layers(
        self,
        batch: Sequence[SequenceRows],
        *,
        inputs: torch.Tensor | None = None,
        fed: torch.Tensor | None = None,
        feature_layers: Sequence[int] = (),
        first_layer: int = 0,
        last_layer: int | None = None,
        want_hidden: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """As :meth:`run`, over layers ``first_layer .. last_layer - 1`` and from hidden states [rows, hidden] float32
        instead of tokens where ``inputs`` is given. A model with a fusion takes tokens and, before each, a state
        (``inputs``) or features (``fed``, [rows, layers, hidden] bfloat16). Returns logits, features and the last
        layer's output before the final norm, float32 [rows, hidden].
        """
        tokens: list[int] = []
        starts = [0]
        bases: list[int] = []
        parents: list[int] = []
        wanted: list[int] = []
        for rows in batch:
            count = len(rows.tokens)
            tokens.extend(rows.tokens)
            parents.extend(range(-1, count - 1) if rows.parents is None else rows.parents)
            starts.append(starts[-1] + count)
            bases.append(rows.base)
            wanted.extend(range(starts[-1] - rows.logits, starts[-1]))
        logits, features, hidden = self._model.run(
            tokens,
            inputs,
            fed,
            starts,
            bases,
            parents,
            [list(rows.blocks) for rows in batch],
            wanted,
            list(feature_layers),
            first_layer,
            self.num_layers if last_layer is None else last_layer,
            want_hidden,
        )
        if logits.shape[1] != self._head_rows:
            logits = logits[:, : self._head_rows]
        return logits, features if feature_layers else None, hidden if want_hidden else None

    def keep(self, rows: SequenceRows, path: Sequence[int]) -> None:
        self._model.keep(list(rows.blocks), rows.base, list(path))


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return math.ceil(tokens / BLOCK_SIZE)
