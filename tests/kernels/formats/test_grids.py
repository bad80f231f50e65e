"""Blocks taken apart into steps, offsets and levels, and put together again."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.errors import UnsupportedError
from llmctl.kernels.formats.codecs import dequantize, quantize
from llmctl.kernels.formats.grids import GRIDS, BlockGrid
from llmctl.kernels.formats.spec import FORMATS

each_grid = pytest.mark.parametrize("name", list(GRIDS))


def grid_of(name: str, rows: int = 5, columns: int = 512) -> BlockGrid:
    weight = np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)
    weight[1, :256] = 0  # scales of zero
    return BlockGrid.of(quantize(weight, FORMATS[name]))


def any_levels(grid: BlockGrid) -> np.ndarray:
    spec = grid.spec
    possible = spec.table() if spec.table is not None else np.arange(spec.lowest, spec.highest + 1, dtype=np.float32)
    return np.random.default_rng(2).choice(possible, grid.shape[::-1]).astype(np.float32)


@each_grid
def test_bytes_decode_to_the_values_of_the_levels(name: str) -> None:
    grid = grid_of(name)
    levels = any_levels(grid)
    assert np.array_equal(dequantize(grid.tensor(levels)), grid.values(levels).T)


@each_grid
def test_a_tensor_taken_apart_has_the_same_scales_again(name: str) -> None:
    grid = grid_of(name)
    again = BlockGrid.of(grid.tensor(any_levels(grid)))
    assert np.array_equal(grid.steps, again.steps)
    assert (grid.offsets is None) == (again.offsets is None)
    assert grid.offsets is None or np.array_equal(grid.offsets, again.offsets)


@each_grid
def test_changed_scales_are_stored_as_the_nearest_that_fit(name: str) -> None:
    grid = grid_of(name)
    wanted = grid.steps[3] * np.float32(0.8)
    grid.steps[3] = grid.nearest_step(3, wanted)
    unit = grid.block_scales[0] if grid.block_scales is not None else np.abs(wanted) / 1024
    assert (np.abs(grid.steps[3] - wanted) <= np.abs(unit) / 2 * 1.001).all()
    if grid.offsets is not None:
        wanted = grid.offsets[3] * np.float32(0.8)
        grid.offsets[3] = grid.nearest_offset(3, wanted)
        unit = grid.block_offsets[0] if grid.block_offsets is not None else np.abs(wanted) / 1024
        assert (np.abs(grid.offsets[3] - wanted) <= np.abs(unit) / 2 * 1.001).all()
    levels = any_levels(grid)
    assert np.array_equal(dequantize(grid.tensor(levels)), grid.values(levels).T)


def test_a_format_without_a_grid_is_refused_by_name() -> None:
    weight = np.ones((1, 32), np.float32)
    with pytest.raises(UnsupportedError, match="MXFP4 has no grid"):
        BlockGrid.of(quantize(weight, FORMATS["MXFP4"]))
