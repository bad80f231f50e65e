"""Reads SentencePiece's tokenizer.model (a protobuf message) with numpy: no protobuf library, no object per piece.

ModelProto: 1 pieces {1 piece, 2 score f32, 3 type}, 2 trainer_spec {3 model_type, 24 treat_whitespace_as_suffix, 35
byte_fallback, 40-43 unk/bos/eos/pad id}, 3 normalizer_spec {2 precompiled_charsmap, 3 add_dummy_prefix,
4 remove_extra_whitespaces, 5 escape_whitespaces}. Source: sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.tokenizer.facts import TokenType

_PIECE = 0x0A  # field 1, length-delimited
_BPE = 2
_MODEL_TYPES = {1: "Unigram", 2: "BPE", 3: "word", 4: "character"}
_WIRE_FIXED = {1: 8, 5: 4}


@dataclass
class SpmModel:
    """A SentencePiece BPE model.

    pieces, scores (float32), types (uint8): per id. unk_id …: -1 where there is none. charsmap: normalization, b"" for identity.
    """

    pieces: list[bytes]
    scores: np.ndarray
    types: np.ndarray
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    charsmap: bytes = b""


def read_spm_model(data: bytes) -> SpmModel:
    """The model in the bytes of a tokenizer.model.

    Errors, without the file's name: FormatError for what is no such message, UnsupportedError for other algorithms.
    """
    try:
        starts, position = _piece_starts(data)
        pieces, scores, types = _pieces(data, starts)
        rest = {number: value for number, value in _fields(data, position) if isinstance(value, bytes)}
        trainer, normalizer = dict(_fields(rest.get(2, b""))), dict(_fields(rest.get(3, b"")))
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise FormatError(f"not a SentencePiece model, or cut short ({error})") from None
    if not pieces:
        raise FormatError("not a SentencePiece model: it holds no pieces")
    _refuse_others(trainer, normalizer)
    return SpmModel(
        pieces,
        scores,
        types,
        *(_signed(trainer.get(number, default)) for number, default in ((40, 0), (41, 1), (42, 2), (43, -1))),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        charsmap=bytes(normalizer.get(2, b"")),
    )


def _refuse_others(trainer: dict[int, Any], normalizer: dict[int, Any]) -> None:
    kind = trainer.get(3, 1)
    if kind != _BPE:
        raise UnsupportedError(f"SentencePiece model of type {_MODEL_TYPES.get(kind, kind)}; only BPE is supported")
    if trainer.get(24, 0) or not normalizer.get(5, 1):
        raise UnsupportedError("SentencePiece model that writes spaces as a suffix or not at all; only the prefix ▁ is supported")


def _piece_starts(data: bytes) -> tuple[np.ndarray, int]:
    """Where each piece message begins (behind its tag), and where the run of pieces ends. They come first in the file."""
    return _chain_of_plain_pieces(data) or _walk_pieces(data)


def _chain_of_plain_pieces(data: bytes) -> tuple[np.ndarray, int] | None:
    """As `_piece_starts`, without a step per piece: all places that look like a short piece, if they follow on one another.

    A short piece is 0A length 0A text_length text 15 score [18 type]. None where the run is broken before its end.
    """
    buffer = np.frombuffer(data + bytes(272), np.uint8)
    at = np.flatnonzero((buffer[:-272] == _PIECE) & (buffer[2:-270] == _PIECE))
    length, text_length = buffer[at + 1].astype(np.int64), buffer[at + 3].astype(np.int64)
    score_at = at + 4 + text_length
    extra = length - text_length
    fits = (length < 0x80) & (buffer[score_at] == 0x15)
    fits &= (extra == 7) | ((extra == 9) & (buffer[score_at + 5] == 0x18))
    starts, stops = at[fits] + 1, (at + 2 + length)[fits]
    whole = len(starts) > 0 and starts[0] == 1 and np.array_equal(starts[1:] - 1, stops[:-1]) and stops[-1] <= len(data)
    if not whole or (stops[-1] < len(data) and data[stops[-1]] == _PIECE):
        return None
    return starts, int(stops[-1])


def _walk_pieces(data: bytes) -> tuple[np.ndarray, int]:
    starts = []
    append = starts.append
    position, size = 0, len(data)
    while position < size and data[position] == _PIECE:
        position += 1
        append(position)
        length = data[position]
        if length < 0x80:
            position += 1 + length
        else:
            length, position = _varint(data, position)
            position += length
    if position > size:
        raise ValueError("a piece reaches over the end")
    return np.array(starts, np.int64), position


def _pieces(data: bytes, at: np.ndarray) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """Texts, scores and types. Nearly all messages have one shape, which is read in bulk; the rest one by one."""
    buffer = np.frombuffer(data + bytes(16), np.uint8)
    length, text_length = buffer[at].astype(np.int64), buffer[at + 2].astype(np.int64)
    text_end = at + 3 + text_length
    plain = (length < 0x80) & (buffer[at + 1] == _PIECE) & (text_length < 0x80)
    text_end = np.where(plain, text_end, at)
    plain &= buffer[text_end] == 0x15
    typed = plain & (length == text_length + 9) & (buffer[text_end + 5] == 0x18)
    plain &= typed | (length == text_length + 7)
    score_bytes = buffer[text_end[:, None] + np.arange(1, 5)]
    scores = np.where(plain, np.ascontiguousarray(score_bytes).view("<f4")[:, 0], np.float32(0))
    types = np.where(typed, buffer[text_end + 6], TokenType.NORMAL).astype(np.uint8)
    pieces = [data[start:end] for start, end in zip((at + 3).tolist(), text_end.tolist(), strict=True)]
    for index in np.flatnonzero(~plain).tolist():
        size, begin = _varint(data, int(at[index]))
        fields = dict(_fields(data[begin : begin + size]))
        pieces[index], types[index] = bytes(fields.get(1, b"")), int(fields.get(3, TokenType.NORMAL))
        scores[index] = struct.unpack("<f", fields.get(2, bytes(4)))[0]
    return pieces, scores, types


def _fields(data: bytes, position: int = 0) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message's fields: int for varints, bytes for the rest."""
    while position < len(data):
        tag, position = _varint(data, position)
        wire = tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in _WIRE_FIXED:
            size = _WIRE_FIXED[wire]
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + size > len(data):
            raise ValueError(f"a field of {size} bytes at byte {position} reaches over the end")
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError(f"a number at byte {position} has no end")


def _signed(value: int) -> int:
    """An int32 of protobuf: negative ones are stored as 64-bit two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value
