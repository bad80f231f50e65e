"""Q2_K to Q6_K, encoded: groups are fitted first, then the scales of a super-block's groups are rounded, then the codes are
chosen anew for the scales as they are stored.

Encoders take float32 columns (256, n), a super-block a column, an importance or None, and fill records of n blocks (see
layouts.py). The blocks are llama.cpp's, bit for bit; the searches are in search.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmctl.kernels.formats.bits import pack_planes, to_f16_scale
from llmctl.kernels.formats.importance import Importance
from llmctl.kernels.formats.kquants import pack_scales
from llmctl.kernels.formats.search import (
    TINY,
    F,
    Steps,
    clamped,
    extreme,
    fit_affine,
    fit_by_turns,
    fit_positive,
    fit_symmetric,
    nearest,
    ordered_sum,
)

_WEIGHTED_STEPS = Steps(-0.9, 0.05, 36)


@dataclass(frozen=True)
class _AffineFormat:
    """group: elements sharing a scale. top: greatest code; unit: greatest code of a scale. mean_factor: in the weights with an
    importance. absolute: without one, errors count as |x| |x − x̂|."""

    group: int
    top: int
    unit: int
    steps: Steps
    mean_factor: int = 2
    absolute: bool = False


_Q2_K = _AffineFormat(16, 3, 15, Steps(-0.5, 0.1, 15), mean_factor=1, absolute=True)
_Q4_K = _AffineFormat(32, 15, 63, Steps(-1, 0.1, 20))
_Q5_K = _AffineFormat(32, 31, 63, Steps(-0.5, 0.1, 15))


def encode_q2_k(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """16 groups of 16 with four bits for scale and offset each."""
    store_q2_k(blocks, *_encode_affine(columns, importance, blocks, _Q2_K))


def encode_q4_k(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """8 groups of 32 with six bits for scale and offset each."""
    store_q4_k(blocks, *_encode_affine(columns, importance, blocks, _Q4_K))


def encode_q5_k(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """As Q4_K with a fifth bit."""
    store_q5_k(blocks, *_encode_affine(columns, importance, blocks, _Q5_K))


def encode_q3_k(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """16 groups of 16, no offsets, signed six-bit scales."""
    scale, scales, codes = _q3_k_groups(columns) if importance is None else _q3_k_weighted_groups(columns, importance)
    blocks["d"] = to_f16_scale(scale)
    store_q3_k(blocks, scales.T, _round_symmetric(columns, blocks["d"], scales, 4, codes))


def encode_q6_k(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """16 groups of 16, no offsets, signed eight-bit scales."""
    groups = _groups(columns, 16)
    weights = groups * groups if importance is None else _groups(importance.weights, 16)
    fit = fit_symmetric(groups, weights, 32)
    values = fit.scale.reshape(16, -1)
    zero = np.abs(extreme(values)) < TINY
    scale, scales = _signed_scales(values, 128)
    blocks["d"] = to_f16_scale(np.where(zero, F(0), scale))
    scales = np.where(zero, 0, scales)
    codes = _round_symmetric(columns, blocks["d"], scales, 32, _ungrouped(fit.codes(groups, 32)))
    codes[zero] = 0
    store_q6_k(blocks, scales.T, codes)


def store_q2_k(blocks: np.ndarray, scales: np.ndarray, offsets: np.ndarray, codes: np.ndarray) -> None:
    """Everything but d and dmin: codes of scales and offsets, integers (n, 16), and of the elements, uint8 (n, 256)."""
    blocks["scales"] = scales | offsets << 4
    blocks["qs"] = pack_planes(codes.reshape(-1, 2, 4, 32))


def store_q4_k(blocks: np.ndarray, scales: np.ndarray, offsets: np.ndarray, codes: np.ndarray) -> None:
    """Everything but d and dmin: codes of scales and offsets, integers (n, 8), and of the elements, uint8 (n, 256)."""
    blocks["scales"] = pack_scales(scales.astype(np.uint8), offsets.astype(np.uint8))
    blocks["qs"] = pack_planes(codes.reshape(-1, 4, 2, 32))


def store_q5_k(blocks: np.ndarray, scales: np.ndarray, offsets: np.ndarray, codes: np.ndarray) -> None:
    """As `store_q4_k`."""
    store_q4_k(blocks, scales, offsets, codes & 15)
    blocks["qh"] = pack_planes((codes >> 4).reshape(-1, 8, 32))


def store_q3_k(blocks: np.ndarray, scales: np.ndarray, codes: np.ndarray) -> None:
    """Everything but d: codes of scales, integers (n, 16) from −32, and of the elements, uint8 (n, 256) from 0."""
    unsigned = (scales + 32).astype(np.uint8)
    low, high = pack_planes((unsigned & 15).reshape(-1, 2, 8)), pack_planes((unsigned >> 4).reshape(-1, 4, 4))
    blocks["scales"] = np.concatenate([low, high], axis=1)
    blocks["qs"] = pack_planes((codes & 3).reshape(-1, 2, 4, 32))
    blocks["qh"] = pack_planes((codes >> 2).reshape(-1, 8, 32))


def store_q6_k(blocks: np.ndarray, scales: np.ndarray, codes: np.ndarray) -> None:
    """Everything but d: codes of scales, integers (n, 16), and of the elements, uint8 (n, 256) from 0."""
    blocks["ql"] = pack_planes((codes & 15).reshape(-1, 2, 2, 64))
    blocks["qh"] = pack_planes((codes >> 4).reshape(-1, 2, 4, 32))
    blocks["scales"] = scales.astype(np.int8)


def _groups(columns: np.ndarray, size: int) -> np.ndarray:
    """(256, n) → (size, 256 / size · n): the groups of all blocks as columns, the first of every block first."""
    return np.ascontiguousarray(columns.reshape(-1, size, columns.shape[1]).swapaxes(0, 1)).reshape(size, -1)


def _ungrouped(groups: np.ndarray) -> np.ndarray:
    """Inverse of `_groups` for 256 elements a block."""
    size = len(groups)
    return groups.reshape(size, 256 // size, -1).swapaxes(0, 1).reshape(256, -1)


def _weights(columns: np.ndarray, importance: Importance, size: int, factor: int) -> np.ndarray:
    """In groups: importance · sqrt(factor · Σ₂₅₆ x² / 256 + x²)."""
    mean = F(factor) * ordered_sum(columns * columns) / F(256)
    return _groups(importance.element_weights(columns, mean), size)


def _own_weights(groups: np.ndarray, form: _AffineFormat) -> np.ndarray:
    """Without an importance: large values count more."""
    if form.absolute:
        return np.abs(groups)
    return np.sqrt(ordered_sum(groups * groups) / F(form.group)) + np.abs(groups)


def _encode_affine(
    columns: np.ndarray, importance: Importance | None, blocks: np.ndarray, form: _AffineFormat
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fills d and dmin; the codes of scales and offsets uint8 (n, groups), and of the elements uint8 (n, 256)."""
    groups, sums = _groups(columns, form.group), None
    if importance is None:
        fit = fit_affine(groups, _own_weights(groups, form), form.top, form.steps, absolute=form.absolute)
    else:
        weights = _weights(columns, importance, form.group, form.mean_factor)
        sums = ordered_sum(weights).reshape(-1, columns.shape[1])
        fit = fit_affine(groups, weights, form.top, _WEIGHTED_STEPS)
    d, scales = _positive_scales(fit.scale.reshape(-1, columns.shape[1]), sums, form.unit)
    dmin, offsets = _positive_scales(fit.offset.reshape(-1, columns.shape[1]), sums, form.unit)
    blocks["d"], blocks["dmin"] = to_f16_scale(d), to_f16_scale(dmin)
    step = (blocks["d"].astype(F) * scales.astype(F)).reshape(-1)
    offset = (blocks["dmin"].astype(F) * offsets.astype(F)).reshape(-1)
    codes = np.where(step != 0, clamped((groups + offset) / step, 0, form.top), fit.codes(groups, form.top))
    return scales.T.astype(np.uint8), offsets.T.astype(np.uint8), _ungrouped(codes).T.astype(np.uint8)


def _positive_scales(values: np.ndarray, weights: np.ndarray | None, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """values (groups, n) as multiples, int32 0 … unit, of one number a block (n,)."""
    if weights is not None:
        return fit_positive(values, weights, unit)
    largest = np.maximum(values.max(axis=0), F(0))
    inverse = np.where(largest > 0, F(unit) / largest, F(0))
    codes = np.minimum(nearest(inverse * values) & 255, unit)
    return np.where(largest > 0, largest / F(unit), F(0)), codes


def _signed_scales(values: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """values (groups, n) as multiples, −limit … limit − 1, of one number a block: the largest in magnitude is −limit."""
    inverse = F(-limit) / extreme(values)
    return 1 / inverse, clamped(inverse * values, -limit, limit - 1)


def _q3_k_groups(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """d (n,), scales (16, n), codes from 0 (256, n)."""
    values, codes = fit_by_turns(_groups(columns, 16), 4)
    values = values.reshape(16, -1)
    zero = extreme(values) == 0
    scale, scales = _signed_scales(values, 32)
    return np.where(zero, F(0), scale), np.where(zero, -32, scales), _ungrouped(codes)


def _q3_k_weighted_groups(columns: np.ndarray, importance: Importance) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    groups, weights = _groups(columns, 16), _weights(columns, importance, 16, 2)
    fit = fit_symmetric(groups, weights, 4)
    values = fit.scale.reshape(16, -1)
    outer = fit_symmetric(values, ordered_sum(weights).reshape(16, -1), 32)
    return outer.scale, outer.codes(values, 32) - 32, _ungrouped(fit.codes(groups, 4))


def _round_symmetric(columns: np.ndarray, d: np.ndarray, scales: np.ndarray, half: int, codes: np.ndarray) -> np.ndarray:
    """Codes from 0, uint8 (n, 256), for the scales as they are stored; where such a scale is 0, the codes given."""
    steps = np.repeat(d.astype(F) * scales.astype(F), 16, axis=0)
    rounded = clamped(columns / steps, -half, half - 1) + half
    return np.where(steps != 0, rounded, codes).T.astype(np.uint8)


ENCODERS = {
    "Q2_K": encode_q2_k,
    "Q3_K": encode_q3_k,
    "Q4_K": encode_q4_k,
    "Q5_K": encode_q5_k,
    "Q6_K": encode_q6_k,
}
