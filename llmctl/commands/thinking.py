"""What a model thinks before it answers, told apart from the answer while both stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Piece(NamedTuple):
    """A stretch of text, thought or said."""

    text: str
    is_thought: bool


class ThinkSplitter:
    """Divides a stream at <think> and </think>, which themselves are not shown. Only what may be the start of a tag is held
    back.

    begins_thinking: the prompt ended inside a thought already.
    """

    def __init__(self, *, begins_thinking: bool = False) -> None:
        self._is_thought, self._held = begins_thinking, ""

    def push(self, text: str) -> Iterator[Piece]:
        """The pieces that can be shown now."""
        self._held += text
        while True:
            tag = CLOSE if self._is_thought else OPEN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            yield from self._piece(before)
            self._is_thought, self._held = not self._is_thought, after
        keep = next((n for n in range(min(len(tag) - 1, len(self._held)), 0, -1) if tag.startswith(self._held[-n:])), 0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        yield from self._piece(shown)

    def flush(self) -> Iterator[Piece]:
        """What is still held back, at the end."""
        held, self._held = self._held, ""
        yield from self._piece(held)

    def _piece(self, text: str) -> Iterator[Piece]:
        if text:
            yield Piece(text, self._is_thought)
