"""Added tokens are found where the `tokenizers` library finds them."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from llmctl.runtime.tokenizer.facts import AddedToken
from llmctl.runtime.tokenizer.matcher import TokenMatcher

FLAGS = st.fixed_dictionaries({name: st.booleans() for name in ("lstrip", "rstrip", "single_word")})
TOKENS = st.dictionaries(st.text("ab<_", min_size=1, max_size=3), FLAGS, min_size=1, max_size=5)


def test_longest_at_the_leftmost_place() -> None:
    matcher = TokenMatcher([AddedToken(1, "<a"), AddedToken(2, "<a>"), AddedToken(3, "a>b")])
    assert matcher.split("x<a>b<a") == ["x", 2, "b", 1]
    assert matcher.split("") == []
    assert matcher.split("xa>b") == ["x", 3]


def test_without_tokens_the_text_is_one_piece() -> None:
    assert TokenMatcher([]).split("abc") == ["abc"]
    assert TokenMatcher([AddedToken(1, "")]).split("abc") == ["abc"]
    assert not TokenMatcher([])


def test_white_space_is_swallowed_once() -> None:
    matcher = TokenMatcher([AddedToken(1, "<l>", lstrip=True), AddedToken(2, "<r>", rstrip=True)])
    assert matcher.split("a \n<l> b<r>\t\u3000<l>") == ["a", 1, " b", 2, 1]
    assert matcher.split("\x1c<l>") == ["\x1c", 1]  # a separator, but no White_Space


def test_single_words_stand_alone() -> None:
    matcher = TokenMatcher([AddedToken(1, "ab", single_word=True)])
    assert matcher.split("ab abc ab,é_ab ab") == [1, " abc ", 1, ",é_ab ", 1]
    assert matcher.split("abab") == ["abab"]


@given(TOKENS, st.text("ab<_ \n\u00e9", max_size=20))
def test_as_the_library_finds_them(flags: dict[str, dict[str, bool]], text: str) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate("ab<_ \n\u00e9")}, []))
    library.add_tokens([tokenizers.AddedToken(name, normalized=False, **given) for name, given in flags.items()])
    ids = {name: library.token_to_id(name) for name in flags}
    matcher = TokenMatcher(AddedToken(ids[name], name, **given) for name, given in flags.items())
    ours: list[int] = []
    for part in matcher.split(text):
        ours += [part] if isinstance(part, int) else [library.token_to_id(letter) for letter in part]
    strips_twice = any(given["rstrip"] for given in flags.values()) and any(set(name) <= {" "} for name in flags)
    assert strips_twice or ours == library.encode(text).ids
