"""A sequence's pages in one group of layers, in the order of its tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

GONE = -1
"""Stands in a table for a page that was given back from its beginning."""


class BlockTable:
    """A sequence's pages, in order. They lie in an array with room to grow, because a step is described by one, and to make it
    of a list would cost more with every token.

    first: the first page that is held; those before it are GONE, but for the first `anchors` pages, which never are.
    """

    def __init__(self, pages: Iterable[int] = (), anchors: int = 0) -> None:
        self._room, self._length, self.first, self.anchors = np.empty(16, np.int64), 0, 0, anchors
        self.extend(pages)

    @property
    def array(self) -> np.ndarray:
        """The pages, int64; good until the table changes."""
        return self._room[: self._length]

    @property
    def places(self) -> list[int]:
        """Where in the table the pages are that are not gone."""
        return [*range(min(self.anchors, self.first, self._length)), *range(self.first, self._length)]

    @property
    def held(self) -> list[int]:
        """The pages that are not gone."""
        return self.array[: min(self.anchors, self.first)].tolist() + self.array[self.first :].tolist()

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

    def replace(self, index: int, page: int) -> None:
        """Put another page there."""
        self.array[index] = page

    def cut(self, length: int) -> list[int]:
        """Keep the first `length` pages; returns the others, but for those gone."""
        removed: list[int] = [self[place] for place in self.places if place >= length]
        self._length = min(self._length, length)
        self.first = min(self.first, self._length)
        return removed

    def before(self, index: int) -> list[int]:
        """The pages before `index` that are neither gone nor anchors."""
        pages: list[int] = self.array[max(self.first, self.anchors) : index].tolist()
        return pages

    def drop_before(self, index: int) -> list[int]:
        """These pages are gone; returns them."""
        dropped = self.before(index)
        if dropped:
            self.first = min(index, self._length)
            self.array[self.first - len(dropped) : self.first] = GONE
        return dropped

    def reach(self, pages: list[int], first: int) -> None:
        """Of an empty table: its pages, of which those before `first` that are no anchors may be GONE."""
        self.extend(pages)
        self.first = first if first > self.anchors else 0
