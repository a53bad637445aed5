"""The draft on the fast pass guesses what its mathematics in torch guesses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.draft.fast_head import FastHead
from services.draft.feature_head import FeatureHead, FeatureHeadConfig
from services.model.configuration import ModelConfig
from services.model.forward import SequenceRows
from services.model.kernels import build
from services.model.kernels.checkpoint import CheckpointError

pytestmark = pytest.mark.skipif(build.why_not_here() is not None, reason=f"no fast pass here: {build.why_not_here()}")

TARGET = ModelConfig(
    architecture="LlamaForCausalLM",
    vocabulary_size=160,
    hidden_size=96,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    norm_eps=1e-5,
    context_limit=64,
    tied_embeddings=True,
)
CONFIG = FeatureHeadConfig(96, 6, 2, 32, 128, 1e-5, 10000.0, 48, (1, 2, 3))


@pytest.fixture
def head(tmp_path: Path) -> FeatureHead:
    torch.manual_seed(3)
    embed = torch.randn(160, 96)
    vocabulary = torch.randperm(160)[:48].sort().values
    head = FeatureHead(CONFIG, embed, embed[vocabulary], vocabulary)
    save_file(head.own_state(), tmp_path / "draft.safetensors")
    save_file({"model.embed_tokens.weight": embed}, tmp_path / "model.safetensors")
    return head


def attend_to(keys: list[torch.Tensor], values: list[torch.Tensor]):
    """Attention of one row to all rows before it and to itself."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys.append(key[0])
        values.append(value[0])
        k, v = (torch.stack(t).repeat_interleave(3, 1) for t in (keys, values))
        scores = torch.einsum("hd,phd->hp", query[0], k) * 32**-0.5
        return torch.einsum("hp,phd->hd", scores.softmax(-1), v)[None]

    return attend


@torch.no_grad()
def test_pairs_and_chain_match_the_torch_mathematics(head: FeatureHead, tmp_path: Path) -> None:
    fast = FastHead.load(tmp_path, tmp_path, TARGET, CONFIG, threads=1, context=64)
    fast.forward_pass.allocate_cache(4)
    tokens = torch.tensor([4, 9, 150, 31, 77])
    features = torch.randn(5, 3, 96).bfloat16()
    logits, states = fast.extend([SequenceRows(tokens.tolist(), 0, [2, 1], 5)], features)
    logits_next, _ = fast.step([SequenceRows([12], 5, [2, 1], 1)], states[-1:])

    attend = attend_to([], [])
    entered = head.enter(tokens, head.fuse(features))
    h = torch.cat([head.step(entered[i : i + 1], torch.tensor([i]), attend) for i in range(5)])
    following = head.step(head.enter(torch.tensor([12]), h[-1:]), torch.tensor([5]), attend)

    assert torch.equal(fast.vocabulary, head.vocabulary)
    for found, expected in ((logits, head.logits(h)), (logits_next, head.logits(following))):
        assert (found - expected).abs().mean() < 0.03 * expected.std()


def test_the_head_rotates_as_it_was_trained_whatever_the_target_does(head: FeatureHead, tmp_path: Path) -> None:
    scaled = replace(
        TARGET, rope_theta=500.0, rope_parameters={"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}
    )
    answers = []
    for target in (TARGET, scaled):
        fast = FastHead.load(tmp_path, tmp_path, target, CONFIG, threads=1, context=64)
        fast.forward_pass.allocate_cache(4)
        features = torch.linspace(-1, 1, 5 * 3 * 96).view(5, 3, 96).bfloat16()
        answers.append(fast.extend([SequenceRows([4, 9, 150, 31, 77], 0, [0], 5)], features)[0])
    assert torch.equal(*answers)


def test_a_draft_of_another_width_is_refused_by_the_tensors_name(head: FeatureHead, tmp_path: Path) -> None:
    state = head.own_state()
    state["input.weight"] = state["input.weight"][:, :64].contiguous()
    save_file(state, tmp_path / "draft.safetensors")
    with pytest.raises(CheckpointError, match=r"input.weight has shape \[96, 64\]"):
        FastHead.load(tmp_path, tmp_path, TARGET, CONFIG, threads=1, context=64)
