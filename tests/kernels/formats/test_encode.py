"""Encoders: the codes of llama.cpp's reference quantization, error budgets, and what is refused."""

from __future__ import annotations

import struct

import gguf
import gguf.quants
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.codecs import ENCODERS, can_quantize, dequantize, quantize
from llmctl.kernels.formats.spec import FORMATS

each_encoder = pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])  # for others: test_encode_search.py
NO_ENCODER = [f for f in FORMATS if f not in ENCODERS and f not in ("F32", "F16", "BF16")]


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def blocks_of(array: np.ndarray, name: str) -> np.ndarray:
    return quantize(array, FORMATS[name]).blocks


def by_gguf(array: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(array, gguf.GGMLQuantizationType[name])


# Scalar transcription of the rules, one float32 operation at a time: what numpy's vector paths are checked against.

F = np.float32


def _half_bytes(value: np.float32) -> bytes:
    return struct.pack("<e", float(value))


def _nibbles(codes: list[int]) -> bytes:
    return bytes((codes[j] & 15) | (codes[j + 16] & 15) << 4 for j in range(16))


def _fifth_bits(codes: list[int]) -> bytes:
    return sum((code >> 4) << j for j, code in enumerate(codes)).to_bytes(4, "little")


def _signed_block(block: np.ndarray, half: int) -> tuple[bytes, list[int]]:
    largest = extreme = F(0)
    for x in block:
        if largest < abs(x):
            largest, extreme = abs(x), x
    d = extreme / F(-half)
    inverse = F(1) / d if d else F(0)
    return _half_bytes(d), [min(2 * half - 1, int(x * inverse + F(half + 0.5))) for x in block]


def _offset_block(block: np.ndarray, top: int) -> tuple[bytes, list[int]]:
    low, high = block[0], block[0]
    for x in block:
        low, high = (x if x < low else low), (x if x > high else high)
    d = (high - low) / F(top)
    inverse = F(1) / d if d else F(0)
    return _half_bytes(d) + _half_bytes(low), [int((x - low) * inverse + F(0.5)) for x in block]


def scalar_q4_0(block: np.ndarray) -> bytes:
    scales, codes = _signed_block(block, 8)
    return scales + _nibbles(codes)


def scalar_q5_0(block: np.ndarray) -> bytes:
    scales, codes = _signed_block(block, 16)
    return scales + _fifth_bits(codes) + _nibbles(codes)


def scalar_q4_1(block: np.ndarray) -> bytes:
    scales, codes = _offset_block(block, 15)
    return scales + _nibbles(codes)


def scalar_q5_1(block: np.ndarray) -> bytes:
    scales, codes = _offset_block(block, 31)
    return scales + _fifth_bits(codes) + _nibbles(codes)


def scalar_q8_0(block: np.ndarray) -> bytes:
    d = max(abs(x) for x in block) / F(127)
    inverse = F(1) / d if d else F(0)
    steps = [float(x * inverse) for x in block]  # float64 holds step + 0.5 exactly
    codes = [int(step + 0.5) if step >= 0 else -int(0.5 - step) for step in steps]
    return _half_bytes(d) + np.array(codes, np.int8).tobytes()


SCALAR = {"Q4_0": scalar_q4_0, "Q4_1": scalar_q4_1, "Q5_0": scalar_q5_0, "Q5_1": scalar_q5_1, "Q8_0": scalar_q8_0}

# Few distinct values make ties, equal extremes and zeros of both signs common. None is so small that 1 / d overflows.
_values = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 8.0, -8.0, 127.0, -127.0, 63.5, 1e-30, -1e-30, 6e-8, 3e4, -3e4]),
    st.floats(-100, 100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30),
)
_blocks = st.lists(_values, min_size=32, max_size=32).map(lambda v: np.array(v, np.float32))


@each_encoder
@settings(deadline=None, derandomize=True, max_examples=200)
@given(block=_blocks)
@example(block=np.full(32, -0.0, np.float32))
@example(block=np.array([0.0, -0.0] * 16, np.float32))
@example(block=np.array([-0.0, 0.0, 1.0, 0.25] * 8, np.float32))
@example(block=np.array([2.0, -2.0, 0.49999997, 0.5] * 8, np.float32))
@example(block=np.array([-127.0, 0.5, -0.5, 2.5] * 8, np.float32))
def test_equals_the_scalar_rules(name: str, block: np.ndarray) -> None:
    with np.errstate(under="ignore"):
        assert blocks_of(block, name).tobytes() == SCALAR[name](block)


@each_encoder
@pytest.mark.parametrize("scale", [1e-5, 0.02, 1.0, 1000.0])
def test_equals_gguf_bit_for_bit(name: str, scale: float) -> None:
    array = weights(300, 7 * 64) * F(scale)  # several chunks, the last one short
    array[:100] = np.round(array[:100] / F(scale) * 4) * F(scale)  # ties and exact zeros
    assert np.array_equal(blocks_of(array, name), by_gguf(array, name))


@each_encoder
def test_a_row_longer_than_a_chunk(name: str) -> None:
    array = weights(2, 96 * 1024)
    assert np.array_equal(blocks_of(array, name), by_gguf(array, name))


# Root mean square error of W x relative to its size, for normal weights. Measured, plus a tenth.
ERROR_BUDGET = {"Q4_0": 0.095, "Q4_1": 0.085, "Q5_0": 0.047, "Q5_1": 0.042, "Q8_0": 0.0059}


@each_encoder
def test_dot_product_error_budget(name: str) -> None:
    matrix, vectors = weights(256, 1024), weights(1024, 64, seed=1)
    restored = dequantize(quantize(matrix, FORMATS[name]))
    error = np.linalg.norm((restored - matrix) @ vectors) / np.linalg.norm(matrix @ vectors)
    assert error < ERROR_BUDGET[name]


@each_encoder
def test_no_element_is_off_by_more_than_its_step(name: str) -> None:
    matrix = weights(64, 512)
    error = np.abs(dequantize(quantize(matrix, FORMATS[name])) - matrix).reshape(-1, 32).max(axis=1)
    blocks = matrix.reshape(-1, 32)
    span, largest = np.ptp(blocks, axis=1), np.abs(blocks).max(axis=1)
    # Q4_0 and Q5_0 clip the value opposite the extreme to one step less; the others round to half a step.
    step = {"Q4_0": largest / 8, "Q5_0": largest / 16, "Q4_1": span / 30, "Q5_1": span / 62, "Q8_0": largest / 254}[name]
    assert (error <= step * 1.01 + largest * 2e-3).all()


@each_encoder
def test_values_on_the_grid_survive_exactly(name: str) -> None:
    low, high = {"Q4_0": (-8, 7), "Q4_1": (0, 15), "Q5_0": (-16, 15), "Q5_1": (0, 31), "Q8_0": (-127, 127)}[name]
    rng = np.random.default_rng(5)
    codes = rng.integers(low, high + 1, (40, 32)).astype(np.float32)
    codes[:, 3], codes[:, 20] = low, high  # the grid's ends occur in each block
    array = codes * F(0.0625) + (F(-1.5) if low == 0 else F(0))
    assert np.array_equal(dequantize(quantize(array, FORMATS[name])), array)


@each_encoder
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_blocks_decode_to_exact_zeros(name: str, zero: float) -> None:
    array = weights(4, 96)
    array[1] = zero  # a row
    array[2, 32:64] = zero  # a group
    restored = dequantize(quantize(array, FORMATS[name]))
    assert np.isfinite(restored).all()
    assert not restored[1].any()
    assert not restored[2, 32:64].any()


@each_encoder
@pytest.mark.parametrize("tiny", [1e-45, 1e-42, 1e-39, 1e-37, 1e-20])
def test_values_below_float16_decode_to_zeros_without_warnings(name: str, tiny: float) -> None:
    array = weights(2, 64) * F(tiny)
    array[0, 5] = 0
    assert not dequantize(quantize(array, FORMATS[name])).any()


@each_encoder
def test_three_axes(name: str) -> None:
    array = weights(3, 5, 64)
    tensor = quantize(array, FORMATS[name])
    assert tensor.shape == (3, 5, 64)
    assert tensor.blocks.shape == (3, 5, 2 * FORMATS[name].bytes_per_block)
    for expert in range(3):
        assert np.array_equal(tensor.blocks[expert], blocks_of(array[expert], name))
    assert quantize(array[:0], FORMATS[name]).shape == (0, 5, 64)
    assert quantize(array[..., :0], FORMATS[name]).blocks.shape == (3, 5, 0)


@each_encoder
def test_views_are_encoded_with_the_right_values(name: str) -> None:
    base = weights(64, 4, 96)
    read_only = base[0].copy()
    read_only.flags.writeable = False
    views = {
        "transposed": base[:, 0, :].T,
        "axes swapped": base.transpose(2, 1, 0),
        "strided": base[::2, ::-1, ::3],
        "column slice": base[:, :, 32:],
        "broadcast": np.broadcast_to(base[0, 0], (3, 96)),
        "read only": read_only,
    }
    for what, view in views.items():
        before = view.copy()
        assert np.array_equal(blocks_of(view, name), by_gguf(np.ascontiguousarray(view), name)), what
        assert np.array_equal(view, before), what


@each_encoder
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats_are_widened(name: str, dtype) -> None:
    array = weights(8, 64).astype(dtype)
    assert np.array_equal(blocks_of(array, name), blocks_of(array.astype(np.float32), name))


@each_encoder
def test_rows_must_be_whole_blocks(name: str) -> None:
    with pytest.raises(FormatError, match=f"{name} needs rows that are a multiple of 32 elements, got 48"):
        quantize(weights(2, 48), FORMATS[name])
    with pytest.raises(FormatError, match="single number"):
        quantize(np.float32(1).reshape(()), FORMATS[name])


@each_encoder
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused_with_their_place(name: str, bad: float) -> None:
    array = weights(3000, 64)  # the bad row lies in the third chunk
    array[2500, 33] = bad
    with pytest.raises(FormatError, match=f"^{bad} in row 2500, column 33: weights must be finite"):
        quantize(array, FORMATS[name])


@each_encoder
@pytest.mark.parametrize("value", [1e7, -1e7, 3e38])
def test_scales_beyond_float16_are_refused(name: str, value: float) -> None:
    array = weights(2, 64)
    array[1, 7] = value
    with pytest.raises(FormatError, match="largest float16 is 65504"):
        quantize(array, FORMATS[name])


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1"])
def test_a_range_beyond_float32_is_refused(name: str) -> None:
    array = weights(1, 32)
    array[0, :2] = 3e38, -3e38
    with pytest.raises(FormatError, match="largest float16"):
        quantize(array, FORMATS[name])


def test_float64_beyond_float32_is_refused() -> None:
    with pytest.raises(FormatError, match=r"1e\+300 in row 0, column 3 does not fit F32"):
        quantize(np.where(np.arange(32) == 3, 1e300, 1.0)[None], FORMATS["Q8_0"])


@pytest.mark.parametrize("name", NO_ENCODER)
def test_formats_without_encoder_say_which_exist(name: str) -> None:
    assert not can_quantize(FORMATS[name])
    with pytest.raises(UnsupportedError, match=f"no encoder for {name}; .*F32, F16, BF16, Q4_0, .*Q8_0"):
        quantize(weights(1, 256), FORMATS[name])


def test_can_quantize_names_what_quantize_takes() -> None:
    assert {f for f in FORMATS if can_quantize(FORMATS[f])} == {"F32", "F16", "BF16", *ENCODERS}


def test_float8_input_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="float8_e5m2"):
        quantize(np.zeros((1, 32), ml_dtypes.float8_e5m2), FORMATS["Q8_0"])


# Casts.

BF16_TROUBLE = np.array([0x47C3, 0x0001, 0x8000, 0x7FC0, 0xFFA5], np.uint16)  # 1e5, a subnormal, -0, two NaNs


def test_the_same_type_is_bit_exact() -> None:
    array = BF16_TROUBLE.view(ml_dtypes.bfloat16)
    assert np.array_equal(quantize(array, FORMATS["BF16"]).view(np.uint16), BF16_TROUBLE)
    half = np.arange(1 << 16, dtype=np.uint16)
    assert np.array_equal(quantize(half.view(np.float16), FORMATS["F16"]).view(np.uint16), half)
    full = np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)
    assert np.array_equal(quantize(full, FORMATS["F32"]).view(np.uint32), full.view(np.uint32))


def test_overflow_to_float16_names_value_place_and_limit() -> None:
    array = np.array([[1, 2], [3, 1e5]]).astype(ml_dtypes.bfloat16)
    with pytest.raises(FormatError, match=r"99840 in row 1, column 1 does not fit F16, whose largest value is 65504"):
        quantize(array, FORMATS["F16"])
    with pytest.raises(FormatError, match="65520 in row 0, column 0 does not fit F16"):
        quantize(np.float32(65520).reshape(()), FORMATS["F16"])
    assert quantize(np.array([65519.99], np.float32), FORMATS["F16"])[0] == 65504


def test_overflow_to_bfloat16_is_refused() -> None:
    with pytest.raises(FormatError, match=r"3.4e\+38 in row 0, column 0 does not fit BF16"):
        quantize(np.array([3.4e38], np.float32), FORMATS["BF16"])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "F16"), (ml_dtypes.bfloat16, "F32"), (np.float16, "BF16")])
def test_conversions_refuse_non_finite_values(bad: float, dtype, name: str) -> None:
    with pytest.raises(FormatError, match=f"^{bad} in row 0, column 1: weights must be finite"):
        quantize(np.array([[0, bad, 1]]).astype(dtype), FORMATS[name])


def test_bfloat16_rounds_as_gguf() -> None:
    bits = np.random.default_rng(7).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    bits[:5000] = (bits[:5000] & 0xFFFF0000) | 0x8000  # ties
    array = bits.view(np.float32)
    array = np.where(np.abs(array) < 3.38e38, array, F(1))[None]
    assert np.array_equal(quantize(array, FORMATS["BF16"]).view(np.uint8), by_gguf(array, "BF16"))


def test_float16_rounds_half_to_even() -> None:
    rng = np.random.default_rng(8)
    array = np.concatenate([rng.standard_normal(2000) * 1e-6, rng.standard_normal(2000) * 100]).astype(np.float32)
    expected = b"".join(struct.pack("<e", float(x)) for x in array)
    assert quantize(array, FORMATS["F16"]).tobytes() == expected


def test_casts_keep_shape_and_order_of_views() -> None:
    array = weights(4, 6, 5)
    for name in ("F16", "BF16"):
        view = array.transpose(2, 0, 1)[::2]
        assert np.array_equal(quantize(view, FORMATS[name]), quantize(np.ascontiguousarray(view), FORMATS[name]))
