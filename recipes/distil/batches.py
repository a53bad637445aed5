"""Which sequences, and which stretch of each, make up a training step; fixed by the seed and the step's number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.distil.corpus import Corpus, CorpusError, CorpusSequence

POOL = 16
"""Batches that are sorted by length together, so that sequences of one batch are about as long."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences cut behind their stretch of chain starts, and padded."""

    tokens: Tensor
    """[B, T + 1]"""
    features: Tensor
    """[B, T + 1, layers, D] bfloat16"""
    starts: Tensor
    """[B, P]: pairs at which chains start, in a row."""
    length: Tensor
    """[B]: tokens of each sequence; what lies behind is padding."""


def epoch_order(sequences: Sequence[CorpusSequence], batch: int, seed: int, epoch: int) -> list[list[int]]:
    """All sequences in batches, shuffled anew each epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(sequences), generator=generator).tolist()
    batches: list[list[int]] = []
    for i in range(0, len(order), batch * POOL):
        pool = sorted(order[i : i + batch * POOL], key=lambda number: sequences[number].length)
        batches += [pool[j : j + batch] for j in range(0, len(pool), batch)]
    whole = [one for one in batches if len(one) == batch]
    shuffle = torch.randperm(len(whole), generator=generator).tolist()
    return [whole[i] for i in shuffle]


class Batches:
    """The batches of each step."""

    def __init__(self, corpus: Corpus, batch: int, chains: int, steps_ahead: int, seed: int) -> None:
        """``chains`` starts in a batch, spread evenly over its sequences; ``steps_ahead`` unrolled steps a chain.

        Raises CorpusError for a corpus too small for one batch.
        """
        self.corpus, self.batch, self.ahead, self.seed = corpus, batch, steps_ahead, seed
        self.chains_each = chains // batch
        self.sequences = [s for s in corpus.sequences if s.length - s.prompt > steps_ahead + 4]
        self.per_epoch = len(self.sequences) // batch
        if len(self.sequences) < batch:
            raise CorpusError("the training text has fewer usable sequences than one batch: ask for more prompts")
        self._epoch, self._order = -1, [[0]]

    def at(self, step: int) -> Batch:
        """The batch of step ``step``, whatever came before."""
        if not self._epoch >= 0 or step not in self._span:
            self._enter(step)
        picked = [self.sequences[i] for i in self._order[step - self._span.start]]
        generator = torch.Generator().manual_seed(self.seed * 7_919 + step)
        return self._assemble(picked, generator)

    def _enter(self, step: int) -> None:
        epoch, first = 0, 0
        while True:
            order = epoch_order(self.sequences, self.batch, self.seed, epoch)
            if step < first + len(order):
                self._epoch, self._order, self._span = epoch, order, range(first, first + len(order))
                return
            epoch, first = epoch + 1, first + len(order)

    def _assemble(self, picked: list[CorpusSequence], generator: torch.Generator) -> Batch:
        starts, ends = [], []
        for sequence in picked:
            first, last = sequence.prompt - 1, sequence.length - 2
            room = max(0, last - first + 1 - self.chains_each)
            begin = first + int(torch.randint(room + 1, (1,), generator=generator))
            starts.append(torch.arange(begin, begin + self.chains_each))
            ends.append(min(sequence.length, begin + self.chains_each + self.ahead + 1))
        width = max(ends)
        tokens = torch.zeros(len(picked), width, dtype=torch.long)
        shape = self.corpus.features(picked[0]).shape[1:]
        features = torch.zeros(len(picked), width, *shape, dtype=torch.bfloat16)
        for i, (sequence, end) in enumerate(zip(picked, ends, strict=True)):
            tokens[i, :end] = self.corpus.tokens(sequence)[:end]
            features[i, :end] = self.corpus.features(sequence)[:end]
        return Batch(tokens, features, torch.stack(starts), torch.tensor(ends))
