"""Streams of codes: golden words, and everything that the maker of test models lays out bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_packed_model import awq_words_of, loose_words_of, words_of

from llmctl.runtime.checkpoint import packed_bits


def hexadecimal(words: np.ndarray) -> list[str]:
    return [f"{word:#010x}" for word in words.reshape(-1).view(np.uint32)]


@pytest.mark.parametrize("pack", [packed_bits.pack_codes, words_of])
def test_golden_words(pack) -> None:
    eight = np.arange(8, dtype=np.uint8)[None]
    assert hexadecimal(pack(eight, 4)) == ["0x76543210"]
    threes = (np.arange(32, dtype=np.uint8) % 8)[None]
    assert hexadecimal(pack(threes, 3)) == ["0x88fac688", "0xc688fac6", "0xfac688fa"]


@pytest.mark.parametrize("pack", [packed_bits.awq_words, awq_words_of])
def test_golden_awq_word(pack) -> None:
    assert hexadecimal(pack(np.arange(8, dtype=np.uint8)[None])) == ["0x75316420"]


def codes_of(rows: int, count: int, bits: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, (rows, count), dtype=np.uint8)


shapes = given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 200), st.integers(0, 99))


@shapes
def test_packing_is_the_stream_of_bits(bits: int, rows: int, count: int, seed: int) -> None:
    codes = codes_of(rows, count, bits, seed)
    words = packed_bits.pack_codes(codes, bits)
    assert words.shape == (rows, packed_bits.words_for(count, bits))
    assert np.array_equal(words.view("<i4"), words_of(codes, bits))
    assert np.array_equal(packed_bits.unpack_codes(words, bits, count), codes)
    assert np.array_equal(packed_bits.unpack_codes(words.T.copy().T, bits, count), codes)


@shapes
def test_words_of_whole_codes(bits: int, rows: int, count: int, seed: int) -> None:
    codes = codes_of(rows, count, bits, seed)
    assert np.array_equal(packed_bits.unpack_words(loose_words_of(codes, bits), bits, count), codes)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 99))
def test_awq_words_and_rows(eights_of_columns: int, eights_of_rows: int, seed: int) -> None:
    """A file's matrix (in, out) and the streams of the weight's rows."""
    weight = codes_of(8 * eights_of_rows, 8 * eights_of_columns, 4, seed)  # (out, in)
    stored = awq_words_of(weight.T)
    assert np.array_equal(packed_bits.awq_columns(stored.view("<u4")), weight.T)
    assert np.array_equal(packed_bits.awq_words(weight.T).view("<i4"), stored)
    streams = packed_bits.awq_rows(stored.view("<u4"))
    assert np.array_equal(streams, packed_bits.pack_codes(weight, 4))
    assert np.array_equal(packed_bits.awq_from_rows(streams).view("<i4"), stored)
