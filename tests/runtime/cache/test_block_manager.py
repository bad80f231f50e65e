"""Pages are handed out once, given back exactly, shared without being changed, and never lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmctl.runtime.cache.block_manager import BlockManager, GroupStats, SequencePages
from llmctl.runtime.cache.block_table import GONE, BlockTable
from llmctl.runtime.cache.memory import Demand, LayerShape, plan_cache


def manager(num_pages: int | tuple[int, ...], *windows: int | None, draft: int = 0) -> BlockManager:
    """One group a window, all with as many pages or each with its own."""
    layers = [LayerShape(1, 1, window) for window in windows or (None,)]
    plan = plan_cache(layers, "f32", Demand(4096, longest_draft=draft))
    pages = (num_pages,) * len(plan.groups) if isinstance(num_pages, int) else num_pages
    return BlockManager(type(plan)(plan.demand, plan.groups, pages, plan.nbytes))


class Text:
    """A sequence as the manager sees it: pages, ids, how many are computed."""

    def __init__(self, blocks: BlockManager, ids: list[int], *, rest: bool = False) -> None:
        self.blocks, self.ids = blocks, ids
        self.pages = blocks.new_pages()
        self.computed = blocks.find_prefix(self.pages, ids)
        if rest:
            self.computed += blocks.find_rest(self.pages, ids)

    def end(self) -> None:
        """Its last page too may be found."""
        self.blocks.remember_rest(self.pages, self.ids, self.computed)
        self.blocks.release(self.pages)

    def run(self, count: int) -> bool:
        """A step of `count` tokens; False if there is no room."""
        end = self.computed + count
        if not self.blocks.can_grow(self.pages, self.computed, end):
            return False
        self.blocks.grow(self.pages, self.computed, end)
        self.computed = end
        self.blocks.remember(self.pages, self.ids, end)
        return True


def stats(blocks: BlockManager, *texts: Text) -> GroupStats:
    """Of the first group."""
    return blocks.stats((text.pages, text.computed) for text in texts)[0]


def table(pages: SequencePages, group: int = 0) -> list[int]:
    return pages.tables[group].array.tolist()


def test_grow_takes_only_missing_pages_and_rewind_returns_the_tail() -> None:
    blocks = manager(5)
    pages = blocks.new_pages()
    blocks.grow(pages, 0, 16)
    assert len(pages) == 1
    blocks.grow(pages, 16, 17)
    assert (len(pages), blocks.num_free) == (2, 3)
    blocks.grow(pages, 17, 32)
    assert (len(pages), blocks.num_free) == (2, 3)
    assert blocks.rewind(pages, 16) == 16
    assert (len(pages), blocks.num_free) == (1, 4)
    blocks.release(pages)
    assert (len(pages), blocks.num_free) == (0, 5)


def test_growing_past_the_pool_is_our_own_mistake() -> None:
    blocks = manager(1)
    assert not blocks.can_grow(blocks.new_pages(), 0, 17)
    with pytest.raises(AssertionError):
        blocks.grow(blocks.new_pages(), 0, 17)


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 8, 16, 17, 40])
@pytest.mark.parametrize("draft", [0, 3, 20])
@pytest.mark.parametrize("step", [1, 4, 33])
def test_a_window_keeps_what_is_seen_and_no_more(window: int, draft: int, step: int) -> None:
    blocks = manager(64, window, None, draft=draft)
    pages = blocks.new_pages()
    for computed in range(0, 400, step):
        blocks.grow(pages, computed, computed + step)
        held = pages.tables[0]
        first_seen = max(0, computed - window + 1)
        assert held.first <= first_seen // 16
        assert all(page != GONE for page in table(pages)[first_seen // 16 :])
        if step <= draft + 1:
            assert len(held.held) <= blocks.demand.sequence_pages(window)
        assert len(pages.tables[1].held) == -(-(computed + step) // 16)


@pytest.mark.parametrize("window", [8, 16, 50])
@pytest.mark.parametrize("step", [1, 4, 6])
def test_a_draft_can_be_taken_back_after_the_window_moved_on(window: int, step: int) -> None:
    """Verified in one step (6) or drafted one by one (1): up to five tokens go back, and what the next one sees is there."""
    blocks = manager(64, window, None, draft=5)
    pages, computed = blocks.new_pages(), 0
    for turn in range(200):
        blocks.grow(pages, computed, computed + step)
        computed += step
        if turn % 3 == 2:
            back = min(5, turn % 6, step * 3 - 1)
            assert blocks.rewind(pages, computed - back) == computed - back
            computed -= back
        seen = max(0, computed - window + 1) // 16
        assert pages.tables[0].first <= seen
        assert len(pages.tables[0]) == -(-computed // 16)


def test_taking_back_more_than_the_window_kept_leaves_nothing() -> None:
    blocks = manager(64, 16, None)
    pages = blocks.new_pages()
    for computed in range(100):
        blocks.grow(pages, computed, computed + 1)
    assert blocks.rewind(pages, 40) == 0
    assert (len(pages), blocks.num_free) == (0, 128)


# --- sharing ----------------------------------------------------------------------------------------------------------


def test_a_text_that_begins_alike_uses_the_same_pages() -> None:
    blocks = manager(20)
    first = Text(blocks, list(range(50)))
    first.run(50)
    second = Text(blocks, [*range(40), 99, 99])
    assert second.computed == 32
    assert table(second.pages) == table(first.pages)[:2]
    second.run(10)
    assert table(second.pages)[2] != table(first.pages)[2]
    assert stats(blocks).pages_held == 5


def test_what_pages_waste_counts_shared_ones_once() -> None:
    blocks = manager(20, 16)
    first = Text(blocks, list(range(50)))
    first.run(50)
    second = Text(blocks, [*range(40), 99, 99])
    second.run(10)
    found = stats(blocks, first, second)
    assert (found.pages_held, found.tokens_held) == (5, 50 + 10)
    assert found.waste == 1 - 60 / 80
    first.ids += [0]
    first.run(1)  # its window is in pages 2 and 3 from here on, the other's in pages 1 and 2
    assert stats(blocks, first, second).tokens_held == (16 + 3) + (16 + 10)


def test_all_of_a_text_is_never_found_because_one_token_has_to_run() -> None:
    blocks = manager(20)
    Text(blocks, list(range(32))).run(32)
    assert Text(blocks, list(range(32))).computed == 16
    assert Text(blocks, list(range(33))).computed == 32


def test_what_was_given_back_is_found_until_its_pages_are_needed() -> None:
    blocks = manager(6)
    old, new = Text(blocks, [1] * 33), Text(blocks, [2] * 33)
    old.run(33)
    new.run(33)
    blocks.release(old.pages)
    blocks.release(new.pages)
    assert (blocks.num_free, stats(blocks).pages_remembered) == (6, 4)
    other = Text(blocks, [3] * 48)
    other.run(48)  # two empty pages, and the end of the text that was used least recently
    assert Text(blocks, [2] * 33).computed == 32
    assert Text(blocks, [1] * 33).computed == 16
    assert stats(blocks).evictions == 1


def test_two_texts_of_one_hash_are_told_apart() -> None:
    """−1 and −2 have the same hash in Python, so tuples of them have too."""
    assert hash((-1,) * 16) == hash((-2,) * 16)
    blocks = manager(20)
    Text(blocks, [-1] * 33).run(33)
    assert Text(blocks, [-2] * 33).computed == 0


def test_a_page_after_another_beginning_is_not_taken_for_it() -> None:
    """The second pages have the same tokens."""
    blocks = manager(20)
    Text(blocks, [1] * 16 + [5] * 17).run(33)
    assert Text(blocks, [2] * 16 + [5] * 17).computed == 0


def test_a_prefix_is_used_only_where_the_window_is_there_as_well() -> None:
    blocks = manager((60, 14), None, 16)
    first, other = Text(blocks, list(range(200))), Text(blocks, list(range(1000, 1200)))
    while first.computed < 200:
        assert first.run(1)
    # Nobody holds the pages that the window gave back, but they have their text while they are not needed.
    early = Text(blocks, [*range(100), 999])
    assert early.computed == 96
    blocks.release(early.pages)
    while other.computed < 200:
        assert other.run(1)
    assert Text(blocks, [*range(100), 999]).computed == 0, "all of it is in the first group, its end in none but that"
    again = Text(blocks, [*range(200), 999])
    assert again.computed == 192, "the window's own pages are still held"
    assert again.pages.tables[1].first == (192 - 16 + 1) // 16
    assert table(again.pages, 1)[:11] == [GONE] * 11


def test_forks_share_their_pages_until_one_writes() -> None:
    blocks = manager(20)
    first = Text(blocks, list(range(40)))
    first.run(40)
    twin = blocks.fork(first.pages)
    assert table(twin) == table(first.pages)
    assert stats(blocks).pages_held == 3
    shared = table(twin)[2]
    blocks.grow(twin, 40, 41)
    (copy,) = blocks.take_copies()
    assert (copy.group, copy.source, copy.target) == (0, shared, table(twin)[2])
    assert table(twin)[:2] == table(first.pages)[:2]
    first.run(1)
    assert blocks.take_copies() == [], "the last one left writes in place"
    blocks.release(twin)
    blocks.release(first.pages)
    assert blocks.num_free == 20


def test_a_page_that_can_be_found_is_copied_before_it_changes() -> None:
    """Taken back into a full page and written again: whoever finds the old text must find it unchanged."""
    blocks = manager(20)
    text = Text(blocks, list(range(32)))
    text.run(32)
    found = table(text.pages)[1]
    text.computed = blocks.rewind(text.pages, 20)
    text.ids = [*range(20), *[77] * 30]
    text.run(12)
    (copy,) = blocks.take_copies()
    assert (copy.source, copy.target) == (found, table(text.pages)[1])
    assert table(Text(blocks, [*range(32), 0]).pages) == [table(text.pages)[0], found]
    assert table(Text(blocks, [*text.ids[:32], 0]).pages) == table(text.pages)


@pytest.mark.parametrize("windows", [(None,), (None, 16), (24, 5)])
def test_a_text_goes_on_where_another_ended(windows: tuple[int | None, ...]) -> None:
    """Within a page, which is copied: the old text may be gone on from again, and differently."""
    blocks = manager(20, *windows)
    first = Text(blocks, list(range(40)))
    first.run(39)
    first.end()
    for found, ending in ((39, [50]), (40, [60, 61])):
        text = Text(blocks, [*range(40), *ending], rest=True)
        assert text.computed == found
        text.run(len(text.ids) - found)
        assert len(blocks.take_copies()) == len(windows)
        text.end()
    assert Text(blocks, [*range(36), 7, 7, 7], rest=True).computed == 36
    assert Text(blocks, [*range(40), 60, 61, 9], rest=True).computed == 42
    assert Text(blocks, list(range(40)), rest=True).computed == 39, "one token has to run"


def test_a_page_begun_alike_is_found_where_texts_part() -> None:
    blocks = manager(20)
    first = Text(blocks, list(range(40)))
    first.run(40)
    assert Text(blocks, [*range(20), 99, 99], rest=True).computed == 20


def test_where_no_page_is_left_for_a_copy_the_old_text_is_given_up() -> None:
    blocks = manager(3)
    first = Text(blocks, list(range(40)))
    first.run(40)
    first.end()
    text = Text(blocks, list(range(48)), rest=True)
    assert text.computed == 40
    assert text.run(8)
    assert blocks.take_copies() == []
    blocks.release(text.pages)
    assert Text(blocks, [*range(47), 0, 0], rest=True).computed == 47


def test_a_compressed_text_is_not_gone_on_from() -> None:
    blocks = manager(20)
    text = Text(blocks, list(range(40)))
    text.run(40)
    blocks.release(text.pages)
    text = Text(blocks, [*range(100, 140)])
    text.run(40)
    blocks.compress(text.pages, 40, 20, lambda tables: None)
    text.end()
    assert Text(blocks, [*range(100, 141)], rest=True).computed == 32, "only what was there before"


MOVES = ["new", "run", "back", "fork", "end"]


@settings(max_examples=120)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(MOVES), st.integers(0, 60)), max_size=60),
    st.sampled_from([(None,), (None, 16), (24, None, 5)]),
)
def test_nothing_is_lost_and_nothing_that_is_shared_changes(moves, windows) -> None:
    """Three sequences over the same few texts, in any order. What every slot holds is followed: (token, position)."""
    blocks = manager(16, *windows, draft=4)
    stored = [dict[int, list]() for _ in windows]
    texts: list[Text | None] = [None] * 3
    for who, move, number in moves:
        text = texts[who]
        if move == "new":
            if text:
                text.end()
            texts[who] = Text(blocks, [number % 2] * (16 * (1 + number % 3)) + [number] * 100, rest=number % 4 > 0)
        elif text is None:
            continue
        elif move == "run":
            _run(blocks, text, 1 + number, stored)
        elif move == "back":
            text.computed = blocks.rewind(text.pages, max(0, text.computed - number % 7))
        elif move == "fork" and texts[number % 3] is None:
            twin = Text(manager(1), list(text.ids))
            twin.blocks, twin.pages, twin.computed = blocks, blocks.fork(text.pages), text.computed
            twin.ids[text.computed :] = [99] * (len(text.ids) - text.computed)
            texts[number % 3] = twin
        elif move == "end":
            text.end()
            texts[who] = None
        for each in texts:
            if each is not None:
                _check(blocks, each, stored)
    for text in texts:
        if text is not None:
            blocks.release(text.pages)
    assert blocks.num_free == 16 * len(windows)


def _run(blocks: BlockManager, text: Text, count: int, stored: list[dict[int, list]]) -> None:
    before = text.computed
    if before + count > len(text.ids) or not text.run(count):
        return
    for copy in blocks.take_copies():
        stored[copy.group][copy.target] = list(stored[copy.group][copy.source])
    for group, pages in enumerate(stored):
        for position in range(before, text.computed):
            page = text.pages.tables[group][position // 16]
            pages.setdefault(page, [None] * 16)[position % 16] = (text.ids[position], position)


def _check(blocks: BlockManager, text: Text, stored: list[dict[int, list]]) -> None:
    """What the next token sees is this text's."""
    for group, window in enumerate(blocks.windows):
        for position in range(0 if window is None else max(0, text.computed - window + 1), text.computed):
            page = text.pages.tables[group][position // 16]
            assert stored[group][page][position % 16] == (text.ids[position], position)


# --- tables -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.lists(st.integers(0, 99), max_size=40), st.integers(0, 60)), max_size=30))
def test_a_table_is_a_list_that_lies_in_an_array(moves: list[list[int] | int]) -> None:
    table, plain = BlockTable(), []
    for move in moves:
        if isinstance(move, list):
            table.extend(move)
            plain += move
        else:
            assert table.cut(move) == plain[move:]
            del plain[move:]
        assert (table.array.tolist(), len(table)) == (plain, len(plain))
        assert [table[i] for i in range(len(table))] == plain


def test_what_is_gone_from_a_table_is_given_back_once() -> None:
    table = BlockTable([4, 5, 6, 7])
    assert table.drop_before(2) == [4, 5]
    assert table.drop_before(1) == []
    assert (table.array.tolist(), table.held) == ([GONE, GONE, 6, 7], [6, 7])
    assert table.cut(1) == [6, 7]
    assert table.cut(0) == []
    table.extend([8])
    assert table.held == [8]


def test_a_described_table_stays_as_it_was_while_the_sequence_grows() -> None:
    table = BlockTable([3])
    described = table.array
    for page in range(100):
        table.extend([page])
    assert described.tolist() == [3]
