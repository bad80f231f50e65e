"""Where kernels run and what they write to: compiled on a GPU, or numpy under triton's interpreter (TRITON_INTERPRET=1).

Triton settles which of the two when a kernel is defined, so the variable has to be set before this module is imported.
"""

from __future__ import annotations

import torch
import triton


def interpreting() -> bool:
    """Whether kernels run in triton's interpreter. There is no inline assembly in it, and dots of bf16 are wrong: kernels branch
    on a constexpr that is given this."""
    return bool(triton.knobs.runtime.interpret)


def usual_device() -> str:
    """The device of those who name none."""
    return "cpu" if interpreting() else "cuda"


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Memory for what a kernel writes, not initialised. Kernels' results come from here and nowhere else: tests put guard bands
    around them and garbage into them."""
    return _allocate(shape, dtype, device)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """The same, of zeros: for sums that several programs add to."""
    return empty(shape, dtype, device).zero_()


def cdiv(count: int, size: int) -> int:
    """Blocks of `size` that hold `count`."""
    return -(-count // size)


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two from `count` and `least` on: the sizes that triton's blocks have."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def warps_of_row(block: int) -> int:
    """Warps for a program that holds a row of `block` numbers: 16 numbers a thread, of long rows 32."""
    return min(max(block // 512, 1), 16)
