"""How much the columns of a matrix matter: weights of the squared rounding errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmctl.kernels.formats.search import ordered_sum


@dataclass(frozen=True)
class Importance:
    """What encoders are given of it for n blocks.

    weights: float32 (elements, n), of every element. row_mean_square: float32 (n,), Σ x² / K over the whole row of the block.
    """

    weights: np.ndarray
    row_mean_square: np.ndarray

    def element_weights(self, columns: np.ndarray, mean_square: np.ndarray) -> np.ndarray:
        """weights · sqrt(mean_square + x²): large values count more."""
        return self.weights * np.sqrt(mean_square + columns * columns)


def spread(importance: np.ndarray, values: np.ndarray, elements_per_block: int) -> Importance:
    """importance float32 (K,) of the columns of values (rows, K), for the blocks of all rows."""
    rows, columns = values.shape
    weights = np.ascontiguousarray(np.tile(importance.reshape(-1, elements_per_block), (rows, 1)).T)
    mean_square = ordered_sum(values.T * values.T) / np.float32(columns)
    return Importance(weights, np.repeat(mean_square, columns // elements_per_block))
