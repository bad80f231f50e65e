"""head_linear and join_heads: the reference against loops in numpy, native programs against the reference.

A product of one head is the kernel of linear, which test_linear.py tries on every instruction set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import row_programs
import torch

from llmctl.kernels._native import NativeOps
from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels.formats.codecs import dequantize, quantize
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.ops import Ops

TOKENS = 40


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def products(ops: Ops, x: Any, weight: Any, heads: int) -> Any:
    """x [T, heads · in] by the heads' matrices, then the rows side by side."""
    y = ops.head_linear(ops.reshape(x, (-1, heads, x.shape[-1] // heads)), ops.prepare_weight(weight))
    return ops.reshape(y, (-1, heads * weight.shape[1]))


def test_every_head_has_a_matrix_of_its_own() -> None:
    x, weight = normal(5, 3, 8), normal(3, 4, 8, seed=1)
    found = ReferenceOps().head_linear(torch.from_numpy(x), torch.from_numpy(weight)).numpy()
    expected = np.stack([x[:, head] @ weight[head].T for head in range(3)], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_heads_are_joined_one_by_one() -> None:
    x, y = normal(5, 3, 8), normal(5, 3, 4, seed=1)
    found = ReferenceOps().join_heads(torch.from_numpy(x), torch.from_numpy(y)).numpy()
    np.testing.assert_array_equal(found, np.concatenate([x, y], axis=2))


SHAPES = pytest.mark.parametrize(("heads", "inner", "outer"), [(1, 64, 16), (3, 32, 20), (40, 64, 48)])


@pytest.mark.parametrize("form", ["F32", "BF16", "Q8_0", "Q4_0"])
@SHAPES
def test_a_program_equals_the_reference(heads: int, inner: int, outer: int, form: str) -> None:
    table, weight = normal(TOKENS, heads * inner), quantize(normal(heads, outer, inner, seed=1), FORMATS[form])
    ops, reference = NativeOps(2, "float"), ReferenceOps()
    found = row_programs.computed(ops, table, lambda x: products(ops, x, weight, heads))
    expected = products(reference, torch.from_numpy(table), dequantize(weight), heads).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activations", ["float", "int8"])
@SHAPES
def test_bits_depend_on_neither_chunks_nor_threads(heads: int, inner: int, outer: int, activations: str) -> None:
    table, weight = normal(TOKENS, heads * inner), quantize(normal(heads, outer, inner, seed=1), FORMATS["Q8_0"])

    def computed(threads: int, sizes: tuple[int, ...]) -> np.ndarray:
        ops = NativeOps(threads, activations)
        return row_programs.computed(ops, table, lambda x: products(ops, x, weight, heads), sizes)

    whole = computed(1, (TOKENS,))
    for threads, sizes in ((2, (1,) * TOKENS), (1, (7, 1, 20, 2, 10)), (3, (33, 7))):
        np.testing.assert_array_equal(computed(threads, sizes), whole)


def test_int8_activations_are_rounded_head_by_head() -> None:
    """A head of large numbers takes nothing from the precision of the one beside it, though both are half a block."""
    table, weight = normal(4, 2 * 16), quantize(normal(2, 16, 16, seed=1), FORMATS["F32"])
    padded = np.zeros((2, 16, 32), np.float32)
    padded[:, :, :16] = weight
    wide = np.zeros((4, 2, 32), np.float32)
    wide[:, :, :16] = table.reshape(4, 2, 16) * np.float32([[[1e4], [1]]])
    ops = NativeOps(1)
    stored = quantize(padded, FORMATS["Q8_0"])
    found = row_programs.computed(ops, wide.reshape(4, -1), lambda x: products(ops, x, stored, 2)).reshape(4, 2, 16)
    expected = np.einsum("thi,hoi->tho", wide, dequantize(stored))
    np.testing.assert_allclose(found[:, 1], expected[:, 1], atol=0.1)


def test_a_program_joins_heads() -> None:
    table, ops = normal(TOKENS, 3 * 12), NativeOps(2)

    def joined(x: Any) -> Any:
        halves = ops.reshape(x, (-1, 3, 12)), ops.reshape(ops.scale(x, 2.0), (-1, 3, 12))
        return ops.reshape(ops.join_heads(*halves), (-1, 3 * 24))

    x = table.reshape(TOKENS, 3, 12)
    np.testing.assert_array_equal(
        row_programs.computed(ops, table, joined), np.concatenate([x, 2 * x], axis=2).reshape(TOKENS, -1)
    )
