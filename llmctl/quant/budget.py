"""Types for all matrices within a number of bytes: where a bit buys most.

What a type costs a group of matrices is its loss on the calibration text, Σ (ŵ − w) H (ŵ − w)ᵀ, times how much the model's output
suffers from a loss there. The second factor is measured: one group at a time is rounded coarsely, and the divergence from the
unrounded model is taken. Small errors add up, so the sum of all costs is what the finished file should diverge by.

The choice is a knapsack: one type a group, least cost within the budget. It is solved exactly, but that sizes are rounded up to
one part in 2¹⁶ of the budget; what is left over is then spent where it still fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmctl.errors import UsageError
from llmctl.kernels.formats.spec import Format

_UNITS = 1 << 16


@dataclass(frozen=True)
class Option:
    """One type for a group. nbytes: in the file, padding included. cost: expected divergence, nats."""

    format: Format
    nbytes: int
    cost: float


@dataclass(frozen=True)
class Group:
    """Matrices that have one type: those that share an input and are fused by runtimes. options: at least one."""

    names: tuple[str, ...]
    options: tuple[Option, ...]

    def __post_init__(self) -> None:
        assert self.options, self.names


@dataclass(frozen=True)
class Assignment:
    """formats: by name of the matrix. nbytes: of all groups. cost: expected divergence, nats."""

    formats: dict[str, Format]
    nbytes: int
    cost: float


def assign(groups: Sequence[Group], budget: int) -> Assignment:
    """The options with the least cost in all that fit `budget` bytes; UsageError where not even the smallest do."""
    least = sum(min(option.nbytes for option in group.options) for group in groups)
    check_size(least, budget)
    chosen = _knapsack(groups, budget)
    _spend(groups, chosen, budget)
    picked = [group.options[index] for group, index in zip(groups, chosen, strict=True)]
    formats = {name: option.format for group, option in zip(groups, picked, strict=True) for name in group.names}
    return Assignment(formats, sum(option.nbytes for option in picked), sum(option.cost for option in picked))


def check_size(least: int, budget: int) -> None:
    """UsageError where the smallest types need more bytes than there are."""
    if least > budget:
        raise UsageError(f"the matrices need {least} bytes in their smallest types, and only {budget} are left for them")


def _knapsack(groups: Sequence[Group], budget: int) -> list[int]:
    """Index of each group's option. Table of the least cost for every number of units, group by group.

    Every group pays its smallest size in bytes first; only what goes beyond is counted in units, rounded up.
    """
    base = [min(option.nbytes for option in group.options) for group in groups]
    spare = budget - sum(base)
    unit = max(1, -(-spare // _UNITS))
    least, taken = np.zeros(spare // unit + 1), []
    for group, smallest in zip(groups, base, strict=True):
        tried = np.stack([_after(least, -(-(option.nbytes - smallest) // unit), option.cost) for option in group.options])
        taken.append(tried.argmin(axis=0).astype(np.uint8))
        least = tried.min(axis=0)
    return _walk_back(groups, base, unit, taken, len(least) - 1)


def _after(least: np.ndarray, units: int, cost: float) -> np.ndarray:
    """The table once an option of so many units and this cost is added."""
    found = np.full_like(least, np.inf)
    if units < len(least):
        found[units:] = least[: len(least) - units] + cost
    return found


def _walk_back(groups: Sequence[Group], base: list[int], unit: int, taken: list[np.ndarray], left: int) -> list[int]:
    chosen = []
    for group, smallest, table in zip(reversed(groups), reversed(base), reversed(taken), strict=True):
        chosen.append(int(table[left]))
        left -= -(-(group.options[chosen[-1]].nbytes - smallest) // unit)
    return chosen[::-1]


def _spend(groups: Sequence[Group], chosen: list[int], budget: int) -> None:
    """Spend in `chosen` what rounding of sizes has left over: the change that saves most, as long as one fits."""
    left = budget - sum(group.options[index].nbytes for group, index in zip(groups, chosen, strict=True))
    while True:
        best, best_saving = None, 0.0
        for i, group in enumerate(groups):
            now = group.options[chosen[i]]
            for j, option in enumerate(group.options):
                if option.nbytes - now.nbytes <= left and now.cost - option.cost > best_saving:
                    best, best_saving = (i, j), now.cost - option.cost
        if best is None:
            return
        i, j = best
        left -= groups[i].options[j].nbytes - groups[i].options[chosen[i]].nbytes
        chosen[i] = j


@dataclass(frozen=True)
class Probe:
    """One group rounded on trial. loss: what the group's loss then is; divergence: what the whole model's then is, nats."""

    loss: float
    divergence: float


def slopes(probes: Mapping[str, Probe], floor: float = 0.0) -> dict[str, float]:
    """Divergence per loss, by group.

    floor: the divergence that is measured with nothing rounded: noise of the arithmetic. A probe that does not rise above it says
    nothing; its group gets the median of the others.
    """
    found = {
        key: (probe.divergence - floor) / probe.loss
        for key, probe in probes.items()
        if probe.loss > 0 and probe.divergence > floor
    }
    usual = float(np.median(list(found.values()))) if found else 1.0
    return {key: found.get(key, usual) for key in probes}


def measure_slopes(
    groups: Mapping[str, Callable[[], tuple[float, Mapping[str, np.ndarray]]]],
    divergence: Callable[[Mapping[str, np.ndarray]], float],
) -> dict[str, float]:
    """Divergence per loss of every group, measured by rounding one after the other.

    groups: by key, a function that rounds the group coarsely and returns (loss, float32 weights by name). divergence: of the
    model with these weights in place from the unrounded one, nats; called with none for the noise.
    """
    floor = divergence({})
    probes = {}
    for key, rounded in groups.items():
        loss, weights = rounded()
        probes[key] = Probe(loss, divergence(weights))
    return slopes(probes, floor)
