"""Weights whose columns are sorted by group (GPTQ with activation order), on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmctl.errors import FormatError
from llmctl.kernels._native import NativeOps
from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.native import _native

VOCAB, COLUMNS, GROUP = 11, 128, 32


def reordered(rows: int, *, seed: int = 0, bits: int = 4, order: np.ndarray | None = None) -> PackedIntTensor:
    rng = np.random.default_rng(seed)
    return PackedIntTensor(
        bits=bits,
        group_size=GROUP,
        shape=(rows, COLUMNS),
        codes=rng.integers(0, 256, (rows, COLUMNS * bits // 8), dtype=np.uint8),
        scales=rng.standard_normal((rows, COLUMNS // GROUP)).astype(np.float32),
        zero_points=rng.integers(0, 1 << bits, (rows, COLUMNS // GROUP), dtype=np.uint8),
        column_order=rng.permutation(COLUMNS).astype(np.int32) if order is None else order,
    )


def in_stored_order(tensor: PackedIntTensor) -> np.ndarray:
    plain = PackedIntTensor(tensor.bits, tensor.group_size, tensor.shape, tensor.codes, tensor.scales, tensor.zero_points)
    return dequantize(plain)


def test_values_come_back_in_the_columns_own_order() -> None:
    tensor = reordered(600)  # several chunks
    values = dequantize(tensor)
    assert np.array_equal(values[:, tensor.column_order], in_stored_order(tensor))
    assert np.array_equal(ReferenceOps(threads=1).prepare_weight(tensor).numpy(), values)
    assert tensor.nbytes == tensor.codes.nbytes + tensor.scales.nbytes + tensor.zero_points.nbytes + 4 * COLUMNS


@pytest.mark.parametrize("order", [np.zeros(COLUMNS, np.int32), np.arange(1, COLUMNS + 1, dtype=np.int32), np.arange(COLUMNS)])
def test_an_order_that_is_none_is_refused(order: np.ndarray) -> None:
    with pytest.raises(FormatError, match="column_order must"):
        reordered(4, order=order)


def compute(forward: Any, ids: list[int], activations: str, threads: int = 2) -> tuple[NativeOps, np.ndarray]:
    ops = NativeOps(threads, activations)
    run = ops.compile(lambda batch, rows: ops.take_rows(forward(ops), rows), [])
    count, tokens = len(ids), np.array(ids, np.int64)
    places = np.arange(count, dtype=np.int64)
    batch = BatchDescription(
        token_ids=tokens,
        positions=places,
        inv_freqs=[],
        cu_seqlens_q=[0, count],
        page_maps=[],
        block_size=16,
    )
    return ops, run(batch, places).copy()


@pytest.mark.parametrize(("activations", "tolerance"), [("float", 1e-5), ("int8", 0.02)])
@pytest.mark.parametrize("count", [1, 40])
def test_native_products_meet_the_right_columns(activations: str, tolerance: float, count: int) -> None:
    """Three products of one input, two of them of one order, as q, k and v may be."""
    table = np.random.default_rng(1).standard_normal((VOCAB, COLUMNS)).astype(np.float32)
    first = reordered(48, seed=2)
    weights = [first, reordered(48, seed=3, order=first.column_order), reordered(48, seed=4, bits=8)]
    ids = [i % VOCAB for i in range(count)]

    def forward(ops: NativeOps) -> Any:
        x = ops.embedding(None, ops.prepare_weight(table))
        y = [ops.linear(x, ops.prepare_weight(weight)) for weight in weights]
        gathers = [node for node in ops._graph.nodes if node.op == "take_columns"]
        assert len(gathers) == 2
        return ops.add(ops.add(y[0], y[1]), y[2])

    expected = sum(table[ids] @ dequantize(weight).T for weight in weights)
    _, found = compute(forward, ids, activations)
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_an_embedding_with_an_order() -> None:
    table = reordered(VOCAB, seed=5)
    _, found = compute(lambda ops: ops.embedding(None, ops.prepare_weight(table)), [3, 7, 3], "float")
    np.testing.assert_allclose(found, dequantize(table)[[3, 7, 3]], rtol=1e-6)


@pytest.mark.parametrize("order", [[0, 1, 1, 2], [0, 1, 2, 4], [-1, 0, 1, 2]])
def test_the_program_takes_permutations_only(order: list[int]) -> None:
    op = _native.RowOp(_native.RowKind.Gather)
    with pytest.raises(ValueError, match="every element once"):
        op.set_order(np.array(order, np.int32))


def test_an_order_of_another_length_is_refused() -> None:
    program = _native.Program(_native.ThreadPool(1), True)
    op = _native.RowOp(_native.RowKind.Gather)
    op.a, op.out = program.add_buffer(8, False), program.add_buffer(8, False)
    op.set_order(np.arange(4, dtype=np.int32))
    with pytest.raises(ValueError, match="as long as the rows"):
        program.add_matrix_phase(False, [op], -1, [])
