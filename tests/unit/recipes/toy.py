"""A draft, a corpus and a target of toy size."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from services.draft.feature_head import FeatureHead, FeatureHeadConfig

CONFIG = FeatureHeadConfig(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48, rms_norm_eps=1e-5,
    rope_theta=10000.0, draft_vocabulary_size=20, feature_layers=(1, 2, 3),
)  # fmt: skip
VOCABULARY_SIZE = 40


def draft(seed: int = 0) -> FeatureHead:
    """Random weights; the draft guesses every second token."""
    torch.manual_seed(seed)
    embed = torch.randn(VOCABULARY_SIZE, 32).bfloat16()
    vocabulary = torch.arange(0, VOCABULARY_SIZE, 2, dtype=torch.int32)
    return FeatureHead(CONFIG, embed, embed[vocabulary.long()] * 0.3, vocabulary)


def text(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [length] and states [length, 3, 32]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY_SIZE // 2, (length,), generator=generator) * 2
    return tokens, torch.randn(length, 3, 32, generator=generator).bfloat16()


def shard(path: Path, lengths: list[int], prompt: int = 4, greedy: bool = True, seed: int = 0) -> None:
    """A corpus shard of random text."""
    pieces = [text(length, seed + i) for i, length in enumerate(lengths)]
    tensors = {
        "tokens": torch.cat([tokens for tokens, _ in pieces]).int(),
        "starts": torch.tensor([0, *lengths]).cumsum(0),
        "prompts": torch.full((len(lengths),), prompt, dtype=torch.int32),
        "greedy": torch.full((len(lengths),), int(greedy), dtype=torch.uint8),
        "features": torch.cat([features for _, features in pieces]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
