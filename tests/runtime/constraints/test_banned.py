"""Banned strings: no answer holds one, however it is cut into tokens, and nothing else is forbidden."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.errors import UsageError
from llmctl.runtime.constraints.banned import BannedStrings
from llmctl.runtime.constraints.token_texts import breakers

TEXTS = ["a", "b", "c", "ab", "abc", "bc", "ca", "cab", "aa", "bb", "é", "", "<end>"]
PIECES = [*(text.encode() for text in TEXTS), b"\xc3", b"\xa9"]
CONTROL = TEXTS.index("<end>")


def tokenizer() -> SimpleNamespace:
    return SimpleNamespace(token_bytes=PIECES.__getitem__, is_control=lambda token_id: token_id == CONTROL)


words = st.text(alphabet="abcé", min_size=1, max_size=4)


@given(st.lists(words, min_size=1, max_size=3), st.lists(st.integers(0, len(PIECES) - 1), max_size=25))
def test_exactly_the_tokens_that_would_complete_a_string_are_forbidden(strings: list[str], wanted: list[int]) -> None:
    constraint, said = BannedStrings(tokenizer(), len(PIECES), strings)(), b""
    for token_id in wanted:
        row = np.zeros(len(PIECES), np.float32)
        constraint.forbid(row)
        shown = [b"" if i == CONTROL else piece for i, piece in enumerate(PIECES)]
        expected = [any(text.encode() in said + piece for text in strings) for piece in shown]
        assert (row == -np.inf).tolist() == expected
        if not expected[token_id]:
            constraint.accept(token_id)
            said += shown[token_id]


def test_a_real_vocabulary_never_says_it(babble, vocabulary) -> None:
    maker = BannedStrings(vocabulary.tokenizer, vocabulary.num_tokens, ["e", "th", "\n"])
    text = vocabulary.tokenizer.decode(babble(maker, 1, limit=200))
    assert len(text) > 300
    assert "e" not in text
    assert "th" not in text
    assert "\n" not in text


def test_the_empty_string_is_refused() -> None:
    with pytest.raises(UsageError, match="an empty one"):
        BannedStrings(tokenizer(), len(PIECES), ["a", ""])


def test_breakers_are_the_tokens_that_hold_one_and_control_tokens() -> None:
    assert breakers(tokenizer(), len(PIECES), ["b"]) == {i for i, text in enumerate(TEXTS) if "b" in text} | {CONTROL}
    assert breakers(tokenizer(), len(PIECES), []) == {CONTROL}
