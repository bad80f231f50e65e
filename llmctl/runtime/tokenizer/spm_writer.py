"""Writes SentencePiece's tokenizer.model: the reverse of `spm_model`, with the same fields of the same messages."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from llmctl.errors import FormatError
from llmctl.runtime.tokenizer.facts import TokenType

_BPE = 2
_VARINT, _BYTES, _FIXED32 = 0, 2, 5
# How the library spells a special piece whose id is none (-1): names it never finds, so that it takes no other piece for it.
_SPECIAL = (("unk", 40, 45), ("bos", 41, 46), ("eos", 42, 47), ("pad", 43, 48))


def write_spm_model(
    pieces: Sequence[bytes],
    scores: Sequence[float],
    types: Sequence[int],
    special: dict[str, int | None],
    *,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
) -> bytes:
    """The bytes of a tokenizer.model for a BPE of scores.

    pieces: UTF-8, spaces written ▁. types: TokenType numbers. special: ids by "unk", "bos", "eos", "pad".
    FormatError for what the library does not load: a piece that is empty or there twice, not exactly one unknown piece.
    """
    _check(pieces, types)
    body = b"".join(
        _field(1, _field(1, piece) + _float(2, score) + (b"" if kind == TokenType.NORMAL else _number(3, int(kind))))
        for piece, score, kind in zip(pieces, scores, types, strict=True)
    )
    return body + _field(2, _trainer(pieces, types, special)) + _field(3, _normalizer(add_dummy_prefix, remove_extra_whitespaces))


def _check(pieces: Sequence[bytes], types: Sequence[int]) -> None:
    seen: set[bytes] = set()
    for token_id, piece in enumerate(pieces):
        if not piece:
            raise FormatError(f"the token {token_id} is empty, which SentencePiece does not load")
        if piece in seen:
            raise FormatError(f"the token {token_id} is {piece[:40]!r}, which is there twice: SentencePiece does not load that")
        seen.add(piece)
    unknown = sum(int(kind) == TokenType.UNKNOWN for kind in types)
    if unknown != 1:
        raise FormatError(f"SentencePiece needs one unknown token, found {unknown}")


def _trainer(pieces: Sequence[bytes], types: Sequence[int], special: dict[str, int | None]) -> bytes:
    fields = [_number(3, _BPE), _number(4, len(pieces)), _number(35, int(TokenType.BYTE in types))]
    for name, id_field, piece_field in _SPECIAL:
        token_id = special.get(name)
        fields.append(_number(id_field, -1 if token_id is None else token_id))
        if token_id is not None:
            fields.append(_field(piece_field, pieces[token_id]))
    return b"".join(fields)


def _normalizer(add_dummy_prefix: bool, remove_extra_whitespaces: bool) -> bytes:
    return (
        _field(1, b"identity") + _number(3, int(add_dummy_prefix)) + _number(4, int(remove_extra_whitespaces)) + _number(5, 1)
    )


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value & (1 << 64) - 1)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | _FIXED32) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
