"""How far rounded weights and the outputs they make are off, added up over rows."""

from __future__ import annotations

from math import log10, sqrt

import torch

from llmctl.quant.gptq import loss

_ROWS = 512  # that are looked at together: bounds the memory


class ErrorSums:
    """Of matrices that read one input."""

    def __init__(self) -> None:
        self._error = self._size = self._loss = self._energy = 0.0
        self._has_outputs = False

    def add(self, weight: torch.Tensor, values: torch.Tensor, products: torch.Tensor | None) -> None:
        """weight, values: float32 [N, K], as it was and as it is. products: float32 [K, K], E[x xᵀ], None if unknown."""
        for own, made in zip(weight.split(_ROWS), values.split(_ROWS), strict=True):
            self._error += float((made - own).square_().sum(dtype=torch.float64))
            self._size += float(own.square().sum(dtype=torch.float64))
            if products is not None:
                self._loss += float(loss(own, made, products).sum())
                self._energy += float(loss(own, torch.zeros_like(own), products).sum())
        self._has_outputs = products is not None

    def facts(self) -> dict[str, float | None]:
        """relative_rms_error of the weights; loss, output_error (relative) and sqnr_db of the outputs where they are known."""
        found: dict[str, float | None] = {"relative_rms_error": sqrt(self._error / self._size) if self._size else 0.0}
        if self._has_outputs:
            found |= {"loss": self._loss, "output_error": sqrt(max(self._loss, 0.0) / self._energy) if self._energy > 0 else 0.0}
            known = self._loss > 0 and self._energy > 0
            found["sqnr_db"] = 10 * log10(self._energy / self._loss) if known else None
        return found
