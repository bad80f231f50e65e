"""The canonical packed-integer tensor: what it accepts, and the values it stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmctl.errors import FormatError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.packed_int import PackedIntTensor


def parts(bits: int, rows: tuple[int, ...], columns: int, group_size: int, zeros: bool, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    groups = 1 if group_size == -1 else columns // group_size
    return {
        "bits": bits,
        "group_size": group_size,
        "shape": (*rows, columns),
        "codes": rng.integers(0, 256, (*rows, columns * bits // 8), dtype=np.uint8),
        "scales": rng.standard_normal((*rows, groups)).astype(np.float32),
        "zero_points": rng.integers(0, 1 << bits, (*rows, groups), dtype=np.uint8) if zeros else None,
    }


def by_definition(tensor: PackedIntTensor) -> np.ndarray:
    """One number at a time."""
    out = np.empty(tensor.shape, np.float32)
    for *row, column in np.ndindex(*tensor.shape):
        row = tuple(row)
        if tensor.bits == 8:
            code = int(tensor.codes[(*row, column)])
        else:
            code = int(tensor.codes[(*row, column // 2)]) >> (4 * (column % 2)) & 15
        place = (*row, column // tensor.columns_per_group)
        zero = 1 << (tensor.bits - 1) if tensor.zero_points is None else int(tensor.zero_points[place])
        out[(*row, column)] = tensor.scales[place] * np.float32(code - zero)
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("rows", "columns", "group_size"), [((3,), 128, 32), ((2, 5), 96, -1), ((1,), 192, 64)])
def test_values_are_scale_times_code_less_zero(bits: int, zeros: bool, rows: tuple, columns: int, group_size: int) -> None:
    tensor = PackedIntTensor(**parts(bits, rows, columns, group_size, zeros))
    assert np.array_equal(dequantize(tensor), by_definition(tensor))


def test_many_rows_are_decoded_in_chunks_into_the_array_given() -> None:
    tensor = PackedIntTensor(**parts(4, (700,), 256, 128, True))
    out = np.full(tensor.shape, np.nan, np.float32)
    assert dequantize(tensor, out=out) is out
    assert np.array_equal(out[-3:], by_definition(PackedIntTensor(**{**_last_rows(tensor, 3)})))
    assert np.isfinite(out).all()


def _last_rows(tensor: PackedIntTensor, count: int) -> dict[str, Any]:
    cut = {name: getattr(tensor, name)[-count:] for name in ("codes", "scales", "zero_points")}
    return {"bits": tensor.bits, "group_size": tensor.group_size, "shape": (count, tensor.shape[-1]), **cut}


def test_sizes() -> None:
    tensor = PackedIntTensor(**parts(4, (6,), 256, 128, True))
    assert (tensor.num_groups, tensor.num_elements, tensor.nbytes) == (2, 1536, 768 + 48 + 12)
    whole = PackedIntTensor(**parts(8, (6,), 160, -1, False))
    assert (whole.columns_per_group, whole.num_groups, whole.nbytes) == (160, 1, 960 + 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "4 or 8 bits, got 3"),
        ({"shape": ()}, r"rows of columns, got shape \(\)"),
        ({"shape": (4, 0)}, "rows of columns"),
        ({"group_size": 48}, "multiple of 32 that divides the 128 columns of a row.* got 48"),
        ({"group_size": 0}, "got 0"),
        ({"group_size": -2}, "got -2"),
        ({"group_size": 96}, "got 96"),
        ({"codes": np.zeros((4, 128), np.uint8)}, r"codes must be uint8 \(4, 64\), got uint8 \(4, 128\)"),
        ({"codes": np.zeros((4, 64), np.int8)}, "got int8"),
        ({"scales": np.zeros((4, 4), np.float16)}, r"scales must be float32 \(4, 4\), got float16"),
        ({"scales": np.zeros((4, 2), np.float32)}, r"got float32 \(4, 2\)"),
        ({"scales": np.full((4, 4), np.inf, np.float32)}, "finite"),
        ({"zero_points": np.zeros((4, 2), np.uint8)}, r"zero_points must be uint8 \(4, 4\)"),
        ({"zero_points": np.full((4, 4), 16, np.uint8)}, "zero points of 4-bit codes are below 16"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        PackedIntTensor(**{**parts(4, (4,), 128, 32, True), **change})


def test_a_row_that_groups_cannot_cover_is_refused() -> None:
    with pytest.raises(FormatError, match="got -1"):
        PackedIntTensor(8, -1, (1, 40), np.zeros((1, 40), np.uint8), np.ones((1, 1), np.float32))


def test_the_reference_backend_prepares_it() -> None:
    from llmctl.kernels._reference import ReferenceOps

    tensor = PackedIntTensor(**parts(4, (5,), 64, 32, True))
    prepared = ReferenceOps(threads=1).prepare_weight(tensor)
    assert np.array_equal(prepared.numpy(), dequantize(tensor))
