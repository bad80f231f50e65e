"""Memory for kernels under test: filled with garbage before, and checked around its edges after."""

from __future__ import annotations

import torch

BAND = 64
"""Elements before and after."""
_POISON = {torch.bool: True, torch.uint8: 0xA5, torch.int8: -91, torch.int16: -23131, torch.int32: -1515870811}
_POISON |= {torch.int64: -6510615555426900571}


class GuardedMemory:
    """Tensors between guard bands, filled with NaN or with numbers no test expects."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """What launch.empty gives while this stands for its memory."""
        count = torch.Size(shape).numel()
        wide = torch.float32 if _is_fp8(dtype) else dtype
        whole = torch.full((count + 2 * BAND,), _POISON.get(dtype, float("nan")), dtype=wide, device=device).to(dtype)
        self._made.append((whole, whole.view(torch.uint8).clone()))
        return whole[BAND : BAND + count].view(shape)

    def guarded(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers between guard bands: what reads past them reads NaN."""
        place = self.empty(tuple(tensor.shape), tensor.dtype, tensor.device)
        place.view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))
        return place

    def check(self) -> None:
        """Nothing was written outside. Errors: AssertionError."""
        for whole, before in self._made:
            size, now = BAND * whole.element_size(), whole.view(torch.uint8)
            name = f"a tensor of {whole.numel() - 2 * BAND} {whole.dtype}"
            assert torch.equal(now[:size], before[:size]), f"written before {name}"
            assert torch.equal(now[-size:], before[-size:]), f"written past {name}"


def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype.is_floating_point
