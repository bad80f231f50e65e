"""rms_norm in Triton, alone or of a sum that is kept: x + y is the residual stream, read once and written once. For products of
integers the result is rounded to int8 on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmctl.kernels.triton_lib import launch
from llmctl.kernels.triton_lib.activations import QuantizedRows, empty_rows, store_rounded
from llmctl.kernels.triton_lib.compilation import Case


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize the last axis of x [..., H] to unit mean square and scale by weight [H] or [heads, H]; float32 inside."""
    return _run(x, None, weight, eps)[1]


def add_rms_norm(
    x: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + addend [T, H], rounded to their dtype, and the norm of that."""
    return _run(x, addend, weight, eps)[:2]


def rounded_rms_norm(
    x: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, QuantizedRows]:
    """x [T, H] or x + addend, its norm, and that as `quantize_rows` rounds it. H is a multiple of 32."""
    return _run(x, addend, weight, eps, empty_rows(*x.shape, x.device))


def _run(
    x: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float, rounded: QuantizedRows | None = None
) -> tuple[torch.Tensor, torch.Tensor, QuantizedRows | None]:
    x, size = x.contiguous(), x.shape[-1]
    rows, block = x.numel() // size, launch.power_of_two(size)
    y = launch.empty(tuple(x.shape), x.dtype, x.device)
    total = x if addend is None else launch.empty(tuple(x.shape), x.dtype, x.device)
    if rows:
        more = x if addend is None else addend.contiguous()
        codes = (None, None, None) if rounded is None else (rounded.codes, rounded.scales, rounded.sums)
        choices = {"BLOCK": block, "HAS_ADDEND": addend is not None, "ROUND": rounded is not None}
        heads, warps = weight.numel() // size, launch.warps_of_row(block)
        rms_norm_kernel[(rows,)](x, more, weight, total, y, *codes, size, heads, eps, **choices, num_warps=warps)
    return total, y, rounded


@triton.jit
def rms_norm_kernel(
    x, addend, weight, total, y, codes, scales, sums, size, heads, eps,
    BLOCK: tl.constexpr, HAS_ADDEND: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One row a program. weight: a vector for each of `heads` neighbouring rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    seen = column < size
    values = tl.load(x + row * size + column, mask=seen, other=0.0).to(tl.float32)
    if HAS_ADDEND:
        values += tl.load(addend + row * size + column, mask=seen, other=0.0).to(tl.float32)
        kept = values.to(total.dtype.element_ty)
        tl.store(total + row * size + column, kept, mask=seen)
        values = kept.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / size + eps)
    factors = tl.load(weight + (row % heads) * size + column, mask=seen, other=0.0)
    normed = (values * scale * factors).to(y.dtype.element_ty)
    tl.store(y + row * size + column, normed, mask=seen)
    if ROUND:
        store_rounded(normed.to(tl.float32), codes, scales, sums, row, size, 0, BLOCK)


def kernel_cases() -> list[Case]:
    """Rows of 4096 as a layer has them, rounded and not, and heads of 128."""
    plain = dict.fromkeys(("x", "addend", "total", "y"), "*fp16") | {"weight": "*fp32"}
    rounded = plain | {"codes": "*i8", "scales": "*fp32", "sums": "*fp32"}
    numbers, nothing = {"size": "i32", "heads": "i32", "eps": "fp32"}, {"codes": None, "scales": None, "sums": None}
    shapes = {
        "add.h4096": (plain, {"BLOCK": 4096, "HAS_ADDEND": True, "ROUND": False, **nothing}),
        "add.round.h4096": (rounded, {"BLOCK": 4096, "HAS_ADDEND": True, "ROUND": True}),
        "h128": (plain, {"BLOCK": 128, "HAS_ADDEND": False, "ROUND": False, **nothing}),
    }
    return [
        Case(
            f"rms_norm.{name}",
            rms_norm_kernel,
            types | numbers,
            constants,
            aligned=(*types, "size"),
            num_warps=launch.warps_of_row(constants["BLOCK"]),
            every_commit=name != "add.h4096",
        )
        for name, (types, constants) in shapes.items()
    ]
