"""Who runs: which requests are admitted, and which rows go into the next pass.

A plain data structure: first come, first served; a request is admitted when the cache can hold it to its end, and then
takes part in every pass. Prompts share what the row budget leaves after the decoding sequences, so that a long prompt
does not hold up the answers of others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.target.block_manager import BlockManager
from services.target.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence in the next pass, and how many of its waiting tokens are run."""

    sequence: Sequence
    rows: int

    @property
    def reaches_end(self) -> bool:
        """Whether the last committed token is among the rows: then the pass gives the next one."""
        return self.rows == self.sequence.waiting_rows


class Scheduler:
    """Waiting and running sequences."""

    def __init__(self, blocks: BlockManager, max_sequences: int, prefill_rows: int) -> None:
        """``prefill_rows``: rows of prompts in one pass."""
        self.blocks = blocks
        self._max_sequences = max_sequences
        self._prefill_rows = prefill_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to the running ones, in order, while there is room."""
        admitted = []
        while self.waiting and len(self.running) < self._max_sequences:
            blocks = self.blocks.allocate(self.waiting[0].request.limit)
            if blocks is None:
                break
            sequence = self.waiting.popleft()
            sequence.blocks = blocks
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def schedule(self) -> list[Scheduled]:
        """The next pass: every sequence that decodes, and prompts up to the budget, oldest first."""
        budget = self._prefill_rows
        scheduled = []
        for sequence in self.running:
            if not sequence.ready:
                continue
            rows = sequence.waiting_rows
            if sequence.in_prefill:
                rows = min(rows, budget)
                budget -= rows
            if rows:
                scheduled.append(Scheduled(sequence, rows))
        return scheduled

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is, and give its blocks back. Idempotent."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.blocks.release(sequence.blocks)
