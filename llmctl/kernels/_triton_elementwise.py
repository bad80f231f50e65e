"""Ops on single numbers that have no folder of their own: gated, growth, softcap. In float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmctl.kernels.triton_lib import launch
from llmctl.kernels.triton_lib.compilation import Case

_BLOCK = 1024


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap · tanh(x / cap)."""
    x, y = x.contiguous(), launch.empty(tuple(x.shape), x.dtype, x.device)
    if x.numel():
        softcap_kernel[(launch.cdiv(x.numel(), _BLOCK),)](x, y, x.numel(), cap, _BLOCK)
    return y


def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, H] times the sigmoid of gate [T, 1]."""
    return _of_rows(x, gate, 1.0, 1, is_gate=True)


def growth(x: torch.Tensor, positions: torch.Tensor, rate: float, length: int) -> torch.Tensor:
    """x [T, …] times 1 + rate · log(1 + positions // length), positions int64 [T]."""
    return _of_rows(x, positions, rate, length, is_gate=False)


def _of_rows(x: torch.Tensor, of_row: torch.Tensor, rate: float, length: int, *, is_gate: bool) -> torch.Tensor:
    x, y = x.contiguous(), launch.empty(tuple(x.shape), x.dtype, x.device)
    if x.numel():
        size = x[0].numel()
        grid = (len(x), launch.cdiv(size, _BLOCK))
        scale_rows_kernel[grid](x, of_row.contiguous(), y, size, rate, length, IS_GATE=is_gate, BLOCK=_BLOCK)
    return y


@triton.jit
def softcap_kernel(x, y, count, cap, BLOCK: tl.constexpr):
    """Flat over all numbers."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    values = cap * (2.0 * tl.sigmoid(2.0 * values / cap) - 1.0)
    tl.store(y + place, values.to(y.dtype.element_ty), mask=place < count)


@triton.jit
def scale_rows_kernel(x, of_row, y, size, rate, length, IS_GATE: tl.constexpr, BLOCK: tl.constexpr):
    """Row program_id(0) times a factor of its own."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    if IS_GATE:
        factor = tl.sigmoid(tl.load(of_row + row).to(tl.float32))
    else:
        factor = 1.0 + rate * tl.log(1.0 + (tl.load(of_row + row) // length).to(tl.float32))
    tl.store(y + row * size + column, (values * factor).to(y.dtype.element_ty), mask=column < size)


def kernel_cases() -> list[Case]:
    """Softcap of logits, and both kinds of factors."""
    rows = {"x": "*fp16", "of_row": "*i64", "y": "*fp16", "size": "i32", "rate": "fp32", "length": "i32"}
    flat = {"x": "*fp16", "y": "*fp16", "count": "i32", "cap": "fp32"}
    return [
        Case("softcap", softcap_kernel, flat, {"BLOCK": _BLOCK}, ("x", "y", "count")),
        Case("growth", scale_rows_kernel, rows, {"IS_GATE": False, "BLOCK": _BLOCK}, ("x", "y", "size")),
        Case("gated", scale_rows_kernel, rows | {"of_row": "*fp16"}, {"IS_GATE": True, "BLOCK": _BLOCK}, ("x", "y", "size")),
    ]
