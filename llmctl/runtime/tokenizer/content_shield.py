"""Keeps the text of a conversation from turning into control tokens.

A chat template writes control tokens as text, and so can a user. Once both are in one string nothing tells them apart,
so the user's are taken out first: each control token's text inside the conversation is replaced by one private-use
character that occurs nowhere else, the template is rendered, and the text is put back together with the places where it
stands, in which the tokenizer then reads no control tokens.

One character, because a template may cut, trim and split what it is given; none of that can leave half a placeholder.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from llmctl.errors import ChatTemplateError

_PRIVATE_USE = range(0xE000, 0xF900)
# A placeholder, or the escape that Python's `repr` (a template printing a list) turns it into.
_PLACEHOLDER = re.compile(r"([\ue000-\uf8ff])|\\u([ef][0-9a-f]{3})")


class ControlTokens:
    """Finds the texts of a vocabulary's control tokens, leftmost and longest first."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        self._longest = max(map(len, self.texts), default=0)
        self._last = frozenset(text[-1] for text in self.texts)
        self._lengths: dict[str, list[int]] = {}
        for text in self.texts:
            self._lengths.setdefault(text[0], []).append(len(text))
        self._lengths = {first: sorted(set(lengths), reverse=True) for first, lengths in self._lengths.items()}
        self._first = re.compile("[" + "".join(map(re.escape, self._lengths)) + "]" if self._lengths else r"(?!)")

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of each control token in `text`."""
        position = 0
        while found := self._first.search(text, position):
            start = position = found.start()
            candidates = (text[start : start + length] for length in self._lengths[text[start]])
            token = next((candidate for candidate in candidates if candidate in self.texts), "")
            if token:
                yield start, start + len(token)
            position += len(token) or 1

    def split(self, text: str) -> list[str]:
        """`text` cut at its control tokens: plain, token, plain, token, ..., plain; plain parts may be empty."""
        parts, position = [], 0
        for start, end in self.spans(text):
            parts += [text[position:start], text[start:end]]
            position = end
        return [*parts, text[position:]]

    @functools.cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self.texts for n in range(1, len(text)))

    @functools.cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(text[n:] for text in self.texts for n in range(1, len(text)))

    def torn_start(self, text: str) -> str:
        """The longest start of `text` that is the end of a control token, so text before it could complete it."""
        head = text[: self._longest]
        if self._last.isdisjoint(head):  # nearly always, and then the set of endings need not even be made
            return ""
        return next((head[:n] for n in range(len(head), 0, -1) if head[:n] in self._endings), "")

    def torn_end(self, text: str) -> str:
        """The longest end of `text` that is the start of a control token."""
        tail = text[-self._longest :] if self._longest else ""
        if not self._first.search(tail):
            return ""
        return next((tail[-n:] for n in range(len(tail), 0, -1) if tail[-n:] in self._beginnings), "")


@functools.lru_cache(maxsize=4)
def control_tokens(texts: tuple[str, ...]) -> ControlTokens:
    """The finder for one vocabulary, made once."""
    return ControlTokens(texts)


class ContentShield:
    """Placeholders for the control tokens found in one conversation.

    `surroundings` are all strings the template will see, and its own source: no character in them is used.
    """

    def __init__(self, control: ControlTokens, surroundings: Iterable[str]) -> None:
        self._control = control
        taken = {code for text in surroundings for code in _private_use_codes(text)}
        self._free = (chr(code) for code in _PRIVATE_USE if code not in taken)
        self._placeholders: dict[str, str] = {}  # original text -> placeholder
        self._originals: dict[str, str] = {}

    @property
    def is_empty(self) -> bool:
        """Nothing had to be replaced."""
        return not self._placeholders

    def protect(self, text: str, keep: frozenset[str] = frozenset()) -> str:
        """Replace the control tokens in `text`, except those in `keep`."""
        parts = self._control.split(text)
        parts[1::2] = [token if token in keep else self._placeholder(token) for token in parts[1::2]]
        return "".join(parts)

    def protect_edges(self, text: str, keep: frozenset[str] = frozenset()) -> str:
        """`protect`, and the same for half a control token at either edge: a template may join texts, and trim them."""
        text = self.protect(text, keep)
        body = text.strip()
        if not body:
            return text
        before, after = text[: text.index(body)], text[text.index(body) + len(body) :]
        if end := self._control.torn_end(body):
            body = body[: -len(end)] + self._placeholder(end)
        if start := self._control.torn_start(body):
            body = self._placeholder(start) + body[len(start) :]
        return before + body + after

    def restore(self, text: str) -> str:
        """Put the original texts back."""
        return _PLACEHOLDER.sub(self._original, text)

    def restore_spans(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """`restore`, and start and end of what was put back, in order."""
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        done = length = 0
        for found in _PLACEHOLDER.finditer(text):
            original = self._original(found)
            if original != found[0]:
                parts += [text[done : found.start()], original]
                start = length + found.start() - done
                length = start + len(original)
                spans.append((start, length))
                done = found.end()
        return "".join([*parts, text[done:]]), spans

    def restore_all(self, value: Any) -> Any:
        """`restore` on every string in nested dicts and lists."""
        return map_strings(value, self.restore)

    def _placeholder(self, original: str) -> str:
        if original not in self._placeholders:
            character = next(self._free, None)
            if character is None:
                raise ChatTemplateError(f"the messages hold more than {len(_PRIVATE_USE)} different control tokens")
            self._placeholders[original] = character
            self._originals[character] = original
        return self._placeholders[original]

    def _original(self, found: re.Match[str]) -> str:
        character = found[1] or chr(int(found[2], 16))
        return self._originals.get(character, found[0])


def _private_use_codes(text: str) -> Iterator[int]:
    for character, code in _PLACEHOLDER.findall(text):
        yield ord(character) if character else int(code, 16)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to every string in it, keys of mappings included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_strings(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def strings_in(value: Any) -> Iterator[str]:
    """Every string in nested dicts and lists, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from strings_in(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)
