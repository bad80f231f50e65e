"""Ops that work on rows: norms, activations, the residual stream. Against the reference, at sizes that fill no block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmctl.kernels.rms_norm import _reference as rms_reference
from llmctl.kernels.rms_norm import _triton as rms_triton

Guard = Callable[[torch.Tensor], torch.Tensor]
DTYPES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 128), (1, 1000)])
def test_rms_norm_is_the_reference(shape: tuple[int, ...], dtype: torch.dtype, guarded: Guard) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1])
    y = rms_triton.rms_norm(guarded(x), guarded(weight), 1e-5)
    torch.testing.assert_close(y, rms_reference.rms_norm(x, weight, 1e-5), rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_of_a_sum_keeps_the_sum(dtype: torch.dtype, guarded: Guard) -> None:
    x, addend, weight = torch.randn(3, 100).to(dtype), torch.randn(3, 100).to(dtype), torch.randn(100)
    total, y = rms_triton.add_rms_norm(guarded(x), guarded(addend), guarded(weight), 1e-5)
    step = 0.0 if dtype != torch.bfloat16 else 2**-7  # the interpreter cuts bf16 off where a GPU rounds
    torch.testing.assert_close(total, x + addend, rtol=step, atol=0.0)
    torch.testing.assert_close(y, rms_reference.rms_norm(total, weight, 1e-5), rtol=DTYPES[dtype], atol=DTYPES[dtype])


def test_every_head_has_its_own_weight(guarded: Guard) -> None:
    x, weight = torch.randn(2, 3, 16), torch.randn(3, 16)
    y = rms_triton.rms_norm(guarded(x), guarded(weight), 1e-5)
    torch.testing.assert_close(y, rms_reference.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=2e-6)


def test_no_rows_are_no_launch() -> None:
    assert rms_triton.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
