"""The two ways to merge a word, against the definition."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llmctl.runtime.tokenizer import merge as module
from llmctl.runtime.tokenizer.merge import NO_MERGE, merge

RANKS = st.dictionaries(st.text("abc", min_size=2, max_size=4), st.integers(0, 5), max_size=12)


def by_definition(symbols: list[str], ranks: dict[str, int]) -> list[str]:
    symbols = list(symbols)
    while True:
        found = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in ranks]
        if not found:
            return symbols
        _, at = min(found)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(st.text("abc", max_size=60), RANKS)
def test_both_ways_do_what_is_defined(word: str, ranks: dict[str, int]) -> None:
    def rank(left: str, right: str) -> int:
        return ranks.get(left + right, NO_MERGE)

    expected = by_definition(list(word), ranks)
    assert merge(list(word), rank, str.__add__) == expected
    assert module._merge_long(list(word), rank, str.__add__) == expected


def test_long_words_take_the_queue() -> None:
    ranks = {"aa": 0, "aaaa": 1}
    merged = merge(["a"] * 10001, lambda a, b: ranks.get(a + b, NO_MERGE), str.__add__)
    assert merged == ["aaaa"] * 2500 + ["a"]
    assert len("".join(merged)) > module._LONG
