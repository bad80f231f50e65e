"""Byte-pair encoding of one word: the best pair of neighbours is joined until no pair can be.

Both kinds of vocabulary here do this and differ in what makes a pair the best: its place in a list of merges, or the
score of the piece it makes. Sennrich et al. 2016, https://arxiv.org/abs/1508.07909.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

Symbol = TypeVar("Symbol", int, str)

NO_MERGE = 1 << 62
_LONG = 96  # symbols from which keeping a queue costs less than searching the list again


def merge(symbols: list[Symbol], rank: Callable[[Symbol, Symbol], int], join: Callable[[Symbol, Symbol], Symbol]) -> list[Symbol]:
    """The symbols after all merges, the pair of lowest rank first, of equal ones the leftmost.

    rank: of a pair, or NO_MERGE. join: what a pair becomes.
    """
    if len(symbols) > _LONG:
        return _merge_long(symbols, rank, join)
    symbols = list(symbols)
    ranks = [rank(left, right) for left, right in pairwise(symbols)]
    while ranks:
        best = min(ranks)
        if best == NO_MERGE:
            break
        at = ranks.index(best)
        symbols[at : at + 2] = [join(symbols[at], symbols[at + 1])]
        del ranks[at]
        if at:
            ranks[at - 1] = rank(symbols[at - 1], symbols[at])
        if at < len(ranks):
            ranks[at] = rank(symbols[at], symbols[at + 1])
    return symbols


def _merge_long(
    symbols: list[Symbol], rank: Callable[[Symbol, Symbol], int], join: Callable[[Symbol, Symbol], Symbol]
) -> list[Symbol]:
    """The same in n log n: a queue of pairs, entries whose symbols have changed since are passed over."""
    now: list[Symbol | None] = list(symbols)
    after = [*range(1, len(now)), -1]
    before = list(range(-1, len(now) - 1))
    queue: list[tuple[int, int, int, Symbol, Symbol]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right >= 0:
            place = rank(now[left], now[right])
            if place != NO_MERGE:
                heapq.heappush(queue, (place, left, right, now[left], now[right]))

    for left in range(len(now) - 1):
        offer(left, left + 1)
    while queue:
        _, left, right, left_symbol, right_symbol = heapq.heappop(queue)
        if now[left] != left_symbol or now[right] != right_symbol or after[left] != right:
            continue
        now[left] = join(left_symbol, right_symbol)
        now[right] = None
        after[left] = after[right]
        if after[left] >= 0:
            before[after[left]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [symbol for symbol in now if symbol is not None]
