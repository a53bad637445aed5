"""From logits to a token: what a request may ask of the distribution, and the noise that draws from it.

A distribution here is a float32 vector that sums to 1, *after* penalties, temperature and truncation: the target's is
p, a draft's is q, and both are made by :func:`distribution`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Verification(enum.Enum):
    """How sampled proposals are accepted; see :mod:`services.target.verification`."""

    TOKEN = "token"
    BLOCK = "block"
    COUPLED = "coupled"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks of the next token; ranges and defaults are common.proto's."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    verification: Verification = Verification.BLOCK

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0

    @property
    def plain_greedy(self) -> bool:
        """Whether the next token is simply the largest logit."""
        return self.greedy and not self.penalised


NOT_FINITE = "the model's logits are not finite"


class DistributionError(ValueError):
    """Logits that make no distribution."""


class History:
    """The distinct tokens of prompt and answer, for the penalties; rejected tokens are taken back by :meth:`pop`."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._counts: dict[int, int] = {}
        self._places: dict[int, int] = {}  # of each distinct token in _seen, so that no step costs more than O(1)
        self._seen = np.zeros(64, np.int64)
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        count = self._counts.get(token, 0)
        self._counts[token] = count + 1
        if count == 0:
            place = self._places[token] = len(self._places)
            if place == self._seen.shape[0]:
                self._seen = np.resize(self._seen, 2 * place)
            self._seen[place] = token

    def pop(self, token: int) -> None:
        """Undo one :meth:`push` of ``token``."""
        self._counts[token] -= 1
        if self._counts[token] == 0:
            del self._counts[token]
            place, last = self._places.pop(token), int(self._seen[len(self._places)])
            if last != token:  # The last one moves into the gap.
                self._seen[place], self._places[last] = last, place

    def seen(self) -> Ints:
        """The distinct tokens, in no order. A view: good until the next push or pop."""
        return self._seen[: len(self._places)]


NO_HISTORY = History()


def penalise(logits: Floats, params: SamplingParams, history: History) -> Floats:
    """Repetition penalty (Keskar et al. 2019): positive logits of seen tokens are divided, negative ones multiplied."""
    if not params.penalised:
        return logits
    logits = logits.copy()
    seen = history.seen()
    seen = seen[seen < logits.shape[0]]
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    return logits


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities of tokens, as far as they may differ from 0: truncation leaves few, and then all else is quick."""

    weights: Floats
    """Sum to 1."""
    ids: Ints | None
    """Token of each weight, ascending; None: weight i is token i's."""

    def at(self, token: int) -> float:
        """The probability of one token; 0 for one outside the vocabulary."""
        place = token if self.ids is None else int(self.ids.searchsorted(token))
        if not 0 <= place < self.weights.shape[0] or (self.ids is not None and self.ids[place] != token):
            return 0.0
        return float(self.weights[place])

    def dense(self, vocabulary: int) -> Floats:
        """[vocabulary], entry i is token i's."""
        if self.ids is None:
            return self.weights
        p = np.zeros(vocabulary, np.float32)
        p[self.ids] = self.weights
        return p


def distribution(logits: Floats, params: SamplingParams, history: History = NO_HISTORY) -> Distribution:
    """What the next token is drawn from: penalty, temperature, top_k, top_p, min_p, in this order.

    ``logits`` [vocabulary] float32. At temperature 0 it is one-hot. Equal values stand or fall together in every
    truncation.

    Raises DistributionError for logits that are not numbers.
    """
    x = penalise(logits, params, history)
    if params.greedy:
        return Distribution(np.ones(1, np.float32), np.array([_argmax(x)]))
    peak, ids = x.max(), None
    if not np.isfinite(peak):
        raise DistributionError(NOT_FINITE)
    if 0 < params.top_k < x.shape[0]:
        ids = np.flatnonzero(x >= _kth_largest(x, params.top_k))
        x = x[ids]
    with np.errstate(over="ignore"):  # Far below the peak at a low temperature: -inf, and a weight of 0.
        weights: Floats = np.exp((x - peak) / np.float32(max(params.temperature, 1e-30)))
    # The largest weight is 1, so min_p is a threshold as it stands, whatever top_p leaves.
    least = max(_nucleus_threshold(weights, params.top_p), np.float32(params.min_p))
    if least > 0:
        kept = np.flatnonzero(weights >= least)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    return Distribution(weights / np.float32(weights.sum(dtype=np.float64)), ids)


def process(logits: Floats, params: SamplingParams, history: History = NO_HISTORY) -> Floats:
    """:func:`distribution`, with an entry for every logit: how q is shipped."""
    return distribution(logits, params, history).dense(logits.shape[0])


def _argmax(x: Floats) -> int:
    choice = int(x.argmax())  # NaN counts as the largest.
    if not np.isfinite(x[choice]):
        raise DistributionError(NOT_FINITE)
    return choice


def _kth_largest(x: Floats, k: int) -> np.float32:
    """The k-th largest of ``x``. Sorts few: at least k values reach the k-th largest of maxima of disjoint groups."""
    groups = x.shape[0] // 64
    if k <= groups:
        maxima = x[: 64 * groups].reshape(64, groups).max(0)
        x = x[x >= np.sort(maxima)[-k]]
    return np.float32(np.sort(x)[-k])


def _nucleus_threshold(weights: Floats, top_p: float) -> np.float32:
    """The least weight among the smallest set of largest weights whose share reaches ``top_p``; 0 for all of them.

    ``weights`` have a maximum of 1. Sorts few: all weights below (1 - top_p) of the mean together are less than what
    may be missing, and most nuclei are far smaller.
    """
    if top_p >= 1.0:
        return np.float32(0)
    total = weights.sum(dtype=np.float64)
    for least in (2**-4, 2**-8, 2**-12, (1 - top_p) * total / weights.shape[0], 0.0):
        large = weights[weights >= least]
        if large.sum(dtype=np.float64) >= top_p * total:
            break
    large = np.sort(large)[::-1]
    sums = np.cumsum(large, dtype=np.float64)
    return np.float32(large[min(int(np.searchsorted(sums, top_p * total)), large.shape[0] - 1)])


class Purpose(enum.IntEnum):
    """What a random number is for; numbers of different purposes are independent."""

    CHOICE = 0
    """The target's own choice at a position; the draft's too when verification is coupled."""
    DRAFT = 1
    ACCEPTANCE = 2
    RESIDUAL = 3


_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 0xFFFFFFFFFFFFFFFF
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""The finaliser of SplitMix64 (Steele, Lea and Flood 2014), each x = (x ^ x >> shift) * factor: every bit in moves
every bit out."""


def _mix(x: int) -> int:
    for shift, factor in _STEPS:
        x = (x ^ x >> shift) * factor & _WORD
    return x


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers as a function of (seed, purpose, place), drawn in no order: SplitMix64 in counter mode.

    A *place* is a position in the sequence and, for what may be tried again at the same position with other tokens,
    the base of the round that tries it (0 otherwise): numbers that were looked at once are not used again.
    """

    seed: int

    def uniform(self, purpose: Purpose, position: int, base: int = 0) -> float:
        """One number in (0, 1)."""
        return ((_mix(self._key(purpose, position, base)) >> 12) + 0.5) * 2.0**-52

    def exponentials(self, purpose: Purpose, position: int, base: int, tokens: Ints) -> NDArray[np.float64]:
        """One Exp(1) number for each token id, whatever other ids are asked for."""
        x = tokens.astype(np.uint64)
        x *= np.uint64(_GOLDEN)
        x += np.uint64(self._key(purpose, position, base))
        shifted = np.empty_like(x)
        for shift, factor in _STEPS:  # In place: this is the most costly part of a draw from the whole vocabulary.
            x ^= np.right_shift(x, np.uint64(shift), out=shifted)
            if factor != 1:
                x *= np.uint64(factor)
        x >>= np.uint64(12)
        uniforms = x.view(np.int64).astype(np.float64)
        uniforms += 0.5
        uniforms *= 2.0**-52
        return np.negative(np.log(uniforms, out=uniforms), out=uniforms)

    def _key(self, purpose: Purpose, position: int, base: int) -> int:
        key = 0
        for part in (self.seed, int(purpose), position, base):
            key = _mix((key + part) * _GOLDEN + _GOLDEN & _WORD)
        return key


def draw(p: Floats, noise: Noise, purpose: Purpose, position: int, base: int = 0, ids: Ints | None = None) -> int:
    """A token from ``p``, as the argmin of Exp(1) / p: the Gumbel-max trick (Maddison et al. 2014).

    ``ids`` [len(p)] names the token of each entry; without it entry i is token i. Noise goes by token, so draft and
    target draw with the same noise even if the draft's head has fewer rows. Weights need not sum to 1.
    """
    possible = p > 0
    count = np.count_nonzero(possible)
    if count < p.shape[0]:
        support = np.flatnonzero(possible)
        p, ids = p[support], support if ids is None else ids[support]
    elif ids is None:
        ids = np.arange(count)
    if count == 1:
        return int(ids[0])
    race = noise.exponentials(purpose, position, base, ids)
    race /= p
    return int(ids[race.argmin()])


def choose(p: Distribution, position: int, noise: Noise) -> int:
    """The target's own choice from p of the token at ``position``."""
    return draw(p.weights, noise, Purpose.CHOICE, position, ids=p.ids)


def sample(logits: Floats, params: SamplingParams, history: History, position: int, noise: Noise) -> int:
    """The target's own choice of the token at ``position``: what standard decoding emits.

    Raises DistributionError for logits that are not numbers.
    """
    if params.greedy:
        return _argmax(penalise(logits, params, history))
    return choose(distribution(logits, params, history), position, noise)
