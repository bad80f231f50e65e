"""AWQ: channels of large activations are made larger in the weights and smaller in what comes before them, then rounded.

Lin et al., "AWQ: Activation-aware Weight Quantization", 2024. The scale of a channel is a power of its mean magnitude; the error
of the outputs decides which, and no scaling at all is among the choices. Where a scale goes is the topology's business (`fold`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.plain import cast
from llmctl.kernels.formats.spec import Format
from llmctl.quant.walk import LayerWeights
from llmctl.runtime.models.topology import InputGroup, ScaleSource

_COARSE = tuple(step / 10 for step in range(11))  # 0 is the identity
_FINE = 0.05  # then what lies this far from the best
_ROWS = 512  # that are looked at together
Loss = Callable[[torch.Tensor], float]
"""Factors on the columns of the weights, float32 [K] → how far the outputs are off when they are rounded with them."""


@dataclass(frozen=True)
class Smoothing:
    """scales: float32 [K], factors on the columns of the weights. power: of the mean magnitude, 0 if nothing is scaled. before,
    after: loss of rounding without and with it."""

    scales: torch.Tensor
    power: float
    before: float
    after: float


def choose_scales(weights: Iterable[torch.Tensor], magnitudes: torch.Tensor, channels: np.ndarray, loss: Loss) -> Smoothing:
    """weights: float32 [N, K], of one input. magnitudes: float32 [K], E|x| of it. channels: which of the source's channels each
    column is: those of one share a scale."""
    magnitudes, sizes = (_by_channel(values, channels) for values in (magnitudes, _mean_sizes(weights)))

    def tried(power: float) -> Smoothing:
        scales = _scales(magnitudes, sizes, power)
        return Smoothing(scales, power, before, loss(scales))

    before = loss(torch.ones_like(magnitudes))
    best = Smoothing(torch.ones_like(magnitudes), 0.0, before, before)
    best = min(best, *map(tried, _COARSE[1:]), key=_after)
    near = (power for power in (best.power - _FINE, best.power + _FINE) if 0 < power <= 1)
    return min(best, *map(tried, near), key=_after)


def _after(one: Smoothing) -> float:
    return one.after


def _by_channel(values: torch.Tensor, channels: np.ndarray) -> torch.Tensor:
    """The mean over the columns of each channel, for every column."""
    places = torch.from_numpy(channels)
    sums = torch.zeros(int(places.max()) + 1).index_add_(0, places, values)
    return (sums / torch.bincount(places).clamp(min=1))[places]


def _mean_sizes(weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """Mean |w| of every column, relative to the row's largest, so that rows count alike."""
    total, count = None, 0
    for part in (part for weight in weights for part in weight.split(_ROWS)):
        sizes = part.abs()
        sizes = sizes.div_(sizes.amax(1, keepdim=True).clamp_(min=1e-12)).sum(0, dtype=torch.float64)
        total, count = sizes if total is None else total + sizes, count + len(part)
    assert total is not None, "no weights"
    return (total / count).float()


def _scales(magnitudes: torch.Tensor, sizes: torch.Tensor, power: float) -> torch.Tensor:
    """Factors around 1; channels that were never used keep 1."""
    scales = magnitudes.clamp(min=1e-6).pow(power) / sizes.clamp(min=1e-6).pow(1 - power)
    scales = scales.clamp(min=1e-4)
    scales = scales / (scales.max() * scales.min()).sqrt()
    return torch.where(magnitudes > 0, scales, 1)


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
