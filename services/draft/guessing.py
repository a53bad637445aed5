"""A sequence as the draft holds it, and how its next guess is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from slipstream.v1 import common_pb2

from services.link.round import ContextUpdate, RoundError
from services.model.sampling import Floats, History, Ints, Noise, Purpose, SamplingParams, Verification, draw, process

_VERIFICATIONS = {
    common_pb2.VERIFICATION_TOKEN: Verification.TOKEN,
    common_pb2.VERIFICATION_BLOCK: Verification.BLOCK,
    common_pb2.VERIFICATION_COUPLED: Verification.COUPLED,
}


@dataclass
class Held:
    """A sequence that has a place in the cache."""

    blocks: range
    sampling: SamplingParams
    request_id: str
    committed: int = 0
    """Tokens of the sequence, as the target counts them."""
    length: int = 0
    """Rows in the cache that stand for committed tokens: fewer, where the sequence was joined in its middle."""
    history: History = field(default_factory=History)
    """Committed tokens, where a penalty asks for them."""
    rounds: int = 0
    proposed: int = 0

    @property
    def noise(self) -> Noise:
        return Noise(self.sampling.seed)


@dataclass
class Guessing:
    """A sequence in the round that runs."""

    held: Held
    update: ContextUpdate
    tokens: list[int] = field(default_factory=list)
    q: list[Floats] = field(default_factory=list)
    over: bool = False
    """No further guess can be made in this round."""

    @property
    def more(self) -> bool:
        return not self.over and len(self.tokens) < self.update.draft_length


def choose(g: Guessing, logits: Floats, ids: Ints | None, vocabulary: int) -> None:
    """Add the next guess of a chain, and the q it was drawn from where the target needs it.

    ``logits`` [columns] float32; ``ids`` names the token of each column, without it column i is token i; ``vocabulary``
    is the draft's. Raises services.model.sampling.DistributionError for logits that are not numbers.
    """
    sampling = g.held.sampling
    if ids is None and 0 < g.update.vocabulary < logits.shape[0]:
        logits = logits[: g.update.vocabulary]
    if sampling.plain_greedy:
        best = int(logits.argmax())
        g.tokens.append(best if ids is None else int(ids[best]))
        return
    base = g.update.committed_length
    position = base + len(g.tokens)
    q = _distribution(logits, g, ids, vocabulary)
    if sampling.greedy or sampling.verification is Verification.COUPLED:
        token = draw(q, g.held.noise, Purpose.CHOICE, position, 0, ids)
    else:
        token = draw(q, g.held.noise, Purpose.DRAFT, position, base, ids)
        g.q.append(q)
    g.tokens.append(token)


def _distribution(logits: Floats, g: Guessing, ids: Ints | None, vocabulary: int) -> Floats:
    """q over the columns, with the penalties that committed tokens and guesses call for."""
    sampling, history = g.held.sampling, g.held.history
    whole = logits
    if sampling.penalised and ids is not None:  # Penalties go by token.
        whole = np.full(vocabulary, -np.inf, np.float32)
        whole[ids] = logits
    for token in g.tokens:
        history.push(token)
    try:
        q = process(whole, sampling, history)
    finally:
        for token in g.tokens:
            history.pop(token)
    return q if whole is logits or ids is None else q[ids]


def read_sampling(message: common_pb2.SamplingParams | None) -> SamplingParams:
    """The parameters as the target has checked them. Raises RoundError if they are missing."""
    if message is None:
        raise RoundError("sampling must be set in the first round of a sequence")
    if message.verification not in _VERIFICATIONS:
        raise RoundError("sampling.verification must be set")
    if not (message.temperature >= 0 and message.repetition_penalty > 0 and 0 < message.top_p <= 1):
        raise RoundError("sampling must be complete and within its ranges")
    return SamplingParams(
        message.temperature,
        message.top_k,
        message.top_p,
        message.min_p,
        message.repetition_penalty,
        message.seed,
        _VERIFICATIONS[message.verification],
    )
