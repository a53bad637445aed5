"""Where keys and values live: blocks of the cache, taken when a request is admitted and given back when it ends."""

from __future__ import annotations

from services.model.forward import BLOCK_SIZE


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


class BlockManager:
    """A free list. What a request may need at most is reserved at once: nothing runs out on the way."""

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, tokens: int) -> list[int] | None:
        """Blocks for so many tokens, or None if there are too few."""
        count = blocks_for(tokens)
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        """Give blocks back; empties the list, so that a second release does nothing."""
        self._free.extend(reversed(blocks))
        blocks.clear()
        assert len(self._free) <= self.total, "a block was given back twice"
