"""How a guess is drawn: q is what it was drawn from, with every sampling parameter on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from slipstream.v1 import common_pb2

from services.draft.guessing import read_sampling
from services.model.sampling import History, Noise, Purpose, draw, process, sample
from tests.unit.draft.toys import SAMPLED, VOCABULARY, CountingChain, drafter, start, then

COLUMNS = [0, 2, 3, 5, 7, 8, 9, 11, 12, 15]


def params(**changes: object) -> common_pb2.SamplingParams:
    message = common_pb2.SamplingParams()
    message.CopyFrom(SAMPLED)
    for name, value in changes.items():
        setattr(message, name, value)
    return message


EVERYTHING = {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4}


def random_chain(width: int = VOCABULARY) -> CountingChain:
    table = np.random.default_rng(5).normal(size=(VOCABULARY, width)).astype(np.float32) * 2
    chain = CountingChain(width)
    chain.logits_of = lambda token: table[token]
    return chain


@pytest.mark.parametrize("columns", [None, COLUMNS])
def test_q_is_what_the_guess_was_drawn_from(columns: list[int] | None) -> None:
    """Chi-square over 4,000 seeds against the q that was shipped; the chance of a false alarm is 1 in 10,000."""
    chain = random_chain(VOCABULARY if columns is None else len(columns))
    draft = drafter(chain, columns)
    counts = np.zeros(chain.width)
    q = None
    for seed in range(4000):
        update = start(1, [4, 9, 4], 1, params(seed=seed, **EVERYTHING), want_distribution=True)
        (answer,) = draft.propose([update])
        assert answer.q is not None
        assert q is None or np.array_equal(answer.q[0], q)
        q = answer.q[0]
        counts[answer.tokens[0] if columns is None else columns.index(answer.tokens[0])] += 1
    assert q is not None
    assert q.dtype == np.float32
    assert counts[q == 0].sum() == 0
    kept = q > 0
    assert 1 < kept.sum() < chain.width
    expected = q[kept] / q[kept].sum(dtype=np.float64) * 4000
    assert stats.chisquare(counts[kept], expected).pvalue > 1e-4


def test_q_is_the_targets_own_processing_of_the_drafts_logits() -> None:
    chain = random_chain()
    (answer,) = drafter(chain).propose([start(1, [4, 9, 4], 2, params(**EVERYTHING), want_distribution=True)])
    history = History([4, 9, 4])
    assert answer.q is not None
    assert np.array_equal(answer.q[0], process(chain.logits_of(4), read_sampling(params(**EVERYTHING)), history))
    history.push(answer.tokens[0])  # A guess counts for the next one's penalty.
    second = process(chain.logits_of(answer.tokens[0]), read_sampling(params(**EVERYTHING)), history)
    assert np.array_equal(answer.q[1], second)


def test_guesses_that_were_rejected_leave_the_penalty_as_it_was() -> None:
    chain = random_chain()
    draft = drafter(chain)
    draft.propose([start(1, [4], 3, params(**EVERYTHING))])
    (answer,) = draft.propose([then(1, 2, [11], 1, want_distribution=True)])
    assert answer.q is not None
    expected = process(chain.logits_of(11), read_sampling(params(**EVERYTHING)), History([4, 11]))
    assert np.array_equal(answer.q[0], expected)


def test_a_coupled_guess_is_the_choice_that_the_target_would_make_from_the_same_logits() -> None:
    chain = random_chain()
    coupled = params(verification=common_pb2.VERIFICATION_COUPLED, **EVERYTHING)
    for seed in range(50):
        coupled.seed = seed
        (answer,) = drafter(chain).propose([start(1, [4, 9], 1, coupled, want_distribution=True)])
        choice = sample(chain.logits_of(9), read_sampling(coupled), History([4, 9]), 2, Noise(seed))
        assert answer.tokens == [choice]
        assert answer.q is None


def test_a_drawn_guess_does_not_use_the_targets_own_noise() -> None:
    chain = random_chain()
    same = 0
    for seed in range(200):
        (answer,) = drafter(chain).propose([start(1, [4], 1, params(seed=seed))])
        same += answer.tokens[0] == draw(
            process(chain.logits_of(4), read_sampling(SAMPLED)), Noise(seed), Purpose.CHOICE, 1
        )
    assert same < 150


def test_a_greedy_guess_with_a_penalty_sends_no_q() -> None:
    chain = random_chain()
    greedy = params(temperature=0, repetition_penalty=1.5)
    (answer,) = drafter(chain).propose([start(1, [4, 4], 1, greedy, want_distribution=True)])
    assert answer.tokens == [sample(chain.logits_of(4), read_sampling(greedy), History([4, 4]), 2, Noise(7))]
    assert answer.q is None


def test_q_rides_only_where_it_is_wanted() -> None:
    (answer,) = drafter(random_chain()).propose([start(1, [4], 2, SAMPLED)])
    assert len(answer.tokens) == 2
    assert answer.q is None


def test_a_sequence_guesses_the_same_whoever_rides_beside_it() -> None:
    alone = drafter(random_chain()).propose([start(1, [4], 4, SAMPLED)])[0]
    beside = drafter(random_chain()).propose([start(2, [7], 2, SAMPLED), start(1, [4], 4, SAMPLED)])[1]
    assert alone.tokens == beside.tokens
