"""How scripts/gpu_check.py measures: graph replays over rotated buffers on a GPU; a plain call where there is none."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llmctl.kernels._triton_graphs import CudaRecorder

_REPLAYS = 7
_LEAST_US = 400.0
"""A graph holds calls for about so long: its own launch is lost in it."""

Calls = Sequence[Callable[[], torch.Tensor]]
"""The same call over buffers that take turns, so that none is still in a cache."""


@dataclass(frozen=True)
class Ceilings:
    """What the device does at best, measured in this run. empty_graph_us: a replay of nothing."""

    copy_gb_per_s: float
    read_gb_per_s: float
    teraflops: float
    empty_graph_us: float


class CudaTimer:
    """Medians of graph replays."""

    def microseconds(self, calls: Calls) -> float:
        """Of one call."""
        once = self._median([calls[i % len(calls)] for i in range(len(calls))]) / len(calls)
        count = max(len(calls), int(_LEAST_US / max(once, 0.5)))
        return self._median([calls[i % len(calls)] for i in range(count)]) / count

    def _median(self, calls: Calls) -> float:
        def run() -> torch.Tensor:
            return [call() for call in calls][-1]

        replay, _ = CudaRecorder().record(run)
        return statistics.median(self._replay(replay) for _ in range(_REPLAYS))

    @staticmethod
    def _replay(replay: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


class DryTimer:
    """One call by the clock: figures without meaning, from code that runs."""

    @staticmethod
    def microseconds(calls: Calls) -> float:
        """Of one call."""
        begin = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - begin) * 1e6


Timer = CudaTimer | DryTimer


def measure_ceilings(timer: Timer, device: str, nbytes: int, side: int) -> Ceilings:
    """nbytes: of the buffers that are copied and read; side: of the matrices that are multiplied."""
    source = torch.zeros(nbytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    a, b = (torch.ones(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    copied = timer.microseconds([lambda: target.copy_(source)])
    read = timer.microseconds([lambda: source.view(-1, 1024).amax(dim=1)])
    multiplied = timer.microseconds([lambda: a @ b])
    small = torch.zeros(1, device=device)
    empty = timer.microseconds([lambda: small.add_(1)])
    return Ceilings(2e-3 * nbytes / copied, 1e-3 * nbytes / read, 2e-6 * side**3 / multiplied, empty)
