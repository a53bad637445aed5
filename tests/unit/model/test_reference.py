"""The reference pass gives transformers' answers, and a row's bits depend on the row and its context alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.model import reference
from services.model.configuration import ModelConfig
from services.model.errors import ModelError
from services.model.forward import BLOCK_SIZE, SequenceRows
from services.model.reference import BUCKET, ReferencePass
from tests.unit.model import toys

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma2", "mixtral")
TOKENS = [(37 * i + 11) % toys.VOCABULARY for i in range(45)]


def as_pass(model: Any) -> ReferencePass:
    raw = json.loads(model.config.to_json_string(use_diff=False))
    return ReferencePass(
        model, ModelConfig.from_dict({"max_position_embeddings": 128, "num_attention_heads": 4, **raw})
    )


def plain(model: Any, tokens: Sequence[int], **kwargs: Any) -> Any:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), **kwargs)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


PASSES: dict[str, ReferencePass] = {}


def passes(kind: str) -> ReferencePass:
    if kind not in PASSES:
        PASSES[kind] = as_pass(toys.model(kind))
        PASSES[kind].allocate_cache(32)
    return PASSES[kind]


def whole(kind: str, tokens: Sequence[int] = TOKENS) -> torch.Tensor:
    """Logits of all rows, run as one chain."""
    return passes(kind).run([SequenceRows(tokens, 0, (0, 1, 2), logits=len(tokens))]).logits


def test_logits_are_those_of_transformers(kind: str) -> None:
    expected = plain(toys.model(kind), TOKENS).logits[0].log_softmax(-1)
    found = whole(kind).log_softmax(-1)
    assert torch.nn.functional.kl_div(found, expected, reduction="batchmean", log_target=True) < 1e-6
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert len(set(expected.argmax(-1).tolist())) > 5  # the toy does not answer everything alike


def test_features_are_outputs_of_the_layers(kind: str) -> None:
    states = plain(toys.model(kind), TOKENS, output_hidden_states=True).hidden_states
    found = passes(kind).run([SequenceRows(TOKENS, 0, (0, 1, 2), logits=0)], feature_layers=(0, 2)).features
    assert found is not None
    assert found.shape == (len(TOKENS), 2, 64)
    assert found.dtype == torch.bfloat16
    for column, layer in enumerate((0, 2)):
        torch.testing.assert_close(found[:, column].float(), states[layer][0], rtol=0.02, atol=0.02)


def test_a_model_that_routes_rows_to_experts_runs_a_row_at_a_time() -> None:
    assert passes("mixtral").rows_per_run == 1
    assert passes("llama").rows_per_run == BUCKET


def cut(tokens: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
    pieces, base = [], 0
    for size in [*sizes, len(tokens)]:
        if tokens[base : base + size]:
            pieces.append((base, tokens[base : base + size]))
        base += size
    return pieces


@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 20), max_size=6),
    st.lists(st.integers(0, 6), min_size=8, max_size=8),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=25)
def test_bits_do_not_depend_on_chunks_neighbours_or_blocks(
    kind: str, sizes: list[int], neighbours: list[int], choice: random.Random
) -> None:
    """The prompt in any pieces, each beside other sequences of any length, before or after, in any blocks."""
    forward, expected = passes(kind), whole(kind)
    blocks = choice.sample(range(32), 4)
    own, other = blocks[:3], blocks[3:]
    found, states = [], []
    for (base, piece), beside in zip(cut(TOKENS, sizes), neighbours, strict=False):
        rows = SequenceRows(piece, base, own, logits=len(piece))
        stranger = [SequenceRows([choice.randrange(toys.VOCABULARY) for _ in range(beside)], 0, other, logits=1)]
        batch = [*stranger, rows] if beside and choice.random() < 0.7 else [rows, *(stranger if beside else [])]
        output = forward.run(batch, feature_layers=(1, 3))
        start = sum(r.logits for r in batch[: batch.index(rows)])
        found.append(output.logits[start : start + len(piece)])
        assert output.features is not None
        before = sum(len(r.tokens) for r in batch[: batch.index(rows)])
        states.append(output.features[before : before + len(piece)])
    assert torch.equal(torch.cat(found), expected)
    again = forward.run([SequenceRows(TOKENS, 0, own, logits=1)], feature_layers=(1, 3)).features
    assert again is not None
    assert torch.equal(torch.cat(states), again)


def test_a_branch_of_a_tree_has_the_bits_of_a_chain(kind: str) -> None:
    forward, prompt, branch = passes(kind), TOKENS[:20], TOKENS[20:24]
    expected = whole(kind, TOKENS[:24])[20:]
    forward.run([SequenceRows(prompt, 0, (4, 5))])
    # The branch is rows 0, 2, 4, 5; the others are wrong guesses.
    tree = [branch[0], 5, branch[1], 6, branch[2], branch[3], 7]
    parents = [-1, -1, 0, 1, 2, 4, 5]
    found = forward.run([SequenceRows(tree, 20, (4, 5), logits=7, parents=parents)]).logits
    assert torch.equal(found[[0, 2, 4, 5]], expected)


def test_the_kept_path_of_a_tree_goes_on_like_a_chain(kind: str) -> None:
    forward, prompt = passes(kind), TOKENS[:20]
    expected = whole(kind, TOKENS[:24])[23:]
    forward.run([SequenceRows(prompt, 0, (4, 5))])
    rows = SequenceRows([9, TOKENS[20], 8, TOKENS[21], TOKENS[22]], 20, (4, 5), parents=[-1, -1, 0, 1, 3])
    forward.run([rows])
    forward.keep(rows, [1, 3, 4])
    assert torch.equal(forward.run([SequenceRows([TOKENS[23]], 23, (4, 5))]).logits, expected)


def test_rejected_rows_are_overwritten_by_the_next_pass(kind: str) -> None:
    forward, expected = passes(kind), whole(kind, TOKENS[:24])[23:]
    forward.run([SequenceRows(TOKENS[:20], 0, (4, 5))])
    forward.run([SequenceRows([1, 2, 3, 4, 5], 20, (4, 5))])
    assert torch.equal(forward.run([SequenceRows(TOKENS[20:24], 20, (4, 5))]).logits, expected)


def test_only_the_rows_that_want_logits_get_them() -> None:
    forward = passes("llama")
    batch = [SequenceRows(TOKENS[:20], 0, (0, 1), logits=0), SequenceRows(TOKENS[:3], 0, (2,), logits=2)]
    assert torch.equal(forward.run(batch).logits, whole("llama")[1:3])
    assert forward.run([]).logits.shape == (0, toys.VOCABULARY)


def test_a_model_whose_maps_are_not_row_invariant_runs_a_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferencePass, "_is_row_invariant", lambda *_: False)
    forward = as_pass(toys.model("llama"))
    forward.allocate_cache(4)
    assert forward.rows_per_run == 1
    logits = forward.run([SequenceRows(TOKENS[:20], 0, (0, 1), logits=20)]).logits
    torch.testing.assert_close(logits, whole("llama")[:20], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (SequenceRows([toys.VOCABULARY], 0, (0,)), "vocabulary"),
        (SequenceRows([-1], 0, (0,)), "vocabulary"),
        (SequenceRows([1] * 17, 0, (0,)), "blocks"),
        (SequenceRows([1], -1, (0,)), "blocks"),
        (SequenceRows([1], 0, (32,)), "cache"),
        (SequenceRows([1], 0, (-1,)), "cache"),
        (SequenceRows([1], 128, tuple(range(9))), "context"),
        (SequenceRows([1, 2], 0, (0,), parents=[0, -1]), "follows"),
        (SequenceRows([1, 2], 0, (0,), parents=[-1]), "parents"),
        (SequenceRows([1], 0, (0,), logits=2), "logits"),
    ],
)
def test_rows_that_break_the_rules_are_refused(rows: SequenceRows, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        passes("llama").run([rows])


def test_feature_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="feature layers"):
        passes("llama").run([SequenceRows([1], 0, (0,))], feature_layers=(4,))


def test_the_cache_is_as_large_as_it_says() -> None:
    forward = passes("qwen3")
    assert forward.cache_bytes_per_block == 3 * 2 * (2 * 32) * 4 * BLOCK_SIZE


@pytest.mark.parametrize(("kind", "named"), [("bloom", "Bloom"), ("mamba", "Mamba")])
def test_an_architecture_whose_attention_is_its_own_is_refused(kind: str, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        as_pass(toys.model(kind))


def test_an_answer_that_is_not_transformers_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = reference.paged_attention.attend

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        output, _ = real(*args, **kwargs)
        return torch.zeros_like(output), None

    monkeypatch.setattr(reference.paged_attention, "attend", forgetful)
    with pytest.raises(ModelError, match="same answer"):
        as_pass(toys.model("llama"))


def test_a_folder_is_loaded_in_the_format_asked_for(tmp_path: Path) -> None:
    toys.model("llama").save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert ReferencePass.load(tmp_path, config, "fp32").weight_format == "fp32"
    assert ReferencePass.load(tmp_path, config, "bf16").weight_format == "bf16"


def test_bits_do_not_depend_on_the_place_in_a_bucket_in_bf16_either(tmp_path: Path) -> None:
    toys.model("llama").save_pretrained(tmp_path)
    forward = ReferencePass.load(tmp_path, ModelConfig.from_folder(tmp_path), "bf16")
    forward.allocate_cache(8)
    whole = forward.run([SequenceRows(TOKENS, 0, (0, 1, 2), logits=len(TOKENS))]).logits
    for first in range(1, BUCKET):
        parts = [
            forward.run([SequenceRows(TOKENS[a:b], a, (3, 4, 5), logits=b - a)]).logits
            for a, b in ((0, first), (first, len(TOKENS)))
        ]
        assert torch.equal(torch.cat(parts), whole)
