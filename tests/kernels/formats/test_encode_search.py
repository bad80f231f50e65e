"""Encoders that search for their scales (K-quants, IQ4_NL, and all with an importance) and MXFP4: llama.cpp's bytes, errors,
importance, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from awkward import AWKWARD, COLUMNS, IMPORTANCES, awkward, bell, importance

from llmctl.errors import FormatError
from llmctl.kernels.formats.codecs import ENCODERS, dequantize, quantize
from llmctl.kernels.formats.spec import FORMATS

each_encoder = pytest.mark.parametrize("name", list(ENCODERS))
SEARCHING = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
each_searching = pytest.mark.parametrize("name", SEARCHING)
WEIGHTED = [name for name in ENCODERS if name not in ("Q8_0", "MXFP4")]

# Hashes of each row's blocks by llama.cpp's ggml_quantize_chunk: scripts/make_golden_blocks.py.
GOLDEN = json.loads((Path(__file__).parent / "golden_blocks.json").read_text())


def restored(array: np.ndarray, name: str, weights: np.ndarray | None = None) -> np.ndarray:
    return dequantize(quantize(array, FORMATS[name], weights))


@each_encoder
@pytest.mark.parametrize("kind", IMPORTANCES)
def test_blocks_are_those_of_llama_cpp(name: str, kind: str) -> None:
    blocks = quantize(awkward(), FORMATS[name], importance(kind)).blocks
    hashes = [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in blocks]
    assert dict(zip(AWKWARD, hashes, strict=True)) == dict(zip(AWKWARD, GOLDEN[name][kind], strict=True))


# Relative root mean square error for weights of a bell shape. Measured, plus a tenth.
ERROR_BUDGET = {"Q2_K": 0.31, "Q3_K": 0.17, "Q4_K": 0.078, "Q5_K": 0.04, "Q6_K": 0.021, "IQ4_NL": 0.087, "MXFP4": 0.13}


@pytest.mark.parametrize(("name", "budget"), ERROR_BUDGET.items())
def test_error_budget(name: str, budget: float) -> None:
    array = bell(64)
    error = np.linalg.norm(restored(array, name) - array) / np.linalg.norm(array)
    assert budget / 1.6 < error < budget


@pytest.mark.parametrize("name", WEIGHTED)
def test_an_importance_lowers_the_weighted_error(name: str) -> None:
    array, weights = bell(64), importance("uneven")

    def loss(found: np.ndarray) -> float:
        return float((weights * (found - array).astype(np.float64) ** 2).sum())

    assert loss(restored(array, name, weights)) < 0.95 * loss(restored(array, name))


@pytest.mark.parametrize("name", ["Q8_0", "MXFP4"])
def test_formats_that_do_without_an_importance(name: str) -> None:
    array = bell(4)
    assert np.array_equal(restored(array, name, importance("uneven")), restored(array, name))


@each_encoder
@pytest.mark.parametrize("kind", IMPORTANCES)
def test_zeros_decode_to_zeros_and_nothing_to_nan(name: str, kind: str) -> None:
    found = restored(awkward(), name, importance(kind))
    assert np.isfinite(found).all()
    for row in ("zeros", "zeros of both signs", "below the limit of zero"):
        assert not np.abs(found[AWKWARD.index(row)]).max() > 1e-15, row


@each_encoder
def test_subnormal_numbers_decode_to_finite_ones(name: str) -> None:
    for scale in (1e-45, 1e-42, 1e-39, 1e-37):
        assert np.isfinite(restored(bell(2) * np.float32(scale), name, importance("uneven"))).all()


@each_searching
@pytest.mark.parametrize("kind", IMPORTANCES)
def test_rows_do_not_depend_on_their_neighbours(name: str, kind: str) -> None:
    array = awkward()
    whole = quantize(array, FORMATS[name], importance(kind)).blocks
    for row in (0, 5, len(array) - 1):
        assert np.array_equal(quantize(array[row : row + 1], FORMATS[name], importance(kind)).blocks[0], whole[row])


@each_searching
def test_three_axes_and_views(name: str) -> None:
    array = bell(6).reshape(2, 3, COLUMNS)
    tensor = quantize(array, FORMATS[name])
    assert tensor.shape == array.shape
    assert np.array_equal(tensor.blocks[1], quantize(array[1], FORMATS[name]).blocks)
    view = np.asfortranarray(array[0])
    assert np.array_equal(quantize(view, FORMATS[name]).blocks, tensor.blocks[0])
    assert quantize(array[:0], FORMATS[name]).shape == (0, 3, COLUMNS)


@each_searching
def test_rows_must_be_whole_blocks(name: str) -> None:
    size = FORMATS[name].elements_per_block
    with pytest.raises(FormatError, match=f"{name} needs rows that are a multiple of {size} elements, got 48"):
        quantize(bell(2, 48), FORMATS[name])


@pytest.mark.parametrize("name", [*SEARCHING, "MXFP4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused_with_their_place(name: str, bad: float) -> None:
    array = bell(300)
    array[250, 33] = bad
    with pytest.raises(FormatError, match=f"^{bad} in row 250, column 33: weights must be finite"):
        quantize(array, FORMATS[name])


@each_searching
def test_scales_beyond_float16_are_refused(name: str) -> None:
    array = bell(2)
    array[1] *= np.float32(1e36)
    with pytest.raises(FormatError, match="largest float16 is 65504"):
        quantize(array, FORMATS[name])


def test_mxfp4_has_any_range() -> None:
    array = bell(8)
    for scale in (1e30, 1e-30):
        scaled = array * np.float32(scale)
        error = np.linalg.norm((restored(scaled, "MXFP4") - scaled) / scale) / np.linalg.norm(array)
        assert error < ERROR_BUDGET["MXFP4"]
