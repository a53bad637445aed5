"""Open a target by name, folder or file, through the product's own store and loading."""

from __future__ import annotations

from recipes.distil.target import ChatTokenizer, Origin, Target, TargetWeights
from services.model import loading, store


def open_target(source: str, threads: int) -> Target:
    """The target ``source``: "default", a GGUF file or a Hugging Face folder.

    Raises services.model.errors.ModelError for a model that is no good, and
    services.model.kernels.checkpoint.CheckpointError for one that is not Llama-like.
    """
    prepared = store.prepare(source)
    loaded = loading.load(prepared, loading.LoadSettings(threads=threads))
    return Target(
        forward=loaded.forward_pass,
        tokenizer=ChatTokenizer(loaded.tokenizer),
        weights=TargetWeights.read(prepared.path, prepared.config),
        end_tokens=frozenset(loaded.tokenizer.eos_token_ids),
        origin=Origin(
            model_id=prepared.model_id,
            weights_fingerprint=prepared.weights_fingerprint,
            tokenizer_fingerprint=prepared.tokenizer_fingerprint,
            compute_path=loaded.forward_pass.compute_path,
        ),
    )
