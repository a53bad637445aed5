"""The rows of a batch one by one: token, position, and the slots of the cache that each sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from services.model.forward import BLOCK_SIZE, SequenceRows


@dataclass(frozen=True, slots=True)
class Row:
    token: int
    position: int
    seen: torch.Tensor
    """Slots that the row attends to, in order of position, its own last; slot = block * BLOCK_SIZE + offset."""
    wants_logits: bool


def plan(batch: Sequence[SequenceRows], num_blocks: int, vocabulary_size: int, context_limit: int) -> list[Row]:
    """All rows of a batch, in order. Raises ValueError for one that breaks the rules of SequenceRows."""
    return [row for rows in batch for row in _rows(rows, num_blocks, vocabulary_size, context_limit)]


def _rows(rows: SequenceRows, num_blocks: int, vocabulary_size: int, context_limit: int) -> list[Row]:
    count = len(rows.tokens)
    slots = _slots(rows, num_blocks)
    if not 0 <= rows.logits <= count:
        raise ValueError(f"logits of {rows.logits} rows are wanted, there are {count}")
    if any(not 0 <= token < vocabulary_size for token in rows.tokens):
        raise ValueError(f"a token is outside the vocabulary of {vocabulary_size}")
    first_wanted = count - rows.logits
    planned = []
    walk = _chain(slots, rows) if rows.parents is None else _tree(slots, rows, rows.parents)
    for i, (depth, seen) in enumerate(walk):
        if rows.base + depth >= context_limit:
            raise ValueError(f"position {rows.base + depth} is outside the context of {context_limit}")
        planned.append(Row(rows.tokens[i], rows.base + depth, seen, i >= first_wanted))
    return planned


def _chain(slots: torch.Tensor, rows: SequenceRows) -> Iterator[tuple[int, torch.Tensor]]:
    """For each row its depth and the slots that it sees: a prefix of the places."""
    for i in range(len(rows.tokens)):
        yield i, slots[: rows.base + i + 1]


def _tree(slots: torch.Tensor, rows: SequenceRows, parents: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """For each row its depth and the slots that it sees: the cache, its ancestors from the root on, itself."""
    if len(parents) != len(rows.tokens):
        raise ValueError(f"{len(parents)} parents for {len(rows.tokens)} rows")
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"row {i} follows row {parent}, which is not before it")
        paths.append([*(paths[parent] if parent >= 0 else []), i])
        yield len(paths[i]) - 1, torch.cat([slots[: rows.base], slots[[rows.base + row for row in paths[i]]]])


def _slots(rows: SequenceRows, num_blocks: int) -> torch.Tensor:
    """The slot of each place from 0 to the last row's."""
    places = rows.base + len(rows.tokens)
    if rows.base < 0 or places > len(rows.blocks) * BLOCK_SIZE:
        raise ValueError(f"rows at places {rows.base} .. {places - 1} do not fit into {len(rows.blocks)} blocks")
    blocks = torch.tensor(list(rows.blocks), dtype=torch.long)
    if any(not 0 <= block < num_blocks for block in rows.blocks):
        raise ValueError(f"a block is outside the cache of {num_blocks}")
    return (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(-1)[:places]
