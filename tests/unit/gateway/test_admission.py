"""The queue at the gateway is bounded, fair, and forgets who goes away."""

from __future__ import annotations

import asyncio

import pytest

from gateway.admission import Admission
from services.serving.errors import QueueFull, Unavailable


class Caller:
    """Holds a place until it is let go."""

    def __init__(self, admission: Admission, order: list[int], name: int) -> None:
        self.leave = asyncio.Event()
        self._order, self._name = order, name
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        async with admission.place():
            self._order.append(self._name)
            await self.leave.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_places_are_given_in_order_of_arrival() -> None:
    admission, order = Admission(1, 5), list[int]()
    callers = [Caller(admission, order, i) for i in range(4)]
    for caller in callers:
        await settle()
        caller.leave.set()
        await caller.task
    assert order == [0, 1, 2, 3]
    assert (admission.running, admission.waiting) == (0, 0)


async def test_beyond_the_queue_callers_are_refused_with_a_hint() -> None:
    admission, order = Admission(1, 1), list[int]()
    callers = [Caller(admission, order, i) for i in range(2)]
    await settle()
    with pytest.raises(QueueFull) as caught:
        async with admission.place():
            pass
    assert caught.value.retry_after_s
    for caller in callers:
        caller.leave.set()
        await caller.task


async def test_a_caller_that_gives_up_leaves_the_queue() -> None:
    admission, order = Admission(1, 1), list[int]()
    first, second = Caller(admission, order, 0), Caller(admission, order, 1)
    await settle()
    second.task.cancel()
    await settle()
    assert admission.waiting == 0
    third = Caller(admission, order, 2)
    first.leave.set()
    third.leave.set()
    await asyncio.gather(first.task, third.task)
    assert order == [0, 2]
    assert admission.running == 0


async def test_a_place_that_comes_with_the_cancellation_is_handed_on() -> None:
    admission, order = Admission(1, 5), list[int]()
    async with admission.place():
        second, third = Caller(admission, order, 1), Caller(admission, order, 2)
        await settle()
    second.task.cancel()  # The place is second's by now, but second has not run yet.
    await settle()
    assert order == [2]
    third.leave.set()
    await third.task
    assert admission.running == 0


async def test_a_closed_gateway_admits_nobody() -> None:
    admission = Admission(1, 1)
    admission.close()
    with pytest.raises(Unavailable):
        async with admission.place():
            pass


async def test_a_waiter_that_gives_up_as_the_place_comes_free_is_passed_over() -> None:
    admission, order = Admission(1, 5), list[int]()
    async with admission.place():
        second = Caller(admission, order, 1)
        await settle()
        second.task.cancel()  # It has not run yet when the place is handed on.
    with pytest.raises(asyncio.CancelledError):
        await second.task
    assert order == []
    assert (admission.running, admission.waiting) == (0, 0)


async def test_idle_is_told_once_all_have_left() -> None:
    admission = Admission(1, 1)
    async with admission.place():
        idle = asyncio.create_task(admission.idle())
        await settle()
        assert not idle.done()
    await idle
