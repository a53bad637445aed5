"""The feature-fed draft from its folder: card and weights, and the target that lends it embedding and head."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from slipstream.v1 import common_pb2, draft_pb2

from services.draft.chain import Chain
from services.draft.drafter import ChainDrafter, blocks_per_sequence
from services.draft.fast_head import FastHead, as_llama
from services.draft.feature_head import FeatureHead, FeatureHeadConfig
from services.draft.info import describe
from services.draft.settings import DraftSettings
from services.draft.torch_head import TorchHead
from services.model.configuration import ModelConfig
from services.model.errors import ModelError
from services.model.forward import BLOCK_SIZE
from services.model.kernels import fast
from services.model.kernels.build import BuildError
from services.model.kernels.checkpoint import SafetensorsCheckpoint, open_checkpoint
from services.model.store import PreparedModel, prepare

log = structlog.get_logger()

CARD = "card.json"
WEIGHTS = "draft.safetensors"


def load_feature_drafter(folder: Path, settings: DraftSettings) -> ChainDrafter:
    """Raises ModelError, or services.model.kernels.checkpoint.CheckpointError for weights that do not fit."""
    card = read_card(folder)
    target = prepare(settings.target)
    check_card(card, target)
    layers = tuple(int(layer) for layer in card["feature_layers"])
    info = describe(_model_info(folder, card, target), "features", settings, layers)
    chain, vocabulary, reason = _chain(folder, card, target, settings.threads, info)
    info.model.compute_path, info.model.compute_path_reason = "reference" if reason else "fast", reason
    info.model.weight_format = "bf16" if reason else "int8"
    return ChainDrafter("features", chain, info, vocabulary.numpy().astype(np.int32), target.config.hidden_size)


def read_card(folder: Path) -> dict[str, Any]:
    """Raises ModelError unless it is the card of a feature head."""
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the draft's {CARD} cannot be read ({error}); make the draft again") from error
    if not isinstance(card, dict) or card.get("kind") != "feature_head":
        raise ModelError(f"the draft's {CARD} does not describe a feature head; make the draft again")
    if missing := [key for key in ("feature_layers", "target", "config") if not card.get(key)]:
        raise ModelError(f"the draft's {CARD} says nothing of {', '.join(missing)}; make the draft again")
    return card


def check_card(card: dict[str, Any], target: PreparedModel) -> None:
    """Another tokenizer or shape cannot work; other weights of the same target can, worse. Raises ModelError."""
    made_for = card["target"]
    if made_for.get("tokenizer_fingerprint") != target.tokenizer_fingerprint:
        raise ModelError(
            f"the draft was made for {made_for.get('model_id')!r}, whose tokenizer is not that of {target.model_id!r};"
            " make a draft for this target"
        )
    width = card["config"].get("hidden_size")
    if width != target.config.hidden_size or max(card["feature_layers"]) > target.config.num_layers:
        raise ModelError(
            f"the draft was made for states of {width} values after layers {card['feature_layers']};"
            f" {target.model_id!r} has {target.config.num_layers} layers of {target.config.hidden_size};"
            " make a draft for this target"
        )
    if made_for.get("weights_fingerprint") != target.weights_fingerprint:
        log.warning("the draft was made for other weights of its target; it will guess worse", target=target.model_id)


def _chain(
    folder: Path, card: dict[str, Any], target: PreparedModel, threads: int, info: draft_pb2.DraftServiceGetInfoResponse
) -> tuple[Chain, torch.Tensor, str]:
    """The head, its vocabulary, and why it is not on the fast pass (empty if it is)."""
    blocks = info.max_sequences * blocks_per_sequence(info)
    sizes = head_sizes(card)
    reason = fast.why_not(as_llama(sizes, target.config))
    if reason is None:
        context = info.context_limit + info.max_draft_length
        try:
            head = FastHead.load(folder, target.path, target.config, sizes, threads=threads, context=context)
        except BuildError as error:
            reason = f"the fast pass cannot be built here: {error}"
        else:
            head.forward_pass.allocate_cache(blocks)
            return head, head.vocabulary, ""
    torch_head = load_torch_head(folder, sizes, target.path, target.config)
    return TorchHead(torch_head, blocks * BLOCK_SIZE), torch_head.vocabulary, reason


def head_sizes(card: dict[str, Any]) -> FeatureHeadConfig:
    """Raises ModelError for a card that does not say them."""
    try:
        return FeatureHeadConfig(**{**card["config"], "feature_layers": tuple(card["feature_layers"])})
    except TypeError as error:
        raise ModelError(f"the draft's {CARD} does not say its sizes ({error}); make the draft again") from error


def load_torch_head(folder: Path, sizes: FeatureHeadConfig, target_folder: Path, target: ModelConfig) -> FeatureHead:
    """The draft in torch, float32. Raises ModelError or CheckpointError for weights that do not fit."""
    own = SafetensorsCheckpoint(folder, WEIGHTS)
    vocabulary = own.whole("vocabulary")
    checkpoint = open_checkpoint(target_folder, target.num_heads, target.num_kv_heads)
    shape = (target.vocabulary_size, target.hidden_size)
    embed = checkpoint.tensor("model.embed_tokens.weight", shape)
    tied = target.tied_embeddings or not checkpoint.has("lm_head.weight")
    rows = embed if tied else checkpoint.tensor("lm_head.weight", shape)
    try:
        head = FeatureHead(sizes, embed, rows[vocabulary.long()], vocabulary)
    except (ValueError, IndexError) as error:
        raise ModelError(f"the draft's {CARD} does not fit its weights ({error}); make the draft again") from error
    names = [name for name in head.state_dict() if name != "vocabulary"]
    state = {name: own.tensor(name, tuple(head.state_dict()[name].shape)) for name in names}
    head.load_state_dict({**state, "vocabulary": vocabulary})
    return head.eval().requires_grad_(False)


def _model_info(folder: Path, card: dict[str, Any], target: PreparedModel) -> common_pb2.ModelInfo:
    try:
        digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    except OSError as error:
        raise ModelError(f"the draft's {WEIGHTS} cannot be read; make the draft again") from error
    return common_pb2.ModelInfo(
        model_id=f"{target.model_id} feature head",
        weights_fingerprint=f"sha256:{digest}",
        tokenizer_fingerprint=str(card["target"]["tokenizer_fingerprint"]),
        vocabulary_size=target.config.vocabulary_size,
        context_limit=target.config.context_limit,
    )
