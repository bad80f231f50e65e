"""Finds added tokens in text: at each place the longest, going from left to right."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from llmctl.runtime.tokenizer.facts import AddedToken

# Unicode's White_Space. str.strip() would also take U+001C to U+001F.
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


class TokenMatcher:
    """Cuts text at added tokens, as the `tokenizers` library does: leftmost, longest, flags of the token obeyed."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens: dict[str, AddedToken] = {}
        lengths: dict[str, set[int]] = {}
        for token in tokens:
            if token.text and token.text not in self._tokens:
                self._tokens[token.text] = token
                lengths.setdefault(token.text[0], set()).add(len(token.text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._first = re.compile("[" + "".join(map(re.escape, lengths)) + "]") if lengths else None

    def __bool__(self) -> bool:
        return self._first is not None

    def split(self, text: str, plain: Sequence[tuple[int, int]] = ()) -> list[str | int]:
        """The text in order as pieces between added tokens (never empty) and ids of added tokens.

        plain: stretches (start, end) in order; a special token that shares a character with one is not seen.
        """
        if self._first is None:
            return [text] if text else []
        parts: list[str | int] = []
        done = position = 0
        while found := self._first.search(text, position):
            token = self._longest_at(text, found.start(), plain)
            if token is None or (token.single_word and _inside_word(text, found.start(), found.start() + len(token.text))):
                position = found.start() + (1 if token is None else len(token.text))
                continue
            start, stop = found.start(), found.start() + len(token.text)
            while token.lstrip and start > done and text[start - 1] in WHITE_SPACE:
                start -= 1
            while token.rstrip and stop < len(text) and text[stop] in WHITE_SPACE:
                stop += 1
            if start > done:
                parts.append(text[done:start])
            parts.append(token.id)
            done = position = stop
        if done < len(text):
            parts.append(text[done:])
        return parts

    def _longest_at(self, text: str, start: int, plain: Sequence[tuple[int, int]]) -> AddedToken | None:
        for length in self._lengths[text[start]]:
            token = self._tokens.get(text[start : start + length])
            if token is not None and not (token.special and _meets(plain, start, start + len(token.text))):
                return token
        return None


def _meets(stretches: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    last = bisect_left(stretches, (stop,)) - 1  # the last that begins before `stop`
    return last >= 0 and stretches[last][1] > start


def _inside_word(text: str, start: int, stop: int) -> bool:
    return (start > 0 and _is_word(text[start - 1])) or (stop < len(text) and _is_word(text[stop]))


def _is_word(character: str) -> bool:
    r"""What `\w` means in Unicode: letters, marks, decimal digits, joining punctuation and the two joiners."""
    category = unicodedata.category(character)
    return category[0] in "LM" or category in ("Nd", "Nl", "Pc") or character in "\u200c\u200d"
