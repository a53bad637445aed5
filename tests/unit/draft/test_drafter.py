"""Sequences of a draft: what is held, in which places, for how long; and the guesses of a round."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from slipstream.v1 import common_pb2

from services.link.round import OK, RoundError
from services.model.forward import SequenceRows
from tests.unit.draft.toys import GREEDY, SAMPLED, CountingChain, drafter, features, start, then

FULL = common_pb2.FALLBACK_REASON_DRAFT_FULL
CONTEXT = common_pb2.FALLBACK_REASON_DRAFT_CONTEXT
INVALID = common_pb2.FALLBACK_REASON_DRAFT_INVALID


def test_a_greedy_round_guesses_on_from_the_last_token_without_q() -> None:
    (draft,) = drafter(CountingChain()).propose([start(1, [4, 5], 3)])
    assert (draft.base_length, draft.tokens, draft.q, draft.refusal) == (2, [6, 7, 8], None, OK)


def test_all_sequences_of_a_round_share_its_passes() -> None:
    chain = CountingChain()
    draft = drafter(chain)
    answers = draft.propose([start(1, [4, 5], 3), start(2, [9], 1), start(3, [1, 2, 3], 0)])
    assert [a.tokens for a in answers] == [[6, 7, 8], [10], []]
    assert [len(batch) for batch in chain.batches] == [3, 1, 1]
    assert draft.passes == 3


def test_rejected_guesses_are_overwritten_by_what_was_committed() -> None:
    chain = CountingChain()
    draft = drafter(chain)
    draft.propose([start(1, [4, 5], 3)])  # Guesses 6, 7, 8; the target keeps 6 and goes on with 12.
    (answer,) = draft.propose([then(1, 4, [6, 12], 2)])
    assert answer.tokens == [13, 14]
    blocks = draft._held[1].blocks
    assert chain.held(blocks, 5) == [4, 5, 6, 12, 13]


def test_a_sequence_catches_up_on_what_it_was_only_told() -> None:
    chain = CountingChain()
    draft = drafter(chain)
    draft.propose([start(1, [1, 2, 3], 0)])
    draft.propose([then(1, 20, list(range(17)), 0)])
    (answer,) = draft.propose([then(1, 21, [9], 1)])
    assert answer.tokens == [10]
    assert chain.held(draft._held[1].blocks, 21) == [1, 2, 3, *range(17), 9]


def test_places_of_two_sequences_never_meet() -> None:
    chain = CountingChain()
    draft = drafter(chain)
    draft.propose([start(1, [1] * 50, 8), start(2, [2] * 50, 8), start(3, [3] * 50, 8)])
    for number in (1, 2, 3):
        assert chain.held(draft._held[number].blocks, 50) == [number] * 50


def test_a_full_draft_refuses_by_name_until_a_place_is_free() -> None:
    draft = drafter(CountingChain(), sequences=1)
    answers = draft.propose([start(1, [4], 1), start(2, [4], 1)])
    assert [a.refusal for a in answers] == [OK, FULL]
    assert draft.propose([then(2, 2, [5], 1)])[0].refusal == FULL  # It keeps saying so.
    draft.release([1])
    assert draft.propose([start(2, [4, 5], 1)])[0].tokens == [6]


def test_a_sequence_longer_than_the_context_is_refused_by_name_and_its_place_freed() -> None:
    draft = drafter(CountingChain(), context=32)
    draft.propose([start(1, [1] * 20, 2)])
    answers = draft.propose([then(1, 31, [1] * 11, 2), start(2, [4], 1)])
    assert [a.refusal for a in answers] == [CONTEXT, OK]
    assert draft.held == 1
    assert draft.propose([then(1, 32, [1], 2)])[0].refusal == CONTEXT


def test_the_last_place_of_the_context_is_used() -> None:
    draft = drafter(CountingChain(), context=32)
    (answer,) = draft.propose([start(1, [1] * 24, 8)])
    assert answer.tokens == list(range(2, 10))


def test_a_gap_in_what_the_draft_was_told_is_noticed() -> None:
    draft = drafter(CountingChain())
    draft.propose([start(1, [4, 5], 1)])
    assert draft.propose([then(1, 9, [6], 1)])[0].refusal == INVALID
    assert draft.held == 0
    assert draft.propose([start(1, [4, 5], 1)])[0].tokens == [6]


def test_a_sequence_that_was_never_started_is_refused_and_takes_no_place() -> None:
    draft = drafter(CountingChain())
    assert draft.propose([then(5, 2, [6], 1)])[0].refusal == INVALID
    assert draft.held == 0


def test_a_new_start_forgets_what_was_held() -> None:
    draft = drafter(CountingChain(), sequences=1)
    draft.propose([start(1, [4, 5], 1)])
    assert draft.propose([start(1, [9], 1)])[0].tokens == [10]
    assert draft.held == 1


def test_places_come_back_after_any_mix_of_ends() -> None:
    draft = drafter(CountingChain(), sequences=3, context=32)
    for number in range(200):
        draft.propose([start(number, [1] * (20 + number % 3), 2)])
        if number % 3 == 0:
            draft.propose([then(number, 40, [1] * 20, 2)])  # Too long: refused.
        if number % 2:
            draft.propose([start(number, [1], 2)])
        draft.release([number, number])
    assert draft.held == 0
    assert len(draft._free) == 3
    assert draft._refused == {}


@pytest.mark.parametrize(
    ("sampling", "what"),
    [
        (None, "sampling"),
        (common_pb2.SamplingParams(top_p=1, repetition_penalty=1), "verification"),
        (common_pb2.SamplingParams(verification=common_pb2.VERIFICATION_TOKEN), "ranges"),
    ],
)
def test_a_start_without_whole_sampling_parameters_cannot_be_meant(
    sampling: common_pb2.SamplingParams | None, what: str
) -> None:
    with pytest.raises(RoundError, match=what):
        drafter(CountingChain()).propose([start(1, [4], 1, sampling)])


def test_no_tokens_no_guess_no_pass() -> None:
    draft = drafter(CountingChain())
    draft.propose([start(1, [4], 1)])
    passes = draft.passes
    (answer,) = draft.propose([then(1, 1, [], 2)])
    assert answer.tokens == []
    assert draft.passes == passes


def test_one_sequence_without_numbers_does_not_hurt_the_others() -> None:
    chain = CountingChain()
    usual = chain.logits_of
    chain.logits_of = lambda token: usual(token) * (np.nan if token == 6 else 1)
    answers = drafter(chain).propose([start(1, [5], 4, SAMPLED), start(2, [9], 4, SAMPLED)])
    assert len(answers[0].tokens) <= 4
    assert len(answers[1].tokens) == 4


class RememberingChain(CountingChain):
    """An oracle: its best guess is a hash of all tokens that stand before it, so one wrong place changes every guess."""

    def _run(self, rows: Sequence[SequenceRows]) -> tuple[torch.Tensor, torch.Tensor]:
        super()._run(rows)
        logits = []
        for row in rows:
            end = row.base + len(row.tokens)
            logits += [self.after(self.held(row.blocks, end - row.logits + 1 + i)) for i in range(row.logits)]
        stacked = np.stack(logits) if logits else np.zeros((0, self.width), np.float32)
        return torch.from_numpy(stacked), torch.zeros(sum(len(row.tokens) for row in rows), 1)

    def after(self, tokens: Sequence[int | None]) -> np.ndarray:
        return np.eye(self.width, dtype=np.float32)[zlib.crc32(repr(list(tokens)).encode()) % self.width]


def expected_guesses(chain: RememberingChain, committed: Sequence[int], k: int) -> list[int]:
    tokens = list(committed)
    for _ in range(k):
        tokens.append(int(chain.after(tokens).argmax()))
    return tokens[len(committed) :]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_accepted_the_guesses_are_those_of_a_draft_that_saw_only_what_was_committed(seed: int) -> None:
    chance = random.Random(seed)
    chain = RememberingChain()
    draft = drafter(chain, context=128)
    committed: dict[int, list[int]] = {}
    guessed: dict[int, list[int]] = {}
    for _ in range(60):
        updates = []
        for number in chance.sample(range(3), chance.randint(1, 3)):
            if number in committed and (chance.random() < 0.1 or len(committed[number]) > 100):
                draft.release([number])
                del committed[number]
            k = chance.randint(0, 4)
            if number not in committed:
                new = [chance.randrange(16) for _ in range(chance.randint(1, 20))]
                committed[number] = list(new)
                updates.append(start(number, new, k))
                continue
            accepted = guessed[number][: chance.randint(0, len(guessed[number]))]
            new = [*accepted, chance.randrange(16)]
            committed[number] += new
            updates.append(then(number, len(committed[number]), new, k))
        for update, answer in zip(updates, draft.propose(updates), strict=True):
            number = update.sequence_id
            assert answer.base_length == len(committed[number])
            assert answer.tokens == expected_guesses(chain, committed[number], update.draft_length)
            guessed[number] = answer.tokens


# --- fed with states ---


def test_each_token_is_fed_with_the_states_of_the_one_before_it() -> None:
    chain = CountingChain()
    draft = drafter(chain, layers=(3, 7))
    (answer,) = draft.propose([start(1, [4, 5, 6], 2, features=features(40, 50))])
    assert answer.tokens == [7, 8]
    assert list(chain.batches[0][0].tokens) == [5, 6]
    assert chain.fed[0] is not None
    assert chain.fed[0][:, 0, 0].tolist() == [40, 50]
    draft.propose([then(1, 5, [7, 9], 1, features=features(60, 70))])
    assert chain.fed[1] is not None
    assert chain.fed[1][:, 0, 0].tolist() == [60, 70]
    assert chain.held(draft._held[1].blocks, 4) == [5, 6, 7, 9]


def test_a_chain_goes_on_from_the_state_of_its_own_last_row() -> None:
    chain = CountingChain()
    drafter(chain, layers=(3, 7)).propose(
        [
            start(1, [4, 5, 6], 3, features=features(40, 50)),
            start(2, [1, 2], 0, features=features(10)),
            start(3, [1, 9], 2, features=features(10)),
        ]
    )
    # States are the tokens of their rows: of sequences 1 and 3, then of sequence 1 alone.
    assert [s[:, 0].tolist() for s in chain.states if s is not None] == [[6, 9], [7]]


def test_a_sequence_joined_in_its_middle_starts_with_what_is_known_from_there() -> None:
    chain = CountingChain()
    draft = drafter(chain, layers=(3, 7))
    (answer,) = draft.propose([start(1, [4, 5], 1, committed_length=500, features=features(40))])
    assert (answer.base_length, answer.tokens) == (500, [6])
    assert draft.propose([then(1, 501, [6], 1, features=features(50))])[0].tokens == [7]


def test_missing_features_cannot_be_meant() -> None:
    with pytest.raises(RoundError, match="features are missing"):
        drafter(CountingChain(), layers=(3, 7)).propose([start(1, [4, 5], 1)])


def test_a_first_token_alone_gives_no_guess() -> None:
    (answer,) = drafter(CountingChain(), layers=(3, 7)).propose([start(1, [4], 2)])
    assert (answer.tokens, answer.refusal) == ([], OK)


# --- vocabularies ---


def test_columns_are_translated_to_tokens() -> None:
    columns = [0, 3, 4, 9, 15]
    chain = CountingChain(width=5)
    chain.logits_of = lambda token: np.eye(5, dtype=np.float32)[(columns.index(token) + 1) % 5]
    (answer,) = drafter(chain, columns).propose([start(1, [3], 3, GREEDY)])
    assert answer.tokens == [4, 9, 15]


def test_guesses_stay_within_a_target_that_has_fewer_tokens() -> None:
    update = start(1, [4], 4, SAMPLED, want_distribution=True, vocabulary=5)
    (answer,) = drafter(CountingChain()).propose([update])
    assert answer.q is not None
    assert answer.q.shape == (4, 5)
    assert max(answer.tokens) < 5
    (greedy,) = drafter(CountingChain()).propose([start(1, [4], 3, vocabulary=5)])
    assert max(greedy.tokens) < 5
