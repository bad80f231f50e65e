"""embedding in Triton: rows of a quantized table become numbers as they are taken."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmctl.kernels.linear._triton import tensors_of
from llmctl.kernels.linear._triton_cases import weight_types
from llmctl.kernels.triton_lib.compilation import Case
from llmctl.kernels.triton_lib.forms import FORMS
from llmctl.kernels.triton_lib.launch import cdiv, empty
from llmctl.kernels.triton_lib.unpack import code_at, scale_at, words_at
from llmctl.kernels.triton_lib.weights import TritonWeight

_BLOCK = 256


def embedding(token_ids: torch.Tensor, table: TritonWeight, scale: float = 1.0) -> torch.Tensor:
    """Rows of table (V, H) for token_ids int64 [T], times scale in the table's compute dtype: [T, H]."""
    factor = float(torch.tensor(scale, dtype=table.dtype))
    if table.form is None:
        rows = table.planes.low[token_ids].to(table.dtype)
        return rows if factor == 1.0 else rows * factor
    columns = table.shape[1]
    out = empty((len(token_ids), columns), table.dtype, table.device)
    if len(token_ids):
        order = token_ids if table.order is None else table.order
        grid, stride = (len(token_ids), cdiv(columns, _BLOCK)), table.planes.low.shape[-1]
        embedding_kernel[grid](
            token_ids, *tensors_of(table), order, out, stride, columns, factor, **table.form.constants(),
            HAS_ORDER=table.order is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


@triton.jit
def embedding_kernel(
    token_ids,
    low,
    high,
    scales,
    extra,
    order,
    out,
    stride,
    K,
    factor,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIGNED: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (token, block of columns). A row is rounded to the type of out before it is scaled, as that of a plain table is."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids + token)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < K
    sub_block, half, word, byte = column // 32, column % 32 // 16, column % 16 // 4, column % 4
    low_words = words_at(low, sub_block, half, word, stride, row, mask, LOW)
    high_words = low_words
    if HIGH:
        high_words = words_at(high, sub_block, half, word, stride, row, mask, HIGH)
    step, offset = scale_at(scales, extra, sub_block, half, stride, row, mask, LOW, KIND, GROUP, ZEROS)
    number = step * code_at(low_words, high_words, half, word, byte, LOW, HIGH, SIGNED) + offset
    if HAS_ORDER:
        column = tl.load(order + column, mask=mask, other=0).to(tl.int32)
    number = number.to(out.dtype.element_ty).to(tl.float32) * factor
    tl.store(out + token * K + column, number.to(out.dtype.element_ty), mask=mask)


def kernel_cases() -> list[Case]:
    """A table as files have it."""
    form = FORMS["Q6_K"]
    types = weight_types(form) | {"token_ids": "*i64", "order": "*i64", "out": "*fp16"}
    types |= {"stride": "i32", "K": "i32", "factor": "fp32"}
    constants = {**form.constants(), "HAS_ORDER": False, "BLOCK": _BLOCK}
    aligned = tuple(argument for argument in types if argument != "factor")
    return [Case("embedding.Q6_K", embedding_kernel, types, constants, aligned)]
