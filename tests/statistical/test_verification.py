"""Speculative sampling draws from the target's own distribution, whatever is asked for and however the draft guesses.

Each test draws sequences of three tokens by rounds of propose and verify, counts them, and compares the counts with the exact
probabilities of the target by a G-test. Seeds are fixed, so a pass stays a pass; over seeds, the chance that a correct
implementation fails one test is ALARM (one in a million). The last test shows that wrong implementations do fail.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.stats import chi2, norm

from services.model.sampling import Floats, History, Noise, Purpose, SamplingParams, Verification, draw, process, sample
from services.target.verification import Proposal, Verdict, verify

ALARM = 1e-6
VOCABULARY = 8
LENGTH = 3
PROMPT = (0, 3)
"""Tokens that penalties have seen from the start."""
PLAIN = SamplingParams(temperature=1.0)


@functools.cache
def model(seed: int, tokens: tuple[int, ...], sharpness: float = 1.5) -> Floats:
    """Logits after these tokens: any function of the context will do."""
    return np.random.default_rng([seed, *tokens]).normal(0, sharpness, VOCABULARY).astype(np.float32)


def target_rows(tokens: Sequence[int], guesses: Sequence[int]) -> Floats:
    return np.stack([model(1, (*tokens, *guesses[:i])) for i in range(len(guesses) + 1)])


@functools.cache
def target_distribution(tokens: tuple[int, ...], params: SamplingParams) -> Floats:
    return process(model(1, tokens), params, History(tokens))


@dataclass(frozen=True)
class Draft:
    """How guesses are made."""

    seed: int = 2
    columns: tuple[int, ...] | None = None
    """Tokens that the draft can guess; None: all."""
    deterministic: bool = False
    likeness: float = 0.6
    """How much of the target's logits is in the draft's."""
    changes: tuple[tuple[str, float], ...] = ()
    """Where the draft's own sampling differs from what was asked for; it knows of no penalty in any case."""
    misreports: bool = False
    """Ships the plain softmax as q, however it guessed."""

    @property
    def ids(self) -> np.ndarray | None:
        return None if self.columns is None else np.array(self.columns, np.int64)

    def logits(self, tokens: tuple[int, ...]) -> Floats:
        mixed = self.likeness * model(1, tokens) + (1 - self.likeness) * model(self.seed, tokens)
        return mixed.astype(np.float32)[slice(None) if self.columns is None else list(self.columns)]

    def propose(self, tokens: tuple[int, ...], k: int, params: SamplingParams, noise: Noise) -> Proposal:
        base, guesses, rows, ids = len(tokens), [], [], self.ids
        coupled = params.verification is Verification.COUPLED
        purpose, place = (Purpose.CHOICE, 0) if coupled else (Purpose.DRAFT, base)
        for i in range(k):
            context = (*tokens, *guesses)
            q = draft_distribution(self, context, params)
            if self.deterministic:
                best = int(self.logits(context).argmax())
                guesses.append(best if ids is None else int(ids[best]))
            else:
                guesses.append(draw(q, noise, purpose, base + i, place, ids))
            rows.append(draft_distribution(replace(self, changes=()), context, PLAIN) if self.misreports else q)
        with_q = k > 0 and (self.misreports or not self.deterministic)
        return Proposal(guesses, np.stack(rows) if with_q else None, ids)


@functools.cache
def draft_distribution(draft: Draft, tokens: tuple[int, ...], params: SamplingParams) -> Floats:
    return process(draft.logits(tokens), replace(params, repetition_penalty=1.0, **dict(draft.changes)))


Judge = Callable[[Floats, Proposal, SamplingParams, History, int, Noise], Verdict]


def sequences(
    draft: Draft, k: int, params: SamplingParams, judge: Judge = verify, trials: int = 2500
) -> Counter[tuple[int, ...]]:
    """Counts of the sequences drawn by rounds."""
    counts: Counter[tuple[int, ...]] = Counter()
    for trial in range(trials):
        noise, tokens = Noise(trial), PROMPT
        while len(tokens) < len(PROMPT) + LENGTH:
            proposal = draft.propose(tokens, k, params, noise)
            rows = target_rows(tokens, proposal.tokens)
            verdict = judge(rows, proposal, params, History(tokens), len(tokens), noise)
            tokens = (*tokens, *proposal.tokens[: verdict.accepted], verdict.token)
        counts[tokens[len(PROMPT) : len(PROMPT) + LENGTH]] += 1
    return counts


def probabilities(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Of each sequence, by the target alone."""
    found = {}
    for sequence in itertools.product(range(VOCABULARY), repeat=LENGTH):
        steps = (target_distribution((*PROMPT, *sequence[:i]), params)[sequence[i]] for i in range(LENGTH))
        probability = math.prod(float(step) for step in steps)
        if probability > 0:
            found[sequence] = probability
    return found


def p_value(counts: Counter[tuple[int, ...]], params: SamplingParams) -> float:
    """G-test of the counts; cells that expect fewer than five are taken together."""
    trials = counts.total()
    expected = {sequence: trials * p for sequence, p in probabilities(params).items()}
    if set(counts) - set(expected):
        return 0.0  # A sequence that the target never says.
    large = {s for s, e in expected.items() if e >= 5}
    cells = [(counts[s], expected[s]) for s in large]
    rest = (sum(n for s, n in counts.items() if s not in large), sum(e for s, e in expected.items() if s not in large))
    cells += [rest] if rest[1] > 0 else []
    g = 2 * sum(n * np.log(n / e) for n, e in cells if n)
    return float(chi2.sf(g, max(len(cells) - 1, 1)))


EVERYTHING = SamplingParams(temperature=0.7, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.4)
CASES = {
    "temperature 1": (PLAIN, Draft(), 3),
    "temperature 1.6, far draft": (SamplingParams(temperature=1.6), Draft(likeness=0.1), 2),
    "temperature 0.3": (SamplingParams(temperature=0.3), Draft(), 2),
    "all parameters": (EVERYTHING, Draft(), 3),
    "all parameters, temperature 1.3": (replace(EVERYTHING, temperature=1.3), Draft(likeness=0.3), 4),
    "all parameters, restricted vocabulary": (EVERYTHING, Draft(columns=(0, 2, 5, 6)), 3),
    "restricted vocabulary": (PLAIN, Draft(columns=(0, 2, 5)), 3),
    "deterministic draft": (PLAIN, Draft(deterministic=True), 2),
    "deterministic draft, all parameters": (EVERYTHING, Draft(deterministic=True), 3),
    "draft with a truncation of its own": (PLAIN, Draft(changes=(("top_k", 2), ("temperature", 0.5))), 3),
    "one guess": (PLAIN, Draft(), 1),
}


@pytest.mark.parametrize("verification", [Verification.TOKEN, Verification.BLOCK])
@pytest.mark.parametrize("case", CASES)
def test_sequences_follow_the_targets_distribution(case: str, verification: Verification) -> None:
    params, draft, k = CASES[case]
    params = replace(params, verification=verification)
    assert p_value(sequences(draft, k, params), params) > ALARM


@pytest.mark.parametrize("k", [0, 3])
def test_coupled_and_standard_sequences_follow_it_too(k: int) -> None:
    params = replace(EVERYTHING, verification=Verification.COUPLED)
    assert p_value(sequences(Draft(), k, params), params) > ALARM


def test_coupled_answers_are_token_identical_to_standard_decoding() -> None:
    accepted = 0
    for seed in range(1000):
        wish = np.random.default_rng(seed)
        params = SamplingParams(
            temperature=wish.uniform(0.1, 2),
            top_k=int(wish.integers(0, 9)),
            top_p=wish.uniform(0.3, 1),
            min_p=wish.uniform(0, 0.2),
            repetition_penalty=wish.uniform(0.7, 1.6),
            verification=Verification.COUPLED,
        )
        k, draft = int(wish.integers(1, 5)), Draft(columns=(0, 1, 2, 4, 7) if seed % 2 else None)
        noise, standard, speculative = Noise(seed), PROMPT, PROMPT
        for _ in range(6):
            choice = sample(model(1, standard), params, History(standard), len(standard), noise)
            standard = (*standard, choice)
        while len(speculative) < len(standard):
            proposal = draft.propose(speculative, k, params, noise)
            rows = target_rows(speculative, proposal.tokens)
            verdict = verify(rows, proposal, params, History(speculative), len(speculative), noise)
            speculative = (*speculative, *proposal.tokens[: verdict.accepted], verdict.token)
            accepted += verdict.accepted
        assert speculative[: len(standard)] == standard
    assert accepted > 1000


# --- how many are accepted ---


def promised(draft: Draft, k: int, params: SamplingParams) -> float:
    """Mean of the accepted guesses of one round, summed over all that the draft can guess.

    Token-level accepts the i-th with the product of min(1, p / q), block with w_i (Sun et al. 2024, section 4).
    """
    mean = 0.0
    for guesses in itertools.product(range(VOCABULARY), repeat=k):
        chance, kept = 1.0, []
        for i, token in enumerate(guesses):
            context = (*PROMPT, *guesses[:i])
            p, q = (
                float(d[token])
                for d in (target_distribution(context, params), draft_distribution(draft, context, params))
            )
            chance, before = chance * q, kept[-1] if kept else 1.0
            block = params.verification is Verification.BLOCK
            kept.append(min(before * p / q, 1.0) if block else before * min(p / q, 1.0))
        mean += chance * sum(kept)
    return mean


@pytest.mark.parametrize("verification", [Verification.TOKEN, Verification.BLOCK])
@pytest.mark.parametrize("likeness", [0.2, 0.7])
def test_guesses_are_accepted_as_often_as_the_algorithm_promises(verification: Verification, likeness: float) -> None:
    params, draft, k = replace(PLAIN, verification=verification), Draft(likeness=likeness), 3
    accepted = accepted_counts(draft, k, params)
    error = accepted.std() / math.sqrt(accepted.shape[0])
    assert abs(accepted.mean() - promised(draft, k, params)) < norm.isf(ALARM / 2) * error


@pytest.mark.parametrize("likeness", [0.2, 0.5, 0.8])
def test_block_verification_accepts_no_less_than_token_level(likeness: float) -> None:
    draft, k = Draft(likeness=likeness), 4
    by_token, by_block = (
        accepted_counts(draft, k, replace(PLAIN, verification=v)) for v in (Verification.TOKEN, Verification.BLOCK)
    )
    assert by_block.mean() > by_token.mean()


def accepted_counts(draft: Draft, k: int, params: SamplingParams) -> np.ndarray:
    """Accepted guesses of one round, by trial."""
    counts = []
    for trial in range(2000):
        proposal = draft.propose(PROMPT, k, params, Noise(trial))
        rows = target_rows(PROMPT, proposal.tokens)
        counts.append(verify(rows, proposal, params, History(PROMPT), len(PROMPT), Noise(trial)).accepted)
    return np.array(counts)


# --- the tests above can fail ---


def correction_from_p(logits, proposal, params, history, position, noise):
    """The correction drawn from p itself instead of max(p - q, 0)."""
    verdict = verify(logits, proposal, params, history, position, noise)
    at = verdict.accepted
    if at == len(proposal.tokens):
        return verdict
    return Verdict(at, draw(process(logits[at], params, history), noise, Purpose.RESIDUAL, position + at, position))


def without_penalty(logits, proposal, params, history, position, noise):
    return verify(logits, proposal, replace(params, repetition_penalty=1.0), history, position, noise)


def penalty_of_committed_tokens_only(logits, proposal, params, history, position, noise):
    """The accepted prefix does not count for the next position's penalty."""

    class Frozen(History):
        push = pop = lambda self, token: None

    frozen = Frozen()
    for token in history.seen().tolist():
        History.push(frozen, token)
    return verify(logits, proposal, params, frozen, position, noise)


def min_p_on_the_bonus_token_only(logits, proposal, params, history, position, noise):
    verdict = verify(logits, proposal, replace(params, min_p=0.0), history, position, noise)
    if verdict.accepted < len(proposal.tokens):
        return verdict
    return verify(logits[-1:], Proposal(()), params, History([*history.seen(), *proposal.tokens]), position, noise)


WRONG = {
    "softmax as q of an argmax": (PLAIN, Draft(deterministic=True, misreports=True), verify),
    "q before truncation": (PLAIN, Draft(changes=(("top_k", 3),), misreports=True), verify),
    "q before temperature": (PLAIN, Draft(changes=(("temperature", 0.6),), misreports=True), verify),
    "correction from p": (PLAIN, Draft(), correction_from_p),
    "no penalty": (EVERYTHING, Draft(), without_penalty),
    "penalty of committed tokens only": (EVERYTHING, Draft(), penalty_of_committed_tokens_only),
    "min_p on the bonus token only": (replace(PLAIN, min_p=0.2), Draft(), min_p_on_the_bonus_token_only),
}


@pytest.mark.parametrize("verification", [Verification.TOKEN, Verification.BLOCK])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_verifications_are_found_out(wrong: str, verification: Verification) -> None:
    params, draft, judge = WRONG[wrong]
    params = replace(params, verification=verification)
    assert p_value(sequences(draft, 2, params, judge, trials=1500), params) < ALARM
