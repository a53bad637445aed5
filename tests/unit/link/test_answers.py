"""What a draft answers is checked before a guess or a number of it is used."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from slipstream.v1 import common_pb2, draft_pb2

from services.link import tensors
from services.link.answers import read_answer
from services.link.arena import Arena
from services.link.round import RoundError
from services.link.session import Session
from services.link.tensors import TensorError
from tests.unit.link.toys import draft_info, following

UPDATES = [following(7, 10, [3], 2, want_distribution=True)]


def session(columns: list[int] | None = None, width: int = 8, arena: Arena | None = None) -> Session:
    chosen = None if columns is None else np.array(columns, np.int64)
    return Session(None, queue.SimpleQueue(), draft_info(), chosen, width, 64, arena)


def proposal(tokens: list[int], q: np.ndarray | None = None, **changes: object) -> draft_pb2.Proposal:
    fields = {"sequence_id": 7, "base_length": 10, "tokens": tokens, **changes}
    sequence = draft_pb2.SequenceProposal(**fields)
    if q is not None:
        sequence.distribution.CopyFrom(tensors.write(q.astype(np.float32), tensors.FLOAT32, None))
    return draft_pb2.Proposal(round=1, sequences=[sequence])


def test_guesses_come_with_the_distribution_they_were_drawn_from() -> None:
    q = np.full((2, 8), 0.125)
    drafts, stale = read_answer(proposal([1, 7], q), UPDATES, session())
    assert drafts[7].tokens == [1, 7]
    assert np.array_equal(drafts[7].q, q.astype(np.float32))
    assert stale == 0


def test_guesses_without_a_distribution_count_as_deterministic() -> None:
    drafts, _ = read_answer(proposal([1, 7]), UPDATES, session())
    assert drafts[7].q is None


def test_a_proposal_on_another_base_is_dropped_and_counted() -> None:
    drafts, stale = read_answer(proposal([1, 7], base_length=9), UPDATES, session())
    assert drafts == {}
    assert stale == 1


def test_a_refusal_says_why() -> None:
    refused = proposal([], refusal=common_pb2.FALLBACK_REASON_DRAFT_CONTEXT)
    drafts, _ = read_answer(refused, UPDATES, session())
    assert drafts[7].refusal == common_pb2.FALLBACK_REASON_DRAFT_CONTEXT


UNIFORM = np.full((2, 8), 0.125)
ZERO = np.array([[0, 1, 0, 0, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: proposal([1, 2, 3]), "more guesses"),
        (lambda: proposal([1, 64]), "vocabulary"),
        (lambda: proposal([-1]), "vocabulary"),
        (lambda: proposal([1, 8], UNIFORM), "draft's vocabulary"),
        (lambda: proposal([1, 3], ZERO), "rules out"),
        (lambda: proposal([1], UNIFORM), "shape"),
        (lambda: proposal([1, 2], UNIFORM[:, :7]), "shape"),
        (lambda: proposal([1, 2], UNIFORM * 2), "sum"),
        (lambda: proposal([1, 2], UNIFORM * np.nan), "finite"),
        (lambda: proposal([1, 2], sequence_id=8), "other sequences"),
        (lambda: draft_pb2.Proposal(round=1), "other sequences"),
    ],
)
def test_a_wrong_answer_is_refused(make: Callable[[], draft_pb2.Proposal], what: str) -> None:
    with pytest.raises((RoundError, TensorError), match=what):
        read_answer(make(), UPDATES, session())


def test_a_guess_must_be_among_the_columns_of_a_draft_vocabulary() -> None:
    q = np.full((1, 3), 1 / 3)
    drafts, _ = read_answer(proposal([63], q), UPDATES, session([0, 5, 63], 3))
    assert drafts[7].tokens == [63]
    for outside in (4, 62):
        with pytest.raises(RoundError, match="draft's vocabulary"):
            read_answer(proposal([outside], q), UPDATES, session([0, 5, 62 if outside == 4 else 63], 3))


def test_a_region_of_a_closed_arena_is_an_error(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 1024)
    writer = arena.begin(1)
    answer = proposal([1, 2])
    answer.sequences[0].distribution.CopyFrom(tensors.write(UNIFORM.astype(np.float32), tensors.FLOAT32, writer))
    writer.finish()
    arena.close()
    with pytest.raises(TensorError, match="closed"):
        read_answer(answer, UPDATES, session(arena=arena))


def test_a_refusal_that_has_no_name_here_counts_as_invalid() -> None:
    drafts, _ = read_answer(proposal([], refusal=99), UPDATES, session())
    assert drafts[7].refusal == common_pb2.FALLBACK_REASON_DRAFT_INVALID
