"""The draft's end: what a target may say, and what is freed when it is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from slipstream.v1 import common_pb2, draft_pb2

from services.link import tensors
from services.link.arena import Arena, ArenaInfo
from services.link.server import SESSIONS, SessionServer
from tests.unit.link.toys import GREEDY, HIDDEN, TARGET, CountingDrafter, draft_info

Request = draft_pb2.SpeculateRequest
Response = draft_pb2.SpeculateResponse


def attach(**changes: object) -> Request:
    fields = {"target": TARGET, "shared_memory": False, "hidden_size": HIDDEN, **changes}
    return Request(attach=draft_pb2.Attach(**fields))


def propose(number: int, *contexts: draft_pb2.SequenceContext) -> Request:
    return Request(propose=draft_pb2.Propose(round=number, sequences=contexts))


def context(sequence_id: int, tokens: list[int], k: int = 2, **changes: object) -> draft_pb2.SequenceContext:
    fields = {"start": True, "sampling": GREEDY, "committed_length": len(tokens), "draft_length": k, **changes}
    return draft_pb2.SequenceContext(sequence_id=sequence_id, tokens=tokens, **fields)


def release(*sequence_ids: int) -> Request:
    return Request(release=draft_pb2.Release(sequence_ids=sequence_ids))


def converse(server: SessionServer, *requests: Request) -> list[Response]:
    return list(server.speculate(iter(requests)))


def test_a_session_opens_with_what_the_draft_is() -> None:
    drafter = CountingDrafter(draft_info(), columns=[0, 1, 9])
    (answer,) = converse(SessionServer(drafter, None), attach())
    assert answer.attached.info == drafter.info
    assert list(answer.attached.draft_vocabulary) == [0, 1, 9]
    assert len(answer.attached.session_id) == 16


def test_all_sequences_of_a_round_are_answered_in_one_message_in_their_order() -> None:
    server = SessionServer(CountingDrafter(), None)
    _, answer = converse(server, attach(), propose(1, context(9, [1, 2]), context(4, [7], k=1)))
    assert answer.proposal.round == 1
    assert [(s.sequence_id, s.base_length, list(s.tokens)) for s in answer.proposal.sequences] == [
        (9, 2, [3, 4]),
        (4, 1, [8]),
    ]
    assert answer.proposal.draft_passes == 1


def test_release_frees_and_is_not_answered() -> None:
    drafter = CountingDrafter()
    seen: list[int] = []

    def requests() -> Iterator[Request]:
        yield attach()
        yield propose(1, context(1, [1]), context(2, [1]))
        yield release(1, 77)
        yield propose(2, context(2, [2], start=False, committed_length=2))
        seen.append(drafter.held)

    answers = list(SessionServer(drafter, None).speculate(requests()))
    assert len(answers) == 3
    assert seen == [1]


def test_a_dead_session_leaves_no_sequence_and_no_segment(tmp_path: Path) -> None:
    drafter = CountingDrafter(draft_info(feature_layers=[1]))
    server = SessionServer(drafter, tmp_path)
    stream = server.speculate(iter([attach(shared_memory=True), propose(1, context(1, [1, 2]))]))
    next(stream)
    assert len(list(tmp_path.iterdir())) == 2
    next(stream)
    assert drafter.held == 1
    stream.close()  # As grpc does when the target is gone.
    assert drafter.held == 0
    assert server.sessions == 0
    assert list(tmp_path.iterdir()) == []


def test_names_are_removed_once_the_target_has_opened_the_arenas(tmp_path: Path) -> None:
    server = SessionServer(CountingDrafter(), tmp_path)
    left: list[int] = []

    def requests() -> Iterator[Request]:
        yield attach(shared_memory=True)
        yield Request(mapped=draft_pb2.Mapped(ok=True))
        yield propose(1, context(1, [1], want_distribution=True))
        left.append(len(list(tmp_path.iterdir())))

    *_, answer = list(server.speculate(requests()))
    assert left == [0]
    assert answer.proposal.sequences[0].distribution.HasField("region")


@pytest.mark.parametrize("how", ["not offered", "not mapped", "no folder"])
def test_without_shared_memory_tensors_ride_inline(tmp_path: Path, how: str) -> None:
    server = SessionServer(CountingDrafter(), tmp_path / "missing" if how == "no folder" else tmp_path)
    requests = [attach(shared_memory=how != "not offered")]
    if how == "not mapped":
        requests.append(Request(mapped=draft_pb2.Mapped(ok=False)))
    *_, answer = converse(server, *requests, propose(1, context(1, [1], want_distribution=True)))
    distribution = answer.proposal.sequences[0].distribution
    assert tensors.read(distribution, tensors.FLOAT32, (2, 64), None).sum() == 2.0


def test_one_session_cannot_reach_another_ones_sequences() -> None:
    drafter = CountingDrafter()
    server = SessionServer(drafter, None)
    mine = server.speculate(
        iter([attach(), propose(1, context(1, [1])), propose(2, context(1, [2], start=False, committed_length=2))])
    )
    next(mine)
    next(mine)
    converse(server, attach(), propose(1, context(1, [30])), release(1))
    assert drafter.held == 1
    assert list(next(mine).proposal.sequences[0].tokens) == [3, 4]
    assert list(drafter.tokens.values()) == [[1, 2]]


def test_one_session_cannot_wipe_another_ones_regions(tmp_path: Path) -> None:
    server = SessionServer(CountingDrafter(), tmp_path)
    mine = server.speculate(iter([attach(shared_memory=True), propose(1, context(1, [1], want_distribution=True))]))
    i = next(mine).attached.proposals
    arena = Arena.open(tmp_path, ArenaInfo(i.name, i.epoch, i.slots, i.slot_size))
    region = next(mine).proposal.sequences[0].distribution
    converse(server, attach(shared_memory=True), propose(1, context(1, [5], want_distribution=True)), release(1))
    q = tensors.read(region, tensors.FLOAT32, (2, 64), arena)
    assert q[0, 2] == 0.75
    assert (tmp_path / i.name).exists()


def test_features_come_through_the_arena(tmp_path: Path) -> None:
    drafter = CountingDrafter(draft_info(feature_layers=[1, 2]))
    server = SessionServer(drafter, tmp_path)
    bits = np.arange(2 * HIDDEN, dtype=np.uint16).reshape(1, 2, HIDDEN)
    responses: list[Response] = []

    def requests() -> Iterator[Request]:
        yield attach(shared_memory=True)
        i = responses[0].attached.features
        arena = Arena.open(tmp_path, ArenaInfo(i.name, i.epoch, i.slots, i.slot_size))
        writer = arena.begin(1)
        tensor = tensors.write(bits, tensors.BFLOAT16, writer)
        writer.finish()
        assert tensor.HasField("region")
        yield propose(1, context(1, [1, 2], features=tensor))
        told.extend(drafter.features.values())

    told: list[list[np.ndarray]] = []
    for response in server.speculate(requests()):
        responses.append(response)
    assert np.array_equal(told[0][0], bits)


@pytest.mark.parametrize(
    ("requests", "what"),
    [
        ([release(1)], "first request must be `attach`"),
        ([Request()], "first request must be `attach`"),
        ([attach(), attach()], "attached once"),
        ([attach(), Request()], "without a message"),
        ([attach(), propose(2, context(1, [1]))], "count up"),
        ([attach(), propose(1), propose(1)], "count up"),
        ([attach(), propose(1, context(1, [1]), context(1, [1]))], "twice"),
        ([attach(), propose(1, context(1, [64]))], "vocabulary"),
        ([attach(), propose(1, context(1, [-1]))], "vocabulary"),
        ([attach(), propose(1, context(1, [1], k=9))], "draft_length"),
        ([attach(), propose(1, context(1, [1], k=-1))], "draft_length"),
        ([attach(), propose(1, context(1, [1, 2], committed_length=1))], "committed_length"),
        ([attach(), propose(1, context(1, [1, 2], features=draft_pb2.Tensor()))], "features"),
    ],
)
def test_a_request_that_cannot_be_meant_ends_the_session_by_name(requests: list[Request], what: str) -> None:
    drafter = CountingDrafter()
    *_, answer = converse(SessionServer(drafter, None), *requests)
    assert answer.failed.reason == common_pb2.FALLBACK_REASON_DRAFT_INVALID
    assert what in answer.failed.detail
    assert drafter.held == 0


def test_a_feature_of_another_shape_is_refused() -> None:
    drafter = CountingDrafter(draft_info(feature_layers=[1, 2]))
    for rows in (0, 2):  # The first token of a sequence has no predecessor: two tokens go with one row.
        tensor = tensors.write(np.zeros((rows, 2, HIDDEN), np.uint16), tensors.BFLOAT16, None)
        *_, answer = converse(SessionServer(drafter, None), attach(), propose(1, context(1, [1, 2], features=tensor)))
        assert "shape" in answer.failed.detail


def test_a_failing_drafter_ends_the_session_and_its_error_stays_here() -> None:
    drafter = CountingDrafter()
    drafter.failure = RuntimeError("cannot open /srv/models/secret")
    *_, answer = converse(SessionServer(drafter, None), attach(), propose(1, context(1, [1])))
    assert answer.failed.detail == "the draft failed"


@pytest.mark.parametrize(
    ("target", "hidden", "reason"),
    [
        ({"tokenizer_fingerprint": "sha256:others"}, HIDDEN, common_pb2.FALLBACK_REASON_VOCABULARY_MISMATCH),
        ({"weights_fingerprint": "sha256:draft"}, HIDDEN, common_pb2.FALLBACK_REASON_DRAFT_INVALID),
        ({"vocabulary_size": 0}, HIDDEN, common_pb2.FALLBACK_REASON_DRAFT_INVALID),
        ({"vocabulary_size": 9}, HIDDEN, common_pb2.FALLBACK_REASON_DRAFT_INVALID),
        ({}, HIDDEN + 1, common_pb2.FALLBACK_REASON_DRAFT_INVALID),
    ],
)
def test_a_target_that_the_draft_cannot_ride_with_is_refused(
    target: dict[str, object], hidden: int, reason: common_pb2.FallbackReason
) -> None:
    changed = common_pb2.ModelInfo()
    changed.CopyFrom(TARGET)
    for name, value in target.items():
        setattr(changed, name, value)
    drafter = CountingDrafter(draft_info(feature_layers=[1]), columns=[0, 9])
    (answer,) = converse(SessionServer(drafter, None), attach(target=changed, hidden_size=hidden))
    assert answer.failed.reason == reason
    assert answer.failed.detail


def test_more_targets_than_a_draft_serves_are_refused_and_the_others_go_on() -> None:
    server = SessionServer(CountingDrafter(), None)
    streams = [server.speculate(iter([attach(), propose(1, context(1, [1]))])) for _ in range(SESSIONS)]
    for stream in streams:
        assert next(stream).HasField("attached")
    (refused,) = converse(server, attach())
    assert refused.failed.reason == common_pb2.FALLBACK_REASON_DRAFT_FULL
    assert all(next(stream).HasField("proposal") for stream in streams)
    for stream in streams:
        stream.close()
    assert converse(server, attach())[0].HasField("attached")


def test_a_release_and_an_end_during_a_round_wait_for_it() -> None:
    drafter = CountingDrafter()
    server = SessionServer(drafter, None)
    stream = server.speculate(iter([attach(), propose(1, context(1, [1]))]))
    next(stream)
    drafter.go.clear()
    answers: list[Response] = []
    busy = threading.Thread(target=lambda: answers.append(next(stream)))
    busy.start()
    other = threading.Thread(target=converse, args=(server, attach(), release(1)))
    other.start()
    drafter.go.set()
    busy.join(10)
    other.join(10)
    assert answers[0].HasField("proposal")
    assert drafter.held == 1


def test_a_session_whose_end_fails_does_not_take_a_place_for_ever() -> None:
    drafter = CountingDrafter()

    def fails(sequence_ids: object) -> None:
        raise RuntimeError("cannot forget")

    drafter.release = fails
    server = SessionServer(drafter, None)
    for _ in range(SESSIONS + 1):
        with pytest.raises(RuntimeError, match="cannot forget"):
            converse(server, attach())
    assert server.sessions == 0
