"""Which of the proposed tokens stand, and which token follows them. All three ways leave the target's distribution as
it is.

A round proposes x_1 .. x_k. Row i of the logits is the target's after x_1 .. x_i; p_i and q_i are the distributions of
target and draft there, so x_{i+1} was drawn from q_i and is judged by p_i. Each p_i sees the penalties that the
accepted prefix calls for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.model.sampling import (
    NOT_FINITE,
    Distribution,
    DistributionError,
    Floats,
    History,
    Ints,
    Noise,
    Purpose,
    SamplingParams,
    Verification,
    distribution,
    draw,
    sample,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    accepted: int
    """How many proposals stand, from the first."""
    token: int
    """What follows them: the bonus token if all stand, else the correction."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The guesses of one round, and the distributions they were drawn from."""

    tokens: Sequence[int]
    q: Floats | None = None
    """[k, columns], rows sum to 1 to rounding; None: the draft did not draw, its q is one-hot."""
    columns: Ints | None = None
    """Token of each column of q, ascending; None: column i is token i."""

    def at(self, i: int) -> float:
        """q_i of the guess that was drawn from it."""
        token = self.tokens[i]
        if self.q is None:
            return 1.0
        place = token if self.columns is None else int(self.columns.searchsorted(token))
        if place >= self.q.shape[1] or (self.columns is not None and self.columns[place] != token):
            return 0.0
        return float(self.q[i, place] / np.float32(self.q[i].sum(dtype=np.float64)))

    def residual(self, i: int, weight: float, p: Distribution) -> Floats:
        """max(weight p - q_i, 0) on the support of p: it is 0 elsewhere."""
        rest: Floats = np.float32(weight) * p.weights
        if p.ids is None:
            rest -= self._dense(i, rest.shape[0])
        elif self.columns is None or p.ids.shape[0] > 1000:
            rest -= self._dense(i, int(p.ids[-1]) + 1)[p.ids]
        else:  # A few look-ups are quicker than a vocabulary.
            places = np.minimum(self.columns.searchsorted(p.ids), self.columns.shape[0] - 1)
            rest -= np.where(self.columns[places] == p.ids, self._row(i)[places], 0)
        return np.maximum(rest, 0, out=rest)

    def _dense(self, i: int, size: int) -> Floats:
        """q_i of tokens 0 .. size - 1."""
        q = np.zeros(size, np.float32)
        if self.q is None:
            q[self.tokens[i] : self.tokens[i] + 1] = 1  # a slice: the token may lie behind
        elif self.columns is None:
            width = min(size, self.q.shape[1])
            q[:width] = self._row(i)[:width]
        else:
            width = int(self.columns.searchsorted(size))
            q[self.columns[:width]] = self._row(i)[:width]
        return q

    def _row(self, i: int) -> Floats:
        """q_i by columns, with the rounding of its sum taken out."""
        assert self.q is not None
        row: Floats = self.q[i]
        return row / np.float32(row.sum(dtype=np.float64))


def verify(
    logits: Floats, proposal: Proposal, params: SamplingParams, history: History, position: int, noise: Noise
) -> Verdict:
    """Judge a proposal by logits [k + 1, vocabulary]; ``position`` is that of x_1 in the sequence.

    ``history`` holds the committed tokens and comes back unchanged. With no guesses it is standard decoding.

    Raises services.model.sampling.DistributionError for logits that are not numbers.
    """
    if params.greedy or params.verification is Verification.COUPLED or not proposal.tokens:
        return _coupled(logits, proposal.tokens, params, history, position, noise)
    if params.verification is Verification.TOKEN:
        return _token_level(logits, proposal, params, history, position, noise)
    return _block(logits, proposal, params, history, position, noise)


def _coupled(
    logits: Floats, tokens: Sequence[int], params: SamplingParams, history: History, position: int, noise: Noise
) -> Verdict:
    """Accept a guess exactly when it is the target's own choice: argmax, or the draw with the position's own noise."""
    if params.plain_greedy:
        choices = logits.argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(tokens) if token != choices[i]), len(tokens))
        if not np.isfinite(logits[range(accepted + 1), choices[: accepted + 1]]).all():  # NaN counts as the largest
            raise DistributionError(NOT_FINITE)
        return Verdict(accepted, choices[accepted])
    with _Prefix(history) as prefix:
        for i, token in enumerate(tokens):
            choice = sample(logits[i], params, history, position + i, noise)
            if choice != token:
                return Verdict(i, choice)
            prefix.push(token)
        k = len(tokens)
        return Verdict(k, sample(logits[k], params, history, position + k, noise))


def _token_level(
    logits: Floats, proposal: Proposal, params: SamplingParams, history: History, position: int, noise: Noise
) -> Verdict:
    """Leviathan et al. 2023, algorithm 1: accept x with probability min(1, p(x) / q(x)), else draw from max(p - q,
    0)."""
    with _Prefix(history) as prefix:
        for i, token in enumerate(proposal.tokens):
            p, q = distribution(logits[i], params, history), proposal.at(i)
            # A guess that its own q rules out was not drawn from it.
            if not q > 0 or noise.uniform(Purpose.ACCEPTANCE, position + i, position) * q >= p.at(token):
                return Verdict(i, _correct(p, proposal.residual(i, 1.0, p), noise, position + i, position))
            prefix.push(token)
        k = len(proposal.tokens)
        return Verdict(k, sample(logits[k], params, history, position + k, noise))


def _block(
    logits: Floats, proposal: Proposal, params: SamplingParams, history: History, position: int, noise: Noise
) -> Verdict:
    """Sun et al. 2024, algorithm 2: the run is accepted up to the last i whose own coin falls right.

    w_i = min(w_{i-1} p(x_i) / q(x_i), 1) is the chance to keep the prefix x_1 .. x_i in the best coupling (w_0 = 1).
    It is kept as a whole with probability h_i = m_i / (m_i + 1 - w_i), where m_i = sum max(w_i p_i - q_i, 0), and h_k
    = w_k; what follows a prefix that ends at i < k is drawn from max(w_i p_i - q_i, 0).

    The coins are independent, so they are thrown from the last to the first: the first to fall right decides.
    """
    k = len(proposal.tokens)
    kept: list[tuple[float, Distribution]] = []  # w_i and p_i, as long as w_i > 0: no longer prefix can be kept
    weight = 1.0
    with _Prefix(history) as prefix:
        for i, token in enumerate(proposal.tokens):
            p, q = distribution(logits[i], params, history), proposal.at(i)
            kept.append((weight, p))
            weight = min(weight * p.at(token) / q, 1.0) if q > 0 else 0.0
            if weight == 0:
                break
            prefix.push(token)
        if noise.uniform(Purpose.ACCEPTANCE, position + k, position) < weight:
            return Verdict(k, sample(logits[k], params, history, position + k, noise))
    for i, (weight, p) in reversed(list(enumerate(kept))):
        rest = proposal.residual(i, weight, p)
        mass = float(rest.sum(dtype=np.float64))
        coin = noise.uniform(Purpose.ACCEPTANCE, position + i, position)
        if i == 0 or (mass > 0 and coin < mass / (mass + 1 - weight)):
            return Verdict(i, _correct(p, rest, noise, position + i, position))
    raise AssertionError("the empty prefix is always kept")


def _correct(p: Distribution, rest: Floats, noise: Noise, position: int, base: int) -> int:
    """The token after a rejection. p = q to the last bit leaves nothing but rounding to reject: then it is p's."""
    return draw(rest if rest.any() else p.weights, noise, Purpose.RESIDUAL, position, base, p.ids)


class _Prefix:
    """Guesses that stand so far, in the history for as long as they are judged."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._pushed: list[int] = []

    def __enter__(self) -> _Prefix:
        return self

    def push(self, token: int) -> None:
        self._history.push(token)
        self._pushed.append(token)

    def __exit__(self, *_: object) -> None:
        for token in self._pushed:
            self._history.pop(token)
