"""One table of names, both ways, and the row order that goes with it."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.kernels.formats.codecs import dequantize, quantize
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint.names import deinterleave_rows, interleave_rows
from llmctl.runtime.models.registry import FAMILIES


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_name_goes_there_and_back(family: object) -> None:
    names = family.gguf_names
    modules = [*names.top, *(f"model.layers.17.{module}" for module in names.layer)]
    for name in (f"{module}.{kind}" for module in modules for kind in ("weight", "bias")):
        assert names.to_hf(names.to_gguf(name)) == name


def test_names_outside_the_table_have_no_counterpart() -> None:
    names = FAMILIES[0].gguf_names
    for name in ("model.layers.0.mlp.gate_proj.scales", "model.layers.x.input_layernorm.weight", "model.vision.weight", ""):
        assert names.to_gguf(name) is None


def test_interleaving_puts_the_two_halves_of_a_head_side_by_side() -> None:
    rows = np.arange(12)[:, None]
    assert interleave_rows(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize("num_heads", [1, 3, 6])
def test_deinterleaving_undoes_it_for_vectors_matrices_and_blocks(num_heads: int) -> None:
    matrix = np.random.default_rng(1).standard_normal((36, 64)).astype(np.float32)
    assert np.array_equal(deinterleave_rows(interleave_rows(matrix, num_heads), num_heads), matrix)
    assert np.array_equal(deinterleave_rows(interleave_rows(matrix[:, 0], num_heads), num_heads), matrix[:, 0])
    stored = quantize(matrix, FORMATS["Q4_0"])
    moved = interleave_rows(stored, num_heads)
    assert np.array_equal(dequantize(moved), interleave_rows(dequantize(stored), num_heads))
    assert np.array_equal(deinterleave_rows(moved, num_heads).blocks, stored.blocks)
