"""One side of a layer's pages for the reference backend: a tensor of plain numbers, or blocks by the codecs of files."""

from __future__ import annotations

import math

import torch

from llmctl.errors import OutOfMemoryError
from llmctl.kernels.kv_types import BLOCK_TYPES, rotation
from llmctl.kernels.store_kv.rounding import LARGEST_FP8, decode_rows, encode_rows

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class PlainPages:
    """Numbers [slots, num_kv_heads, width] of a dtype. numbers: given where they are a part of another side's."""

    def __init__(self, shape: tuple[int, int, int], side: str, device: str, numbers: torch.Tensor | None = None) -> None:
        self.numbers = _allocate(shape, _DTYPES[side], side, device) if numbers is None else numbers
        self.width = self.numbers.shape[-1]

    def first(self, width: int) -> PlainPages:
        """The same pages, of which only the first numbers of every row are seen."""
        return PlainPages((0, 0, 0), "f32", "cpu", self.numbers[..., :width])

    def store(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """rows [n, num_kv_heads, width] → slots [n]."""
        if self.numbers.dtype != torch.float8_e4m3fn:
            self.numbers[slots] = rows.to(self.numbers.dtype)
            return
        rows = rows.float().where(rows.isfinite(), torch.nan).clamp(-LARGEST_FP8, LARGEST_FP8)
        self.numbers.view(torch.uint8)[slots] = rows.to(torch.float8_e4m3fn).view(torch.uint8)  # bytes can be indexed

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """float32 [n, num_kv_heads, width]."""
        if self.numbers.dtype != torch.float8_e4m3fn:
            return self.numbers[slots].float()
        return self.numbers.view(torch.uint8)[slots].view(torch.float8_e4m3fn).float()

    def copy(self, source: slice, target: slice) -> None:
        """Some slots to others."""
        self.numbers.view(torch.uint8)[target] = self.numbers.view(torch.uint8)[source].clone()

    def move(self, head: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """One head's rows of some slots to others."""
        self.numbers.view(torch.uint8)[targets, head] = self.numbers.view(torch.uint8)[sources, head]


class BlockPages:
    """Rows as files have them. block: numbers that are rotated together before they are rounded, 0 for none."""

    def __init__(self, shape: tuple[int, int, int], side: str, device: str, block: int) -> None:
        self.side, self.block, self.width, self.device = side, block, shape[-1], device
        self.rows = _allocate((*shape[:2], BLOCK_TYPES[side].row_bytes(shape[-1])), torch.uint8, side, "cpu")

    def first(self, width: int) -> BlockPages:
        """The same pages, of which only the first numbers of every row are seen."""
        seen = object.__new__(BlockPages)
        seen.__dict__ |= self.__dict__ | {"width": width}
        return seen

    def store(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """rows [n, num_kv_heads, width] → slots [n]. A row with a number that is not finite reads back as NaN."""
        self.rows[slots.cpu()] = torch.from_numpy(encode_rows(rows.float().cpu().numpy(), self.side, self.block))

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """float32 [n, num_kv_heads, width]."""
        values = decode_rows(self.rows[slots.cpu()].numpy(), self.side, self.block)
        return torch.from_numpy(values)[..., : self.width].to(self.device)

    def copy(self, source: slice, target: slice) -> None:
        """Some slots to others."""
        self.rows[target] = self.rows[source].clone()

    def move(self, head: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """One head's rows of some slots to others."""
        self.rows[targets.cpu(), head] = self.rows[sources.cpu(), head]


def make_side(shape: tuple[int, int, int], side: str, device: str, *latent: int) -> PlainPages | BlockPages:
    """Uninitialised pages [slots, num_kv_heads, width] of a type. latent: how many numbers of a row are values as well."""
    if side in BLOCK_TYPES:
        return BlockPages(shape, side, device, rotation(side, shape[-1], *latent))
    return PlainPages(shape, side, device)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, side: str, device: str) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch's own class only for devices
        if "memory" not in str(error):
            raise
        wanted = math.prod(shape) * dtype.itemsize
        raise OutOfMemoryError(f"{wanted / 1e9:.1f} GB of {side} could not be allocated on {device}") from error
