"""The untrained draft: the target's last layer, behind projections that pass its own state through."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.distil.target import TargetWeights
from services.draft.feature_head import FeatureHead, FeatureHeadConfig
from services.model.configuration import ModelConfig

BRANCH_SCALE = 0.1
"""The last layer's branches are ten times as large as the draft's input; scaled down, training starts far faster."""


def draft_vocabulary(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """The ``size`` most frequent tokens of ``counts`` [V], ascending; ``always`` are among them. [size] int32."""
    counts = counts.clone()
    counts[list(always)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values.to(torch.int32)


def head_config(config: ModelConfig, feature_layers: Sequence[int], vocabulary_size: int) -> FeatureHeadConfig:
    """Sizes taken over from the target."""
    return FeatureHeadConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        draft_vocabulary_size=vocabulary_size,
        feature_layers=tuple(feature_layers),
    )


def untrained(target: TargetWeights, feature_layers: Sequence[int], vocabulary: Tensor, seed: int) -> FeatureHead:
    """A draft whose layer and norm are the target's last.

    The fused state starts as the last of the wanted layers, and the layer's input as a mix of it and the token's
    embedding; the rest of both projections starts small.
    """
    config = head_config(target.config, feature_layers, vocabulary.numel())
    draft = FeatureHead(config, target.embed, target.head[vocabulary.long()].contiguous(), vocabulary)
    known = draft.layer.state_dict()
    draft.layer.load_state_dict({name: target.last_layer[name] for name in known})
    generator = torch.Generator().manual_seed(seed)
    size, identity = config.hidden_size, torch.eye(config.hidden_size)
    with torch.no_grad():
        draft.layer.self_attn.o_proj.weight.mul_(BRANCH_SCALE)
        draft.layer.mlp.down_proj.weight.mul_(BRANCH_SCALE)
        draft.norm.weight.copy_(target.norm)
        draft.features.weight.normal_(0.0, 0.02 * size**-0.5, generator=generator)
        draft.features.weight[:, -size:] += identity
        draft.input.weight.normal_(0.0, 0.02 * size**-0.5, generator=generator)
        draft.input.weight[:, :size] += identity
        draft.input.weight[:, size:] += identity
    return draft
