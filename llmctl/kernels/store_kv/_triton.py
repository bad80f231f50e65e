"""store_kv in Triton: one program writes one head's row of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmctl.kernels.store_kv._triton_pages import TritonPages
from llmctl.kernels.store_kv._triton_rows import PER_SCALE, store_row
from llmctl.kernels.triton_lib.launch import power_of_two


def store_kv(keys: torch.Tensor, values: torch.Tensor | None, pages: TritonPages, slot_mapping: torch.Tensor) -> None:
    """Write each token's key and value row into its slot of the pages; slot −1 is skipped."""
    for rows, side in ((keys, pages.keys), (values, pages.values)):
        if rows is not None:
            tokens, heads, width = rows.shape
            assert (heads, width) == tuple(side.numbers.shape[1:]), (rows.shape, side.numbers.shape)
            sizes = {"HEADS": heads, "WIDTH": width, "BLOCK": power_of_two(width, PER_SCALE)}
            store_rows[(tokens, heads)](rows.contiguous(), side.stored, side.scales, slot_mapping, **sizes, num_warps=1)


@triton.jit
def store_rows(x, codes, scales, slots, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, HEADS, WIDTH] → the rows of slots [T] int64."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        values = tl.load(x + (token * HEADS + head) * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        store_row(codes, scales, slot * HEADS + head, values, WIDTH, BLOCK)
