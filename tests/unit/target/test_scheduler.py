"""Who runs: a plain data structure, tested without a model."""

from __future__ import annotations

from slipstream.v1 import common_pb2

from services.model.sampling import SamplingParams
from services.target.block_manager import BlockManager
from services.target.scheduler import Scheduler
from services.target.sequence import Mode, Request, Sequence
from services.target.stopping import Answer, StopConditions
from tests.fakes import FakeStream


def sequence(id_: int, prompt: int, max_tokens: int = 16) -> Sequence:
    stop = StopConditions(max_tokens)
    request = Request("r", tuple([1] * prompt), SamplingParams(), stop, Mode.STANDARD, common_pb2.MODE_STANDARD, 0)
    return Sequence(id_, request, Answer(stop, FakeStream()), lambda event: None)


def test_requests_are_admitted_in_order_while_the_cache_can_hold_them_to_their_end() -> None:
    scheduler = Scheduler(BlockManager(5), max_sequences=8, prefill_rows=64)
    first, second, small = sequence(1, 32, 16), sequence(2, 32, 16), sequence(3, 1, 1)
    for s in (first, second, small):
        scheduler.add(s)
    assert scheduler.admit() == [first]
    assert list(scheduler.waiting) == [second, small], "a small one does not overtake: nobody starves"
    scheduler.remove(first)
    assert scheduler.admit() == [second, small]


def test_no_more_than_max_sequences_run() -> None:
    scheduler = Scheduler(BlockManager(100), max_sequences=2, prefill_rows=64)
    for i in range(3):
        scheduler.add(sequence(i, 4))
    assert len(scheduler.admit()) == 2


def test_prompts_share_what_the_row_budget_leaves_and_decoding_goes_on_beside_them() -> None:
    scheduler = Scheduler(BlockManager(100), max_sequences=8, prefill_rows=10)
    decoding, long, other = sequence(1, 4), sequence(2, 25), sequence(3, 5)
    for s in (decoding, long, other):
        scheduler.add(s)
    scheduler.admit()
    decoding.commit([7])
    assert [(i.sequence.id, i.rows, i.reaches_end) for i in scheduler.schedule()] == [(1, 1, True), (2, 10, False)]
    long.cached = 20
    assert [(i.sequence.id, i.rows, i.reaches_end) for i in scheduler.schedule()] == [
        (1, 1, True),
        (2, 5, True),
        (3, 5, True),
    ]


def test_every_block_comes_back_once() -> None:
    blocks = BlockManager(10)
    scheduler = Scheduler(blocks, 4, 16)
    running = sequence(1, 30)
    scheduler.add(running)
    scheduler.admit()
    assert blocks.free == 10 - 3
    scheduler.remove(running)
    scheduler.remove(running)
    assert blocks.free == 10
