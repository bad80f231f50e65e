"""Rounding to nearest: the codes are gguf-py's, the error is what it says, whatever the chunks."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest

from llmctl.errors import FormatError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant import rtn

BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows at a time, so that every test crosses borders of chunks."""
    monkeypatch.setattr(rtn, "_CHUNK_ELEMENTS", 3 * 96)


def random(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32).astype(dtype)


def reference(weight: np.ndarray, name: str) -> bytes:
    return gguf.quants.quantize(weight.astype(np.float32), gguf.GGMLQuantizationType[name]).tobytes()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_blocks_are_those_of_gguf_py(name: str, dtype: object) -> None:
    weight = random(10, 96, dtype=dtype)
    assert rtn.round_to_nearest(weight, FORMATS[name]).tensor.blocks.tobytes() == reference(weight, name)


def test_a_stack_of_matrices_and_a_strided_view() -> None:
    stack = random(4, 5, 64)
    rounded = rtn.round_to_nearest(stack, FORMATS["Q8_0"]).tensor
    assert rounded.shape == (4, 5, 64)
    assert rounded.blocks.tobytes() == reference(stack, "Q8_0")
    view = random(64, 7).T
    assert rtn.round_to_nearest(view, FORMATS["Q4_0"]).tensor.blocks.tobytes() == reference(np.ascontiguousarray(view), "Q4_0")


@pytest.mark.parametrize("name", [*BLOCKS, "F16", "BF16"])
def test_the_error_is_the_distance(name: str) -> None:
    weight = random(10, 96)
    rounded = rtn.round_to_nearest(weight, FORMATS[name])
    difference = weight.astype(np.float64) - dequantize(rounded.tensor)
    assert rounded.squared_error == pytest.approx((difference**2).sum(), rel=1e-5)
    assert rounded.squared_weight == pytest.approx((weight.astype(np.float64) ** 2).sum(), rel=1e-5)
    expected = np.sqrt((difference**2).sum() / (weight.astype(np.float64) ** 2).sum())
    assert rounded.relative_error == pytest.approx(expected, rel=1e-5)
    assert rounded.relative_error > 0


def test_the_error_is_left_out_unless_asked_for() -> None:
    rounded = rtn.round_to_nearest(random(4, 32), FORMATS["Q8_0"], measure=False)
    assert (rounded.squared_error, rounded.squared_weight, rounded.relative_error) == (None, None, None)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_same_format_again_changes_nothing(name: str) -> None:
    first = rtn.round_to_nearest(random(8, 64), FORMATS[name]).tensor
    again = rtn.round_to_nearest(first, FORMATS[name])
    assert again.tensor is first
    assert again.relative_error == 0
    assert again.squared_weight == pytest.approx((dequantize(first).astype(np.float64) ** 2).sum(), rel=1e-5)


def test_blocks_to_other_blocks_go_over_their_values() -> None:
    q8 = rtn.round_to_nearest(random(9, 96), FORMATS["Q8_0"]).tensor
    rounded = rtn.round_to_nearest(q8, FORMATS["Q4_0"])
    assert rounded.tensor.blocks.tobytes() == reference(dequantize(q8), "Q4_0")
    f16 = rtn.round_to_nearest(q8, FORMATS["F16"]).tensor
    np.testing.assert_array_equal(f16, dequantize(q8).astype(np.float16))


def test_zeros_stay_zeros() -> None:
    weight = random(6, 64)
    weight[2] = 0
    weight[4, :32] = 0
    for name in BLOCKS:
        back = dequantize(rtn.round_to_nearest(weight, FORMATS[name]).tensor)
        assert not back[2].any()
        assert not back[4, :32].any()
        assert np.isfinite(back).all()
    assert rtn.round_to_nearest(np.zeros((3, 32), np.float32), FORMATS["Q4_0"]).relative_error == 0


def test_vectors_and_numbers_have_one_row() -> None:
    vector = random(7, dtype=np.float16)
    np.testing.assert_array_equal(rtn.round_to_nearest(vector, FORMATS["F32"]).tensor, vector.astype(np.float32))
    number = rtn.round_to_nearest(np.array(1.5, np.float16), FORMATS["F32"]).tensor
    assert (number.shape, number.dtype, number[()]) == ((), np.float32, 1.5)


@pytest.mark.parametrize("name", ["Q4_0", "F16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_with_its_row(name: str, value: float) -> None:
    weight = random(8, 96)
    weight[7, 5] = value
    with pytest.raises(FormatError, match=r"row 1, column 5: .* \(rows counted from 6\)"):
        rtn.round_to_nearest(weight, FORMATS[name])
    assert rtn.first_nonfinite(weight) == (7, 5)
    assert rtn.first_nonfinite(weight[:7]) is None


def test_what_does_not_fit_is_refused() -> None:
    weight = random(2, 32).astype(ml_dtypes.bfloat16)
    weight[1, 3] = 1e5
    with pytest.raises(FormatError, match="row 1, column 3 does not fit F16"):
        rtn.round_to_nearest(weight, FORMATS["F16"])
    with pytest.raises(FormatError, match="multiple of 32"):
        rtn.round_to_nearest(random(2, 40), FORMATS["Q4_0"])


def test_damaged_scales_are_found() -> None:
    blocks = rtn.round_to_nearest(random(5, 64), FORMATS["Q8_0"]).tensor.blocks.copy()
    blocks[3, 34:36] = np.array([np.nan], np.float16).view(np.uint8)
    damaged = QuantTensor(FORMATS["Q8_0"], (5, 64), blocks)
    assert rtn.first_nonfinite(damaged) == (3, 32)
    with pytest.raises(FormatError, match="nan in row"):
        rtn.round_to_nearest(damaged, FORMATS["Q4_0"])
