"""Row operations of native programs that have no kernel of their own, against the reference ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from row_programs import computed

from llmctl.kernels._native import NativeOps
from llmctl.kernels._reference import ReferenceOps

WIDTHS = [1, 7, 16, 100, 1000]
TOKENS = 40  # of the widest, more than one worker computes for itself


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[-1]).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(width: int, has_bias: bool, threads: int) -> None:
    x, weight, bias = normal(TOKENS, width) + 5, normal(width), normal(width) if has_bias else None
    ops = NativeOps(threads)
    found = computed(ops, x, lambda rows: ops.layer_norm(rows, weight, bias, 1e-5))
    vectors = [None if v is None else torch.from_numpy(v).double() for v in (weight, bias)]
    expected = torch.nn.functional.layer_norm(torch.from_numpy(x).double(), (width,), *vectors, 1e-5)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("width", WIDTHS)
def test_activation(width: int, activation: str) -> None:
    x = normal(TOKENS, width)
    ops = NativeOps(1)
    found = computed(ops, x, lambda rows: ops.activation(rows, activation))
    expected = ReferenceOps().activation(torch.from_numpy(x), activation)
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_growth(width: int) -> None:
    x, positions = normal(TOKENS, width), np.arange(TOKENS)
    ops = NativeOps(1)
    found = computed(ops, x, lambda rows: ops.growth(rows, None, 0.3, 7))
    expected = ReferenceOps().growth(torch.from_numpy(x), torch.from_numpy(positions), 0.3, 7)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_gated(width: int) -> None:
    x, gate = normal(TOKENS, width), normal(1, width)
    ops = NativeOps(2)
    found = computed(ops, x, lambda rows: ops.gated(rows, ops.linear(rows, ops.prepare_weight(gate))))
    expected = ReferenceOps().gated(torch.from_numpy(x), torch.from_numpy(x @ gate.T))
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-5, atol=2e-5)
