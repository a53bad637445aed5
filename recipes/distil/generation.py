"""Many sequences written at once by the target: continuous batching over the product's own pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.model.forward import BLOCK_SIZE, ForwardPass, SequenceRows


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to write."""

    index: int
    """Names the job; with ``seed`` it fixes the noise, whatever else is in the batch."""
    tokens: tuple[int, ...]
    """The prompt."""
    max_new: int
    temperature: float
    """0 is greedy."""
    seed: int


@dataclass(frozen=True, slots=True)
class Written:
    """A finished sequence: its tokens, and the target's states at all of them but the last, which was never run."""

    job: Job
    tokens: tuple[int, ...]
    features: Tensor | None
    """[tokens - 1, layers, hidden size], bfloat16."""


@dataclass(slots=True)
class _Slot:
    """A sequence being written, and the blocks that it owns."""

    job: Job
    blocks: Sequence[int]
    uniforms: np.ndarray
    tokens: list[int]
    features: list[Tensor] = field(default_factory=list)
    done: int = 0

    @property
    def new(self) -> int:
        return len(self.tokens) - len(self.job.tokens)

    def rows(self) -> SequenceRows:
        return SequenceRows(self.tokens[self.done :], self.done, self.blocks, logits=1)


def uniforms(job: Job) -> np.ndarray:
    """The job's noise, one number in [0, 1) for each new token."""
    return np.random.Generator(np.random.Philox(key=[job.seed, job.index])).random(job.max_new, dtype=np.float32)


def choose(logits: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
    """Next tokens [n] from ``logits`` [n, V]: greedy where the temperature is 0, else by inversion."""
    chosen = logits.argmax(-1)
    warm = (temperatures > 0).nonzero().flatten()
    if warm.numel():
        cumulative = (logits[warm] / temperatures[warm, None]).softmax(-1).cumsum(-1)
        wanted = (noise[warm] * cumulative[:, -1]).unsqueeze(-1)
        chosen[warm] = torch.searchsorted(cumulative, wanted).squeeze(-1).clamp(max=logits.shape[1] - 1)
    return chosen


class Generator:
    """Writes sequences with ``slots`` of them in flight.

    ``context`` bounds prompt and new tokens of one sequence, ``end_tokens`` end it.
    """

    def __init__(
        self,
        forward: ForwardPass,
        slots: int,
        context: int,
        end_tokens: frozenset[int],
        feature_layers: Sequence[int] = (),
    ) -> None:
        self.forward, self.slots, self.context = forward, slots, context
        self.end_tokens, self.feature_layers = end_tokens, tuple(feature_layers)
        self.blocks_per_slot = -(-context // BLOCK_SIZE)
        forward.allocate_cache(slots * self.blocks_per_slot)

    def write(self, jobs: Iterable[Job]) -> Iterator[Written]:
        """Yield sequences as they finish; which rides beside which changes nothing in them.

        Raises ValueError for a prompt that leaves no room.
        """
        waiting = iter(jobs)
        free = list(range(self.slots))
        running: dict[int, _Slot] = {}
        while True:
            self._admit(waiting, free, running)
            if not running:
                return
            self._advance(list(running.values()))
            for number in [n for n, slot in running.items() if self._finished(slot)]:
                slot = running.pop(number)
                free.append(number)
                features = torch.cat(slot.features) if self.feature_layers else None
                yield Written(slot.job, tuple(slot.tokens), features)

    def _admit(self, waiting: Iterator[Job], free: list[int], running: dict[int, _Slot]) -> None:
        """Fill free slots, at most four a pass, so that prompts don't make one pass huge."""
        for _ in range(min(4, len(free)) if running else len(free)):
            job = next(waiting, None)
            if job is None:
                return
            if len(job.tokens) + 1 > self.context:
                raise ValueError(f"prompt of {len(job.tokens)} tokens in a context of {self.context}")
            number = free.pop()
            blocks = range(number * self.blocks_per_slot, (number + 1) * self.blocks_per_slot)
            running[number] = _Slot(job, blocks, uniforms(job), list(job.tokens))

    def _advance(self, slots: list[_Slot]) -> None:
        batch = [slot.rows() for slot in slots]
        output = self.forward.run(batch, self.feature_layers)
        temperatures = torch.tensor([slot.job.temperature for slot in slots])
        noise = torch.tensor([float(slot.uniforms[slot.new]) for slot in slots])
        row = 0
        for slot, rows, token in zip(slots, batch, choose(output.logits, temperatures, noise).tolist(), strict=True):
            if output.features is not None:
                slot.features.append(output.features[row : row + len(rows.tokens)].clone())
            row += len(rows.tokens)
            slot.done = len(slot.tokens)
            slot.tokens.append(token)

    def _finished(self, slot: _Slot) -> bool:
        full = slot.new >= slot.job.max_new or len(slot.tokens) >= self.context
        return full or slot.tokens[-1] in self.end_tokens
