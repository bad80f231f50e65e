"""QuantTensor: a weight in a block format, as numpy bytes, usually mapped straight from the file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.formats.spec import Format


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """A tensor whose rows are blocks of a quantized format.

    format: a block format (never a plain one: those are ordinary arrays).
    shape: logical shape, torch order (out_features, in_features) or (experts, out, in); blocks run along the last axis.
    blocks: uint8 array of shape (*shape[:-1], row_bytes).
    """

    format: Format
    shape: tuple[int, ...]
    blocks: np.ndarray

    def __post_init__(self) -> None:
        if self.format.is_plain or not self.shape:
            raise FormatError(f"{self.format.name} with shape {self.shape} is not a tensor of quantized rows")
        expected = (*self.shape[:-1], self.format.row_bytes(self.shape[-1]))
        if self.blocks.dtype != np.uint8 or self.blocks.shape != expected:
            raise FormatError(
                f"{self.format.name} tensor of shape {self.shape} needs uint8 blocks {expected}, "
                f"got {self.blocks.dtype} {self.blocks.shape}"
            )

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.blocks.nbytes

    @property
    def num_elements(self) -> int:
        """Logical elements."""
        return prod(self.shape)
