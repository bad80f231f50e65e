"""The native encoders: the bytes of their definition on every instruction set, whatever the shape, the dtype, the threads."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from awkward import IMPORTANCES, awkward, bell, importance

from llmctl.errors import FormatError, UsageError
from llmctl.kernels.encode import Encoder
from llmctl.kernels.formats.codecs import ENCODERS, quantize
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.native import _native as native

each_isa = pytest.mark.parametrize("isa", native.available_isas())
each_encoder = pytest.mark.parametrize("name", list(ENCODERS))


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(2)


def expected(array: np.ndarray, name: str, weights: np.ndarray | None = None) -> np.ndarray:
    return quantize(array, FORMATS[name], weights).blocks


@each_isa
@each_encoder
@pytest.mark.parametrize("kind", IMPORTANCES)
def test_bytes_are_those_of_the_definition(encoder: Encoder, isa: str, name: str, kind: str) -> None:
    array, weights = awkward(), importance(kind)
    assert np.array_equal(encoder.encode(array, FORMATS[name], weights, isa=isa).blocks, expected(array, name, weights))


@each_isa
@each_encoder
def test_values_below_the_normal_numbers(encoder: Encoder, isa: str, name: str) -> None:
    array = bell(4) * np.array([[1e-45], [1e-42], [1e-39], [1e-37]], np.float32)
    for weights in (None, importance("uneven")):
        assert np.array_equal(encoder.encode(array, FORMATS[name], weights, isa=isa).blocks, expected(array, name, weights))


@each_isa
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q3_K"])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 15, 16, 17, 33])
def test_any_number_of_rows(encoder: Encoder, isa: str, name: str, rows: int) -> None:
    array, weights = bell(rows), importance("uneven")
    assert np.array_equal(encoder.encode(array, FORMATS[name], weights, isa=isa).blocks, expected(array, name, weights))


@each_isa
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats_are_widened(encoder: Encoder, isa: str, dtype: object) -> None:
    array = (bell(5) * np.exp2(-np.arange(512) % 20)).astype(dtype)  # with subnormal numbers of float16
    for name in ("Q8_0", "Q6_K"):
        found = encoder.encode(array, FORMATS[name], isa=isa).blocks
        assert np.array_equal(found, expected(array.astype(np.float32), name))


def test_every_float16_is_widened_exactly(encoder: Encoder) -> None:
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    half = half[np.isfinite(half)].reshape(-1, 32)
    for isa in native.available_isas():
        found = encoder.encode(half, FORMATS["Q8_0"], isa=isa).blocks
        assert np.array_equal(found, expected(half.astype(np.float32), "Q8_0"))


def test_views(encoder: Encoder) -> None:
    base = bell(64, 1024)
    for view in (base[::2], base[:, 256:768], base.T, base[:, ::-1], np.broadcast_to(base[0], (3, 1024))):
        size = view.shape[1] // 32 * 32
        assert np.array_equal(encoder.encode(view[:, :size], FORMATS["Q5_1"]).blocks, expected(view[:, :size], "Q5_1"))


@pytest.mark.parametrize("threads", [1, 2, 5])
@each_encoder
def test_threads_share_the_rows(threads: int, name: str) -> None:
    array = bell(700, 256)
    found = Encoder(threads).encode(array, FORMATS[name]).blocks
    assert np.array_equal(found, expected(array, name))


@each_isa
@each_encoder
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused_with_their_place(encoder: Encoder, isa: str, name: str, bad: float) -> None:
    array = bell(300, 256)
    array[[250, 290], 33] = bad
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        with pytest.raises(FormatError, match=f"^{bad} in row 250, column 33: weights must be finite"):
            encoder.encode(array.astype(dtype), FORMATS[name], isa=isa)


@each_isa
@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "MXFP4"])
def test_scales_beyond_float16_are_refused(encoder: Encoder, isa: str, name: str) -> None:
    array = bell(20)
    array[13] *= np.float32(1e36)
    for weights in (None, importance("uneven")):
        with pytest.raises(FormatError, match="largest float16 is 65504"):
            encoder.encode(array, FORMATS[name], weights, isa=isa)


def test_no_rows_and_no_columns(encoder: Encoder) -> None:
    assert encoder.encode(bell(1)[:0], FORMATS["Q4_K"]).shape == (0, 512)
    assert encoder.encode(bell(2)[:, :0], FORMATS["Q4_K"]).blocks.shape == (2, 0)


def test_what_the_binding_checks() -> None:
    pool, rows = native.ThreadPool(1), bell(2).view(np.uint8)
    blocks = np.empty((2, 288), np.uint8)
    with pytest.raises(ValueError, match="no native encoder is called Q9_K"):
        native.encode(pool, "Q9_K", "F32", rows, blocks)
    with pytest.raises(ValueError, match="F32, F16 or BF16"):
        native.encode(pool, "Q4_K", "F64", rows, blocks)
    with pytest.raises(ValueError, match="blocks must have the bytes"):
        native.encode(pool, "Q4_K", "F32", rows, blocks[:1])
    with pytest.raises(ValueError, match="whole blocks"):
        native.encode(pool, "Q4_K", "F32", np.ascontiguousarray(rows[:, :-4]), blocks)
    with pytest.raises(ValueError, match="one weight a column"):
        native.encode(pool, "Q4_K", "F32", rows, blocks, np.ones(5, np.float32))
    with pytest.raises(ValueError, match="instruction set"):
        native.encode(pool, "Q4_K", "F32", rows, blocks, None, "mmx")


def test_without_the_extension_numpy_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmctl.kernels.encode.why_missing", lambda: "not built")
    monkeypatch.delattr(Encoder, "_native")
    array = bell(3)
    assert np.array_equal(Encoder().encode(array, FORMATS["Q4_K"]).blocks, expected(array, "Q4_K"))


def test_an_instruction_set_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise UsageError("LLMCTL_ISA: there is no such thing")

    monkeypatch.setattr("llmctl.kernels.encode.instruction_set", unknown)
    with pytest.raises(UsageError, match="LLMCTL_ISA"):
        Encoder().encode(bell(3), FORMATS["Q4_K"])
