"""What the draft guessed, checked before any of it is used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from slipstream.v1 import draft_pb2

from services.link import tensors
from services.link.round import ContextUpdate, RoundError, SequenceDraft, known_reason
from services.link.session import Session


def read_answer(
    answer: draft_pb2.Proposal, updates: Sequence[ContextUpdate], session: Session
) -> tuple[dict[int, SequenceDraft], int]:
    """Guesses by sequence, and how many were dropped as stale: their base is not the committed length.

    Raises RoundError or services.link.tensors.TensorError for what did not pass the checks.
    """
    if [s.sequence_id for s in answer.sequences] != [u.sequence_id for u in updates]:
        raise RoundError("the answer is about other sequences than were asked for")
    drafts, stale = {}, 0
    for update, sequence in zip(updates, answer.sequences, strict=True):
        if sequence.tokens and sequence.base_length != update.committed_length:
            stale += 1
            continue
        tokens = list(sequence.tokens)
        _check_tokens(tokens, update.draft_length, session)
        q = _read_distribution(sequence, tokens, session)
        drafts[update.sequence_id] = SequenceDraft(sequence.base_length, tokens, q, known_reason(sequence.refusal))
    return drafts, stale


def _check_tokens(tokens: Sequence[int], draft_length: int, session: Session) -> None:
    if len(tokens) > draft_length:
        raise RoundError("more guesses than were asked for")
    if any(not 0 <= token < session.vocabulary for token in tokens):
        raise RoundError("a guess outside the vocabulary")


def _read_distribution(
    sequence: draft_pb2.SequenceProposal, tokens: Sequence[int], session: Session
) -> NDArray[np.float32] | None:
    """q of each guess; None for guesses that come without one.

    Those count as deterministic, which is lossless however they were made.
    """
    if not tokens or not sequence.HasField("distribution"):
        return None
    q = tensors.read(sequence.distribution, tensors.FLOAT32, (len(tokens), session.width), session.proposals)
    tensors.check_distribution(q)
    columns: NDArray[np.int64] = np.array(tokens, np.int64)
    if session.columns is not None:
        columns = np.minimum(np.searchsorted(session.columns, columns), session.width - 1)
        if (session.columns[columns] != tokens).any():
            raise RoundError("a guess outside the draft's vocabulary")
    elif (columns >= session.width).any():
        raise RoundError("a guess outside the draft's vocabulary")
    if (q[np.arange(len(tokens)), columns] <= 0).any():
        raise RoundError("a guess that its own distribution rules out")
    return q
