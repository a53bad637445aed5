"""From the settings to a drafter: which kind of draft it is, and the pass that it runs on."""

from __future__ import annotations

import importlib
from pathlib import Path

from slipstream.v1 import common_pb2

from services.draft.drafter import ChainDrafter, blocks_per_sequence
from services.draft.feature_draft import load_feature_drafter
from services.draft.info import describe
from services.draft.model_chain import ModelChain
from services.draft.settings import DraftSettings
from services.link.server import Drafter
from services.model.errors import ModelError
from services.model.forward import BLOCK_SIZE
from services.model.kernels.checkpoint import CheckpointError
from services.model.loading import LoadSettings, load
from services.model.store import prepare

DEFAULT_DRAFT = Path(__file__).parents[2] / "drafts" / "smollm2-135m-instruct"


def load_drafter(settings: DraftSettings) -> Drafter:
    """Raises ModelError, one line that says what to change."""
    if settings.drafter:
        return _own_drafter(settings)
    folder = DEFAULT_DRAFT if settings.model == "default" else Path(settings.model)
    if (folder / "card.json").exists():
        try:
            return load_feature_drafter(folder, settings)
        except CheckpointError as error:
            raise ModelError(f"the draft does not fit its target: {error}") from error
    if settings.model == "default":
        raise ModelError("the default draft is missing in this installation; set SLIPSTREAM_DRAFT_MODEL")
    return _model_drafter(settings)


def _own_drafter(settings: DraftSettings) -> Drafter:
    module, _, function = settings.drafter.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"SLIPSTREAM_DRAFT_DRAFTER names no function that can be imported ({error})") from error
    drafter: Drafter = make(settings)
    return drafter


def _model_drafter(settings: DraftSettings) -> ChainDrafter:
    tokens = settings.max_sequences * (settings.context + settings.max_draft_length + BLOCK_SIZE)
    model = load(prepare(settings.model), LoadSettings(threads=settings.threads, cache_tokens=tokens))
    info = describe(common_pb2.ModelInfo(**model.info()), "model", settings, ())
    model.forward_pass.allocate_cache(info.max_sequences * blocks_per_sequence(info))
    return ChainDrafter("model", ModelChain(model.forward_pass), info, None)
