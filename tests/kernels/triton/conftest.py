"""Tests of Triton kernels under triton's interpreter: cases_*.py, which tests/kernels/test_triton_interpreted.py runs.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton/cases_x.py

Whatever a kernel writes to (launch.empty) is poisoned and lies between guard bands; `guarded` gives inputs the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

BAND = 64
_POISON = {torch.bool: True, torch.uint8: 0xA5, torch.int8: -91, torch.int16: -23131, torch.int32: -1515870811}
_POISON |= {torch.int64: -6510615555426900571}


def pytest_configure(config: pytest.Config) -> None:
    """What a GPU computes without a word, numpy warns of: exp of a large number is infinity."""
    config.addinivalue_line("filterwarnings", "ignore:overflow encountered in exp:RuntimeWarning")


def pytest_collection_modifyitems() -> None:
    """Kernels are defined for the interpreter or for a GPU, once in a process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("these tests need TRITON_INTERPRET=1 in the environment before anything is imported")


class GuardedMemory:
    """Tensors between guard bands, filled with garbage: NaN, or numbers no test expects."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """What launch.empty gives in these tests."""
        count = torch.Size(shape).numel()
        wide = torch.float32 if _is_fp8(dtype) else dtype
        whole = torch.full((count + 2 * BAND,), _POISON.get(dtype, float("nan")), dtype=wide).to(dtype)
        self._made.append((whole, whole.view(torch.uint8).clone()))
        return whole[BAND : BAND + count].view(shape)

    def guarded(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers between guard bands: what reads past them reads NaN."""
        place = self.empty(tuple(tensor.shape), tensor.dtype)
        place.view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))
        return place

    def check(self) -> None:
        """Nothing was written outside."""
        for whole, before in self._made:
            size, now = BAND * whole.element_size(), whole.view(torch.uint8)
            assert torch.equal(now[:size], before[:size]), f"written before a tensor of {whole.numel() - 2 * BAND} {whole.dtype}"
            assert torch.equal(now[-size:], before[-size:]), f"written past a tensor of {whole.numel() - 2 * BAND} {whole.dtype}"


def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype.is_floating_point


@pytest.fixture(autouse=True)
def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedMemory]:
    """Of every test: results of kernels are poisoned before, and their surroundings checked after."""
    from llmctl.kernels.triton_lib import launch

    memory = GuardedMemory()
    monkeypatch.setattr(launch, "_allocate", memory.empty)
    yield memory
    memory.check()


@pytest.fixture
def guarded(guarded_memory: GuardedMemory) -> Callable[[torch.Tensor], torch.Tensor]:
    """Puts an input between guard bands."""
    return guarded_memory.guarded
