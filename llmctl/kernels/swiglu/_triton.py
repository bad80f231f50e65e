"""gated_activation and activation in Triton: read once, written once, float32 between."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmctl.kernels.swiglu import CLAMPED_SWIGLU, SWIGLU_ALPHA, SWIGLU_LIMIT
from llmctl.kernels.triton_lib import launch
from llmctl.kernels.triton_lib.activations import QuantizedRows, empty_rows, store_rounded
from llmctl.kernels.triton_lib.compilation import Case

_BLOCK = 1024
_ALPHA, _LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) times up, both [T, I]."""
    return _run(gate, up, activation, is_gated=True)


def activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(x), of the same shape."""
    return _run(x, x, activation, is_gated=False)


def rounded_gated_activation(
    gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, QuantizedRows]:
    """The same, and as `quantize_rows` rounds it. I is a multiple of 32."""
    rounded = empty_rows(*gate.shape, gate.device)
    return _run(gate, up, activation, is_gated=True, rounded=rounded), rounded


def _run(
    gate: torch.Tensor, up: torch.Tensor, activation: str, *, is_gated: bool, rounded: QuantizedRows | None = None
) -> torch.Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y, count = launch.empty(tuple(gate.shape), gate.dtype, gate.device), gate.numel()
    codes = (None, None, None) if rounded is None else (rounded.codes, rounded.scales, rounded.sums)
    if count:
        grid, choices = (launch.cdiv(count, _BLOCK),), (activation, is_gated, rounded is not None, _BLOCK)
        gated_activation_kernel[grid](gate, up, y, *codes, count, *choices)
    return y


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """silu, gelu or gelu_pytorch_tanh of float32 numbers."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 1 + tanh(z) is 2 sigmoid(2 z)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """What gated_activation is of float32 numbers; for other kernels that have both at hand, too."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT)
        return (up + 1.0) * gate * tl.sigmoid(gate * _ALPHA)
    else:
        return activated(gate, ACTIVATION) * up


@triton.jit
def gated_activation_kernel(
    gate, up, y, codes, scales, sums, count,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Flat over all numbers: rows are whole sub-blocks."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = place < count
    values = tl.load(gate + place, mask=seen, other=0.0).to(tl.float32)
    if IS_GATED:
        values = gated(values, tl.load(up + place, mask=seen, other=0.0).to(tl.float32), ACTIVATION)
    else:
        values = activated(values, ACTIVATION)
    made = values.to(y.dtype.element_ty)
    tl.store(y + place, made, mask=seen)
    if ROUND:
        store_rounded(made.to(tl.float32), codes, scales, sums, 0, count, tl.program_id(0) * BLOCK, BLOCK)


def kernel_cases() -> list[Case]:
    """Every activation with a gate; without one gelu stands for all."""
    types = {"gate": "*fp16", "up": "*fp16", "y": "*fp16", "count": "i32"}
    codes = {"codes": "*i8", "scales": "*fp32", "sums": "*fp32"}
    gated_kinds = [("silu", True), ("gelu", True), ("gelu_pytorch_tanh", True), (CLAMPED_SWIGLU, True)]
    return [
        Case(
            f"swiglu.{'round_' if is_rounded else ''}{'' if is_gated else 'plain_'}{name}",
            gated_activation_kernel,
            types | (codes if is_rounded else {}),
            {"ACTIVATION": name, "IS_GATED": is_gated, "ROUND": is_rounded, "BLOCK": _BLOCK}
            | ({} if is_rounded else dict.fromkeys(codes)),
            aligned=(*types, *codes) if is_rounded else tuple(types),
            every_commit=is_rounded,
        )
        for name, is_gated, is_rounded in [*((*kind, False) for kind in [*gated_kinds, ("gelu", False)]), ("silu", True, True)]
    ]
