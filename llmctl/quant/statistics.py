"""What calibrated quantization knows of the inputs of a matrix: Σ x xᵀ, Σ x², Σ |x| and how many tokens they are of.

Sums, never means: parts of them can be added in any order, and an expert that saw few tokens weighs little.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant.imatrix import COUNTS, SUMS
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter, Typed, ValueType
from llmctl.runtime.checkpoint.output_file import OutputFile

_STRIP = 512


class Statistics:
    """Of one input of K channels, in float32. Sums are made on `device`; from `finish` on they are in the machine's memory.

    products: Σ x xᵀ [K, K], after `finish` divided by the tokens, before that not whole; None if only the diagonal was asked for.
    squares: Σ x² [K]. magnitudes: Σ |x| [K]. count: tokens. given: float32 [K], importances of the columns from elsewhere, which
    then stand for E[x²] wherever errors are weighed; None for none.
    """

    def __init__(self, columns: int, *, products: bool = True, device: str = "cpu") -> None:
        self.products = torch.zeros(columns, columns, device=device) if products else None
        self.squares, self.magnitudes = torch.zeros(columns, device=device), torch.zeros(columns, device=device)
        self.count = 0
        self.given: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        """x: float32 [T, K]."""
        self.count += len(x)
        self.magnitudes += x.abs().sum(dim=0)
        if self.products is None:
            self.squares += (x * x).sum(dim=0)
        else:
            for rows, rest in self._strips():
                self.products[rows, rest].addmm_(x[:, rows].T, x[:, rest])

    def merge(self, other: Statistics) -> None:
        """Add what another one saw."""
        self.count += other.count
        self.magnitudes += other.magnitudes
        self.squares += other.squares
        if self.products is not None:
            self.products += other.products

    def finish(self) -> None:
        """To be called once when everything was added: makes `products` whole, and means of the sums."""
        self.squares, self.magnitudes = self.squares.cpu(), self.magnitudes.cpu()
        self.products = None if self.products is None else self.products.cpu()
        if self.products is None:
            return
        for rows, _ in self._strips():  # in place: at 8192 channels a copy would be 270 MB
            own = self.products[rows, rows]
            own.copy_((own + own.T).mul_(0.5))
            below = slice(rows.stop, None)
            self.products[below, rows] = self.products[rows, below].T
        self.squares = self.products.diagonal().clone()
        self.products /= max(1, self.count)

    def _strips(self) -> Iterator[tuple[slice, slice]]:
        """Rows, and the columns from their diagonal on: what is left of it is the same by symmetry."""
        assert self.products is not None
        for start in range(0, len(self.products), _STRIP):
            yield slice(start, start + _STRIP), slice(start, None)

    def copy(self) -> Statistics:
        """Another one of the same inputs; the products are one tensor, which `scale` changes for both."""
        return self._with(self.products, self.squares, self.magnitudes)

    def scale(self, factors: torch.Tensor) -> None:
        """Become those of the inputs times `factors` [K], in place: products are the largest thing there is."""
        if self.products is not None:
            self.products.mul_(factors[:, None]).mul_(factors)
        self.squares, self.magnitudes = self.squares * factors.square(), self.magnitudes * factors.abs()
        self.given = None if self.given is None else self.given * factors.square()

    def _with(self, products: torch.Tensor | None, squares: torch.Tensor, magnitudes: torch.Tensor) -> Statistics:
        found = Statistics(len(squares), products=False)
        found.products, found.squares, found.magnitudes, found.count = products, squares, magnitudes, self.count
        found.given = self.given
        return found

    def take_hessian(self) -> torch.Tensor:
        """Σ x xᵀ / count [K, K]; zeros where nothing was seen. It is no longer held here afterwards."""
        assert self.products is not None, "only the diagonal was collected"
        hessian, self.products = self.products, None
        return hessian

    @property
    def mean_squares(self) -> torch.Tensor:
        """E[x²] [K], or what is given for it; ones where nothing was seen: no column matters more than another."""
        if self.given is not None:
            return self.given
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
    """Write what `read_imatrix` and llama-quantize read: llama.cpp's GGUF form, or its older one if the name ends in .dat.
    OutputError for the disk."""
    if path.suffix.lower() == ".dat":
        _write_legacy(path, found, datasets, chunks, chunk_size)
        return
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


def _write_legacy(path: Path, found: Importances, datasets: Iterable[str], chunks: int, chunk_size: int) -> None:
    """One count for all matrices of a stack, in chunks: means are multiplied by it, and those of experts that no token chose are
    one, as llama.cpp has it."""
    parts = [struct.pack("<i", len(found.sums))]
    for name in sorted(found.sums):
        counts = found.counts[name].reshape(-1, 1).astype(np.float32)
        means = np.where(counts > 0, found.sums[name] / np.maximum(counts, 1), 1)
        calls = max(1, -(-int(counts.max()) // chunk_size))
        values = (means * calls).astype("<f4").tobytes()
        parts += [_counted(name), struct.pack("<ii", calls, len(values) // 4), values]
    parts += [struct.pack("<i", chunks), _counted(next(iter(datasets), ""))]
    file = OutputFile(path)
    try:
        file.write(b"".join(parts))
        file.commit()
    except BaseException:
        file.abort()
        raise


def _counted(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<i", len(data)) + data
