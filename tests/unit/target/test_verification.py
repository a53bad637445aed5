"""What one verification promises, whatever is proposed. That it is exact is tested in tests/statistical."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from services.model.sampling import DistributionError, History, Noise, SamplingParams, Verification, process, sample
from services.target.verification import Proposal, Verdict, verify

VOCABULARY = 8
SAMPLED = [Verification.TOKEN, Verification.BLOCK]
PLAIN = SamplingParams(temperature=1.0)
LOGITS = np.random.default_rng(0).normal(0, 1.5, (5, VOCABULARY)).astype(np.float32)
BEST = LOGITS.argmax(-1).tolist()


def judged(
    tokens: Sequence[int],
    params: SamplingParams,
    seed: int = 0,
    q: np.ndarray | None = None,
    columns: np.ndarray | None = None,
    history: Sequence[int] = (),
    logits: np.ndarray = LOGITS,
) -> Verdict:
    rows = logits[: len(tokens) + 1]
    return verify(rows, Proposal(tokens, q, columns), params, History(history), 10, Noise(seed))


@pytest.mark.parametrize("verification", list(Verification))
@pytest.mark.parametrize("wrong_at", range(4))
def test_greedy_accepts_exactly_what_the_target_would_say(verification: Verification, wrong_at: int) -> None:
    guesses = BEST[:3]
    if wrong_at < 3:
        guesses[wrong_at] = (guesses[wrong_at] + 1) % VOCABULARY
    assert judged(guesses, SamplingParams(verification=verification)) == Verdict(wrong_at, BEST[wrong_at])


def test_greedy_with_a_penalty_counts_the_accepted_prefix() -> None:
    params = SamplingParams(repetition_penalty=9.0)
    logits = np.tile(np.array([2.0, 1.0, 0.5], np.float32), (4, 1))
    assert judged([0, 1, 2], params, logits=logits) == Verdict(3, 0)  # each seen token falls behind the next
    assert judged([0, 0, 1], params, logits=logits) == Verdict(1, 1)
    assert judged([1, 2, 2], params, logits=logits, history=[0]) == Verdict(2, 0)


@pytest.mark.parametrize("verification", list(Verification))
def test_without_guesses_it_is_standard_decoding(verification: Verification) -> None:
    params = replace(PLAIN, verification=verification)
    for seed in range(50):
        expected = sample(LOGITS[0], params, History(), 10, Noise(seed))
        assert judged([], params, seed) == Verdict(0, expected)


@pytest.mark.parametrize("verification", SAMPLED)
def test_guesses_drawn_from_p_itself_are_all_accepted(verification: Verification) -> None:
    params = replace(PLAIN, verification=verification)
    q = np.stack([process(row, params) for row in LOGITS[:4]])
    for seed in range(200):
        guesses = [int(np.random.default_rng([seed, i]).choice(VOCABULARY, p=q[i] / q[i].sum())) for i in range(4)]
        assert judged(guesses, params, seed, q).accepted == 4


@pytest.mark.parametrize("verification", SAMPLED)
def test_a_guess_that_the_target_rules_out_is_never_emitted(verification: Verification) -> None:
    params = SamplingParams(temperature=1.0, top_k=3, verification=verification)
    for seed in range(100):
        verdict = judged([int(LOGITS[0].argmin())] * 2, params, seed)
        assert verdict.accepted == 0
        assert process(LOGITS[0], params)[verdict.token] > 0


@pytest.mark.parametrize("verification", SAMPLED)
def test_a_guess_that_its_own_q_rules_out_is_rejected(verification: Verification) -> None:
    params = replace(PLAIN, verification=verification)
    q = np.zeros((2, VOCABULARY), np.float32)
    q[:, 1] = 1
    for seed in range(100):
        assert judged([BEST[0], 1], params, seed, q).accepted == 0


@pytest.mark.parametrize("verification", SAMPLED)
def test_a_guess_outside_the_vocabulary_of_target_or_draft_is_rejected(verification: Verification) -> None:
    params = replace(PLAIN, verification=verification)
    wide = np.full((1, VOCABULARY + 4), 1 / (VOCABULARY + 4), np.float32)
    some = np.array([[0.5, 0.5]], np.float32)
    for seed in range(50):
        for verdict in (
            judged([VOCABULARY + 2], params, seed),
            judged([VOCABULARY + 2], params, seed, wide),
            judged([7], params, seed, some, np.array([2, 5])),
            judged([3], params, seed, some, np.array([2, 5])),
        ):
            assert verdict.accepted == 0
            assert 0 <= verdict.token < VOCABULARY


@pytest.mark.parametrize("verification", SAMPLED)
@pytest.mark.parametrize("top_k", [0, 4])
def test_q_by_columns_means_what_it_means_over_the_whole_vocabulary(verification: Verification, top_k: int) -> None:
    params = SamplingParams(temperature=1.2, top_k=top_k, verification=verification)
    columns = np.array([0, 2, 3, 6, 7])
    q = np.random.default_rng(1).dirichlet(np.ones(5), 3).astype(np.float32)
    whole = np.zeros((3, VOCABULARY), np.float32)
    whole[:, columns] = q
    for seed in range(200):
        guesses = columns[np.random.default_rng(seed).integers(0, 5, 3)].tolist()
        assert judged(guesses, params, seed, q, columns) == judged(guesses, params, seed, whole)


@pytest.mark.parametrize("verification", SAMPLED)
def test_no_q_means_the_same_as_a_one_hot_q(verification: Verification) -> None:
    params = SamplingParams(temperature=1.3, top_k=5, verification=verification)
    for seed in range(200):
        guesses = np.random.default_rng(seed).integers(0, VOCABULARY, 3).tolist()
        assert judged(guesses, params, seed) == judged(
            guesses, params, seed, np.eye(VOCABULARY, dtype=np.float32)[guesses]
        )


@pytest.mark.parametrize("verification", list(Verification))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_refused_not_emitted(
    verification: Verification, temperature: float, bad: float
) -> None:
    logits = LOGITS.copy()
    logits[1, 3] = bad
    params = SamplingParams(temperature=temperature, verification=verification)
    with pytest.raises(DistributionError, match="not finite"):
        for seed in range(100):  # row 1 counts where the first guess stands
            judged([BEST[0], 3, 3], params, seed, logits=logits)


@pytest.mark.parametrize("verification", list(Verification))
def test_the_history_is_left_as_it_was(verification: Verification) -> None:
    params = SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.2, verification=verification)
    history = History((0, 3))
    for seed in range(50):
        guesses = np.random.default_rng(seed).integers(0, VOCABULARY, 4).tolist()
        verify(LOGITS, Proposal(guesses), params, history, 2, Noise(seed))
        assert sorted(history.seen().tolist()) == [0, 3]
    with pytest.raises(DistributionError):
        verify(np.full((3, VOCABULARY), np.nan, np.float32), Proposal([1, 2]), params, history, 2, Noise(0))
    assert sorted(history.seen().tolist()) == [0, 3]
