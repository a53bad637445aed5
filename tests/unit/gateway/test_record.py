"""A stream that does not reach its end is recorded by what the caller was sent, and its tag's identities hold."""

from __future__ import annotations

from slipstream.v1 import common_pb2, target_pb2

from gateway.record import Record
from tests.stack import identities_hold


def chunk(count: int, drafted: int, accepted: int) -> target_pb2.Chunk:
    return target_pb2.Chunk(token_ids=range(count), num_draft_tokens=drafted, num_accepted_draft_tokens=accepted)


def record() -> Record:
    made = Record("r", common_pb2.MODE_AUTO)
    made.started = target_pb2.Started(active_mode=common_pb2.MODE_SPECULATIVE, prompt_tokens=7)
    for c in (chunk(1, 0, 0), chunk(3, 4, 2), chunk(5, 4, 4), chunk(1, 4, 0), chunk(2, 4, 2)):
        made.add(c)
    return made


def test_an_interrupted_stream_is_counted_by_its_chunks() -> None:
    made = record()
    usage, tag = made.usage(), made.tag()
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 12)
    assert list(tag.acceptance_histogram) == [1, 0, 2, 0, 1]
    assert tag.num_draft_tokens == 16
    assert (tag.tokens_by_origin.standard, tag.tokens_by_origin.bonus, tag.tokens_by_origin.correction) == (1, 1, 2)
    identities_hold(usage, tag)


def test_a_stream_that_reached_its_end_is_told_by_the_target() -> None:
    made = record()
    finished = target_pb2.Finished(
        finish_reason=common_pb2.FINISH_REASON_STOP,
        usage=common_pb2.Usage(prompt_tokens=7, completion_tokens=12),
        tag=common_pb2.OptimizationTag(num_spec_steps=4, drafter="features"),
    )
    made.finish(finished)
    assert made.usage() == finished.usage
    assert made.tag().drafter == "features"
    assert made.tag().time.stream_ms > 0


def test_a_request_that_never_started_used_nothing() -> None:
    made = Record("r", common_pb2.MODE_SPECULATIVE)
    assert made.usage() == common_pb2.Usage()
    identities_hold(made.usage(), made.tag())
