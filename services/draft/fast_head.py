"""The feature-fed draft on the fast pass: :mod:`services.draft.feature_head` with 8-bit weights and a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from services.draft.feature_head import FeatureHeadConfig
from services.model.configuration import ModelConfig
from services.model.forward import SequenceRows
from services.model.kernels.checkpoint import SafetensorsCheckpoint, open_checkpoint
from services.model.kernels.fast import FastPass
from services.model.kernels.packed_model import read_layer
from services.model.kernels.packing import pack


def as_llama(sizes: FeatureHeadConfig, target: ModelConfig) -> ModelConfig:
    """The head's one layer: a plain Llama's, whatever the target's own layers are."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocabulary_size=target.vocabulary_size,
        hidden_size=sizes.hidden_size,
        num_layers=1,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate_size,
        norm_eps=sizes.rms_norm_eps,
        context_limit=target.context_limit,
        tied_embeddings=target.tied_embeddings,
        rope_theta=sizes.rope_theta,
    )


class FastHead:
    """One layer, its head over the draft vocabulary, and its cache of pairs.

    ``vocabulary`` [Vd] int32, ascending, names the token of each column of the logits.
    """

    def __init__(self, forward_pass: FastPass, vocabulary: Tensor) -> None:
        self.forward_pass = forward_pass
        self.vocabulary = vocabulary

    @classmethod
    def load(
        cls,
        folder: Path,
        target_folder: Path,
        target: ModelConfig,
        sizes: FeatureHeadConfig,
        *,
        threads: int,
        context: int,
    ) -> FastHead:
        """From a draft's folder; the embedding and the rows of the head are the target's own.

        Raises CheckpointError for a file that is broken or does not fit the target, BuildError without a fast pass.
        """
        own = SafetensorsCheckpoint(folder, "draft.safetensors")
        size = target.hidden_size
        vocabulary = own.whole("vocabulary")
        config = as_llama(sizes, target)
        forward_pass = FastPass(config, threads, context)
        forward_pass.add_layer(read_layer(own, config, "layer."))
        forward_pass.set_fusion(
            (own.tensor("embed_norm.weight", (size,)), own.tensor("feature_norm.weight", (size,))),
            pack(own.matrix("features.weight", (size, len(sizes.feature_layers) * size))),
            pack(own.matrix("input.weight", (size, 2 * size))),
        )
        checkpoint = open_checkpoint(target_folder, target.num_heads, target.num_kv_heads)
        shape = (target.vocabulary_size, size)
        embedding = checkpoint.matrix("model.embed_tokens.weight", shape)
        tied = target.tied_embeddings or not checkpoint.has("lm_head.weight")
        head = embedding if tied else checkpoint.matrix("lm_head.weight", shape)
        forward_pass.set_embedding_rows(pack(embedding))
        forward_pass.set_head(
            own.tensor("norm.weight", (size,)), pack(head.rows(vocabulary.long())), vocabulary.numel()
        )
        return cls(forward_pass, vocabulary)

    def extend(self, rows: Sequence[SequenceRows], features: Tensor | None) -> tuple[Tensor, Tensor]:
        """Take in committed pairs: tokens, each with the features [rows, layers, hidden] bfloat16 of the one before it.

        Returns logits [wanted rows, Vd] and the states h [rows, hidden] that a chain goes on from, float32.
        """
        return self._run(rows, fed=features)

    def step(self, rows: Sequence[SequenceRows], states: Tensor | None) -> tuple[Tensor, Tensor]:
        """One more guess of each chain: its last guess with the state [rows, hidden] that made it."""
        return self._run(rows, inputs=states)

    def _run(
        self, rows: Sequence[SequenceRows], inputs: Tensor | None = None, fed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits, _, hidden = self.forward_pass.run_layers(rows, inputs=inputs, fed=fed, want_hidden=True)
        assert hidden is not None
        return logits, hidden
