"""What the draft says of itself."""

from __future__ import annotations

from slipstream.v1 import common_pb2, draft_pb2

from services.draft.settings import DraftSettings
from services.model.errors import ModelError


def describe(
    model: common_pb2.ModelInfo, name: str, settings: DraftSettings, layers: tuple[int, ...]
) -> draft_pb2.DraftServiceGetInfoResponse:
    """What GetInfo says. Raises ModelError for a context that leaves no room for guesses."""
    context = min(settings.context, model.context_limit - settings.max_draft_length)
    if context < 1:
        raise ModelError(
            f"{model.model_id} has a context of {model.context_limit} tokens, which leaves nothing beside"
            f" {settings.max_draft_length} guesses; lower SLIPSTREAM_DRAFT_MAX_DRAFT_LENGTH"
        )
    return draft_pb2.DraftServiceGetInfoResponse(
        model=model,
        drafters=[name],
        max_draft_length=settings.max_draft_length,
        context_limit=context,
        max_sequences=settings.max_sequences,
        feature_layers=layers,
    )
