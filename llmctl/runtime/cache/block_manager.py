"""Which cache page belongs to which sequence.

A sequence's block table lists its pages in order; token i lies in page i // block_size. Pages are taken as the sequence
grows and given back when it ends or is cut short. Nothing here touches tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class BlockTable:
    """A sequence's pages, in order. They lie in an array with room to grow, because a step is described by one, and to make it
    of a list would cost more with every token."""

    def __init__(self, pages: Iterable[int] = ()) -> None:
        self._room, self._length = np.empty(16, np.int64), 0
        self.extend(pages)

    @property
    def array(self) -> np.ndarray:
        """The pages, int64; good until the table is cut."""
        return self._room[: self._length]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return int(self.array[index])

    def extend(self, pages: Iterable[int]) -> None:
        """Append pages."""
        added = list(pages)
        end = self._length + len(added)
        if end > len(self._room):
            self._room = np.concatenate([self._room, np.empty(max(end, len(self._room)), np.int64)])
        self._room[self._length : end] = added
        self._length = end

    def cut(self, length: int) -> list[int]:
        """Keep the first `length` pages; returns the others."""
        removed: list[int] = self.array[length:].tolist()
        self._length -= len(removed)
        return removed


class BlockManager:
    """A pool of `num_blocks` pages of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks))[::-1]  # the end is taken first: pages just given back are in memory still

    @property
    def num_free(self) -> int:
        """Pages no sequence holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def can_grow(self, block_table: BlockTable, num_tokens: int) -> bool:
        """True if the sequence can be made to hold `num_tokens` tokens."""
        return self.blocks_for(num_tokens) - len(block_table) <= self.num_free

    def grow(self, block_table: BlockTable, num_tokens: int) -> None:
        """Append free pages until the table holds `num_tokens` tokens; the caller has asked `can_grow`."""
        missing = self.blocks_for(num_tokens) - len(block_table)
        assert missing <= self.num_free, "grow() without can_grow()"
        block_table.extend(self._free.pop() for _ in range(missing))

    def shrink(self, block_table: BlockTable, num_tokens: int) -> None:
        """Give back the pages beyond the first `num_tokens` tokens (0 gives back all): rollback and release."""
        keep = self.blocks_for(num_tokens)
        self._free.extend(reversed(block_table.cut(keep)))
