"""Codes of a few bits in 32-bit words: the one primitive behind the layouts of GPTQ, AWQ and compressed-tensors.

A row of codes is a stream: code i lies at bits [i·b, i·b + b) of the row's little-endian words and may cross from one word
into the next. GPTQ has such streams along columns, compressed-tensors along rows; AWQ has its own order within a word.
"""

from __future__ import annotations

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of an AWQ word, the lowest first, belongs to this one of the word's eight columns."""
_AWQ_PLACE = np.argsort(AWQ_ORDER)


def words_for(count: int, bits: int) -> int:
    """Words that hold `count` codes."""
    return -(-count * bits // 32)


def unpack_codes(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """uint32 (rows, words_for(count, bits)) → uint8 (rows, count). Eight codes are `bits` whole bytes."""
    rows, eights = len(words), -(-count // 8)
    stream = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return stream[:, :count]
    padded = np.zeros((rows, eights * bits + 1), np.uint8)  # the last code may look one byte ahead
    padded[:, : min(stream.shape[1], eights * bits)] = stream[:, : eights * bits]
    codes = np.empty((rows, eights, 8), np.uint8)
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        low = padded[:, byte : byte + eights * bits : bits][:, :eights]
        np.right_shift(low, shift, out=codes[:, :, place])
        if shift + bits > 8:
            codes[:, :, place] |= padded[:, byte + 1 :: bits][:, :eights] << (8 - shift)
    codes &= (1 << bits) - 1
    return codes.reshape(rows, -1)[:, :count]


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 (rows, count) below 2^bits → uint32 (rows, words_for(count, bits)); bits left over are zero."""
    rows, count = codes.shape
    eights, size = -(-count // 8), 4 * words_for(count, bits)
    padded = np.zeros((rows, eights, 8), np.uint8)
    padded.reshape(rows, -1)[:, :count] = codes
    stream = np.zeros((rows, max(size, eights * bits) + 1), np.uint8)
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        stream[:, byte : byte + eights * bits : bits][:, :eights] |= padded[:, :, place] << shift
        if shift + bits > 8:
            stream[:, byte + 1 :: bits][:, :eights] |= padded[:, :, place] >> (8 - shift)
    return np.ascontiguousarray(stream[:, :size]).view("<u4")


def unpack_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """As `unpack_codes`, of words with 32 // bits whole codes each, the bits left over unused: older compressed-tensors."""
    per_word = 32 // bits
    shifts = (np.arange(per_word, dtype=np.uint32) * np.uint32(bits))[None, None, :]
    codes = words.view("<u4")[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)[:, :count]


def awq_columns(words: np.ndarray) -> np.ndarray:
    """AWQ words, uint32 (rows, columns / 8) → uint8 codes (rows, columns), the columns in their own order."""
    nibbles = unpack_codes(words, 4, 8 * words.shape[1]).reshape(*words.shape, 8)
    return nibbles[:, :, _AWQ_PLACE].reshape(len(words), -1)


def awq_words(codes: np.ndarray) -> np.ndarray:
    """The inverse of `awq_columns`: uint8 (rows, columns) → uint32 (rows, columns / 8)."""
    rows, columns = codes.shape
    return pack_codes(codes.reshape(rows, -1, 8)[:, :, list(AWQ_ORDER)].reshape(rows, columns), 4)


def awq_rows(words: np.ndarray) -> np.ndarray:
    """An AWQ matrix, uint32 (in_features, out_features / 8) → streams of its rows, uint32 (out_features, in_features / 8).

    in_features: a multiple of 8. Works on bytes, two rows of the file at a time.
    """
    stored = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1, 4)
    even, odd = stored[0::2], stored[1::2]
    pairs = np.empty((len(even), words.shape[1], 8), np.uint8)
    pairs[:, :, list(AWQ_ORDER[0::2])] = even & 15 | odd << 4
    pairs[:, :, list(AWQ_ORDER[1::2])] = even >> 4 | odd & 240
    return np.ascontiguousarray(pairs.reshape(len(even), -1).T).view("<u4")


def awq_from_rows(streams: np.ndarray) -> np.ndarray:
    """The inverse of `awq_rows`. out_features: a multiple of 8."""
    pairs = np.ascontiguousarray(streams.view(np.uint8).T).reshape(4 * streams.shape[1], -1, 8)
    low, high = pairs[:, :, list(AWQ_ORDER[0::2])], pairs[:, :, list(AWQ_ORDER[1::2])]
    stored = np.empty((2 * len(pairs), *low.shape[1:]), np.uint8)
    stored[0::2] = low & 15 | high << 4
    stored[1::2] = low >> 4 | high & 240
    return stored.reshape(len(stored), -1).view("<u4")
