"""What calibrated quantization knows of the inputs of a matrix: Σ x xᵀ, Σ x², Σ |x| and how many tokens they are of.

Sums, never means: parts of them can be added in any order, and an expert that saw few tokens weighs little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant.imatrix import COUNTS, SUMS
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter, Typed, ValueType

_STRIP = 256


class Statistics:
    """Of one input of K channels, in float32.

    products: Σ x xᵀ [K, K], None if only the diagonal was asked for. squares: Σ x² [K]. magnitudes: Σ |x| [K]. count: tokens.
    """

    def __init__(self, columns: int, *, products: bool = True) -> None:
        self.products = torch.zeros(columns, columns) if products else None
        self.squares, self.magnitudes = torch.zeros(columns), torch.zeros(columns)
        self.count = 0

    def add(self, x: torch.Tensor) -> None:
        """x: float32 [T, K]."""
        self.count += len(x)
        self.magnitudes += x.abs().sum(dim=0)
        if self.products is None:
            self.squares += (x * x).sum(dim=0)
        else:
            self.products.addmm_(x.T, x)

    def merge(self, other: Statistics) -> None:
        """Add what another one saw."""
        self.count += other.count
        self.magnitudes += other.magnitudes
        self.squares += other.squares
        if self.products is not None:
            self.products += other.products

    def finish(self) -> None:
        """To be called once when everything was added: makes `products` symmetric to the last bit."""
        if self.products is None:
            return
        for start in range(0, len(self.products), _STRIP):  # in place: at 8192 channels a copy would be 270 MB
            rows = slice(start, start + _STRIP)
            mean = (self.products[rows, start:] + self.products[start:, rows].T).mul_(0.5)
            self.products[rows, start:] = mean
            self.products[start:, rows] = mean.T
        self.squares = self.products.diagonal().clone()

    def copy(self) -> Statistics:
        """One of its own."""
        return self.scaled(torch.ones_like(self.squares))

    def scaled(self, factors: torch.Tensor) -> Statistics:
        """Those of the inputs times `factors` [K]."""
        found = Statistics(len(factors), products=self.products is not None)
        found.count = self.count
        found.squares, found.magnitudes = self.squares * factors.square(), self.magnitudes * factors.abs()
        if self.products is not None:
            found.products = self.products * factors[:, None] * factors
        return found

    def take_hessian(self) -> torch.Tensor:
        """Σ x xᵀ / count [K, K]; zeros where nothing was seen. The sums are used up by it."""
        assert self.products is not None, "only the diagonal was collected"
        hessian, self.products = self.products.div_(max(1, self.count)), None
        return hessian

    @property
    def mean_squares(self) -> torch.Tensor:
        """E[x²] [K]; ones where nothing was seen: no column matters more than another."""
        return self.squares / self.count if self.count else torch.ones_like(self.squares)

    @property
    def mean_magnitudes(self) -> torch.Tensor:
        """E|x| [K]."""
        return self.magnitudes / max(1, self.count)

    @property
    def is_finite(self) -> bool:
        """False if an input was NaN or infinite, or its squares overflowed."""
        return bool(torch.isfinite(self.squares).all() and torch.isfinite(self.magnitudes).all())


@dataclass(frozen=True)
class Importances:
    """What other programs can use. sums: GGUF name → Σ x², float32 (matrices, K); counts: tokens (matrices,)."""

    sums: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]


def write_imatrix(path: Path, found: Importances, datasets: Iterable[str], chunks: int, chunk_size: int) -> None:
    """Write llama.cpp's GGUF form, which `read_imatrix` and llama-quantize read. OutputError for the disk."""
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": list(datasets),
        "imatrix.chunk_count": Typed(chunks, ValueType.U32),
        "imatrix.chunk_size": Typed(chunk_size, ValueType.U32),
    }
    tensors = {}
    for name in sorted(found.sums):
        tensors[name + SUMS] = found.sums[name].astype(np.float32)
        tensors[name + COUNTS] = found.counts[name].astype(np.float32).reshape(-1, 1)
    with GgufWriter(path, metadata) as writer:
        for name, tensor in tensors.items():
            writer.declare(name, FORMATS["F32"], tensor.shape)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
