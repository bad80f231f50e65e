"""Every format decoded bit for bit as gguf-py decodes it, by looping over the registry."""

from __future__ import annotations

import subprocess
import sys

import gguf
import gguf.quants
import ml_dtypes
import numpy as np
import pytest

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.codecs import DECODERS, dequantize, dequantize_blocks
from llmctl.kernels.formats.kquants import pack_scales, unpack_scales
from llmctl.kernels.formats.layouts import LAYOUTS
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS, Format

BLOCK_FORMATS = [f for f in FORMATS.values() if not f.is_plain]
each_block_format = pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=lambda f: f.name)


def random_blocks(fmt: Format, rows: int, blocks_per_row: int, seed: int = 0) -> np.ndarray:
    """uint8 (rows, row bytes) of random bits, the float16 scales finite but else of any size, sign and subnormality."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * blocks_per_row, fmt.bytes_per_block), dtype=np.uint8)
    records = blocks.view(LAYOUTS[fmt.name])[:, 0]
    for field in {"d", "m", "dmin"} & set(records.dtype.names):
        if records.dtype[field] == np.float16:
            bits = rng.integers(0, 1 << 16, len(records)).astype(np.uint16)
            bits[bits & 0x7C00 == 0x7C00] &= 0x83FF
            records[field] = bits.view(np.float16)
    if fmt.name == "IQ1_M":  # its scale lies in the top nibbles of four words; clear a bit of the exponent
        records["scales"][:, 3] &= 0xBFFF
    if fmt.name == "MXFP4":  # the last exponents times six exceed float32
        records["e"] = np.minimum(records["e"], 250)
    return blocks.reshape(rows, -1)


def by_gguf(fmt: Format, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[fmt.name])


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype == np.float32 and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def test_every_block_format_has_a_decoder() -> None:
    assert set(DECODERS) == {f.name for f in BLOCK_FORMATS}


@each_block_format
def test_equals_gguf_bit_for_bit(fmt: Format) -> None:
    blocks = random_blocks(fmt, rows=317, blocks_per_row=7)  # several chunks, the last one short
    expected = by_gguf(fmt, blocks)
    assert np.isfinite(expected).all()
    assert same_bits(dequantize_blocks(fmt, blocks), expected)


@each_block_format
def test_every_byte_value_in_every_place(fmt: Format) -> None:
    blocks = np.repeat(np.arange(256, dtype=np.uint8)[:, None], fmt.bytes_per_block, axis=1)
    expected, got = by_gguf(fmt, blocks), dequantize_blocks(fmt, blocks)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    finite = ~np.isnan(expected)
    assert same_bits(got[finite], expected[finite])


@each_block_format
def test_damaged_scales_decode_without_warnings(fmt: Format) -> None:
    blocks = np.full((1, fmt.bytes_per_block), 0xFF, np.uint8)
    assert np.array_equal(np.isnan(dequantize_blocks(fmt, blocks)), np.isnan(by_gguf(fmt, blocks)))


@each_block_format
def test_zero_bytes_decode_to_finite_numbers(fmt: Format) -> None:
    assert np.isfinite(dequantize_blocks(fmt, np.zeros((2, fmt.bytes_per_block), np.uint8))).all()


@each_block_format
def test_three_axes_and_empty_tensors(fmt: Format) -> None:
    rows = random_blocks(fmt, rows=6, blocks_per_row=2)
    shape = (2, 3, 2 * fmt.elements_per_block)
    tensor = QuantTensor(fmt, shape, rows.reshape(2, 3, -1))
    assert dequantize(tensor).shape == shape
    assert same_bits(dequantize(tensor).reshape(6, -1), by_gguf(fmt, rows))
    assert dequantize_blocks(fmt, rows[:0]).shape == (0, shape[-1])
    assert dequantize_blocks(fmt, rows[:, :0]).shape == (6, 0)


@each_block_format
def test_strided_unaligned_and_read_only_blocks(fmt: Format) -> None:
    rows = random_blocks(fmt, rows=8, blocks_per_row=3)
    expected = by_gguf(fmt, rows)
    assert same_bits(dequantize_blocks(fmt, rows[::-2]), np.ascontiguousarray(expected[::-2]))
    tail = expected[:, fmt.elements_per_block :]
    assert same_bits(dequantize_blocks(fmt, rows[:, fmt.bytes_per_block :]), np.ascontiguousarray(tail))
    mapped = np.frombuffer(b"\0" + rows.tobytes(), np.uint8)[1:].reshape(rows.shape)
    assert not mapped.flags.writeable
    assert same_bits(dequantize_blocks(fmt, mapped), expected)


@each_block_format
def test_out_is_filled_and_returned(fmt: Format) -> None:
    rows = random_blocks(fmt, rows=5, blocks_per_row=2)
    out = np.full((5, 2 * fmt.elements_per_block), np.nan, np.float32)
    assert dequantize_blocks(fmt, rows, out=out) is out
    assert same_bits(out, by_gguf(fmt, rows))


def test_partial_blocks_and_other_dtypes_are_refused() -> None:
    with pytest.raises(FormatError, match="multiple of 18 bytes long, got 35"):
        dequantize_blocks(FORMATS["Q4_0"], np.zeros((2, 35), np.uint8))
    with pytest.raises(FormatError, match="array of bytes, got int16"):
        dequantize_blocks(FORMATS["Q4_0"], np.zeros((2, 18), np.int16))


# The published example: eight 6-bit scales and offsets in twelve bytes.
GOLDEN_SCALES = np.array([[1, 10, 20, 30, 40, 50, 60, 63]], np.uint8)
GOLDEN_OFFSETS = np.array([[63, 0, 5, 17, 33, 48, 2, 31]], np.uint8)
GOLDEN_PACKED = bytes.fromhex("81 ca d4 de bf c0 05 51 18 02 2c ff")


def test_golden_six_bit_scales() -> None:
    scales, offsets = unpack_scales(np.frombuffer(GOLDEN_PACKED, np.uint8)[None])
    assert np.array_equal(scales, GOLDEN_SCALES)
    assert np.array_equal(offsets, GOLDEN_OFFSETS)
    assert pack_scales(GOLDEN_SCALES, GOLDEN_OFFSETS).tobytes() == GOLDEN_PACKED


def test_six_bit_scales_round_trip() -> None:
    packed = np.random.default_rng(3).integers(0, 256, (1000, 12), dtype=np.uint8)
    assert np.array_equal(pack_scales(*unpack_scales(packed)), packed)


def test_q4_k_by_hand() -> None:
    """One block written from the format's description: d = 0.5, dmin = 0.25, the golden scales, codes 0..15 cycling."""
    codes = np.arange(256) % 16
    halves = codes.reshape(4, 2, 32)
    block = np.concatenate(
        [
            np.array([0.5, 0.25], "<f2").view(np.uint8),
            np.frombuffer(GOLDEN_PACKED, np.uint8),
            (halves[:, 0] | halves[:, 1] << 4).astype(np.uint8).ravel(),
        ]
    )
    expected = 0.5 * GOLDEN_SCALES.repeat(32) * codes - 0.25 * GOLDEN_OFFSETS.repeat(32)
    assert np.array_equal(dequantize_blocks(FORMATS["Q4_K"], block), expected.astype(np.float32))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_floats_equal_gguf_for_every_16_bit_pattern(name: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32)
    stored = (patterns << 16) if name == "F32" else patterns.astype(np.uint16)
    blocks = stored.view(np.uint8).reshape(256, -1)
    expected, got = by_gguf(FORMATS[name], blocks), dequantize_blocks(FORMATS[name], blocks)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    assert same_bits(got[~np.isnan(got)], expected[~np.isnan(expected)])


@pytest.mark.parametrize("dtype", ["<f4", "<f2", ml_dtypes.bfloat16, "<f8", "<i1", "<i2", "<i4", "<i8"])
def test_plain_arrays_widen(dtype) -> None:
    array = np.array([[-3, 0, 1], [100, -128, 7]]).astype(dtype)
    out = np.empty((2, 3), np.float32)
    for got in (dequantize(array), dequantize(array, out=out), dequantize(array.T).T):
        assert got.dtype == np.float32
        assert got.tolist() == [[-3, 0, 1], [100, -128, 7]]
    assert dequantize(array, out=out) is out
    assert dequantize(array[0, 0]).shape == ()


def test_float32_is_not_copied() -> None:
    array = np.ones((2, 3), np.float32)
    array.flags.writeable = False
    assert dequantize(array) is array


def test_float64_beyond_float32_is_refused() -> None:
    with pytest.raises(FormatError, match=r"-1e\+300 in row 1, column 0 does not fit F32"):
        dequantize(np.array([[1.0, np.inf], [-1e300, 0.0]]))
    assert np.array_equal(dequantize(np.array([np.inf, 1e-300])), [np.inf, 0])


def test_float8_is_refused_because_its_scales_are_elsewhere() -> None:
    with pytest.raises(UnsupportedError, match=r"float8_e4m3fn have no plain format"):
        dequantize(np.zeros(4, ml_dtypes.float8_e4m3fn))


def test_codecs_import_neither_torch_nor_gguf() -> None:
    code = "import sys, llmctl.kernels.formats.codecs; print(*sorted({'torch', 'gguf'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
