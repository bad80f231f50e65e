"""AWQ: channels of large activations are made larger in the weights and smaller in what comes before them, then rounded.

Lin et al., "AWQ: Activation-aware Weight Quantization", 2024. The scale of a channel is a power of its mean magnitude; the error
of the outputs decides which, and no scaling at all is among the choices. Where a scale goes is the topology's business (`fold`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.plain import cast
from llmctl.kernels.formats.spec import Format
from llmctl.quant.gptq import loss
from llmctl.quant.statistics import Statistics
from llmctl.quant.walk import LayerWeights
from llmctl.runtime.models.topology import InputGroup, ScaleSource

_POWERS = tuple(step / 20 for step in range(21))  # 0 is the identity
_ROWS = 256  # of a matrix, evenly spaced, that the powers are tried on: all rows want much the same
Rounder = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""(module, weight [N, K], importance [K]) → its rounded values."""


@dataclass(frozen=True)
class Smoothing:
    """scales: float32 [K], factors on the columns of the weights. power: of the mean magnitude, 0 if nothing is scaled. before,
    after: loss of rounding without and with it."""

    scales: torch.Tensor
    power: float
    before: float
    after: float


def choose_scales(
    weights: dict[str, torch.Tensor], statistics: Statistics, hessian: torch.Tensor, channels: np.ndarray, rounder: Rounder
) -> Smoothing:
    """weights: float32 [N, K] by module, of one input. channels: which of the source's channels each column is: those of one
    share a scale."""
    weights = {module: weight[:: max(1, len(weight) // _ROWS)] for module, weight in weights.items()}
    magnitudes = _by_channel(statistics.mean_magnitudes, channels)
    sizes = _by_channel(_mean_sizes(weights), channels)
    best = None
    for power in _POWERS:
        scales = _scales(magnitudes, sizes, power)
        found = _loss(weights, statistics, hessian, scales, rounder)
        if best is None:
            best = Smoothing(scales, power, found, found)
        elif found < best.after:
            best = Smoothing(scales, power, best.before, found)
    assert best is not None
    return best


def _by_channel(values: torch.Tensor, channels: np.ndarray) -> torch.Tensor:
    """The mean over the columns of each channel, for every column."""
    places = torch.from_numpy(channels)
    sums = torch.zeros(int(places.max()) + 1).index_add_(0, places, values)
    return (sums / torch.bincount(places).clamp(min=1))[places]


def _mean_sizes(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean |w| of every column, relative to the row's largest, so that rows count alike."""
    parts = [(weight.abs() / weight.abs().amax(1, keepdim=True).clamp(min=1e-12)) for weight in weights.values()]
    return torch.cat(parts).mean(0)


def _scales(magnitudes: torch.Tensor, sizes: torch.Tensor, power: float) -> torch.Tensor:
    """Factors around 1; channels that were never used keep 1."""
    if power == 0:
        return torch.ones_like(magnitudes)
    scales = magnitudes.clamp(min=1e-6).pow(power) / sizes.clamp(min=1e-6).pow(1 - power)
    scales = scales.clamp(min=1e-4)
    scales = scales / (scales.max() * scales.min()).sqrt()
    return torch.where(magnitudes > 0, scales, 1)


def _loss(
    weights: dict[str, torch.Tensor], statistics: Statistics, hessian: torch.Tensor, scales: torch.Tensor, rounder: Rounder
) -> float:
    importance = statistics.mean_squares / scales.square()
    total = 0.0
    for module, weight in weights.items():
        values = rounder(module, weight * scales, importance) / scales
        total += float(loss(weight, values, hessian).sum())
    return total


def fold(layer: LayerWeights, group: InputGroup, scales: torch.Tensor, form: Format) -> torch.Tensor:
    """Multiply the columns of the group's weights, and divide what makes their input: the layer computes what it did.

    form: type that norms are stored in. They are rounded to it here, and the weights get the factors that then remain, which are
    returned: float32 [K].
    """
    factors = scales.numpy()
    source = group.source
    assert source is not None, group
    if source.kind == "norm":
        factors = _divide_norm(layer, source.module, factors, form)
    else:
        rows = np.ones(source.rows[1] - source.rows[0], np.float32)
        rows[source.channels(len(factors))] = factors
        _divide_rows(layer, source, rows)
    for module in (*group.modules, *group.along):
        layer.replaced[layer.full(module) + ".weight"] = layer.matrix(module).numpy() * factors
    return torch.from_numpy(factors)


def _divide_norm(layer: LayerWeights, module: str, factors: np.ndarray, form: Format) -> np.ndarray:
    """The factors after rounding."""
    offset = np.float32(layer.config.norm_offset)
    name = layer.full(module)
    weight = np.array(dequantize(layer.read(name + ".weight")), np.float32)
    divided = dequantize(cast((weight + offset) / factors - offset, form))
    with np.errstate(divide="ignore", invalid="ignore"):
        remaining = (weight + offset) / (divided + offset)
    usable = np.isfinite(remaining) & (remaining > 0)
    layer.replaced[name + ".weight"] = np.where(usable, divided, weight).astype(np.float32)
    factors = np.where(usable, remaining, 1).astype(np.float32)
    if layer.config.norm_bias:
        layer.replaced[name + ".bias"] = np.array(dequantize(layer.read(name + ".bias")), np.float32) / factors
    return factors


def _divide_rows(layer: LayerWeights, source: ScaleSource, factors: np.ndarray) -> None:
    rows = slice(*source.rows)
    for kind in ("weight", "bias"):
        name = f"{layer.full(source.module)}.{kind}"
        if name not in layer.source:
            continue
        values = np.array(dequantize(layer.read(name)), np.float32)
        values[rows] /= factors[:, None] if kind == "weight" else factors
        layer.replaced[name] = values
