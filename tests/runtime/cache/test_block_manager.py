"""Pages are handed out once, given back exactly, and never lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.runtime.cache.block_manager import BlockManager, BlockTable


def test_grow_takes_only_missing_pages_and_shrink_returns_the_tail() -> None:
    blocks = BlockManager(num_blocks=5, block_size=4)
    table = BlockTable()
    blocks.grow(table, 4)
    assert len(table) == 1
    blocks.grow(table, 5)
    assert (len(table), blocks.num_free) == (2, 3)
    blocks.grow(table, 8)
    assert (len(table), blocks.num_free) == (2, 3)
    blocks.shrink(table, 4)
    assert (len(table), blocks.num_free) == (1, 4)
    blocks.shrink(table, 0)
    assert (len(table), blocks.num_free) == (0, 5)


def test_growing_past_the_pool_is_our_own_mistake() -> None:
    blocks = BlockManager(num_blocks=1, block_size=4)
    assert not blocks.can_grow(BlockTable(), 5)
    with pytest.raises(AssertionError):
        blocks.grow(BlockTable(), 5)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=60))
def test_no_page_is_ever_shared_or_lost(moves: list[tuple[int, int]]) -> None:
    """Any order of growing and shrinking of three sequences keeps the pool and the tables a partition of all pages."""
    blocks = BlockManager(num_blocks=12, block_size=4)
    tables = [BlockTable() for _ in range(3)]
    for who, length in moves:
        if length > len(tables[who]) * 4:
            if blocks.can_grow(tables[who], length):
                blocks.grow(tables[who], length)
        else:
            blocks.shrink(tables[who], length)
        held = [page for table in tables for page in table]
        assert len(held) == len(set(held))
        assert len(held) + blocks.num_free == 12


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


def test_a_described_table_stays_as_it_was_while_the_sequence_grows() -> None:
    table = BlockTable([3])
    described = table.array
    for page in range(100):
        table.extend([page])
    assert described.tolist() == [3]
