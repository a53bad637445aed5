"""Whether a target and a draft may ride together. Both ends check: neither trusts the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from slipstream.v1 import common_pb2, draft_pb2


class AttachError(Exception):
    """This draft cannot ride with this target, and why. The text names no path, no address."""

    def __init__(self, reason: common_pb2.FallbackReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def check_models(target: common_pb2.ModelInfo, draft: common_pb2.ModelInfo) -> None:
    """Padding of the embedding may differ; the tokens may not. Raises AttachError."""
    if not draft.tokenizer_fingerprint or draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise AttachError(
            common_pb2.FALLBACK_REASON_VOCABULARY_MISMATCH,
            f"draft {draft.model_id!r} and target {target.model_id!r} have different tokenizers",
        )
    if draft.weights_fingerprint == target.weights_fingerprint:
        raise AttachError(common_pb2.FALLBACK_REASON_DRAFT_INVALID, "the target was loaded as its own draft")


def check_draft(info: draft_pb2.DraftServiceGetInfoResponse, num_layers: int | None) -> None:
    """What the target relies on in a draft's description of itself. Raises AttachError."""
    invalid = common_pb2.FALLBACK_REASON_DRAFT_INVALID
    if info.max_draft_length < 1 or info.context_limit < 1:
        raise AttachError(invalid, "the draft holds no sequence, or guesses nothing")
    if not info.drafters:
        raise AttachError(invalid, "the draft names no drafter")
    if any(layer < 0 or (num_layers is not None and layer > num_layers) for layer in info.feature_layers):
        raise AttachError(invalid, "the draft wants outputs of layers that the target does not have")


def read_columns(attached: draft_pb2.Attached, vocabulary: int) -> NDArray[np.int64] | None:
    """Token of each column of a q; None: column i is token i.

    Raises AttachError unless they ascend within the vocabulary.
    """
    if not attached.draft_vocabulary:
        return None
    columns: NDArray[Any] = np.array(attached.draft_vocabulary, np.int64)
    if columns[0] < 0 or columns[-1] >= vocabulary or not (np.diff(columns) > 0).all():
        raise AttachError(
            common_pb2.FALLBACK_REASON_DRAFT_INVALID, "the draft's vocabulary is not ascending within the target's"
        )
    return columns


def width(target: common_pb2.ModelInfo, draft: common_pb2.ModelInfo, columns: NDArray[Any] | None) -> int:
    """Columns of a q: the rows of the draft's head, or the tokens that both vocabularies have room for."""
    return min(target.vocabulary_size, draft.vocabulary_size) if columns is None else int(columns.shape[0])
