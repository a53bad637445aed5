"""The training text: the target's own answers with its states, in shards on disk.

A shard is one safetensors file: ``tokens`` [N] int32, ``starts`` [n + 1] int64 (sequence i is ``tokens[starts[i]:
starts[i + 1]]``), ``prompts`` [n] int32 (length of each prompt), ``greedy`` [n] uint8, ``features`` [N, layers, D]
bfloat16. Shards are written whole and renamed into place, so a kill costs the open ones alone; what is in a shard is
fixed by the seed, whenever it was written. Memory is bounded by the few shards that are open at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from recipes.distil.generation import Generator, Job, Written
from recipes.distil.target import ChatTokenizer

SHARD_SEQUENCES = 128


class CorpusError(ValueError):
    """A corpus that cannot be made or used as asked, and what to change."""


@dataclass(frozen=True, slots=True)
class CorpusPlan:
    """What text is to be written."""

    seed: int
    max_new: int = 320
    """Longest answer, in tokens."""
    max_prompt: int = 128
    sampled_share: float = 0.75
    """Share of the user turns that the target writes; the grammar's are well-formed, but of few patterns."""
    greedy_share: float = 0.6
    """The draft is measured on greedy answers; the rest is sampled, to meet the target's second choices too."""
    temperatures: tuple[float, ...] = (0.7, 0.8, 0.9, 1.0)

    def temperature(self, index: int) -> float:
        """Temperature of sequence ``index``."""
        if (index * 0.6180339887498949) % 1.0 < self.greedy_share:
            return 0.0
        return self.temperatures[index % len(self.temperatures)]


@dataclass(frozen=True, slots=True)
class CorpusSequence:
    """One sequence of the corpus, as it lies on disk."""

    shard: int
    start: int
    end: int
    prompt: int
    greedy: bool

    @property
    def length(self) -> int:
        """Tokens, prompt included."""
        return self.end - self.start


def jobs(texts: Sequence[str], tokenizer: ChatTokenizer, plan: CorpusPlan) -> list[Job]:
    """One job for each user turn that fits."""
    encoded = (tokenizer.prompt(text) for text in texts)
    fitting = [tuple(tokens) for tokens in encoded if len(tokens) <= plan.max_prompt]
    return [Job(i, tokens, plan.max_new, plan.temperature(i), plan.seed) for i, tokens in enumerate(fitting)]


def shard_path(folder: Path, number: int) -> Path:
    """Where shard ``number`` lies."""
    return folder / f"shard-{number:05d}.safetensors"


def write(folder: Path, generator: Generator, todo: Sequence[Job], progress: Callable[[int, int], None]) -> None:
    """Write the shards that are not there yet; ``progress(sequences, tokens)`` is called for each finished sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [job for job in todo if not shard_path(folder, job.index // SHARD_SEQUENCES).exists()]
    expected: dict[int, int] = {}
    for job in missing:
        expected[job.index // SHARD_SEQUENCES] = expected.get(job.index // SHARD_SEQUENCES, 0) + 1
    open_shards: dict[int, list[Written]] = {}
    for written in generator.write(missing):
        number = written.job.index // SHARD_SEQUENCES
        open_shards.setdefault(number, []).append(written)
        progress(1, len(written.tokens))
        if len(open_shards[number]) == expected[number]:
            _save(shard_path(folder, number), open_shards.pop(number))


def _save(path: Path, sequences: list[Written]) -> None:
    """The last token of a sequence has no state; it is left out."""
    sequences.sort(key=lambda written: written.job.index)
    lengths = torch.tensor([0] + [len(written.tokens) - 1 for written in sequences])
    features = [written.features for written in sequences if written.features is not None]
    tensors = {
        "tokens": torch.cat([torch.tensor(written.tokens[:-1], dtype=torch.int32) for written in sequences]),
        "starts": lengths.cumsum(0),
        "prompts": torch.tensor([len(written.job.tokens) for written in sequences], dtype=torch.int32),
        "greedy": torch.tensor([written.job.temperature == 0 for written in sequences], dtype=torch.uint8),
        "features": torch.cat(features),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


class Corpus:
    """Shards opened for reading; states stay on disk until they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises CorpusError where there is no shard."""
        self.paths = sorted(folder.glob("shard-*.safetensors"))
        if not self.paths:
            raise CorpusError(f"there is no {folder.name} text: ask for more prompts")
        self._files: list[Any] = [safe_open(path, framework="pt") for path in self.paths]
        self.sequences = [sequence for i in range(len(self._files)) for sequence in self._index(i)]

    def _index(self, shard: int) -> Iterator[CorpusSequence]:
        file = self._files[shard]
        starts, prompts = file.get_tensor("starts").tolist(), file.get_tensor("prompts").tolist()
        greedy = file.get_tensor("greedy").tolist()
        for i, prompt in enumerate(prompts):
            yield CorpusSequence(shard, starts[i], starts[i + 1], prompt, bool(greedy[i]))

    def tokens(self, sequence: CorpusSequence) -> Tensor:
        """[length] int64."""
        piece: Tensor = self._files[sequence.shard].get_slice("tokens")[sequence.start : sequence.end]
        return piece.long()

    def features(self, sequence: CorpusSequence) -> Tensor:
        """[length, layers, D] bfloat16."""
        piece: Tensor = self._files[sequence.shard].get_slice("features")[sequence.start : sequence.end]
        return piece

    def token_counts(self, vocabulary_size: int) -> Tensor:
        """How often each token occurs, [V] int64."""
        counts = torch.zeros(vocabulary_size, dtype=torch.long)
        for file in self._files:
            counts += torch.bincount(file.get_tensor("tokens").long(), minlength=vocabulary_size)
        return counts

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(sequence.length for sequence in self.sequences)

    def fingerprint(self) -> str:
        """Of the tokens, in order."""
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(file.get_tensor("tokens").numpy().tobytes())
        return digest.hexdigest()
