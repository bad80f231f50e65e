"""Strings that must not occur in an answer, however it is cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmctl.errors import UsageError
from llmctl.runtime.constraints.token_texts import TokenTexts
from llmctl.runtime.tokenizer import Tokenizer


class BannedStrings:
    """Makes the constraint of each sequence. A token is forbidden where the answer would then hold one of the strings, letter
    by letter; the prompt does not count. UsageError for an empty string."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, strings: Sequence[str]) -> None:
        if "" in strings:
            raise UsageError("a banned string needs some text, found an empty one")
        banned, tokens = [text.encode() for text in strings], TokenTexts(tokenizer, num_tokens)
        self.texts = tokens.texts
        self.longest = max(map(len, banned))
        self.always = np.array(sorted({i for text in banned for i in tokens.holding(text)}), np.int64)
        # What the answer may end with → the tokens that would complete a string then.
        self.completing: dict[bytes, np.ndarray] = {}
        for start, rest in {(text[:cut], text[cut:]) for text in banned for cut in range(1, len(text))}:
            known = self.completing.get(start, np.empty(0, np.int64))
            self.completing[start] = np.union1d(known, np.array(tokens.beginning_with(rest), np.int64))

    def __call__(self) -> BannedConstraint:
        return BannedConstraint(self)


class BannedConstraint:
    """One answer so far."""

    def __init__(self, strings: BannedStrings) -> None:
        self._strings, self._tail, self.is_complete = strings, b"", True

    def forbid(self, logits: np.ndarray) -> None:
        """As `Constraint`."""
        logits[self._strings.always] = -np.inf
        for length in range(1, len(self._tail) + 1):
            ids = self._strings.completing.get(self._tail[-length:])
            if ids is not None:
                logits[ids] = -np.inf

    def accept(self, token_id: int) -> None:
        """As `Constraint`."""
        kept = self._strings.longest - 1
        self._tail = (self._tail + self._strings.texts[token_id])[-kept:] if kept else b""
