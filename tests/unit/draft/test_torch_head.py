"""The feature-fed draft without the fast pass: chunks, neighbours and chains give what one row at a time gives."""

from __future__ import annotations

import torch

from services.draft.torch_head import TorchHead
from services.model.forward import SequenceRows
from tests.unit.recipes import toy

HEAD = toy.draft().float().eval().requires_grad_(False)


def one_by_one(tokens: torch.Tensor, states: torch.Tensor, guesses: list[int]) -> list[torch.Tensor]:
    """Logits after the pairs, and after each guess, by the mathematics as it is written down."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys.append(key[0])
        values.append(value[0])
        k, v = (torch.stack(t).repeat_interleave(2, 1) for t in (keys, values))
        return torch.einsum("hp,phd->hd", (torch.einsum("hd,phd->hp", query[0], k) * 8**-0.5).softmax(-1), v)[None]

    logits = []
    state = HEAD.fuse(states)
    h = state[:1]
    for position, token in enumerate([*tokens.tolist(), *guesses]):
        entered = HEAD.enter(torch.tensor([token]), state[position : position + 1] if position < len(tokens) else h)
        h = HEAD.step(entered, torch.tensor([position]), attend)
        if position >= len(tokens) - 1:
            logits.append(HEAD.logits(h)[0])
    return logits


def pairs(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, states = toy.text(length, seed)
    return tokens, states


def test_chunks_and_neighbours_give_what_one_row_at_a_time_gives() -> None:
    (tokens, states), (others, other_states) = pairs(7, 1), pairs(3, 2)
    chain = TorchHead(HEAD, 64)
    chain.extend([SequenceRows(tokens[:4].tolist(), 0, range(2, 4), 0)], states[:4])
    logits, h = chain.extend(
        [SequenceRows(others.tolist(), 0, range(2), 1), SequenceRows(tokens[4:].tolist(), 4, range(2, 4), 1)],
        torch.cat([other_states, states[4:]]),
    )
    second, _ = chain.step([SequenceRows([6], 7, range(2, 4), 1)], h[-1:])
    expected = one_by_one(tokens, states, [6])
    assert torch.allclose(logits[0], one_by_one(others, other_states, [])[0], atol=1e-5)
    assert torch.allclose(logits[1], expected[0], atol=1e-5)
    assert torch.allclose(second[0], expected[1], atol=1e-5)


def test_rejected_guesses_leave_no_trace() -> None:
    tokens, states = pairs(6, 3)
    chain = TorchHead(HEAD, 64)
    _, h = chain.extend([SequenceRows(tokens[:3].tolist(), 0, range(2), 1)], states[:3])
    chain.step([SequenceRows([38], 3, range(2), 1)], h[-1:])
    logits, _ = chain.extend([SequenceRows(tokens[3:].tolist(), 3, range(2), 1)], states[3:])
    assert torch.allclose(logits[0], one_by_one(tokens, states, [])[0], atol=1e-5)
