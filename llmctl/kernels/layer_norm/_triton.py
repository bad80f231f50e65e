"""layer_norm in Triton: a row a program, mean and variance from what is in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmctl.kernels.triton_lib import launch
from llmctl.kernels.triton_lib.compilation import Case


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalize the last axis of x [..., H] to mean zero and variance one, then weight and bias [H], or [heads, H]."""
    x, size = x.contiguous(), x.shape[-1]
    rows, block = x.numel() // size, launch.power_of_two(size)
    y = launch.empty(tuple(x.shape), x.dtype, x.device)
    if rows:
        vectors = (weight, weight if bias is None else bias)
        options = {"BLOCK": block, "HAS_BIAS": bias is not None, "num_warps": launch.warps_of_row(block)}
        layer_norm_kernel[(rows,)](x, *vectors, y, size, weight.numel() // size, eps, **options)
    return y


@triton.jit
def layer_norm_kernel(x, weight, bias, y, size, heads, eps, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """One row a program. weight, bias: a vector for each of `heads` neighbouring rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    seen = column < size
    values = tl.load(x + row * size + column, mask=seen, other=0.0).to(tl.float32)
    values = tl.where(seen, values - tl.sum(values) / size, 0.0)
    values *= 1.0 / tl.sqrt(tl.sum(values * values) / size + eps)
    place = (row % heads) * size + column
    values *= tl.load(weight + place, mask=seen, other=0.0)
    if HAS_BIAS:
        values += tl.load(bias + place, mask=seen, other=0.0)
    tl.store(y + row * size + column, values.to(y.dtype.element_ty), mask=seen)


def kernel_cases() -> list[Case]:
    """Rows of 4096 with a bias, and heads of 128 without."""
    types = {"x": "*fp16", "weight": "*fp32", "bias": "*fp32", "y": "*fp16", "size": "i32", "heads": "i32", "eps": "fp32"}
    shapes = {"h4096": {"BLOCK": 4096, "HAS_BIAS": True}, "h128": {"BLOCK": 128, "HAS_BIAS": False}}
    return [
        Case(
            f"layer_norm.{name}",
            layer_norm_kernel,
            types,
            constants,
            aligned=("x", "weight", "bias", "y", "size"),
            num_warps=launch.warps_of_row(constants["BLOCK"]),
            every_commit=name == "h4096",
        )
        for name, constants in shapes.items()
    ]
