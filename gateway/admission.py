"""Who may go to the target now, who waits, and who is refused: a bounded queue, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.serving.errors import QueueFull, Unavailable

RETRY_AFTER_S = 1.0


class Admission:
    """``running`` requests hold a place; up to ``max_waiting`` more wait for one, in order."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self.running = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def close(self) -> None:
        """Admit nobody any more; who waits or runs goes on."""
        self.closed = True

    async def idle(self) -> None:
        """Return once nobody runs or waits."""
        await self._idle.wait()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place at the target. Raises QueueFull, or Unavailable once closed; cancellation leaves the queue at
        once."""
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    async def _acquire(self) -> None:
        if self.closed:
            raise Unavailable("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        if self.running < self._max_running and not self._waiters:
            self.running += 1
            self._idle.clear()
            return
        if len(self._waiters) >= self._max_waiting:
            raise QueueFull(
                f"{self._max_running} requests run and {self._max_waiting} wait; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release()  # The place came together with the cancellation: hand it on.
            elif waiter in self._waiters:  # _release may have passed over it already.
                self._waiters.remove(waiter)
            raise

    def _release(self) -> None:
        """Hand the place to the next in the queue."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.running -= 1
        if self.running == 0:
            self._idle.set()
