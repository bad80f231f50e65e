"""linear in Triton. One to eight rows: matrix-vector products; up to 64: tiles in tensor cores; more: the weight written out in
the compute dtype, and torch.
"""

from __future__ import annotations

from typing import Any

import torch

from llmctl.kernels.linear._triton_matmul import dequantize_kernel, matmul_kernel
from llmctl.kernels.linear._triton_matvec import add_splits_kernel, matvec_kernel
from llmctl.kernels.triton_lib.activations import QuantizedRows, float_rows, quantize_rows
from llmctl.kernels.triton_lib.launch import cdiv, empty, interpreting
from llmctl.kernels.triton_lib.tiles import MAX_MATMUL_ROWS, MAX_MATVEC_ROWS, matmul_tile, matvec_tile
from llmctl.kernels.triton_lib.weights import TritonWeight, prepare_weight

__all__ = ["TritonWeight", "dequantized", "linear", "matmul", "matvec", "prepare_weight"]
_PLAIN = {"LOW": 0, "HIGH": 0, "SIGNED": False, "KIND": "plain", "GROUP": 1, "ZEROS": False}
_ADD_BLOCK = 1024
_WRITE_BLOCK_N = 128


def linear(
    x: torch.Tensor, weight: TritonWeight, bias: torch.Tensor | None = None, rounded: QuantizedRows | None = None
) -> torch.Tensor:
    """x [T, K] times weight (N, K) transposed, plus bias [N]: [T, N]. rounded: x as int8, where somebody made that already."""
    rows = x.shape[0]
    if not rows:
        return empty((0, weight.shape[0]), x.dtype, x.device)
    if rows > MAX_MATMUL_ROWS:
        y = in_stored_order(x, weight) @ dequantized(weight, x.dtype)
        return y if bias is None else y + bias
    x = in_stored_order(x, weight).contiguous()
    if weight.form is not None and rows <= MAX_MATVEC_ROWS:
        return matvec(x, weight, rows, bias=bias, rounded=rounded if weight.order is None else None)
    return matmul(x, weight, rows, bias=bias)


def in_stored_order(x: torch.Tensor, weight: TritonWeight) -> torch.Tensor:
    """x [T, K] with its columns in the order of the weight's."""
    return x if weight.order is None else x.index_select(1, weight.order)


def dequantized(weight: TritonWeight, dtype: torch.dtype) -> torch.Tensor:
    """A matrix's numbers, rounded to the dtype: [K, N] with its own strides."""
    planes = weight.planes
    if weight.form is None:
        return planes.low.to(dtype).T
    (n, k), stride = weight.shape, planes.low.shape[-1]
    out = empty((k, stride), dtype, weight.device)
    grid = (cdiv(stride, _WRITE_BLOCK_N), cdiv(k // 32, 8))
    tensors = _tensors(weight)
    dequantize_kernel[grid](*tensors, out, n, stride, k // 32, **weight.form.constants(), BLOCK_N=_WRITE_BLOCK_N, SUB_BLOCKS=8)
    return out[:, :n]


def matvec(
    x: torch.Tensor,
    weight: TritonWeight,
    m: int,
    matrices: int = 1,
    experts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    x_share: int = 1,
    is_batched: bool = False,
    rounded: QuantizedRows | None = None,
) -> torch.Tensor:
    """m rows of x for each of `matrices` products: row i · matrices + g of the result is row (i · matrices + g) // x_share of x
    times matrix `experts[g]`, or g (is_batched), or the only one; [m · matrices, N]. bias [N], of experts [E, N]."""
    assert x_share == 1 or m == 1
    n, k = weight.shape[-2:]
    tile = matvec_tile(weight.form, m, n, k, matrices, x.device)
    is_int8 = weight.activations == "int8"
    inputs = _activations(x, is_int8, rounded)
    rows, splits = m * matrices, tile.splits
    y = empty((rows, n), x.dtype, x.device)
    out = y if splits == 1 else empty((splits, rows, n), torch.float32, x.device)
    ids, addend = _given(experts, x), _given(bias, x)
    matvec_kernel[(cdiv(n, tile.block_n), splits, matrices)](
        *inputs, *_tensors(weight), ids, addend, out, n, weight.planes.low.shape[-1], k, *_steps(weight), x_share, matrices,
        M=m, **weight.form.constants(), INT8=is_int8, EXPERTS=experts is not None, BATCHED=is_batched,
        HAS_BIAS=bias is not None and splits == 1, STEP=tile.step, SPLITS=splits, BLOCK_N=tile.block_n, INTERPRET=interpreting(),
        num_warps=tile.num_warps,
    )  # fmt: skip
    return y if splits == 1 else _add_splits(out, y, bias, experts)


def matmul(
    x: torch.Tensor,
    weight: TritonWeight,
    m: int,
    matrices: int = 1,
    bias: torch.Tensor | None = None,
    is_batched: bool = False,
) -> torch.Tensor:
    """The same for blocks of rows, without experts."""
    n, k = weight.shape[-2:]
    tile = matmul_tile(m, n, k, matrices, x.device)
    rows, splits = m * matrices, tile.splits
    y = empty((rows, n), x.dtype, x.device)
    out = y if splits == 1 else empty((splits, rows, n), torch.float32, x.device)
    ids = _given(None, x)
    matmul_kernel[(cdiv(m, tile.block_m) * cdiv(n, tile.block_n), splits, matrices)](
        x, *_tensors(weight), ids, ids, _given(bias, x), out, m, n, weight.planes.low.shape[-1], k, x.stride(0), *_steps(weight),
        1, matrices, **constants_of(weight), SORTED=False, BATCHED=is_batched, HAS_BIAS=bias is not None and splits == 1,
        SPLITS=splits, SUB_BLOCKS=sub_blocks_of(weight, tile.sub_blocks), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        UPCAST=upcast(x), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return y if splits == 1 else _add_splits(out, y, bias, None)


def constants_of(weight: TritonWeight) -> dict[str, Any]:
    """The constexpr arguments that tell the form of the weight."""
    return _PLAIN if weight.form is None else weight.form.constants()


def sub_blocks_of(weight: TritonWeight, usual: int) -> int:
    """Plain numbers take 32 lines a sub-block, codes four."""
    return max(1, usual // 4) if weight.form is None else usual


def upcast(x: torch.Tensor) -> bool:
    """Whether dots need float32: the interpreter's of bf16 are wrong."""
    return interpreting() and x.dtype == torch.bfloat16


def _activations(
    x: torch.Tensor, is_int8: bool, rounded: QuantizedRows | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if is_int8:
        rounded = rounded or quantize_rows(x)
        return rounded.codes.view(torch.int64), rounded.scales, rounded.sums
    wide, sums = float_rows(x)
    return wide.view(torch.int64), sums, sums


def _given(tensor: torch.Tensor | None, instead: torch.Tensor) -> torch.Tensor:
    """A kernel's argument that it does not read."""
    return instead if tensor is None else tensor


def _tensors(weight: TritonWeight) -> tuple[torch.Tensor, ...]:
    planes = weight.planes
    return planes.low, _given(planes.high, planes.low), planes.scales, _given(planes.extra, planes.scales)


def _steps(weight: TritonWeight) -> tuple[int, ...]:
    """From one matrix to the next, in numbers."""
    return tuple(part.stride(0) if part.ndim == 3 else 0 for part in _tensors(weight))


def _add_splits(parts: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor | None) -> torch.Tensor:
    numbers = y.numel()
    add_splits_kernel[(cdiv(numbers, _ADD_BLOCK),)](
        parts, _given(experts, y), _given(bias, y), y, y.shape[1], numbers, SPLITS=parts.shape[0], HAS_BIAS=bias is not None,
        EXPERTS=experts is not None, BLOCK=_ADD_BLOCK,
    )  # fmt: skip
    return y
