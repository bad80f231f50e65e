"""AWQ's choice for half a layer: scales that bring closest what the half as a whole makes, once its matrices are rounded.

A group that reads the half's norm is judged by the output of the half (Lin et al. 2024, section 3.2: of the parent module), on
some of the text: what attention or an activation makes of errors counts, not the errors themselves. One whose matrix makes that
output itself is judged by Σ (ŵ − w) H (ŵ − w)ᵀ, which is the same over all of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from llmctl.kernels.formats.spec import Format
from llmctl.quant import awq
from llmctl.quant.gptq import loss
from llmctl.quant.statistics import Statistics
from llmctl.quant.walk import LayerWeights, Walk
from llmctl.runtime.models.topology import InputGroup

_MEASURED = 2  # batches whose outputs are compared
_TRIED = 1  # of them, those that powers are tried on
_ROWS = 256  # of a matrix, evenly spaced, that powers are tried on: all rows want much the same
Rounder = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""(module, weight [N, K], importance [K]) → its rounded values."""


class Half:
    """What comes next in a walk, with the weights as they are in `layer`; trials are measured against it."""

    def __init__(self, walk: Walk, layer: LayerWeights) -> None:
        self._walk, self.layer = walk, layer
        count = len(walk.batches)
        self._batches = sorted({index * count // _MEASURED for index in range(_MEASURED)})
        self._wanted = walk.outputs(layer, self._batches)

    def error(self, trial: LayerWeights, batches: int = _MEASURED) -> float:
        """Σ (made − wanted)² over the first of the batches that are compared."""
        made = self._walk.outputs(trial, self._batches[:batches])
        return sum(float((a - b).square().sum()) for a, b in zip(made, self._wanted, strict=False))

    def changed(self, trial: LayerWeights) -> dict[str, np.ndarray]:
        """Tensors of the trial, by whole name, that the layer has otherwise."""
        return {name: values for name, values in trial.replaced.items() if values is not self.layer.replaced.get(name)}

    def smooth(
        self,
        trial: LayerWeights,
        scaled: list[InputGroup],
        groups: list[InputGroup],
        found: dict[str, Statistics],
        rounder: Rounder,
        norm_format: Format,
    ) -> dict[str, Any]:
        """Fold the best scales of every group that has somewhere to put them; `found`, by leader, becomes that of the scaled
        inputs. Gives what was chosen, for the report."""
        facts = {}
        for group in scaled:
            if (statistics := found.get(group.leader)) is None or group.source is None:
                continue
            if group.source.kind == "norm":
                measure = self._by_output(trial, group, statistics, rounder, norm_format)
            else:
                measure = _by_products(trial, group, statistics, rounder)
            channels, weights = group.source.channels(len(statistics.squares)), map(trial.matrix, group.modules)
            chosen = awq.choose_scales(weights, statistics.mean_magnitudes, channels, measure)
            facts[group.leader] = {"power": chosen.power, "loss_plain": chosen.before, "loss_smoothed": chosen.after}
            if chosen.power > 0:
                factors = awq.fold(trial, group, chosen.scales, norm_format)
                for leader in {group.leader, *(one.leader for one in groups if set(one.modules) <= set(group.modules))}:
                    if leader in found:
                        found[leader].scale(1 / factors)
        return facts

    def _by_output(
        self, layer: LayerWeights, group: InputGroup, statistics: Statistics, rounder: Rounder, norm_format: Format
    ) -> awq.Loss:
        def measure(scales: torch.Tensor) -> float:
            trial = layer.fork()
            factors = awq.fold(trial, group, scales, norm_format)
            importance = statistics.mean_squares / factors.square()
            for module in group.modules:
                name = trial.full(module) + ".weight"
                trial.replaced[name] = rounder(module, trial.matrix(module), importance).numpy()
            return self.error(trial, _TRIED)

        return measure


def _by_products(layer: LayerWeights, group: InputGroup, statistics: Statistics, rounder: Rounder) -> awq.Loss:
    hessian = statistics.copy().take_hessian()
    weights = {module: _some_rows(layer.matrix(module)) for module in group.modules}

    def measure(scales: torch.Tensor) -> float:
        importance, total = statistics.mean_squares / scales.square(), 0.0
        for module, weight in weights.items():
            values = rounder(module, weight * scales, importance) / scales
            total += float(loss(weight, values, hessian).sum())
        return total

    return measure


def _some_rows(weight: torch.Tensor) -> torch.Tensor:
    """A copy, so that the rest can leave memory."""
    return weight[:: max(1, len(weight) // _ROWS)].clone()
