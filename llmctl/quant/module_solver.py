"""From weights that read one input to what a file stores of them: by rounding or GPTQ, into integer grids or GGUF's formats.

Whatever the method, the result is never worse on the calibration text than rounding with searched scales: where it would be, that
is what is kept, and the report says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from llmctl.errors import FormatError
from llmctl.kernels.encode import Encoder
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format
from llmctl.quant import gptq, grid_gptq
from llmctl.quant.error_sums import ErrorSums
from llmctl.quant.integer_descent import improve
from llmctl.quant.integer_grid import GridValues, IntegerGrid, Search, round_to_grid, round_whole_tensor
from llmctl.quant.statistics import Statistics

Target = IntegerGrid | Format
Stored = GridValues | QuantTensor


@dataclass(frozen=True)
class Method:
    """name: rtn, ptq, gptq or awq. search: of scales. damping, activation_order: of GPTQ. per_tensor: one scale a matrix."""

    name: str
    search: Search = "error"
    damping: float = gptq.DAMPING
    activation_order: bool = True
    per_tensor: bool = False

    @property
    def needs_text(self) -> bool:
        """Whether it has to see activations."""
        return self.name != "rtn"

    @property
    def needs_products(self) -> bool:
        """Whether it needs Σ x xᵀ, not only its diagonal."""
        return self.name in ("gptq", "awq")


@dataclass
class Solved:
    """One matrix as a file holds it. facts: for the report."""

    stored: Stored
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> torch.Tensor:
        """float32 [N, K], decoded anew each time: kept, it would be the largest part of a group being solved."""
        stored = self.stored
        return torch.from_numpy(dequantize(stored)) if isinstance(stored, QuantTensor) else stored.values


def target_name(target: Target) -> str:
    """For people."""
    if isinstance(target, Format):
        return target.name
    size = "row" if target.group_size == -1 else target.group_size
    return f"INT{target.bits} {'symmetric' if target.symmetric else 'asymmetric'}, {size}"


def target_bits(target: Target, columns: int) -> float:
    """Stored bits a weight, scales and zeros included."""
    if isinstance(target, Format):
        return target.bits_per_weight
    return target.bits + (16 + (0 if target.symmetric else target.bits)) / target.columns_per_group(columns)


def round_module(
    weight: torch.Tensor,
    target: Target,
    importance: torch.Tensor | None,
    method: Method,
    threads: int,
    products: torch.Tensor | None = None,
) -> Solved:
    """weight: float32 [N, K]. importance: float32 [K] or None. products: float32 [K, K], E[x xᵀ], for integers where the method
    clips by what errors do to the outputs."""
    if isinstance(target, Format):
        columns = None if importance is None else importance.numpy()
        blocks = Encoder(threads).encode(weight.numpy(), target, columns)
        assert isinstance(blocks, QuantTensor)
        return Solved(blocks)
    if method.per_tensor:
        found = round_whole_tensor(weight, target, importance, method.search)
    else:
        found = round_to_grid(weight, target, importance, method.search, products=products, threads=threads)
    return Solved(found)


def solve_group(
    weights: dict[str, torch.Tensor],
    targets: dict[str, Target],
    statistics: Statistics | None,
    method: Method,
    threads: int,
) -> dict[str, Solved]:
    """weights: float32 [N, K] by name, all multiplied with the same input. statistics: of that input, None if unknown."""
    importance = None if statistics is None else statistics.mean_squares
    hessian = statistics.take_hessian() if statistics is not None and statistics.products is not None else None
    by_products = method.name == "awq" and statistics is not None and statistics.count and statistics.given is None
    clip = hessian if by_products else None  # a file of importances has none: columns count by what it says
    solved = {name: round_module(weight, targets[name], importance, method, threads, clip) for name, weight in weights.items()}
    for one in solved.values():
        one.facts["method"] = "rtn" if method.name == "gptq" else method.name
    if method.name == "gptq":
        _improve(solved, weights, targets, statistics, hessian, method, threads)
    for name, one in solved.items():
        _describe(one, weights[name], targets[name], statistics, hessian)
    return solved


def _improve(
    solved: dict[str, Solved],
    weights: dict[str, torch.Tensor],
    targets: dict[str, Target],
    statistics: Statistics | None,
    hessian: torch.Tensor | None,
    method: Method,
    threads: int,
) -> None:
    """Replace what GPTQ finds better values for."""
    seen = statistics is not None and hessian is not None and statistics.count > 0
    found = _compensated(weights, targets, statistics.mean_squares, hessian, method, threads) if seen else {}
    for name, nearest in solved.items():
        values = found.get(name)
        if values is None:
            nearest.facts["fallback"] = "the Hessian has no factor" if seen else "no token was seen"
            continue
        before, after = (float(gptq.loss(weights[name], one.values, hessian).sum()) for one in (nearest, values))
        if after <= before:
            values.facts |= {"method": "gptq", "loss_rtn": before}
            solved[name] = values
        else:
            nearest.facts["fallback"] = f"the loss of GPTQ, {after:.4g}, is above that of rounding, {before:.4g}"


def _compensated(
    weights: dict[str, torch.Tensor],
    targets: dict[str, Target],
    importance: torch.Tensor,
    hessian: torch.Tensor,
    method: Method,
    threads: int,
) -> dict[str, Solved]:
    """GPTQ's values, none where the Hessian has no factor."""
    found: dict[str, Solved] = {}
    grids = [target for target in dict.fromkeys(targets[name] for name in weights) if isinstance(target, IntegerGrid)]
    for grid in grids:
        together = {name: weight for name, weight in weights.items() if targets[name] == grid}
        found |= _on_grid(together, grid, importance, hessian, method, threads)
    formats = {name: target for name, target in targets.items() if isinstance(target, Format)}
    if formats:
        prepared = grid_gptq.prepare(hessian.numpy(), method.damping)
        solver = grid_gptq.Solver.on(threads, method.damping)
        for name, form in formats.items() if prepared is not None else ():
            blocks = grid_gptq.solve_prepared(solver, weights[name].numpy(), prepared, form, importance.numpy())
            found[name] = Solved(blocks, {"damping": method.damping})
    return found


def _on_grid(
    weights: dict[str, torch.Tensor],
    grid: IntegerGrid,
    importance: torch.Tensor,
    hessian: torch.Tensor,
    method: Method,
    threads: int,
) -> dict[str, Solved]:
    """Matrices of one grid are solved as one."""
    factor = gptq.factorize(hessian, damping=method.damping, activation_order=method.activation_order)
    if factor is None:
        return {}
    facts = {"damping": factor.damping, **({"fallback": factor.note} if factor.note else {})}
    weight = torch.cat(list(weights.values())) if len(weights) > 1 else next(iter(weights.values()))
    together = gptq.solve(weight, grid, factor, importance, threads=threads)
    with gptq.damped(hessian, factor.ridge) as damped:
        together = improve(together, weight, damped, threads)
    found, first = {}, 0
    for name, weight in weights.items():
        part = together.rows(first, first + len(weight))
        found[name] = Solved(part, dict(facts))
        first += len(weight)
    return found


def _describe(
    one: Solved, weight: torch.Tensor, target: Target, statistics: Statistics | None, hessian: torch.Tensor | None
) -> None:
    values = one.values
    if not bool(torch.isfinite(values).all()):
        raise FormatError("the quantized values are not finite")
    sums = ErrorSums()
    sums.add(weight, values, hessian)
    facts = {
        "shape": list(weight.shape),
        "type": target_name(target),
        "bits_per_weight": target_bits(target, weight.shape[1]),
        "tokens": statistics.count if statistics is not None else 0,
        **sums.facts(),
    }
    one.facts = facts | one.facts


def codes_of(stored: GridValues) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """uint8 codes [N, K], float16 scales [N, G], uint8 zeros [N, G] or None for symmetric ones."""
    zeros = None if stored.grid.symmetric else stored.zeros.to(torch.uint8).numpy()
    return stored.codes.numpy(), stored.scales.half().numpy(), zeros
