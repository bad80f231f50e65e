"""What the keys and values of a text are like: their range, and the channels that stand out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmctl.runtime.inspection.probe import probe
from llmctl.runtime.loading import LoadedModel

OUTLIER_RATIO = 4.0
"""A channel stands out if its root mean square is so many times the median one of its head."""


@dataclass(frozen=True)
class HeadRange:
    """Keys or values of one head over a text. rms: root mean square. peak: largest magnitude by rms. outliers: channels that
    stand out, the largest first. outlier_ratio: of the largest channel, by the median one."""

    low: float
    high: float
    rms: float
    peak: float
    outlier_ratio: float
    outliers: list[int]


class RangeCounter:
    """Takes in the rows of one layer's keys or values."""

    def __init__(self) -> None:
        self._count = 0
        self._low: np.ndarray | None = None
        self._high: np.ndarray | None = None
        self._squares: np.ndarray | None = None

    def add(self, rows: np.ndarray) -> None:
        """rows [n, heads, channels]."""
        low, high, squares = rows.min(0), rows.max(0), np.square(rows, dtype=np.float64).sum(0)
        first = self._low is None
        self._count += len(rows)
        self._low = low if first else np.minimum(self._low, low)
        self._high = high if first else np.maximum(self._high, high)
        self._squares = squares if first else self._squares + squares

    def heads(self) -> list[HeadRange]:
        """Of every head; at least one row must have come."""
        assert self._low is not None
        return [self._head(h) for h in range(len(self._low))]

    def _head(self, head: int) -> HeadRange:
        low, high = float(self._low[head].min()), float(self._high[head].max())
        channels = np.sqrt(self._squares[head] / self._count)
        rms, median = float(np.sqrt(np.square(channels).mean())), float(np.median(channels))
        ratios = channels / median if median > 0 else np.zeros_like(channels)
        order = np.argsort(-ratios, kind="stable")
        outliers = [int(channel) for channel in order if ratios[channel] >= OUTLIER_RATIO]
        peak = max(-low, high) / rms if rms > 0 else 0.0
        return HeadRange(low, high, rms, peak, float(ratios.max(initial=0.0)), outliers)


def survey_ranges(
    model: LoadedModel, token_ids: list[int], progress: Callable[[int, int], None] | None = None
) -> tuple[list[list[HeadRange]], list[list[HeadRange]]]:
    """Keys and values of a text, layer by layer, head by head. progress: as of `probe`."""
    counters = [(RangeCounter(), RangeCounter()) for _ in range(model.config.num_layers)]
    for seen in probe(model, token_ids, progress):
        for counter, rows in zip(counters[seen.layer], (seen.keys, seen.values), strict=True):
            counter.add(rows)
    keys, values = ([counter.heads() for counter in side] for side in zip(*counters, strict=True))
    return keys, values
