"""linear in Triton. One to eight rows: matrix-vector products; up to 64: tiles in tensor cores; more: the weight written out in
the compute dtype, and torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from llmctl.kernels.linear._triton_matmul import dequantize_kernel, matmul_kernel
from llmctl.kernels.linear._triton_matvec import add_splits_kernel, matvec_kernel
from llmctl.kernels.triton_lib.activations import QuantizedRows, float_rows, quantize_rows
from llmctl.kernels.triton_lib.launch import cdiv, empty, interpreting
from llmctl.kernels.triton_lib.tiles import MAX_MATMUL_ROWS, MatmulTile, gpu_table, matmul_tile, matvec_tile, max_matvec_rows
from llmctl.kernels.triton_lib.weights import TritonWeight, plain_weight, prepare_weight

__all__ = ["TritonWeight", "linear", "prepare_weight"]
PLAIN = {"LOW": 0, "HIGH": 0, "SIGNED": False, "KIND": "plain", "GROUP": 1, "ZEROS": False}
_ADD_BLOCK = 1024
_WRITE_BLOCK_N, _WRITE_SUB_BLOCKS = 128, 8


def linear(
    x: torch.Tensor, weight: TritonWeight, bias: torch.Tensor | None = None, rounded: QuantizedRows | None = None
) -> torch.Tensor:
    """x [T, K] times weight (N, K) transposed, plus bias [N]: [T, N]. rounded: x as int8, where somebody made that already."""
    rows = x.shape[0]
    if not rows:
        return empty((0, weight.shape[0]), x.dtype, x.device)
    x = in_stored_order(x, weight)
    if rows > MAX_MATMUL_ROWS:
        y = x @ dequantized(weight, x.dtype)
        return y if bias is None else y + bias
    if takes_matvec(weight, rows):
        own = rounded if weight.order is None else None
        return matvec(activations_of(x, weight, own), weight, rows, bias=bias)
    return matmul(x, weight, rows, bias=bias)


def takes_matvec(weight: TritonWeight, rows: int) -> bool:
    """Whether so many rows of x are multiplied one by one."""
    return weight.form is not None and rows <= max_matvec_rows(weight.form, weight.activations == "int8")


def in_stored_order(x: torch.Tensor, weight: TritonWeight) -> torch.Tensor:
    """x [..., K] with its columns in the order of the weight's."""
    return x if weight.order is None else x.index_select(-1, weight.order)


def dequantized(weight: TritonWeight, dtype: torch.dtype) -> torch.Tensor:
    """A weight's numbers (…, N, K), columns in stored order, rounded to the dtype: […, K, N] with strides of their own."""
    planes = weight.planes
    if weight.form is None:
        return planes.low.to(dtype).mT
    (n, k), stride = weight.shape[-2:], planes.low.shape[-1]
    out = empty((*weight.shape[:-2], k, stride), dtype, weight.device)
    grid = (cdiv(stride, _WRITE_BLOCK_N), cdiv(k // 32, _WRITE_SUB_BLOCKS), weight.num_matrices)
    dequantize_kernel[grid](
        *tensors_of(weight), out, stride, k // 32, *steps_of(weight), **weight.form.constants(), BLOCK_N=_WRITE_BLOCK_N,
        SUB_BLOCKS=_WRITE_SUB_BLOCKS,
    )  # fmt: skip
    return out[..., :n]


@dataclass(frozen=True)
class Activations:
    """Rows of x [T, K] as matrix-vector kernels read them. values: int64 of eight int8 codes or of two float32, [T, …]; scales:
    of codes; sums: of every 16 numbers. dtype: what x was, and products become."""

    values: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    dtype: torch.dtype


def activations_of(x: torch.Tensor, weight: TritonWeight, rounded: QuantizedRows | None = None) -> Activations:
    """x [T, K], its columns in the order of the weight's, as weights prepared alike take it. rounded: x as int8, if there."""
    if weight.activations == "int8":
        rounded = rounded or quantize_rows(x.contiguous())
        return Activations(rounded.codes.view(torch.int64), rounded.scales, rounded.sums, x.dtype)
    wide, sums = float_rows(x.contiguous())
    return Activations(wide.view(torch.int64), sums, sums, x.dtype)


def matvec(
    x: Activations,
    weight: TritonWeight,
    m: int,
    matrices: int = 1,
    experts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    x_share: int = 1,
    is_batched: bool = False,
) -> torch.Tensor:
    """m rows of x for each of `matrices` products: row i · matrices + g of the result is row (i · matrices + g) // x_share of x
    times matrix `experts[g]`, or g (is_batched), or the only one; [m · matrices, N]. bias [N], of experts [E, N]."""
    assert x_share == 1 or m == 1
    (n, k), device = weight.shape[-2:], weight.device
    is_int8 = weight.activations == "int8"
    tile = matvec_tile(weight.form, m, n, k, matrices, gpu_table(device), is_int8)
    rows, splits = m * matrices, tile.splits
    y = empty((rows, n), x.dtype, device)
    out = y if splits == 1 else empty((splits, rows, n), torch.float32, device)
    matvec_kernel[(cdiv(n, tile.block_n), splits, matrices)](
        x.values, x.scales, x.sums, *tensors_of(weight), _given(experts, y), _given(bias, y), out, n, weight.planes.low.shape[-1],
        k, *steps_of(weight), x_share, matrices, M=m, **weight.form.constants(), INT8=is_int8,
        EXPERTS=experts is not None, BATCHED=is_batched, HAS_BIAS=bias is not None and splits == 1, STEP=tile.step, SPLITS=splits,
        BLOCK_N=tile.block_n, INTERPRET=interpreting(), num_warps=tile.num_warps,
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
    """The same for blocks of rows of x [m · matrices, K], without experts."""
    n, k = weight.shape[-2:]
    tile = matmul_tile(m, n, k, matrices, gpu_table(x.device))
    x, rows, splits = x.contiguous(), m * matrices, tile.splits
    y = empty((rows, n), x.dtype, x.device)
    out = y if splits == 1 else empty((splits, rows, n), torch.float32, x.device)
    _launch_matmul(x, weight, tile, out, m, matrices, bias if splits == 1 else None, is_batched=is_batched)
    return y if splits == 1 else _add_splits(out, y, bias, None)


@dataclass(frozen=True)
class SortedRows:
    """Rows of a result grouped by expert. order: int32, whole blocks of `block_m` rows of one expert, −1 for none; experts:
    int32, one a block."""

    order: torch.Tensor
    experts: torch.Tensor
    block_m: int


def grouped_matmul(
    x: torch.Tensor, weight: TritonWeight, rows: int, groups: SortedRows, bias: torch.Tensor | None, x_share: int
) -> torch.Tensor:
    """[rows, N]: row r is row r // x_share of x times the matrix of its expert, plus its bias of [E, N]."""
    n, k = weight.shape[-2:]
    tile = matmul_tile(groups.block_m, n, k, len(groups.experts), gpu_table(x.device))
    tile = replace(tile, block_m=groups.block_m, splits=1)
    y = empty((rows, n), x.dtype, x.device)
    _launch_matmul(x.contiguous(), weight, tile, y, len(groups.order), 1, bias, groups=groups, x_share=x_share)
    return y


def _launch_matmul(
    x: torch.Tensor,
    weight: TritonWeight,
    tile: MatmulTile,
    out: torch.Tensor,
    m: int,
    matrices: int,
    bias: torch.Tensor | None,
    *,
    is_batched: bool = False,
    groups: SortedRows | None = None,
    x_share: int = 1,
) -> None:
    n, k = weight.shape[-2:]
    constants = PLAIN if weight.form is None else weight.form.constants()
    order, experts = (x, x) if groups is None else (groups.order, groups.experts)
    # Plain numbers take 32 lines a sub-block, codes four.
    sub_blocks = tile.sub_blocks if weight.form is not None else max(1, tile.sub_blocks // 4)
    matmul_kernel[(cdiv(m, tile.block_m) * cdiv(n, tile.block_n), tile.splits, matrices)](
        x, *tensors_of(weight), order, experts, _given(bias, x), out, m, n, weight.planes.low.shape[-1], k, *steps_of(weight),
        x_share, matrices, **constants, SORTED=groups is not None, BATCHED=is_batched, HAS_BIAS=bias is not None,
        SPLITS=tile.splits, SUB_BLOCKS=sub_blocks, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        UPCAST=interpreting() and x.dtype == torch.bfloat16, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def as_plain(weight: TritonWeight) -> TritonWeight:
    """The same matrix (N, K) as plain numbers of the compute dtype."""
    numbers = dequantized(weight, weight.dtype).mT
    if weight.order is not None:
        numbers = numbers.index_select(-1, weight.order.argsort())
    return plain_weight(numbers.contiguous(), weight.activations)


def _given(tensor: torch.Tensor | None, instead: torch.Tensor) -> torch.Tensor:
    """A kernel's argument that it does not read."""
    return instead if tensor is None else tensor


def tensors_of(weight: TritonWeight) -> tuple[torch.Tensor, ...]:
    planes = weight.planes
    return planes.low, _given(planes.high, planes.low), planes.scales, _given(planes.extra, planes.scales)


def steps_of(weight: TritonWeight) -> tuple[int, ...]:
    """From one matrix to the next, in numbers."""
    return tuple(part.stride(0) if part.ndim == 3 else 0 for part in tensors_of(weight))


def _add_splits(parts: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor | None) -> torch.Tensor:
    numbers = y.numel()
    add_splits_kernel[(cdiv(numbers, _ADD_BLOCK),)](
        parts, _given(experts, y), _given(bias, y), y, y.shape[1], numbers, SPLITS=parts.shape[0], HAS_BIAS=bias is not None,
        EXPERTS=experts is not None, BLOCK=_ADD_BLOCK,
    )  # fmt: skip
    return y
