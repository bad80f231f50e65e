"""The bytes of all tokens at once, and which of them hold or begin with something."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from llmctl.runtime.tokenizer import Tokenizer

_ABOVE = b"\xff" * 4  # no token text has four of these bytes in a row


class TokenTexts:
    """texts: the bytes each of the first num_tokens ids shows as, b"" for control tokens."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        ids = range(num_tokens)
        self.texts = [b"" if tokenizer.is_control(i) else tokenizer.token_bytes(i) for i in ids]
        self._order = sorted(ids, key=self.texts.__getitem__)

    def holding(self, part: bytes) -> list[int]:
        """Ids whose text holds `part`."""
        return [token_id for token_id, text in enumerate(self.texts) if part in text]

    def beginning_with(self, start: bytes) -> list[int]:
        """Ids whose text begins with `start`."""
        first = bisect_left(self._order, start, key=self.texts.__getitem__)
        last = bisect_right(self._order, start + _ABOVE, key=self.texts.__getitem__)
        return self._order[first:last]


def breakers(tokenizer: Tokenizer, num_tokens: int, strings: Iterable[str]) -> frozenset[int]:
    """The tokens that break a repetition for DRY: those that hold one of the strings, and control tokens."""
    parts = [text.encode() for text in strings]
    broken = (i for i in range(num_tokens) if any(part in tokenizer.token_bytes(i) for part in parts))
    return frozenset([*broken, *(i for i in range(num_tokens) if tokenizer.is_control(i))])
