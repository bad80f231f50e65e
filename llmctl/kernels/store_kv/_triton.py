"""store_kv in Triton: keys and values of all tokens in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmctl.kernels.store_kv._triton_pages import TritonPages, TritonSide
from llmctl.kernels.store_kv._triton_rows import PER_SCALE, store_rows
from llmctl.kernels.triton_lib.compilation import Case
from llmctl.kernels.triton_lib.launch import cdiv, power_of_two

NUMBERS = 4096
"""Numbers that a program writes, about."""


def store_kv(keys: torch.Tensor, values: torch.Tensor | None, pages: TritonPages, slot_mapping: torch.Tensor) -> None:
    """Write each token's key and value row into its slot of the pages; slot −1 is skipped."""
    tokens, heads, width = keys.shape
    for rows, side in ((keys, pages.keys), (values, pages.values)):
        assert rows is None or tuple(rows.shape[1:]) == tuple(side.numbers.shape[1:]), (rows.shape, side.numbers.shape)
    if not tokens:
        return
    block, two = power_of_two(width, PER_SCALE), values is not None
    sizes = {"HEADS": heads, "WIDTH": width, "ROWS": max(NUMBERS // block, 1), "BLOCK": block}
    sides = (*stored(pages.keys), *stored(pages.values if two else pages.keys))
    grid = (cdiv(tokens * heads, sizes["ROWS"]), 1 + two)
    store_kernel[grid](keys.contiguous(), values.contiguous() if two else keys, *sides, slot_mapping, tokens, **sizes)


def stored(side: TritonSide) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What store_rows takes of a side: e4m3 as bytes."""
    return side.numbers.view(torch.uint8) if side.numbers.dtype == torch.float8_e4m3fn else side.numbers, side.scales


@triton.jit(do_not_specialize=["tokens"])
def store_kernel(
    keys,
    values,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    slots,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """keys, and values as a second row of programs, [tokens, HEADS, WIDTH] → the rows of slots [tokens] int64."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) == 0:
        store_tokens(keys, row, key_codes, key_scales, slots, tokens, HEADS, WIDTH, BLOCK)
    else:
        store_tokens(values, row, value_codes, value_scales, slots, tokens, HEADS, WIDTH, BLOCK)


@triton.jit
def store_tokens(
    x, row, codes, scales, slots, tokens, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """The rows `row` [N] of x [tokens · HEADS, WIDTH], as they are."""
    column = tl.arange(0, BLOCK)
    slot = tl.load(slots + row // HEADS, mask=row < tokens * HEADS, other=-1)
    wanted = (slot >= 0)[:, None] & (column < WIDTH)[None, :]
    numbers = tl.load(x + row[:, None] * WIDTH + column[None, :], mask=wanted, other=0.0).to(tl.float32)
    store_rows(codes, scales, slot * HEADS + row % HEADS, slot >= 0, numbers, WIDTH, BLOCK)


_POINTERS = {"f16": "*fp16", "bf16": "*bf16", "q8_0": "*i8", "fp8": "*u8"}


def kernel_cases() -> list[Case]:
    """Heads of 128 in every type of pages."""
    return [_case(kv_type) for kv_type in _POINTERS]


def _case(kv_type: str) -> Case:
    numbers, scaled = "*bf16" if kv_type == "bf16" else "*fp16", kv_type == "q8_0"
    types = {"keys": numbers, "values": numbers, "key_codes": _POINTERS[kv_type], "value_codes": _POINTERS[kv_type]}
    types |= {"key_scales": "*fp16", "value_scales": "*fp16"} if scaled else {}
    constants = {"HEADS": 8, "WIDTH": 128, "ROWS": NUMBERS // 128, "BLOCK": 128}
    constants |= {} if scaled else {"key_scales": None, "value_scales": None}
    aligned = (*types, "slots")
    return Case(f"store_kv.{kv_type}", store_kernel, types | {"slots": "*i64", "tokens": "i32"}, constants, aligned)
