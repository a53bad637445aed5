"""Chains see at each step exactly what the draft sees at run time."""

from __future__ import annotations

import math

import pytest
import torch

from recipes.distil.chains import Chains
from recipes.distil.evaluation import Acceptance, agreement, rounds_of
from services.draft.feature_head import FeatureHead
from tests.unit.recipes import toy


def one_by_one(
    draft: FeatureHead, tokens: torch.Tensor, features: torch.Tensor, start: int, steps: int
) -> torch.Tensor:
    """The run-time chain, written naively: one row at a time over a growing cache. [steps, D]"""
    cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache.append((key, value))
        keys, values = (torch.stack([pair[i] for pair in cache]) for i in (0, 1))
        groups = query.shape[0] // key.shape[0]
        rows = []
        for head in range(query.shape[0]):
            scores = keys[:, head // groups] @ query[head] / math.sqrt(query.shape[1])
            rows.append(scores.softmax(-1) @ values[:, head // groups])
        return torch.stack(rows)

    state = torch.empty(0)
    for pair in range(start + 1):
        entered = draft.enter(tokens[pair + 1], draft.fuse(features[pair]))
        state = draft.step(entered, torch.tensor(pair), attend)
    outputs = [state]
    for step in range(1, steps):
        state = draft.step(draft.enter(tokens[start + step + 1], state), torch.tensor(start + step), attend)
        outputs.append(state)
    return torch.stack(outputs)


@torch.no_grad()
def test_unrolled_steps_equal_the_run_time_chain() -> None:
    draft, (tokens, features) = toy.draft(), toy.text(14)
    starts = torch.tensor([[3, 4, 8]])
    chains = Chains(draft, tokens[None], features[None, :-1], starts)
    outputs = [chains.first()]
    for step in range(1, 4):
        outputs.append(chains.next(outputs[-1], tokens[starts + step + 1]))
    for i, start in enumerate(starts[0].tolist()):
        expected = one_by_one(draft, tokens, features, start, 4)
        torch.testing.assert_close(torch.stack([h[0, i] for h in outputs]), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_chain_never_sees_a_true_state_behind_its_start() -> None:
    draft, (tokens, features) = toy.draft(), toy.text(14)
    changed = features.clone()
    changed[6:] = 7.0
    outputs = []
    for states in (features, changed):
        chains = Chains(draft, tokens[None], states[None, :-1], torch.tensor([[5]]))
        outputs.append(chains.next(chains.first(), tokens[None, 7:8]))
    assert torch.equal(outputs[0], outputs[1])


def test_a_draft_that_always_agrees_accepts_every_guess() -> None:
    draft, (tokens, features) = toy.draft(), toy.text(30)
    constant = torch.full_like(tokens, int(draft.vocabulary[5]))
    with torch.no_grad():
        draft.head[:] = 0
        draft.head[5] = 1.0
        draft.norm.weight.fill_(0)  # all logits 0: the first row wins
    constant.fill_(int(draft.vocabulary[0]))
    assert agreement(draft, constant, features, 3, 4) == [4] * (30 - 1 - 4 - 3)
    assert agreement(draft, constant + 1, features, 3, 4) == [0] * (30 - 1 - 4 - 3)


def test_rounds_move_on_by_what_was_accepted_and_one() -> None:
    assert rounds_of([2, 9, 9, 0, 1, 9, 4]) == [2, 0, 1, 4]


def test_acceptance_counts_as_the_design_says() -> None:
    acceptance = Acceptance(draft_length=2, rounds=4, histogram=(2, 1, 1))
    assert acceptance.by_position == (0.5, 0.25)
    assert acceptance.mean_acceptance_length == pytest.approx(1.75)
