"""One layer's pages on the GPU: TritonPages, and what is done with them outside the forward pass."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from llmctl.errors import OutOfMemoryError, UnsupportedError
from llmctl.kernels.kv_types import sides_of
from llmctl.kernels.store_kv._triton_rows import PER_SCALE
from llmctl.kernels.triton_lib.launch import empty, interpreting

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.int8, "fp8": torch.float8_e4m3fn}
_CONVERTS_FP8 = (8, 9)
"""The compute capability from which on a GPU has instructions for e4m3."""


@dataclass(frozen=True)
class TritonSide:
    """Rows [slots, num_kv_heads, stride] of numbers or codes. scales [slots, num_kv_heads, stride / 32] float16, of q8_0 only.
    width: how many numbers of a row are seen."""

    numbers: torch.Tensor
    scales: torch.Tensor | None
    width: int

    @classmethod
    def make(cls, shape: tuple[int, int, int], side: str, device: str, latent: int = 0) -> TritonSide:
        """Uninitialised. Errors: UnsupportedError for types that no kernel reads, OutOfMemoryError."""
        if side not in _DTYPES:
            raise UnsupportedError(
                f"--kv-type {side}: the triton backend keeps {', '.join(_DTYPES)}; --backend reference and native keep it"
            )
        if side != "q8_0":
            return cls(_allocate(shape, _DTYPES[side], side, device), None, shape[-1])
        if shape[-1] % PER_SCALE or latent % PER_SCALE:
            parts = f"latents of {latent} and {shape[-1] - latent}" if latent else f"heads of {shape[-1]}"
            raise UnsupportedError(f"--kv-type q8_0: {parts} numbers are not whole blocks of {PER_SCALE}: f16 keeps them")
        scales = _allocate((*shape[:2], shape[-1] // PER_SCALE), torch.float16, side, device)
        return cls(_allocate(shape, torch.int8, side, device), scales, shape[-1])

    @property
    def codes(self) -> torch.Tensor:
        """`numbers` as a kernel takes them: e4m3 as bytes where the GPU cannot convert it."""
        if self.numbers.dtype != torch.float8_e4m3fn or _converts_fp8(self.numbers.device):
            return self.numbers
        return self.numbers.view(torch.uint8)

    @property
    def parts(self) -> Iterator[torch.Tensor]:
        """The tensors of it, as bytes [slots, num_kv_heads, …]."""
        return (part.view(torch.uint8) for part in (self.numbers, self.scales) if part is not None)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """float32 [n, num_kv_heads, width]."""
        rows = self.numbers.view(torch.uint8)[slots].view(self.numbers.dtype).float()  # e4m3 cannot be indexed, its bytes can
        if self.scales is not None:
            rows = (rows.unflatten(-1, (-1, PER_SCALE)) * self.scales[slots].float()[..., None]).flatten(-2)
        return rows[..., : self.width]


@dataclass(frozen=True)
class TritonPages:
    """One layer's pages. values: of latent pages a part of the keys."""

    block_size: int
    keys: TritonSide
    values: TritonSide
    is_latent: bool = False

    @classmethod
    def make(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        kv_type: str,
        device: str,
        latent: int = 0,
    ) -> TritonPages:
        """As `Ops.kv_pages`. Errors: UnsupportedError for types that no kernel reads, OutOfMemoryError."""
        shape, sides = (num_blocks * block_size, num_kv_heads, head_dim), sides_of(kv_type)
        keys = TritonSide.make(shape, sides[0], device, latent)
        if latent:
            return cls(block_size, keys, TritonSide(keys.numbers, keys.scales, latent), is_latent=True)
        return cls(block_size, keys, TritonSide.make(shape, sides[1], device))

    @property
    def num_kv_heads(self) -> int:
        """Rows of a slot."""
        return self.keys.numbers.shape[1]

    @property
    def parts(self) -> list[torch.Tensor]:
        """Every tensor once, as bytes [slots, num_kv_heads, …]."""
        return [part for side in ((self.keys,) if self.is_latent else (self.keys, self.values)) for part in side.parts]


def copy_page(pages: TritonPages, source: int, target: int) -> None:
    """As `Ops.copy_page`."""
    for part in pages.parts:
        _page(part, pages, target).copy_(_page(part, pages, source))


def page_layout(kv_type: str) -> str:
    """As `Ops.page_layout`."""
    # The version is that of the layout: raised when pages of the same shape come to hold other bytes.
    return f"triton-1 {kv_type}"


def read_page(pages: TritonPages, page: int) -> bytes:
    """As `Ops.read_page`: one tensor after the other."""
    return b"".join(_page(part, pages, page).cpu().numpy().tobytes() for part in pages.parts)


def write_page(pages: TritonPages, page: int, data: bytes) -> None:
    """As `Ops.write_page`. Errors: ValueError for another number of bytes."""
    targets = [_page(part, pages, page) for part in pages.parts]
    expected = sum(target.numel() for target in targets)
    if len(data) != expected:
        raise ValueError(f"a page of this layer has {expected} bytes, found {len(data)}")
    stream = io.BytesIO(data)
    for target in targets:
        values = np.frombuffer(stream.read(target.numel()), np.uint8).copy()
        target.copy_(torch.from_numpy(values).view(target.shape))


def move_tokens(pages: TritonPages, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """As `Ops.move_tokens`. sources int64 [num_kv_heads, n], targets int64 [n], on the pages' device."""
    heads = torch.arange(pages.num_kv_heads, device=sources.device)[:, None]
    for part in pages.parts:
        part[targets[None, :], heads] = part[sources, heads]  # all are read before any is written


def _page(part: torch.Tensor, pages: TritonPages, page: int) -> torch.Tensor:
    return part[page * pages.block_size : (page + 1) * pages.block_size]


@cache
def _converts_fp8(device: torch.device) -> bool:
    return not interpreting() and torch.cuda.get_device_capability(device) >= _CONVERTS_FP8


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, side: str, device: str) -> torch.Tensor:
    try:
        return empty(shape, dtype, device)
    except RuntimeError as error:  # torch's own class only for devices
        if "memory" not in str(error):
            raise
        wanted = math.prod(shape) * dtype.itemsize
        raise OutOfMemoryError(f"{wanted / 1e9:.1f} GB of {side} could not be allocated on {device}") from error
