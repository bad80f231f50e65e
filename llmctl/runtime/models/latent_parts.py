"""kv_b_proj of latent attention, which files keep as one matrix, as the two that are read: k_b_proj and v_b_proj.

Its rows are, head by head, those that unfold the latent into a key and those that unfold it into a value. Absorbed attention
multiplies by the first the other way round: k_b_proj (heads, rank, nope_dim) is their transpose, v_b_proj (heads, value_dim,
rank) the others as they are. Newer GGUF files keep the two, in these layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.runtime.models.config import ModelConfig

WHOLE, KEYS, VALUES = "self_attn.kv_b_proj.weight", "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"


@dataclass(frozen=True)
class LatentPart:
    """One of the two. whole: canonical name of the matrix. first, last: its rows of every head, of rows_per_head. turned: read
    with its axes swapped."""

    whole: str
    shape: tuple[int, int, int]
    first: int
    last: int
    rows_per_head: int
    turned: bool

    def take(self, whole: np.ndarray | QuantTensor | PackedIntTensor) -> np.ndarray | QuantTensor:
        """The part of the matrix (heads · rows_per_head, rank). Rows stay as they are quantized; what is turned is unfolded.

        FormatError where the matrix has another shape.
        """
        heads, rank = self.shape[0], self.shape[1 if self.turned else 2]
        expected = (heads * self.rows_per_head, rank)
        if tuple(whole.shape) != expected:
            raise FormatError(f"tensor {self.whole!r} has shape {tuple(whole.shape)}, the config asks for {expected}")
        if isinstance(whole, QuantTensor) and not self.turned:
            blocks = self._rows(whole.blocks)
            return QuantTensor(whole.format, (*blocks.shape[:2], rank), blocks)
        rows = self._rows(whole if isinstance(whole, np.ndarray) else dequantize(whole))
        return np.ascontiguousarray(rows.swapaxes(1, 2) if self.turned else rows)

    def _rows(self, matrix: np.ndarray) -> np.ndarray:
        return matrix.reshape(self.shape[0], self.rows_per_head, -1)[:, self.first : self.last]


def parts_of(name: str, config: ModelConfig) -> dict[str, LatentPart]:
    """Names and descriptions of what the tensor of this canonical name is read as; empty where it is read as it is."""
    if config.latent is None or not name.endswith(WHOLE):
        return {}
    latent, heads, prefix = config.latent, config.num_heads, name.removesuffix(WHOLE)
    keys, rows = latent.nope_dim, latent.nope_dim + latent.value_dim
    return {
        prefix + KEYS: LatentPart(name, (heads, latent.rank, keys), 0, keys, rows, turned=True),
        prefix + VALUES: LatentPart(name, (heads, latent.value_dim, latent.rank), keys, rows, rows, turned=False),
    }


def whole_name(name: str) -> str:
    """Canonical name of the tensor that folders keep the one of this name in: its own, but for the two parts."""
    part = next((part for part in (KEYS, VALUES) if name.endswith(part)), None)
    return name if part is None else name.removesuffix(part) + WHOLE


def join_parts(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The reverse: k_b_proj (heads, rank, nope_dim) and v_b_proj (heads, value_dim, rank) to kv_b_proj (rows, rank)."""
    both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return both.reshape(-1, both.shape[-1])
