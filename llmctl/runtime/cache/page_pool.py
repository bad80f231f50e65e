"""The pages of one group: who holds each, and which of those nobody holds still have a text worth keeping."""

from __future__ import annotations

from collections import OrderedDict

from llmctl.runtime.cache.prefix_tree import PrefixNode


class PagePool:
    """Pages 0 … num_pages − 1. A page has a count of holders; without any it is free, but keeps its text until it is needed.

    group: the pool's number in the nodes. evictions: texts given up so far.
    """

    def __init__(self, group: int, num_pages: int) -> None:
        self.group, self.num_pages, self.evictions = group, num_pages, 0
        self._holders = [0] * num_pages
        self._nodes: list[PrefixNode | None] = [None] * num_pages
        # The end is taken first: pages just given back are in memory still.
        self._empty = list(range(num_pages))[::-1]
        self._remembered: OrderedDict[int, None] = OrderedDict()  # free pages with a text, the least recently used first

    @property
    def num_free(self) -> int:
        """Pages no sequence holds."""
        return len(self._empty) + len(self._remembered)

    @property
    def num_remembered(self) -> int:
        """Those of them that still have a text."""
        return len(self._remembered)

    def take(self) -> int:
        """A page for one holder to write; the least recently used text goes first where no page is empty."""
        if self._empty:
            page = self._empty.pop()
        else:
            page, _ = self._remembered.popitem(last=False)
            self._forget(page)
            self.evictions += 1
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One holder more, of a page that has some or a text."""
        self._remembered.pop(page, None)
        self._holders[page] += 1

    def drop(self, page: int) -> None:
        """One holder less."""
        self._holders[page] -= 1
        assert self._holders[page] >= 0, "a page was given back twice"
        if self._holders[page]:
            return
        if self._nodes[page] is None:
            self._empty.append(page)
        else:
            self._remembered[page] = None

    def is_sole(self, page: int) -> bool:
        """True if dropping the page once makes it free."""
        return self._holders[page] == 1

    def holders(self, page: int) -> int:
        """How many hold it."""
        return self._holders[page]

    def is_known(self, page: int) -> bool:
        """True if it can be found by its text."""
        return self._nodes[page] is not None

    def may_write(self, page: int) -> bool:
        """True if its only holder may change it: nobody else reads it, now or through the tree."""
        return self._holders[page] == 1 and self._nodes[page] is None

    def let_write(self, page: int, wanted: int = 1) -> bool:
        """Where fewer pages are free than wanted, give up this one's text, so that its only holder may change it; False if it
        has others."""
        if self.num_free >= wanted or not self.is_sole(page):
            return False
        self._forget(page)
        self.evictions += 1
        return True

    def remember(self, page: int, node: PrefixNode) -> None:
        """Let the node's tokens be found here, unless they have a page in this group already."""
        if self.group not in node.pages and self._nodes[page] is None:
            node.pages[self.group] = page
            self._nodes[page] = node

    def _forget(self, page: int) -> None:
        node = self._nodes[page]
        assert node is not None, "an empty page among those with a text"
        self._nodes[page] = None
        del node.pages[self.group]
        node.prune()
