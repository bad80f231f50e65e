"""Which cache page belongs to which sequence.

A sequence's block table lists its pages in order; token i lies in page i // block_size. Pages are taken as the sequence
grows and given back when it ends or is cut short. Nothing here touches tensors.
"""

from __future__ import annotations


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

    def can_grow(self, block_table: list[int], num_tokens: int) -> bool:
        """True if the sequence can be made to hold `num_tokens` tokens."""
        return self.blocks_for(num_tokens) - len(block_table) <= self.num_free

    def grow(self, block_table: list[int], num_tokens: int) -> None:
        """Append free pages until the table holds `num_tokens` tokens; the caller has asked `can_grow`."""
        missing = self.blocks_for(num_tokens) - len(block_table)
        assert missing <= self.num_free, "grow() without can_grow()"
        block_table.extend(self._free.pop() for _ in range(missing))

    def shrink(self, block_table: list[int], num_tokens: int) -> None:
        """Give back the pages beyond the first `num_tokens` tokens (0 gives back all): rollback and release."""
        keep = self.blocks_for(num_tokens)
        self._free.extend(reversed(block_table[keep:]))
        del block_table[keep:]
