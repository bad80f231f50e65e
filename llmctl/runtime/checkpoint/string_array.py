"""Arrays of strings as GGUF stores them, read without making a Python string of each.

A vocabulary is one array of a quarter of a million strings, each a u64 length and its bytes, one after the other: where
one begins is known only from the one before. Walking that chain in Python takes tens of milliseconds. Here numpy finds
the places that look like a length (zero bytes after a small number), links each to where it says the next one is, and
keeps whole runs of links that were followed exactly; what such a guess cannot show is walked. The result is the same
for every input.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

from llmctl.errors import FormatError

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 20  # most bytes searched at once: what is made of them stays in the cache
_BYTES_PER_STRING = 20  # about what a token or merge takes, so that little behind a short array is searched
_MAX_RUNS = 2000  # broken runs in a chunk after which the plain walk is faster


class StringArray(Sequence[str]):
    """Strings in GGUF's own encoding: each a little-endian u64 byte count, then the bytes.

    buffer: uint8, the encoded array, exactly; often mapped from the file. Read-only.
    offsets: int64 per string, where its bytes begin in `buffer`.
    lengths: int64 per string, how many bytes.

    String i is `buffer[offsets[i] : offsets[i] + lengths[i]]`: work on these for speed. As a sequence it yields `str`,
    bytes that are not UTF-8 replaced by U+FFFD (a token may be any bytes); `raw` and `tobytes_list` leave them be.
    """

    __slots__ = ("buffer", "lengths", "offsets")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, buffer: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        self.buffer = buffer
        self.offsets = offsets
        self.lengths = lengths

    @classmethod
    def encode(cls, strings: Iterable[str | bytes]) -> StringArray:
        """The strings in GGUF's encoding; text becomes UTF-8 (UnicodeEncodeError for lone surrogates)."""
        items = [item.encode() if isinstance(item, str) else bytes(item) for item in strings]
        lengths = np.fromiter(map(len, items), np.int64, len(items))
        ends = np.cumsum(lengths + 8)
        buffer = np.frombuffer(b"".join(_LENGTH.pack(len(item)) + item for item in items), np.uint8)
        return cls(buffer, ends - lengths, lengths)

    def raw(self, index: int) -> bytes:
        """The bytes of string `index`, as stored."""
        start = int(self.offsets[index])
        return self.buffer[start : start + int(self.lengths[index])].tobytes()

    def tobytes_list(self) -> list[bytes]:
        """All strings as bytes."""
        data = self.buffer.tobytes()
        starts = self.offsets.tolist()
        ends = (self.offsets + self.lengths).tolist()
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def tolist(self) -> list[str]:
        """All strings as text."""
        return [item.decode("utf-8", "replace") for item in self.tobytes_list()]

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.raw(index).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray):
            return np.array_equal(self.buffer, other.buffer)
        return self.tolist() == other if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)}>"


def scan_strings(data: np.ndarray, start: int, count: int) -> StringArray:
    """The `count` strings encoded from byte `start` of `data` (uint8), without copying.

    The array ends `len(result.buffer)` bytes after `start`. FormatError, without the file's name, if a string does not
    fit the bytes left. The caller has checked that `count` lengths could fit at all.
    """
    starts, lengths, end = _Chain(data).follow(start, count)
    return StringArray(data[start:end], starts + (8 - start), lengths)


class _Chain:
    """The chain of strings in `data`, collected as runs of positions and lengths."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        self._view = memoryview(data)
        self._starts: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._missing = 0

    def follow(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Positions of `count` length fields from `start` on, the lengths, and the end of the last string."""
        self._missing = count
        position = start
        while self._missing:
            stop = min(position + min(_CHUNK, self._missing * _BYTES_PER_STRING), len(self._data))
            # At the end of the data with strings missing there is nothing to search, and the walk says so.
            position = self._chunk(position, stop) if position < stop else self._walk(position, stop)
        if not self._starts:
            return np.empty(0, np.int64), np.empty(0, np.int64), position
        return np.concatenate(self._starts), np.concatenate(self._lengths), position

    def _chunk(self, position: int, stop: int) -> int:
        """Follow the chain until it leaves `stop` or is complete; returns the position reached."""
        heads, lengths = likely_heads(self._data, position, stop)
        ends = heads + 8 + lengths
        # Indexes after which the next likely head is not where this string says the next one begins.
        breaks = np.append(np.flatnonzero(ends[:-1] != heads[1:]), len(heads) - 1)
        for _ in range(_MAX_RUNS):
            if not self._missing or position >= stop:
                return position
            first = int(np.searchsorted(heads, position))
            if first < len(heads) and heads[first] == position:
                last = int(breaks[np.searchsorted(breaks, first)])
                last = min(last, first + self._missing - 1)
                self._keep(heads[first : last + 1], lengths[first : last + 1])
                position = int(ends[last])
            else:
                position = self._walk(position, int(heads[first]) if first < len(heads) else stop)
        return self._walk(position, stop)

    def _walk(self, position: int, stop: int) -> int:
        """Follow the chain string by string until it reaches `stop` or is complete."""
        size = len(self._data)
        starts, lengths = [], []
        while position < stop or not starts:
            length = _LENGTH.unpack_from(self._view, position)[0] if position + 8 <= size else 0
            if length > size - position - 8:
                index = len(starts) + sum(map(len, self._starts))
                raise FormatError(f"string {index} claims {length} bytes where {max(0, size - position - 8)} are left")
            starts.append(position)
            lengths.append(length)
            position += 8 + length
            if len(starts) == self._missing:
                break
        self._keep(np.array(starts, np.int64), np.array(lengths, np.int64))
        return position

    def _keep(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._starts.append(starts)
        self._lengths.append(lengths)
        self._missing -= len(starts)


def likely_heads(data: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Ascending positions in data[start:stop] that look like the length field of a short string, and the lengths there.

    A length below 256 is one byte and seven zeros, and seven bytes always hold a whole aligned four-byte word: so zero
    words are sought, and the last byte before each that is not zero. Only lengths that fit in `data` are returned. This
    is a guess: it may miss lengths (0, above 255, at the borders) and report what is none.
    """
    base = start & ~3  # data is a whole mapped file, so this keeps the words aligned
    words = data[base : base + (stop - base & ~3)].view("<u4")
    zeros = np.flatnonzero(words[1:] == 0)
    before = words[zeros]
    heads = base + 4 * zeros + (before > 0xFF) + (before > 0xFFFF) + (before > 0xFFFFFF)
    heads = heads[(before != 0) & (heads + 8 <= len(data)) & (heads >= start)]
    every_byte = np.ndarray((max(0, len(data) - 7),), "<i8", buffer=data, strides=(1,))
    lengths = every_byte[heads]
    fits = (lengths >= 0) & (lengths <= len(data) - 8 - heads)
    return heads[fits], lengths[fits]
