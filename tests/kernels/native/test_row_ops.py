"""Row operations of native programs that have no kernel of their own, against the reference ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from llmctl.kernels._native import NativeOps
from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels.attention import BatchDescription

WIDTHS = [1, 7, 16, 100, 1000]
TOKENS = 40  # of the widest, more than one worker computes for itself


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[-1]).standard_normal(shape, dtype=np.float32)


def computed(table: np.ndarray, function: Callable[[Any, Any], Any], threads: int) -> np.ndarray:
    """function(ops, rows of the table) for every row, by a native program."""
    ops, ids = NativeOps(threads), np.arange(len(table))
    weight = ops.prepare_weight(table)
    run = ops.compile(lambda batch, rows: ops.take_rows(function(ops, ops.embedding(batch.token_ids, weight)), rows), [])
    batch = BatchDescription(ids, ids, ids - ids - 1, [], [0, len(ids)], [len(ids)], [ids[:3]], 16)
    return run(batch, ids).copy()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(width: int, has_bias: bool, threads: int) -> None:
    x, weight, bias = normal(TOKENS, width) + 5, normal(width), normal(width) if has_bias else None
    found = computed(x, lambda ops, rows: ops.layer_norm(rows, weight, bias, 1e-5), threads)
    vectors = [None if v is None else torch.from_numpy(v).double() for v in (weight, bias)]
    expected = torch.nn.functional.layer_norm(torch.from_numpy(x).double(), (width,), *vectors, 1e-5)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("width", WIDTHS)
def test_activation(width: int, activation: str) -> None:
    x = normal(TOKENS, width)
    found = computed(x, lambda ops, rows: ops.activation(rows, activation), 1)
    expected = ReferenceOps().activation(torch.from_numpy(x), activation)
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_growth(width: int) -> None:
    x, positions = normal(TOKENS, width), np.arange(TOKENS)
    found = computed(x, lambda ops, rows: ops.growth(rows, None, 0.3, 7), 1)
    expected = ReferenceOps().growth(torch.from_numpy(x), torch.from_numpy(positions), 0.3, 7)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_gated(width: int) -> None:
    x, gate = normal(TOKENS, width), normal(1, width)
    found = computed(x, lambda ops, rows: ops.gated(rows, ops.linear(rows, ops.prepare_weight(gate))), 2)
    expected = ReferenceOps().gated(torch.from_numpy(x), torch.from_numpy(x @ gate.T))
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-5, atol=2e-5)
