"""The texts of all tokens, in flat buffers: nothing is made per token when it is loaded.

Built once with numpy and kept in the disk cache; read back it is a few views over the bytes of the file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any
from zlib import crc32

from llmctl.runtime.tokenizer.facts import TokenType

Buffer = bytes | bytearray | memoryview

# Types that may come out of plain text. Control and unknown tokens never do, nor do byte tokens by their spelling.
_FROM_TEXT = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)


def build_vocabulary(texts: Sequence[bytes], types: Any) -> dict[str, Buffer]:
    """The sections of a Vocabulary.

    texts: per id, UTF-8 (b"" for an id no token has). types: uint8 array per id, a TokenType.
    """
    import numpy as np

    checksums = np.fromiter(map(crc32, texts), np.uint64, len(texts))
    ids = np.flatnonzero(np.isin(types, _FROM_TEXT)).astype(np.uint64)
    both = np.sort(checksums[ids] << np.uint64(32) | ids)
    ends = np.fromiter(accumulate(map(len, texts), initial=0), np.uint32, len(texts) + 1)
    return {
        "texts": b"".join(texts),
        "offsets": ends.tobytes(),
        "types": types.tobytes(),
        "checksums": (both >> np.uint64(32)).astype(np.uint32).tobytes(),
        "ids": both.astype(np.uint32).tobytes(),
    }


class Vocabulary:
    """Token texts by id, and ids by text."""

    def __init__(self, sections: Mapping[str, Buffer]) -> None:
        self._texts = bytes(sections["texts"])
        self._offsets = memoryview(sections["offsets"]).cast("I")
        self._types = bytes(sections["types"])
        self._checksums = memoryview(sections["checksums"]).cast("I")
        self._ids = memoryview(sections["ids"]).cast("I")

    def __len__(self) -> int:
        return len(self._types)

    def raw(self, token_id: int) -> bytes:
        """The text as UTF-8, as stored."""
        return self._texts[self._offsets[token_id] : self._offsets[token_id + 1]]

    def text(self, token_id: int) -> str:
        """The text as stored; bytes that are not UTF-8 become U+FFFD."""
        return self.raw(token_id).decode("utf-8", "replace")

    def type(self, token_id: int) -> int:
        """A TokenType."""
        return self._types[token_id]

    def find(self, raw: bytes) -> int:
        """The id that plain text of exactly these bytes may become, or -1. The lowest, if several tokens have the text."""
        checksum = crc32(raw)
        at = bisect_left(self._checksums, checksum)
        while at < len(self._checksums) and self._checksums[at] == checksum:
            if self.raw(self._ids[at]) == raw:
                return self._ids[at]
            at += 1
        return -1
