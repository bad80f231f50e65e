"""BPE by the scores of pieces, as SentencePiece does it: any two neighbours that make a piece may be joined.

Kudo & Richardson 2018, https://arxiv.org/abs/1808.06226. The library itself is not used: it takes half of the time a
262k vocabulary may take to be ready, and cannot be told which special tokens to see. The tests compare with it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from llmctl.runtime.tokenizer.bpe import MARKER, WordCache, marker_splitter
from llmctl.runtime.tokenizer.facts import AddedToken, TokenType
from llmctl.runtime.tokenizer.matcher import TokenMatcher
from llmctl.runtime.tokenizer.merge import NO_MERGE, merge
from llmctl.runtime.tokenizer.vocabulary import Buffer, Vocabulary

_CACHED_PAIRS = 1 << 18


def rank_scores(scores: Any) -> bytes:
    """Scores (float array) as u32 ranks: 0 for the highest; equal scores share a rank. NaN comes last."""
    import numpy as np

    _, inverse = np.unique(-np.asarray(scores, np.float32), return_inverse=True)
    return inverse.astype(np.uint32).tobytes()


class SentencePieceEngine:
    """Encodes text that holds no added tokens of the outer kind.

    settings: prefix ("never", "first" in the text, "always": in every stretch), prefix_unless_space (none before a space),
    collapse (runs of spaces become one), charsmap (base64 of SentencePiece's normalization, or null), byte_ids, unk,
    joiners.
    """

    def __init__(self, settings: Mapping[str, Any], sections: Mapping[str, Buffer], inner: Sequence[AddedToken]) -> None:
        self.vocabulary = Vocabulary(sections)
        self._ranks = memoryview(sections["ranks"]).cast("I")
        self._settings = settings
        self._byte_ids: list[int] | None = settings["byte_ids"]
        self._cut = marker_splitter(settings["joiners"])
        self._words = WordCache()
        self._rank_of: dict[str, int] = {}
        self._inner = inner
        self._splits: dict[str, tuple[str, str]] | None = {} if settings["has_unused"] else None

    def encode(self, text: str, *, first: bool) -> list[int]:
        """The ids of a stretch of text. first: whether it begins the whole text."""
        ids: list[int] = []
        for part in self._matcher.split(self._normalize(text, first)):
            if isinstance(part, int):
                ids.append(part)
            else:
                for word in self._cut.split(part):
                    ids.extend(self._words.get(word) or self._encode_word(word))
        return self._fuse_unknown(ids) if self._byte_ids is None else ids

    def bytes_of(self, token_id: int) -> bytes:
        """What an ordinary token stands for in text."""
        return self.vocabulary.raw(token_id).replace(MARKER.encode(), b" ")

    @cached_property
    def _matcher(self) -> TokenMatcher:
        """User-defined pieces, sought where spaces are already ▁."""
        return TokenMatcher(AddedToken(token.id, token.text.replace(" ", MARKER)) for token in self._inner)

    @cached_property
    def _charsmap(self) -> Any:
        from tokenizers.normalizers import Precompiled

        return Precompiled(base64.b64decode(self._settings["charsmap"]))

    def _normalize(self, text: str, first: bool) -> str:
        if self._settings["charsmap"]:
            text = self._charsmap.normalize_str(text)
        if self._settings["collapse"]:
            text = re.sub(" {2,}", " ", text.strip(" "))
        prefix = self._settings["prefix"]
        wanted = bool(text) and (prefix == "always" or (prefix == "first" and first))
        if wanted and not (self._settings["prefix_unless_space"] and text.startswith((" ", MARKER))):
            text = " " + text
        return text.replace(" ", MARKER)

    def _rank(self, left: str, right: str) -> int:
        made = left + right
        rank = self._rank_of.get(made)
        if rank is None:
            if len(self._rank_of) >= _CACHED_PAIRS:
                self._rank_of.clear()
            found = self.vocabulary.find(made.encode())
            rank = self._rank_of[made] = NO_MERGE if found < 0 else self._ranks[found]
        if self._splits is not None and rank != NO_MERGE:
            self._splits[made] = (left, right)
        return rank

    def _encode_word(self, word: str) -> list[int]:
        if self._splits is not None:
            self._splits.clear()
        ids = [token_id for symbol in merge(list(word), self._rank, str.__add__) for token_id in self._ids(symbol)]
        self._words.keep(word, ids)
        return ids

    def _ids(self, symbol: str) -> list[int]:
        """The ids of a symbol: its piece; an unused piece is taken apart again; no piece: bytes or unknown."""
        raw = symbol.encode()
        token_id = self.vocabulary.find(raw)
        if token_id >= 0:
            if self._splits and self.vocabulary.type(token_id) == TokenType.UNUSED and symbol in self._splits:
                return [one for half in self._splits[symbol] for one in self._ids(half)]
            return [token_id]
        unk: int | None = self._settings["unk"]
        ids = [unk] if self._byte_ids is None else [self._byte_ids[b] if self._byte_ids[b] >= 0 else unk for b in raw]
        return [token_id for token_id in ids if token_id is not None]  # without an unknown token it is left out, as in BPE

    def _fuse_unknown(self, ids: list[int]) -> list[int]:
        """A run of unknown characters is one unknown token."""
        unk = self._settings["unk"]
        return [token_id for i, token_id in enumerate(ids) if token_id != unk or not i or ids[i - 1] != unk]
