"""From logits to a distribution and a token: each parameter means what the field means by it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from services.model.sampling import (
    DistributionError,
    History,
    Noise,
    Purpose,
    SamplingParams,
    distribution,
    draw,
    process,
    sample,
)

LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))


def kept(**options: float) -> list[int]:
    return np.flatnonzero(process(LOGITS, SamplingParams(temperature=1.0, **options))).tolist()


def test_at_temperature_one_the_distribution_is_the_softmax() -> None:
    assert process(LOGITS, SamplingParams(temperature=1.0)) == pytest.approx([0.4, 0.3, 0.15, 0.1, 0.05], abs=1e-6)


def test_temperature_divides_logits() -> None:
    p = process(LOGITS, SamplingParams(temperature=0.5))
    squares = np.array([0.4, 0.3, 0.15, 0.1, 0.05]) ** 2
    assert p == pytest.approx(squares / squares.sum(), abs=1e-6)


def test_greedy_is_one_hot() -> None:
    assert process(LOGITS, SamplingParams()).tolist() == [1, 0, 0, 0, 0]


def test_top_k_keeps_the_k_most_likely() -> None:
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=0) == kept(top_k=5) == kept(top_k=99) == [0, 1, 2, 3, 4]


def test_top_k_keeps_ties_together() -> None:
    logits = np.array([1.0, 0.5, 0.5, 0.0], np.float32)
    assert np.flatnonzero(process(logits, SamplingParams(temperature=1.0, top_k=2))).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.39, [0]), (0.41, [0, 1]), (0.69, [0, 1]), (0.86, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3, 4])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, expected: list[int]) -> None:
    assert kept(top_p=top_p) == expected


def test_top_p_over_a_large_flat_vocabulary_keeps_its_share() -> None:
    logits = np.random.default_rng(0).normal(0, 0.01, 40_000).astype(np.float32)
    count = np.count_nonzero(process(logits, SamplingParams(temperature=1.0, top_p=0.5)))
    assert 19_000 < count < 20_100


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_best() -> None:
    assert kept(min_p=0.3) == [0, 1, 2]


def test_truncations_apply_one_after_the_other() -> None:
    # top_p works on what top_k left: of 0.4 and 0.3, the first is 0.57 of the mass.
    assert kept(top_k=2, top_p=0.5) == [0]


def test_repetition_penalty_pulls_seen_tokens_down_whatever_their_sign() -> None:
    logits = np.array([2.0, 1.5, -1.0, -0.5], np.float32)
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0)
    p = process(logits, params, History([0, 2]))
    expected = np.exp([1.0, 1.5, -2.0, -0.5])
    assert p == pytest.approx(expected / expected.sum(), abs=1e-6)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 90)), max_size=300))
def test_history_forgets_what_is_taken_back(steps: list[tuple[bool, int]]) -> None:
    history, tokens = History([1, 2, 2]), [1, 2, 2]
    for back, token in steps:
        if back and token in tokens:
            history.pop(token)
            tokens.remove(token)
        else:
            history.push(token)
            tokens.append(token)
        assert sorted(history.seen().tolist()) == sorted(set(tokens))


def test_logits_that_are_not_numbers_are_refused() -> None:
    bad = np.array([np.nan, 1.0], np.float32)
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        with pytest.raises(DistributionError):
            sample(bad, params, History(), 0, Noise(0))


def plain(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Each parameter by the book, with a full sort of float64."""
    x = logits.astype(np.float64)
    if 0 < params.top_k < len(x):
        x = np.where(x >= np.sort(x)[-params.top_k], x, -np.inf)
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    largest = np.sort(p)[::-1]
    last = min(int(np.searchsorted(np.cumsum(largest), params.top_p)), len(p) - 1)
    p = np.where(p >= largest[last] * (1 - 1e-9), p, 0) if params.top_p < 1 else p
    p = np.where(p >= params.min_p * p.max(), p, 0)
    return p / p.sum()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([5, 64, 130, 1000, 5000]),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    temperature=st.floats(0.1, 2),
    top_k=st.sampled_from([0, 1, 2, 20, 100, 3000]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_short_cuts_keep_the_tokens_that_a_full_sort_keeps(
    seed: int, size: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)
    params = SamplingParams(temperature, top_k, top_p, min_p)
    found, expected = process(logits, params), plain(logits, params)
    differ = (found > 0) != (expected > 0)
    assert differ.sum() <= 1 + size // 1000  # rounding at the very edge of a nucleus
    assert found == pytest.approx(expected, rel=1e-4, abs=2 * expected[expected > 0].min() if differ.any() else 1e-7)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.3}, {"temperature": 0.0}])
def test_a_distribution_answers_for_every_token(options: dict[str, float]) -> None:
    p = distribution(LOGITS, SamplingParams(**{"temperature": 1.0, **options}))
    assert [p.at(token) for token in range(5)] == p.dense(5).tolist()
    assert p.at(5) == p.at(99) == p.at(-1) == 0


def test_excluded_tokens_stay_excluded_whatever_is_asked_for() -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[3, 500]] = 1.0
    for options in ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 2.0}):
        p = process(logits, SamplingParams(temperature=0.5, **options), History([3, 7]))
        assert np.flatnonzero(p).tolist() == [3, 500]


def test_a_temperature_near_zero_is_nearly_greedy() -> None:
    assert process(LOGITS, SamplingParams(temperature=1e-38)).tolist() == [1, 0, 0, 0, 0]


def test_a_seed_and_place_keep_their_choice_from_release_to_release() -> None:
    """Answers are replayed from their seeds: a change of the noise is a change of the contract."""
    params = SamplingParams(temperature=1.0)
    choices = [sample(LOGITS, params, History(), position, Noise(2**64 - 1)) for position in range(24)]
    assert choices == [1, 2, 0, 1, 0, 1, 3, 0, 1, 2, 1, 3, 1, 1, 4, 0, 3, 1, 1, 0, 0, 1, 0, 0]


def test_uniform_numbers_are_uniform() -> None:
    numbers = np.array(
        [Noise(seed).uniform(Purpose.ACCEPTANCE, position) for seed in range(60) for position in range(60)]
    )
    assert 0 < numbers.min() < numbers.max() < 1
    assert kstest(numbers, "uniform").pvalue > 1e-6
    many = Noise(3).exponentials(Purpose.CHOICE, 1, 0, np.arange(50_000))
    assert kstest(many, "expon").pvalue > 1e-6


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0.05, 2),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    penalty=st.floats(0.1, 10),
)
def test_whatever_is_asked_for_the_distribution_is_one(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 5, 30).astype(np.float32)
    p = process(logits, SamplingParams(temperature, top_k, top_p, min_p, penalty), History([1, 2, 3]))
    assert np.isfinite(p).all()
    assert (p >= 0).all()
    assert p.sum(dtype=np.float64) == pytest.approx(1, abs=1e-5)


def test_the_same_seed_and_place_give_the_same_noise_and_others_do_not() -> None:
    ids = np.arange(1000)
    first = Noise(1).exponentials(Purpose.CHOICE, 5, 0, ids)
    assert np.array_equal(first, Noise(1).exponentials(Purpose.CHOICE, 5, 0, ids))
    for other in (
        Noise(2).exponentials(Purpose.CHOICE, 5, 0, ids),
        Noise(1).exponentials(Purpose.DRAFT, 5, 0, ids),
        Noise(1).exponentials(Purpose.CHOICE, 6, 0, ids),
        Noise(1).exponentials(Purpose.CHOICE, 5, 1, ids),
    ):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.15


def test_noise_goes_by_token_whatever_other_tokens_are_asked_for() -> None:
    ids = np.array([3, 17, 4000])
    every = Noise(9).exponentials(Purpose.CHOICE, 2, 0, np.arange(5000))
    assert np.array_equal(Noise(9).exponentials(Purpose.CHOICE, 2, 0, ids), every[ids])


def test_a_draft_with_fewer_rows_draws_the_same_token_from_the_same_distribution() -> None:
    ids = np.array([2, 5, 11, 40], np.int64)
    weights = np.array([0.1, 0.4, 0.3, 0.2], np.float32)
    whole = np.zeros(64, np.float32)
    whole[ids] = weights
    for position in range(200):
        assert draw(whole, Noise(1), Purpose.CHOICE, position) == draw(
            weights, Noise(1), Purpose.CHOICE, position, 0, ids
        )
