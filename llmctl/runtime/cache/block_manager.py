"""Which cache page belongs to which sequence.

A sequence has a block table in every group of layers; it lists its pages in order, token i lies in page i // block_size. Pages
are taken as the sequence grows and given back when it ends or is cut short, and in a group with a window as soon as no query
can see them any more. Sequences may share pages: those forked from each other, and those that begin with the same text. A page
is never written while somebody else may read it: its writer takes a copy first. Nothing here touches tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from llmctl.runtime.cache.block_table import GONE, BlockTable
from llmctl.runtime.cache.memory import BLOCK_SIZE, CachePlan, LayerGroup
from llmctl.runtime.cache.page_pool import PagePool
from llmctl.runtime.cache.prefix_tree import PrefixNode


class SequencePages:
    """The pages of one sequence. tables: group by group. node: the text of its first `num_remembered` pages in the tree.
    num_dropped: tokens that groups without a window have lost from their beginning, so that a later one at position p lies at
    p − num_dropped there; the first `num_fixed` tokens can then only be taken back all at once."""

    def __init__(self, groups: Sequence[LayerGroup], root: PrefixNode) -> None:
        self.tables = [BlockTable(anchors=group.anchor_pages) for group in groups]
        self.node, self.num_remembered = root, 0
        self.num_dropped = self.num_fixed = 0
        root.pins += 1

    def cached(self, window: int | None, num_tokens: int) -> int:
        """Tokens before number `num_tokens` that a group's table counts."""
        return num_tokens if window is not None else num_tokens - self.num_dropped

    def move_to(self, node: PrefixNode, num_remembered: int) -> None:
        """Follow the text to another node."""
        node.pins += 1
        self.node.pins -= 1
        self.node.prune()
        self.node, self.num_remembered = node, num_remembered

    def __len__(self) -> int:
        """Pages held, in all groups."""
        return sum(len(table.held) for table in self.tables)


@dataclass(frozen=True)
class PageCopy:
    """A page of a group that has to be copied before the next step."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class GroupStats:
    """A group's pool: its pages, those that sequences hold (a shared one once), tokens in them, pages of nobody whose text can
    still be found, and texts given up so far."""

    pages: int
    pages_held: int
    tokens_held: int
    pages_remembered: int
    evictions: int

    @property
    def waste(self) -> float:
        """Share of the pages held that has no token in it."""
        return 1 - self.tokens_held / (self.pages_held * BLOCK_SIZE) if self.pages_held else 0.0


@dataclass(frozen=True)
class PageUse:
    """A page in a sequence's table. index: its number there. holders: sequences that have it. is_known: a text that begins alike
    would find it."""

    index: int
    page: int
    holders: int
    is_known: bool


@dataclass
class ReuseStats:
    """Since the start: prompts looked up, their tokens, and how many of these were found."""

    lookups: int = 0
    tokens: int = 0
    found_tokens: int = 0


class BlockManager:
    """Pools of pages, one a group of layers.

    reuse_tokens: texts are found in multiples of so many tokens; None keeps no texts at all.
    """

    def __init__(self, plan: CachePlan, reuse_tokens: int | None = BLOCK_SIZE) -> None:
        self.plan, self.demand, self.reuse_tokens = plan, plan.demand, reuse_tokens
        self.windows = [group.window for group in plan.groups]
        self._pools = [PagePool(i, count) for i, count in enumerate(plan.num_pages)]
        self._root = PrefixNode()
        self._copies: list[PageCopy] = []
        self.reuse = ReuseStats()

    def new_pages(self) -> SequencePages:
        """For a sequence that has none yet."""
        return SequencePages(self.plan.groups, self._root)

    @property
    def num_free(self) -> int:
        """Pages no sequence holds, in all groups."""
        return sum(pool.num_free for pool in self._pools)

    def stats(self, sequences: Iterable[tuple[SequencePages, int]]) -> list[GroupStats]:
        """Of every group. sequences: all that hold pages, and how many of their tokens are computed."""
        filled: list[dict[int, int]] = [{} for _ in self._pools]
        for pages, num_computed in sequences:
            for table, counts, window in zip(pages.tables, filled, self.windows, strict=True):
                for index, page in zip(table.places, table.held, strict=True):
                    tokens = min(max(pages.cached(window, num_computed) - index * BLOCK_SIZE, 0), BLOCK_SIZE)
                    counts[page] = max(counts.get(page, 0), tokens)
        return [
            GroupStats(p.num_pages, p.num_pages - p.num_free, sum(counts.values()), p.num_remembered, p.evictions)
            for p, counts in zip(self._pools, filled, strict=True)
        ]

    def uses(self, pages: SequencePages) -> list[list[PageUse]]:
        """Group by group the pages that a sequence holds, in order."""
        return [
            [PageUse(i, page, pool.holders(page), pool.is_known(page)) for i, page in zip(table.places, table.held, strict=True)]
            for pool, table in zip(self._pools, pages.tables, strict=True)
        ]

    def blocks_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill."""
        return -(-num_tokens // BLOCK_SIZE)

    def can_grow(self, pages: SequencePages, num_computed: int, num_tokens: int) -> bool:
        """True if there are pages for a step that brings the sequence from `num_computed` to `num_tokens` tokens."""
        for pool, table, first, begin, end in self._each(pages, num_computed, num_tokens):
            given_back = sum(pool.is_sole(page) for page in table.before(first))
            copied = self._is_shared(pool, table, begin) and not pool.is_sole(table[begin // BLOCK_SIZE])
            if self.blocks_for(end) - len(table) + copied > pool.num_free + given_back:
                return False
        return True

    def can_admit(self, pages: SequencePages, num_tokens: int) -> bool:
        """True if a sequence that has these pages can be brought to `num_tokens` tokens beside the others, step by step."""
        for pool, table, window in zip(self._pools, pages.tables, self.windows, strict=True):
            wanted = self.blocks_for(num_tokens)
            if window is not None:
                chunk = self.blocks_for(min(self.demand.prefill_chunk, num_tokens))
                wanted = min(wanted, self.demand.sequence_pages(window, table.anchors) + chunk + table.first)
            if wanted - len(table) > pool.num_free:
                return False
        return True

    def grow(self, pages: SequencePages, num_computed: int, num_tokens: int) -> None:
        """Take the pages for such a step, and give back those that nobody can see in it; the caller has asked `can_grow`. What
        `take_copies` then returns must be copied before the step."""
        for pool, table, first, begin, end in self._each(pages, num_computed, num_tokens):
            for page in table.drop_before(first):
                pool.drop(page)
            missing, index = self.blocks_for(end) - len(table), begin // BLOCK_SIZE
            if self._is_shared(pool, table, begin) and not pool.let_write(table[index], missing + 1):
                self._copy_page(pool, table, index)
            assert missing <= pool.num_free, "grow() without can_grow()"
            table.extend(pool.take() for _ in range(missing))

    def _each(
        self, pages: SequencePages, num_computed: int, num_tokens: int
    ) -> Iterable[tuple[PagePool, BlockTable, int, int, int]]:
        """Every group's pool and table, the first page it keeps in such a step, and the step's two numbers as it counts."""
        for pool, table, window in zip(self._pools, pages.tables, self.windows, strict=True):
            first = self.demand.first_kept(window, num_computed, num_tokens) // BLOCK_SIZE
            yield pool, table, first, pages.cached(window, num_computed), pages.cached(window, num_tokens)

    @staticmethod
    def _is_shared(pool: PagePool, table: BlockTable, num_computed: int) -> bool:
        """True if the page that the next token goes to has others who read it."""
        index, offset = divmod(num_computed, BLOCK_SIZE)
        return index < len(table) and offset > 0 and not pool.may_write(table[index])

    def _copy_page(self, pool: PagePool, table: BlockTable, index: int) -> None:
        source, target = table[index], pool.take()
        self._copies.append(PageCopy(pool.group, source, target))
        table.replace(index, target)
        pool.drop(source)

    def take_copies(self) -> list[PageCopy]:
        """The copies that have come up, in the order in which they are to be done."""
        copies, self._copies = self._copies, []
        return copies

    def rewind(self, pages: SequencePages, num_tokens: int) -> int:
        """Take back all but the first `num_tokens` tokens. Returns how many are left: none where a window has lost what the
        next one would have to see, or where they end in what was compressed."""
        for table, window in zip(pages.tables, self.windows, strict=True):
            seen = 0 if window is None else max(0, num_tokens - window + 1)
            if seen // BLOCK_SIZE < table.first and num_tokens > 0:
                num_tokens = 0
        if num_tokens < pages.num_fixed:
            num_tokens = pages.num_fixed = pages.num_dropped = 0
        for pool, table, window in zip(self._pools, pages.tables, self.windows, strict=True):
            keep = self.blocks_for(pages.cached(window, num_tokens))
            for page in reversed(table.cut(keep)):  # the end of a text is given up before its beginning
                pool.drop(page)
        node, count = pages.node, pages.num_remembered
        while count * BLOCK_SIZE > num_tokens and node.parent is not None:
            node, count = node.parent, count - 1
        pages.move_to(node, count)
        return num_tokens

    def release(self, pages: SequencePages) -> None:
        """Give everything back."""
        self.rewind(pages, 0)

    def fork(self, pages: SequencePages) -> SequencePages:
        """Another sequence with the same tokens so far, on the same pages."""
        twin = self.new_pages()
        for pool, table, copy in zip(self._pools, pages.tables, twin.tables, strict=True):
            for page in table.held:
                pool.hold(page)
            copy.extend(table.array.tolist())
            copy.first = table.first
        twin.num_dropped, twin.num_fixed = pages.num_dropped, pages.num_fixed
        twin.move_to(pages.node, pages.num_remembered)
        return twin

    def remember(self, pages: SequencePages, token_ids: list[int], num_computed: int) -> None:
        """Let the sequence's full pages be found by texts that begin with the same tokens. Those of a compressed text are not,
        and what follows it has other keys and values than after the whole of it."""
        if self.reuse_tokens is None or pages.num_fixed:
            return
        while (pages.num_remembered + 1) * BLOCK_SIZE <= num_computed:
            index = pages.num_remembered
            node = pages.node.child(tuple(token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]))
            for pool, table in zip(self._pools, pages.tables, strict=True):
                if table[index] != GONE:
                    pool.remember(table[index], node)
            pages.move_to(node, index + 1)

    def remember_rest(self, pages: SequencePages, token_ids: list[int], num_computed: int) -> None:
        """The same of its last page, which is not full: the sequence is about to be released and writes no more."""
        index = pages.num_remembered
        rest = tuple(token_ids[index * BLOCK_SIZE : num_computed])
        if self.reuse_tokens != BLOCK_SIZE or pages.num_fixed or not 0 < len(rest) < BLOCK_SIZE:
            return
        node = pages.node.child(rest)
        for pool, table in zip(self._pools, pages.tables, strict=True):
            pool.remember(table[index], node)
        node.prune()

    def find_prefix(self, pages: SequencePages, token_ids: list[int], *, beyond_windows: bool = False) -> int:
        """Take what is cached of a text for a sequence without pages; returns how many tokens that is, never all of them.

        A prefix counts only where every group has what the token after it sees: all of it, or its window. beyond_windows: take
        also what is left of the pages before the window, from which shorter texts can go on.
        """
        if self.reuse_tokens is None:
            return 0
        nodes = self._root.find(token_ids, BLOCK_SIZE, (len(token_ids) - 1) // BLOCK_SIZE)
        count = self._longest(nodes)
        for pool, table, window in zip(self._pools, pages.tables, self.windows, strict=True):
            first = 0 if window is None else max(0, count * BLOCK_SIZE - window + 1) // BLOCK_SIZE
            while beyond_windows and first and pool.group in nodes[first - 1].pages:
                first -= 1
            found = enumerate(nodes[:count])
            table.reach([node.pages[pool.group] if i >= first or i < table.anchors else GONE for i, node in found], first)
            for page in table.held:
                pool.hold(page)
        if count:
            pages.move_to(nodes[count - 1], count)
        return count * BLOCK_SIZE

    def find_rest(self, pages: SequencePages, token_ids: list[int]) -> int:
        """After `find_prefix`: tokens more for which some page begins like the rest of the text; the sequence copies it before it
        writes to it. Never all that is left."""
        if self.reuse_tokens != BLOCK_SIZE:
            return 0
        begin = pages.num_remembered * BLOCK_SIZE
        node, count = pages.node.find_beginning(token_ids[begin : min(begin + BLOCK_SIZE, len(token_ids) - 1)], len(self._pools))
        for pool, table in zip(self._pools, pages.tables, strict=True):
            if count:
                pool.hold(node.pages[pool.group])
                table.extend([node.pages[pool.group]])
        return count

    def adopt(self, num_pages: int, firsts: list[int]) -> SequencePages | None:
        """Pages for a text of so many that comes from elsewhere, in each group from the first one on that it has; None where they
        are not free."""
        pages = self.new_pages()
        every = zip(self._pools, self.plan.groups, firsts, strict=True)
        if any(group.held_pages(num_pages, first) > pool.num_free for pool, group, first in every):
            self.release(pages)
            return None
        for pool, table, first in zip(self._pools, pages.tables, firsts, strict=True):
            table.reach([pool.take() if i >= first or i < table.anchors else GONE for i in range(num_pages)], first)
        return pages

    def count_lookup(self, num_tokens: int, num_found: int) -> None:
        """Put a prompt that `find_prefix` was asked for into the statistics."""
        self.reuse.lookups += 1
        self.reuse.tokens += num_tokens
        self.reuse.found_tokens += num_found

    def _longest(self, nodes: list[PrefixNode]) -> int:
        """Pages of the longest prefix that can be used."""
        assert self.reuse_tokens is not None
        runs = [0] * len(self._pools)  # pages in a row, up to here, that each group has
        best = 0
        for count, node in enumerate(nodes, 1):
            runs = [run + 1 if group in node.pages else 0 for group, run in enumerate(runs)]
            seen = (count if w is None else count - max(0, count * BLOCK_SIZE - w + 1) // BLOCK_SIZE for w in self.windows)
            is_whole = count * BLOCK_SIZE % self.reuse_tokens == 0 and self._has_anchors(nodes)
            if is_whole and all(r >= s for r, s in zip(runs, seen, strict=True)):
                best = count
        return best

    def _has_anchors(self, nodes: list[PrefixNode]) -> bool:
        """Whether every group finds the pages there that it never gives up."""
        return all(
            number in node.pages for number, group in enumerate(self.plan.groups) for node in nodes[: group.anchor_pages]
        )

    def can_compress(self, pages: SequencePages, num_kept: int) -> bool:
        """True if there are pages for `compress`."""
        return all(
            sum(not pool.is_sole(page) for page in table.array[: self.blocks_for(num_kept)].tolist()) <= pool.num_free
            for pool, table in self._whole(pages)
        )

    def compress(
        self, pages: SequencePages, num_tokens: int, num_kept: int, move: Callable[[list[np.ndarray | None]], None]
    ) -> None:
        """Keep `num_kept` of a sequence's `num_tokens` tokens in the groups without a window; the caller has asked
        `can_compress`. move: called with their old tables (None for the other groups) when the new ones stand and both can be
        read and written; a place of the new table is never behind that of the old one with the same page.

        Pages that others read, or that texts are found by, are left to them while there are free ones.
        """
        before: list[np.ndarray | None] = [None] * len(self._pools)
        given_back: list[tuple[PagePool, int]] = []
        for pool, table in self._whole(pages):
            old = before[pool.group] = table.array.copy()
            given_back += [(pool, page) for page in reversed(table.cut(self.blocks_for(num_kept)))]
            given_back += [(pool, page) for page in self._own_pages(pool, table)]
            assert len(old) >= len(table), "a compressed text is longer than it was"
        move(before)
        for pool, page in given_back:  # not before: they were read until now
            pool.drop(page)
        pages.num_dropped, pages.num_fixed = num_tokens - num_kept, num_tokens

    @staticmethod
    def _own_pages(pool: PagePool, table: BlockTable) -> list[int]:
        """Replace the pages of a table that its sequence may not write; returns these. Those with other holders come first: for
        them there must be free pages, while a text can be given up."""
        places = sorted(range(len(table)), key=lambda place: pool.is_sole(table[place]))
        replaced = []
        for place in places:
            page = table[place]
            if not pool.may_write(page) and not pool.let_write(page):
                table.replace(place, pool.take())
                replaced.append(page)
        return replaced

    def _whole(self, pages: SequencePages) -> Iterable[tuple[PagePool, BlockTable]]:
        """Pools and tables of the groups without a window."""
        every = zip(self._pools, pages.tables, self.windows, strict=True)
        return ((pool, table) for pool, table, window in every if window is None)
