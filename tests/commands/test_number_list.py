"""Lists and ranges as llama-bench spells them."""

from __future__ import annotations

import pytest

from llmctl.commands.number_list import MOST, number_list
from llmctl.errors import UsageError


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["512"], [512]),
        (["0"], [0]),
        (["8,64", "1"], [8, 64, 1]),
        ([" 8 , 64 "], [8, 64]),
        (["3-6"], [3, 4, 5, 6]),
        (["8-32+8"], [8, 16, 24, 32]),
        (["8-33+8"], [8, 16, 24, 32]),
        (["8-64*2"], [8, 16, 32, 64]),
        (["1-100*3"], [1, 3, 9, 27, 81]),
        (["5-5"], [5]),
        (["5-5*1"], [5]),
        (["0-3"], [0, 1, 2, 3]),
        (["1,4-5,16-64*4"], [1, 4, 5, 16, 64]),
    ],
)
def test_lists_and_ranges(texts, numbers):
    assert number_list(texts, "-p") == numbers


@pytest.mark.parametrize(
    "text", ["", "x", "1,", ",1", "-1", "1.5", "1-", "1-2-3", "1+2", "4-2", "1-5+0", "1-5*1", "0-5*2", "1-5*0", "1 2", "²"]
)
def test_what_is_none(text):
    with pytest.raises(UsageError, match="-p"):
        number_list([text], "-p")


def test_a_number_of_thousands_of_digits_is_none():
    with pytest.raises(UsageError, match="-p: expected a whole number"):
        number_list(["9" * 5000], "-p")


def test_bounds():
    with pytest.raises(UsageError, match="-r must be at least 1, found 0"):
        number_list(["5,0"], "-r", minimum=1)
    assert len(number_list([f"1-{MOST}"], "-p")) == MOST
    with pytest.raises(UsageError, match="more than"):
        number_list(["0-1000000000000"], "-p")
