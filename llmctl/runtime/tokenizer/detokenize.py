"""Token ids back to text, at once or one by one, with the same result."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamingDetokenizer:
    """Text of a growing list of tokens.

    All that `push` and `flush` return, joined, is the decoded text of all tokens. Held back is only a character whose
    bytes are not all there yet. Constant work per token.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], *, strip_space: bool) -> None:
        """bytes_of: of a token, b"" for one to skip. strip_space: whether one space at the very beginning is dropped."""
        self._bytes_of = bytes_of
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """What can be shown now that this token is known."""
        return self._show(self._bytes_of(token_id), final=False)

    def flush(self) -> str:
        """The rest: U+FFFD for a character that stayed incomplete. Afterwards a new text may begin, with no space dropped."""
        return self._show(b"", final=True)

    def _show(self, data: bytes, *, final: bool) -> str:
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data, final)
