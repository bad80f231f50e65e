"""rms_norm in Triton, alone or of a sum that is kept: x + y is the residual stream, read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmctl.kernels.triton_lib import launch
from llmctl.kernels.triton_lib.compilation import Case


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize the last axis of x [..., H] to unit mean square and scale by weight [H] or [heads, H]; float32 inside."""
    return _run(x, None, weight, eps)[1]


def add_rms_norm(
    x: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + addend [T, H], rounded to their dtype, and the norm of that."""
    return _run(x, addend, weight, eps)


def _run(
    x: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, size = x.contiguous(), x.shape[-1]
    rows, block = x.numel() // size, launch.power_of_two(size)
    y = launch.empty(tuple(x.shape), x.dtype, x.device)
    total = x if addend is None else launch.empty(tuple(x.shape), x.dtype, x.device)
    if rows:
        kernel, heads = rms_norm_kernel[(rows,)], weight.numel() // size
        more = x if addend is None else addend.contiguous()
        options = {"BLOCK": block, "HAS_ADDEND": addend is not None, "num_warps": launch.warps_of_row(block)}
        kernel(x, more, weight, total, y, size, heads, eps, **options)
    return total, y


@triton.jit
def rms_norm_kernel(x, addend, weight, total, y, size, heads, eps, BLOCK: tl.constexpr, HAS_ADDEND: tl.constexpr):
    """One row a program. weight: a vector for each of `heads` neighbouring rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    seen = column < size
    values = tl.load(x + row * size + column, mask=seen, other=0.0).to(tl.float32)
    if HAS_ADDEND:
        values += tl.load(addend + row * size + column, mask=seen, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=seen)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / size + eps)
    factors = tl.load(weight + (row % heads) * size + column, mask=seen, other=0.0)
    tl.store(y + row * size + column, (values * scale * factors).to(y.dtype.element_ty), mask=seen)


def kernel_cases() -> list[Case]:
    """Rows of 4096 as a layer has them, and heads of 128."""
    types = {"x": "*fp16", "addend": "*fp16", "weight": "*fp32", "total": "*fp16", "y": "*fp16"}
    types |= {"size": "i32", "heads": "i32", "eps": "fp32"}
    aligned = (*list(types)[:5], "size")
    shapes = {"add.h4096": {"BLOCK": 4096, "HAS_ADDEND": True}, "h128": {"BLOCK": 128, "HAS_ADDEND": False}}
    return [
        Case(f"rms_norm.{name}", rms_norm_kernel, types, constants, aligned, num_warps=launch.warps_of_row(constants["BLOCK"]))
        for name, constants in shapes.items()
    ]
