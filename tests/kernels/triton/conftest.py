"""Tests of Triton kernels under triton's interpreter: cases_*.py, which tests/kernels/test_triton_interpreted.py runs.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton/cases_x.py

Whatever a kernel writes to (launch.empty) is poisoned and lies between guard bands; `guarded` gives inputs the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from guarded_memory import GuardedMemory

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """What a GPU computes without a word, numpy warns of: exp of a large number is infinity."""
    config.addinivalue_line("filterwarnings", "ignore:overflow encountered in exp:RuntimeWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels are defined for the interpreter or for a GPU, once in a process."""
    here = any(item.path.parent == HERE for item in items)
    if here and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("these tests need TRITON_INTERPRET=1 in the environment before anything is imported")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random inputs every time: equal draws and roundings are compared."""
    torch.manual_seed(5)


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
