"""BPE by a list of merges: byte-level vocabularies (GPT-2 and after), and those that write the space as ▁.

The words come from the normalizer and pre_tokenizer of the `tokenizers` library; merging is done here, because building
the library's model of a 150k vocabulary takes tens of times as long as reading the tables below.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import add
from typing import Any, AnyStr

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.tokenizer.facts import AddedToken
from llmctl.runtime.tokenizer.matcher import TokenMatcher
from llmctl.runtime.tokenizer.merge import NO_MERGE, merge
from llmctl.runtime.tokenizer.vocabulary import Buffer, Vocabulary

MARKER = "▁"
_CACHED_WORDS = 1 << 16
_CACHED_PAIRS = 1 << 18
_CACHED_LENGTH = 64  # characters of a word up to which its ids are kept


def byte_letters() -> dict[int, str]:
    """The 256 letters byte-level vocabularies write bytes with: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted({*range(256)} - {*printable})
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


_LETTER_BYTES = {ord(letter): byte for byte, letter in byte_letters().items()}


def build_merges(index: Mapping[AnyStr, int], pairs: Sequence[Sequence[AnyStr]], barred: Any) -> dict[str, Buffer]:
    """The sections of a merge table.

    index: text → id. pairs: in order of rank. barred: ids no merge may make (control tokens), an array.
    FormatError, without the file's name, if a pair or what it makes is not in the vocabulary.
    """
    import numpy as np

    firsts, seconds = zip(*pairs, strict=True) if pairs else ((), ())
    try:
        left, right = (np.fromiter(map(index.__getitem__, texts), np.uint64, len(pairs)) for texts in (firsts, seconds))
        made = _ids_of(index, list(map(add, firsts, seconds)))
    except KeyError as error:
        raise FormatError(f"a merge needs the token {quoted(error.args[0])}, which is not in the vocabulary") from None
    keys = left << np.uint64(32) | right
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    keep = np.concatenate([[True], keys[1:] != keys[:-1]]) if len(keys) else np.empty(0, bool)
    keep &= ~np.isin(made[order], barred)
    order, ids = order[keep].astype(np.uint32), made[order[keep]].astype(np.uint32)
    return {"pairs": keys[keep].tobytes(), "ranks": order.tobytes(), "made": ids.tobytes()}


def _ids_of(index: Mapping[AnyStr, int], texts: list[AnyStr]) -> Any:
    """The ids of the texts. Vocabularies list what merges make in the order of the merges: then nothing is looked up."""
    import numpy as np

    first = index[texts[0]] if texts else 0
    stretch = slice(first, first + len(texts))
    if list(index)[stretch] == texts and list(index.values())[stretch] == list(range(first, first + len(texts))):
        return np.arange(first, first + len(texts), dtype=np.uint64)
    return np.fromiter(map(index.__getitem__, texts), np.uint64, len(texts))


def joiners(texts: Sequence[str]) -> str:
    """The characters that stand before a ▁ inside some token: only after them may a word go on over a ▁."""
    before = re.compile(rf"[^{MARKER}](?={MARKER})", re.DOTALL)
    return "".join(sorted({found for text in texts if MARKER in text[1:] for found in before.findall(text)}))


def marker_splitter(stops: str) -> re.Pattern[str]:
    """A pattern that cuts text before each ▁ no token can reach over. stops: see `joiners`."""
    return re.compile(rf"(?<=[^{MARKER}{re.escape(stops)}])(?={MARKER})")


class WordCache(dict[str, tuple[int, ...]]):
    """Ids of words met before. Emptied when full: words of natural text come back soon."""

    def keep(self, word: str, ids: Sequence[int]) -> None:
        """Remember the ids of a word, unless it is so long that it will hardly come again."""
        if len(word) <= _CACHED_LENGTH:
            if len(self) >= _CACHED_WORDS:
                self.clear()
            self[word] = tuple(ids)


class MergeTable:
    """Ranks and results of pairs of ids."""

    def __init__(self, sections: Mapping[str, Buffer]) -> None:
        self._pairs = memoryview(sections["pairs"]).cast("Q")
        self._ranks = memoryview(sections["ranks"]).cast("I")
        self._made = memoryview(sections["made"]).cast("I")
        self._rank_of: dict[int, int] = {}
        self._made_of: dict[int, int] = {}

    def rank(self, left: int, right: int) -> int:
        """The place of the pair in the list of merges, or NO_MERGE."""
        pair = left << 32 | right
        rank = self._rank_of.get(pair)
        return self._look_up(pair)[0] if rank is None else rank

    def join(self, left: int, right: int) -> int:
        """What a pair that has a rank becomes."""
        pair = left << 32 | right
        made = self._made_of.get(pair)
        return self._look_up(pair)[1] if made is None else made

    def _look_up(self, pair: int) -> tuple[int, int]:
        if len(self._rank_of) >= _CACHED_PAIRS:
            self._rank_of.clear()
            self._made_of.clear()
        at = bisect_left(self._pairs, pair)
        rank, made = NO_MERGE, -1
        if at < len(self._pairs) and self._pairs[at] == pair:
            rank, made = self._ranks[at], self._made[at]
            self._made_of[pair] = made
        self._rank_of[pair] = rank
        return rank, made


class BpeEngine:
    """Encodes text that holds no added tokens of the outer kind.

    settings: pre_tokenizer and normalizer (as in tokenizer.json), byte_level, ignore_merges, byte_ids (256 ids or -1, or
    null), unk, fuse_unk, joiners (null: words are not cut at ▁).
    """

    def __init__(self, settings: Mapping[str, Any], sections: Mapping[str, Buffer], inner: Sequence[AddedToken]) -> None:
        self.vocabulary = Vocabulary(sections)
        self._settings = settings
        self._merges = MergeTable(sections)
        self._byte_level: bool = settings["byte_level"]
        self._byte_ids: list[int] | None = settings["byte_ids"]
        self._cut = None if settings["joiners"] is None else marker_splitter(settings["joiners"])
        self._words = WordCache()
        self._starts: dict[str, tuple[int, ...]] = {}
        self._inner = inner

    def encode(self, text: str, *, first: bool) -> list[int]:
        """The ids of a stretch of text. first: whether it begins the whole text."""
        ids: list[int] = []
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        for part in self._matcher.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                for word in self._split(part, first):
                    ids.extend(self._words.get(word) or self._encode_word(word))
            first = False
        return ids

    def bytes_of(self, token_id: int) -> bytes:
        """What an ordinary token stands for in text."""
        text = self.vocabulary.text(token_id)
        if not self._byte_level:
            return text.replace(MARKER, " ").encode()
        try:
            return bytes(_LETTER_BYTES[ord(letter)] for letter in text)
        except KeyError:  # not written in the byte letters, so it is text as it stands
            return self.vocabulary.raw(token_id)

    @cached_property
    def _matcher(self) -> TokenMatcher:
        """Tokens sought in normalized text."""
        normalize = self._normalizer.normalize_str if self._normalizer is not None else str
        return TokenMatcher(token._replace(text=normalize(token.text)) for token in self._inner)

    @cached_property
    def _components(self) -> Any:
        return text_parts(self._settings["normalizer"], self._settings["pre_tokenizer"])

    @cached_property
    def _normalizer(self) -> Any:
        return self._components.normalizer

    @cached_property
    def _pre_tokenizer(self) -> Any:
        return self._components.pre_tokenizer

    @cached_property
    def _later_pre_tokenizer(self) -> Any:
        """For text after an added token: a Metaspace that puts its marker only at the beginning puts none there."""
        return text_parts(None, _without_first(self._settings["pre_tokenizer"])).pre_tokenizer

    def _split(self, text: str, first: bool) -> list[str]:
        splitter = self._pre_tokenizer if first else self._later_pre_tokenizer
        words = [text] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]
        return words if self._cut is None else [piece for word in words for piece in self._cut.split(word)]

    def _encode_word(self, word: str) -> list[int]:
        ids = [self.vocabulary.find(word.encode())] if self._settings["ignore_merges"] else [-1]
        if ids[0] < 0:
            starts = [token_id for letter in word for token_id in self._starting_ids(letter)]
            ids = merge(starts, self._merges.rank, self._merges.join)
            if self._settings["fuse_unk"]:
                unk = self._settings["unk"]
                ids = [token_id for i, token_id in enumerate(ids) if token_id != unk or not i or ids[i - 1] != unk]
        self._words.keep(word, ids)
        return ids

    def _starting_ids(self, letter: str) -> tuple[int, ...]:
        """What a letter is before merging: its token, else its bytes, else the unknown token, else nothing."""
        known = self._starts.get(letter)
        if known is None:
            raw = letter.encode()
            token_id = self.vocabulary.find(raw)
            known = (token_id,) if token_id >= 0 else self._fallback(raw)
            self._starts[letter] = known
        return known

    def _fallback(self, raw: bytes) -> tuple[int, ...]:
        if self._byte_ids is not None and all(self._byte_ids[byte] >= 0 for byte in raw):
            return tuple(self._byte_ids[byte] for byte in raw)
        unk = self._settings["unk"]
        return () if unk is None else (unk,)


def text_parts(normalizer: Any, pre_tokenizer: Any) -> Any:
    """An object with the `normalizer` and `pre_tokenizer` that tokenizer.json describes so, or None.

    FormatError, without the file's name, if the library cannot make them.
    """
    from tokenizers import Tokenizer

    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": None}
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    try:
        return Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **parts, "model": empty}))
    except Exception as error:  # the library raises plain Exception
        raise FormatError(f"the normalizer or pre_tokenizer cannot be used: {str(error).splitlines()[0]}") from error


def _without_first(step: Any) -> Any:
    if isinstance(step, dict):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            return {**step, "prepend_scheme": "never"}
        return {key: _without_first(value) for key, value in step.items()}
    return [_without_first(one) for one in step] if isinstance(step, list) else step
