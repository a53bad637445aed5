"""The target's end: whatever the draft does, a round returns in time and says why it brought nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from slipstream.v1 import common_pb2, draft_pb2, draft_pb2_grpc

from services.draft.servicer import DraftServicer
from services.link import client
from services.link.arena import Arena, ArenaError
from services.link.client import DraftLink
from services.link.round import OK, ContextUpdate, SequenceDraft
from tests.unit.link.toys import (
    HIDDEN,
    TARGET,
    CountingDrafter,
    draft_info,
    eventually,
    following,
    linked,
    opening,
    served,
)

ABSENT = common_pb2.FALLBACK_REASON_DRAFT_ABSENT
SLOW = common_pb2.FALLBACK_REASON_DRAFT_SLOW
LOST = common_pb2.FALLBACK_REASON_DRAFT_LOST
INVALID = common_pb2.FALLBACK_REASON_DRAFT_INVALID


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_PAUSE_S", (0.01, 0.02))
    monkeypatch.setattr(client, "TROUBLE_PAUSE_S", (0.01, 0.02))
    monkeypatch.setattr(client, "REFUSED_PAUSE_S", 0.02)


def let_go(drafter: CountingDrafter, link: DraftLink) -> None:
    """The late answer comes in, and from now on the draft has all the time it needs."""
    drafter.go.set()
    eventually(lambda: link._session is not None and not link._session.answers.empty())
    link._budget_s = 20


# --- rounds that go well ---


def test_a_round_brings_guesses_for_all_its_sequences(tmp_path: Path) -> None:
    with linked(CountingDrafter(), tmp_path) as link:
        result = link.propose([opening(1, [4, 5], 3), opening(2, [9], 1)])
    assert result.reason == OK
    assert result.drafts[1] == SequenceDraft(2, [6, 7, 8], None)
    assert result.drafts[2] == SequenceDraft(1, [10], None)
    assert result.draft_passes == 1
    assert result.draft_time_s + result.link_time_s > 0


@pytest.mark.parametrize("shared", [True, False])
def test_q_is_the_same_through_shared_memory_and_inline(tmp_path: Path, shared: bool) -> None:
    columns = [0, *range(2, 64, 2)]
    with linked(CountingDrafter(columns=columns), tmp_path, shm=shared) as link:
        assert link._session is not None
        assert link._session.shared_memory is shared
        result = link.propose([opening(1, [5], 1, want_distribution=True)])
        draft = result.drafts[1]
        assert draft.tokens == [6]
        assert draft.q is not None
        assert draft.q.shape == (1, len(columns))
        assert draft.q[0, columns.index(6)] == 0.75
        assert link.state.columns is not None
        assert link.state.columns.tolist() == columns


def test_no_segment_has_a_name_once_a_session_is_open(tmp_path: Path) -> None:
    with linked(CountingDrafter(draft_info(feature_layers=[1])), tmp_path) as link:
        link.propose([opening(1, [5], 1)])
        assert not list(tmp_path.glob("slipstream-*"))


def test_features_reach_the_drafter_bit_for_bit(tmp_path: Path) -> None:
    drafter = CountingDrafter(draft_info(feature_layers=[3, 7]))
    bits = np.arange(2 * 2 * HIDDEN, dtype=np.uint16).reshape(2, 2, HIDDEN)
    with linked(drafter, tmp_path) as link:
        link.propose([opening(1, [1, 2, 3], 1, features=bits)])
        (told,) = drafter.features.values()
        assert np.array_equal(told[0], bits)


def test_accepted_tokens_travel_with_the_next_round(tmp_path: Path) -> None:
    drafter = CountingDrafter()
    with linked(drafter, tmp_path) as link:
        link.propose([opening(1, [1], 2)])
        assert link.propose([following(1, 4, [2, 3, 40], 2)]).drafts[1].tokens == [41, 42]
        assert list(drafter.tokens.values()) == [[1, 2, 3, 40]]
        assert drafter.request_ids == ["request-1"]


def test_a_round_without_guesses_is_handed_over_and_not_waited_for(tmp_path: Path) -> None:
    drafter = CountingDrafter()
    with linked(drafter, tmp_path) as link:
        drafter.go.clear()
        result = link.propose([opening(1, [1, 2], 0)])
        assert result.reason == OK
        assert result.drafts == {}
        drafter.go.set()
        assert link.propose([following(1, 3, [3], 1)]).drafts[1].tokens == [4]


def test_released_sequences_are_forgotten_by_the_draft(tmp_path: Path) -> None:
    drafter = CountingDrafter()
    with linked(drafter, tmp_path) as link:
        link.propose([opening(1, [1], 1), opening(2, [1], 1)])
        link.release([1])
        link.release([])
        link.propose([following(2, 2, [2], 1)])
        assert drafter.held == 1


# --- absent, lost, back again ---


def test_without_a_draft_a_round_says_so_at_once(tmp_path: Path) -> None:
    link = DraftLink(f"unix:{tmp_path}/none.sock", TARGET, HIDDEN, 5.0, tmp_path)
    link.start()
    try:
        assert link.propose([opening(1, [1], 2)]).reason == ABSENT
        assert not link.state.ready
        link.release([1])
    finally:
        link.close()


def test_a_draft_that_comes_later_is_used(tmp_path: Path) -> None:
    link = DraftLink(f"unix:{tmp_path}/draft.sock", TARGET, HIDDEN, 5.0, tmp_path)
    link.start()
    try:
        assert link.propose([opening(1, [1], 2)]).reason == ABSENT
        with served(DraftServicer(CountingDrafter(), tmp_path), tmp_path / "draft.sock"):
            eventually(lambda: link.state.ready)
            assert link.propose([opening(1, [1], 2)]).drafts[1].tokens == [2, 3]
    finally:
        link.close()


def test_after_a_restart_the_session_has_another_number(tmp_path: Path) -> None:
    link = DraftLink(f"unix:{tmp_path}/draft.sock", TARGET, HIDDEN, 5.0, tmp_path)
    link.start()
    numbers = []
    try:
        for _ in range(2):
            with served(DraftServicer(CountingDrafter(), tmp_path), tmp_path / "draft.sock"):
                eventually(lambda: link.state.ready)
                numbers.append(link.state.session)
                assert link.propose([opening(1, [1], 1)], numbers[-1]).reason == OK
            eventually(lambda: not link.state.ready)
            assert link.state.reason == ABSENT
        with served(DraftServicer(CountingDrafter(), tmp_path), tmp_path / "draft.sock"):
            eventually(lambda: link.state.ready)
            # Made for a session that is gone: not sent to the new one.
            assert link.propose([following(1, 2, [2], 1)], numbers[-1]).reason == LOST
    finally:
        link.close()
    assert numbers[0] != numbers[1]


def test_a_stream_that_breaks_during_a_round_ends_the_wait(tmp_path: Path) -> None:
    drafter = CountingDrafter()
    drafter.failure = RuntimeError("broken")
    with linked(drafter, tmp_path, budget_s=20) as link:
        started = time.monotonic()
        assert link.propose([opening(1, [1], 2)]).reason == LOST
        assert time.monotonic() - started < 10
        drafter.failure = None
        eventually(lambda: link.state.ready)
        assert link.propose([opening(1, [1], 2)]).drafts[1].tokens == [2, 3]


def test_rounds_after_close_are_answered_too(tmp_path: Path) -> None:
    with linked(CountingDrafter(), tmp_path) as link:
        link.propose([opening(1, [1], 1)])
    result = link.propose([following(1, 2, [2], 1)])
    assert result.drafts == {}
    assert result.reason in {ABSENT, LOST}
    link.close()


# --- slow ---


def test_a_slow_round_returns_within_its_budget_and_says_why(tmp_path: Path) -> None:
    drafter = CountingDrafter()
    with linked(drafter, tmp_path, budget_s=0.05) as link:
        drafter.go.clear()
        started = time.monotonic()
        assert link.propose([opening(1, [1], 2)]).reason == SLOW
        assert time.monotonic() - started < 2


def test_nobody_waits_twice_for_the_same_round(tmp_path: Path) -> None:
    drafter = CountingDrafter()
    with linked(drafter, tmp_path, budget_s=0.5) as link:
        drafter.go.clear()
        link.propose([opening(1, [1], 2)])
        started = time.monotonic()
        for length in range(2, 22):
            assert link.propose([following(1, length, [5], 2)]).reason == SLOW
        assert time.monotonic() - started < 2  # Twenty budgets would be ten seconds.
        assert link.state.ready


def test_a_late_proposal_is_dropped_and_counted_and_never_used(tmp_path: Path) -> None:
    drafter = CountingDrafter()
    with linked(drafter, tmp_path, budget_s=0.2) as link:
        drafter.go.clear()
        assert link.propose([opening(1, [1], 2), opening(2, [9], 0)]).reason == SLOW
        let_go(drafter, link)
        result = link.propose([following(1, 2, [30], 2)])
        assert result.stale == 1
        assert result.drafts[1] == SequenceDraft(2, [31, 32], None)


def test_what_the_draft_missed_while_it_was_slow_it_is_told_later(tmp_path: Path) -> None:
    drafter = CountingDrafter()
    with linked(drafter, tmp_path, budget_s=0.2) as link:
        drafter.go.clear()
        link.propose([opening(1, [1], 2)])
        link.propose([following(1, 2, [30], 2)])
        link.propose([following(1, 4, [31, 32], 2)])
        let_go(drafter, link)
        assert link.propose([following(1, 5, [33], 1)]).drafts[1].tokens == [34]
        assert list(drafter.tokens.values()) == [[1, 30, 31, 32, 33]]


def test_a_sequence_that_ended_meanwhile_is_not_told(tmp_path: Path) -> None:
    drafter = CountingDrafter()
    with linked(drafter, tmp_path, budget_s=0.2) as link:
        drafter.go.clear()
        link.propose([opening(1, [1], 2)])
        link.propose([opening(2, [7], 2)])
        link.release([2])
        assert link._session is not None
        assert link._session.untold == {}


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_delays_the_draft_ends_up_knowing_exactly_what_was_committed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    drafter = CountingDrafter()
    told: dict[int, list[int]] = {}
    with linked(drafter, tmp_path, budget_s=0.01) as link:
        session = link.state.session

        def update(sequence_id: int, k: int) -> ContextUpdate:
            tokens = [chance.randrange(64) for _ in range(chance.randint(1, 3))]
            start = sequence_id not in told
            told.setdefault(sequence_id, []).extend(tokens)
            if start:
                return opening(sequence_id, tokens, k)
            return following(sequence_id, len(told[sequence_id]), tokens, k)

        for _ in range(60):
            chance.choice([drafter.go.set, drafter.go.set, drafter.go.clear])()
            if link.state.session != session:
                eventually(lambda: link.state.ready)
                told.clear()
                session = link.state.session
            if told and chance.random() < 0.2:
                gone = chance.choice(list(told))
                del told[gone]
                link.release([gone])
            chosen = chance.sample(range(5), 2)
            result = link.propose([update(i, chance.randint(0, 3)) for i in chosen])
            for sequence_id, draft in result.drafts.items():
                assert draft.base_length == len(told[sequence_id])
                assert all(guess == (told[sequence_id][-1] + 1 + i) % 64 for i, guess in enumerate(draft.tokens))
        drafter.go.set()
        link._budget_s = 20
        eventually(lambda: link.state.ready)
        if link.state.session != session:
            told.clear()
        # The last round that was given up may still be on its way: then this one is told with the next.
        eventually(lambda: link.propose([update(i, 1) for i in range(5)]).reason == OK)
        assert sorted(drafter.tokens.values()) == sorted(told.values())


def test_rounds_over_budget_in_a_row_end_the_session_and_a_fresh_one_is_made(tmp_path: Path) -> None:
    drafter = CountingDrafter()
    with linked(drafter, tmp_path, budget_s=0.1) as link:
        session = link._session
        assert session is not None
        for number in range(client.BREACHES):
            drafter.go.clear()
            assert link.propose([opening(number, [1], 2)]).reason == SLOW
            drafter.go.set()
            if number < client.BREACHES - 1:
                eventually(lambda: not session.answers.empty())
        eventually(lambda: link.state.ready and link.state.session != session.number)
        assert link.propose([opening(1, [1], 2)]).drafts[1].tokens == [2, 3]
        assert drafter.held == 1


def test_a_hung_draft_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HUNG_AFTER_S", 0.1)
    drafter = CountingDrafter()
    with linked(drafter, tmp_path, budget_s=0.05) as link:
        drafter.go.clear()
        session = link.state.session
        results = []
        eventually(lambda: results.append(link.propose([opening(1, [1], 2)]).reason) or link.state.session != session)
        assert set(results) <= {SLOW, ABSENT}
        drafter.go.set()
        eventually(lambda: link.state.ready)
        eventually(lambda: link.propose([opening(2, [1], 2)]).reason == OK)


# --- wrong ---


@pytest.mark.parametrize(
    "spoil",
    [
        lambda draft: SequenceDraft(draft.base_length, [99], None),
        lambda draft: SequenceDraft(draft.base_length, [1] * 8, None),
        lambda draft: SequenceDraft(draft.base_length, draft.tokens, np.full((2, 64), np.nan, np.float32)),
        lambda draft: SequenceDraft(draft.base_length, draft.tokens, np.full((2, 64), 1.0, np.float32)),
        lambda draft: SequenceDraft(draft.base_length, draft.tokens, np.full((2, 32), 1 / 32, np.float32)),
    ],
)
def test_a_wrong_answer_is_refused_and_the_next_session_is_used(tmp_path: Path, spoil) -> None:
    drafter = CountingDrafter()
    drafter.spoil = spoil
    with linked(drafter, tmp_path) as link:
        session = link.state.session
        assert link.propose([opening(1, [1], 2)]).reason == INVALID
        drafter.spoil = lambda draft: draft
        eventually(lambda: link.state.ready and link.state.session != session)
        assert link.propose([opening(1, [1], 2)]).drafts[1].tokens == [2, 3]


def test_one_sequence_on_another_base_does_not_hurt_the_others(tmp_path: Path) -> None:
    drafter = CountingDrafter()
    drafter.spoil = lambda draft: SequenceDraft(1, draft.tokens, None)
    with linked(drafter, tmp_path) as link:
        result = link.propose([opening(1, [1], 2), opening(2, [1, 2], 2)])
        assert result.stale == 1
        assert list(result.drafts) == [1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer_fingerprint": "sha256:others"}, common_pb2.FALLBACK_REASON_VOCABULARY_MISMATCH),
        ({"weights_fingerprint": "sha256:target"}, INVALID),
        ({"max_draft_length": 0}, INVALID),
    ],
)
def test_a_draft_that_does_not_fit_is_never_used(
    tmp_path: Path, changes: dict[str, object], reason: common_pb2.FallbackReason
) -> None:
    link = DraftLink(f"unix:{tmp_path}/draft.sock", TARGET, HIDDEN, 5.0, tmp_path)
    with served(DraftServicer(CountingDrafter(draft_info(**changes)), tmp_path), tmp_path / "draft.sock"):
        link.start()
        try:
            eventually(lambda: link.state.reason == reason)
            assert link.propose([opening(1, [1], 2)]).reason == reason
        finally:
            link.close()


class Scripted(draft_pb2_grpc.DraftServiceServicer):
    """A draft that says what it is told to say."""

    def __init__(self, *responses: draft_pb2.SpeculateResponse, info: draft_pb2.DraftServiceGetInfoResponse) -> None:
        self.responses, self.info, self.attempts = responses, info, 0

    def GetInfo(self, request: object, context: grpc.ServicerContext) -> draft_pb2.DraftServiceGetInfoResponse:
        return self.info

    def Speculate(self, requests: object, context: grpc.ServicerContext) -> Iterator[draft_pb2.SpeculateResponse]:
        self.attempts += 1
        yield from self.responses


def attached(**fields: object) -> draft_pb2.SpeculateResponse:
    return draft_pb2.SpeculateResponse(attached=draft_pb2.Attached(info=draft_info(), **fields))


@pytest.mark.parametrize(
    "responses",
    [
        [],
        [draft_pb2.SpeculateResponse()],
        [draft_pb2.SpeculateResponse(proposal=draft_pb2.Proposal(round=1))],
        [draft_pb2.SpeculateResponse(failed=draft_pb2.Failed(reason=INVALID, detail="no"))],
        [attached(draft_vocabulary=[5, 3])],
        [attached(draft_vocabulary=[64])],
    ],
)
def test_a_draft_that_opens_with_nonsense_is_tried_again_and_never_used(tmp_path: Path, responses: list) -> None:
    draft = Scripted(*responses, info=draft_info())
    link = DraftLink(f"unix:{tmp_path}/draft.sock", TARGET, HIDDEN, 5.0, tmp_path)
    with served(draft, tmp_path / "draft.sock"):
        link.start()
        try:
            eventually(lambda: draft.attempts >= 3)
            assert link.propose([opening(1, [1], 2)]).drafts == {}
        finally:
            link.close()


@pytest.mark.parametrize(
    "arena",
    [
        draft_pb2.Arena(name="../../../etc/passwd", size=256, epoch=1, slots=2, slot_size=128),
        draft_pb2.Arena(name="slipstream-" + "0" * 32, size=256, epoch=1, slots=2, slot_size=128),
        draft_pb2.Arena(name="slipstream-" + "0" * 32, size=2**63, epoch=1, slots=2**31, slot_size=2**62),
    ],
)
def test_an_arena_that_cannot_be_opened_is_declined_and_tensors_ride_inline(
    tmp_path: Path, arena: draft_pb2.Arena
) -> None:
    said: list[draft_pb2.SpeculateRequest] = []

    class Listening(Scripted):
        def Speculate(self, requests, context):
            yield from self.responses
            for request in requests:
                said.append(request)

    link = DraftLink(f"unix:{tmp_path}/draft.sock", TARGET, HIDDEN, 5.0, tmp_path)
    with served(Listening(attached(proposals=arena), info=draft_info()), tmp_path / "draft.sock"):
        link.start()
        try:
            eventually(lambda: any(request.HasField("mapped") for request in said))
            assert not next(r for r in said if r.HasField("mapped")).mapped.ok
            eventually(lambda: link.state.ready)
        finally:
            link.close()


def test_an_answer_to_a_round_that_was_never_sent_ends_the_session(tmp_path: Path) -> None:
    early = draft_pb2.SpeculateResponse(proposal=draft_pb2.Proposal(round=7))

    class Early(Scripted):
        def Speculate(self, requests, context):
            yield from self.responses
            for _ in requests:
                pass

    link = DraftLink(f"unix:{tmp_path}/draft.sock", TARGET, HIDDEN, 5.0, tmp_path)
    with served(Early(attached(), early, info=draft_info()), tmp_path / "draft.sock"):
        link.start()
        try:
            eventually(lambda: link.state.ready)
            assert link.propose([opening(1, [1], 2)]).reason in {INVALID, LOST}
        finally:
            link.close()


EPOCH = 5


class Answering(draft_pb2_grpc.DraftServiceServicer):
    """A draft that makes its answer to each round from the request, and from its place among the rounds."""

    def __init__(
        self,
        answer: Callable[[draft_pb2.Propose], Iterable[draft_pb2.SpeculateResponse]],
        folder: Path | None = None,
        info: draft_pb2.DraftServiceGetInfoResponse | None = None,
    ) -> None:
        self.answer, self.info, self.attempts = answer, info or draft_info(), 0
        self.folder = folder

    def GetInfo(self, request: object, context: grpc.ServicerContext) -> draft_pb2.DraftServiceGetInfoResponse:
        return draft_info()

    def Speculate(
        self, requests: Iterator[draft_pb2.SpeculateRequest], context: grpc.ServicerContext
    ) -> Iterator[draft_pb2.SpeculateResponse]:
        self.attempts += 1
        hello = draft_pb2.Attached(info=self.info)
        if self.folder is not None:
            arena = Arena.create(self.folder, 4096)
            i = arena.info
            fields = {"name": i.name, "size": i.size, "epoch": EPOCH, "slots": i.slots, "slot_size": i.slot_size}
            hello.proposals.CopyFrom(draft_pb2.Arena(**fields))
        yield draft_pb2.SpeculateResponse(attached=hello)
        for request in requests:
            if request.HasField("propose"):
                yield from self.answer(request.propose)


def answered(propose: draft_pb2.Propose, **changes: object) -> draft_pb2.SpeculateResponse:
    """The right answer for one sequence, but for the changes."""
    (context,) = propose.sequences
    fields = {"round": propose.round, **{k: v for k, v in changes.items() if k in ("round", "draft_passes")}}
    sequence = {"sequence_id": context.sequence_id, "base_length": context.committed_length, "tokens": [2, 3]}
    sequence |= {k: v for k, v in changes.items() if k not in fields}
    proposal = draft_pb2.Proposal(**fields, sequences=[draft_pb2.SequenceProposal(**sequence)])
    return draft_pb2.SpeculateResponse(proposal=proposal)


@contextmanager
def linked_to(servicer: Answering, folder: Path, shared_memory: Path | None = None) -> Iterator[DraftLink]:
    with served(servicer, folder / "draft.sock"):
        link = DraftLink(f"unix:{folder / 'draft.sock'}", TARGET, HIDDEN, 10.0, shared_memory)
        link.start()
        try:
            yield link
        finally:
            link.close()


def nameless(propose: draft_pb2.Propose) -> draft_pb2.SpeculateResponse:
    return draft_pb2.SpeculateResponse(failed=draft_pb2.Failed(reason=99))


def beyond(propose: draft_pb2.Propose, **wrong: int) -> draft_pb2.SpeculateResponse:
    """A q in a region that was never written, or lies outside the arena."""
    fields = {"epoch": EPOCH, "slot": 1, "generation": 1, "offset": 0, "length": 512, **wrong}
    q = draft_pb2.Tensor(dtype=draft_pb2.DATA_TYPE_FLOAT32, shape=[2, 64], region=draft_pb2.ArenaRegion(**fields))
    return answered(propose, distribution=q)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda propose: answered(propose, round=2**64 - 1),
        lambda propose: answered(propose, round=0),
        lambda propose: answered(propose, tokens=[1] * 9),
        lambda propose: answered(propose, tokens=[-(2**31)]),
        lambda propose: answered(propose, sequence_id=2**64 - 1),
        beyond,
        lambda propose: beyond(propose, offset=4096),
        lambda propose: beyond(propose, slot=2**32 - 1, offset=2**64 - 64, length=2**64 - 1),
        lambda propose: draft_pb2.SpeculateResponse(proposal=draft_pb2.Proposal(round=propose.round)),
        lambda propose: draft_pb2.SpeculateResponse(),
        lambda propose: draft_pb2.SpeculateResponse(attached=draft_pb2.Attached(info=draft_info())),
        nameless,
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_whatever_a_draft_answers_a_round_returns_a_reason_and_the_next_session_is_used(
    tmp_path: Path, wrong: Callable[[draft_pb2.Propose], draft_pb2.SpeculateResponse], shared: bool
) -> None:
    script = [wrong]

    def answer(propose: draft_pb2.Propose) -> Iterator[draft_pb2.SpeculateResponse]:
        yield (script.pop() if script else answered)(propose)

    (tmp_path / "memory").mkdir()
    folder = tmp_path / "memory" if shared else None
    with linked_to(Answering(answer, folder), tmp_path, folder) as link:
        eventually(lambda: link.state.ready)
        session = link.state.session
        result = link.propose([opening(1, [1], 2, want_distribution=True)])
        assert (result.drafts, result.reason in {INVALID, LOST}) == ({}, True)
        eventually(lambda: link.state.ready and link.state.session != session)
        assert link.propose([opening(1, [1], 2)]).drafts[1].tokens == [2, 3]


def test_a_draft_that_fails_with_a_reason_that_has_no_name_here_does_not_end_the_link(tmp_path: Path) -> None:
    draft = Scripted(nameless(draft_pb2.Propose()), info=draft_info())
    with served(draft, tmp_path / "draft.sock"):
        link = DraftLink(f"unix:{tmp_path}/draft.sock", TARGET, HIDDEN, 5.0, None)
        link.start()
        try:
            eventually(lambda: draft.attempts >= 3)
            assert link.state.reason == INVALID
        finally:
            link.close()


def test_a_refusal_without_a_name_and_counts_without_sense_reach_nobody(tmp_path: Path) -> None:
    with linked_to(
        Answering(lambda propose: [answered(propose, tokens=[], refusal=99, draft_passes=-5)]), tmp_path
    ) as link:
        eventually(lambda: link.state.ready)
        result = link.propose([opening(1, [1], 2)])
    assert result.drafts[1].refusal == INVALID
    assert result.draft_passes == 0


def test_answers_that_nobody_asked_for_end_the_session_before_they_pile_up(tmp_path: Path) -> None:
    def flood(propose: draft_pb2.Propose) -> Iterator[draft_pb2.SpeculateResponse]:
        while True:
            yield answered(propose)

    with linked_to(Answering(flood), tmp_path) as link:
        eventually(lambda: link.state.ready)
        session = link._session
        assert session is not None
        link.propose([opening(1, [1], 2)])
        eventually(lambda: link._session is not session)
        assert session.failure == INVALID
        assert session.answers.qsize() <= 2  # The last one, and the end.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer_fingerprint": "sha256:others"}, common_pb2.FALLBACK_REASON_VOCABULARY_MISMATCH),
        ({"weights_fingerprint": "sha256:target"}, INVALID),
        ({"drafters": []}, INVALID),
        ({"feature_layers": [-1]}, INVALID),
    ],
)
def test_the_draft_that_attaches_is_checked_and_not_only_the_one_that_was_asked_before(
    tmp_path: Path, changes: dict[str, object], reason: common_pb2.FallbackReason
) -> None:
    draft = Answering(lambda propose: [answered(propose)], info=draft_info(**changes))
    with linked_to(draft, tmp_path) as link:
        eventually(lambda: draft.attempts >= 3)
        assert not link.state.ready
        assert link.propose([opening(1, [1], 2)]).reason == reason


def test_a_failure_without_a_name_in_a_round_is_an_invalid_draft(tmp_path: Path) -> None:
    with linked_to(Answering(lambda propose: [nameless(propose)]), tmp_path) as link:
        eventually(lambda: link.state.ready)
        session = link._session
        assert session is not None
        assert link.propose([opening(1, [1], 2)]).reason in {INVALID, LOST}
        assert session.failure == INVALID
        eventually(lambda: link.state.ready and link.state.session != session.number)


def test_a_session_that_is_over_holds_no_memory(tmp_path: Path) -> None:
    with linked(CountingDrafter(draft_info(feature_layers=[1])), tmp_path) as link:
        session = link._session
        assert session is not None
        assert session.proposals is not None
        assert session.features is not None
        session.call.cancel()
        eventually(lambda: link.state.ready and link.state.session != session.number)
        for arena in (session.proposals, session.features):
            with pytest.raises(ArenaError, match="closed"):
                arena.begin(1)
