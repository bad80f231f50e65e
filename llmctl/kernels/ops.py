"""The op-set: everything the forward pass may ask of a backend.

The decoder is written once against this protocol. Arrays are opaque to it (torch tensors for `reference` and `triton`, numpy
arrays for `native`); only the backend that made an array may look inside. Shapes and formulas stand in each op's folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from llmctl.kernels.attention import BatchDescription
    from llmctl.kernels.formats.quant_tensor import QuantTensor

Array = Any


class Ops(Protocol):
    """One backend on one device in one compute dtype, with `threads` CPU threads."""

    name: str
    device: str
    dtype: str
    threads: int

    def prepare_weight(self, weight: np.ndarray | QuantTensor) -> Array:
        """A matrix (out_features, in_features) in the layout this backend's linear and embedding read."""

    def prepare_vector(self, vector: np.ndarray | QuantTensor, dtype: str | None = None) -> Array:
        """A norm weight (dtype "float32") or a bias (compute dtype), any stored format."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """An uninitialised array, for cache pages; dtype is f32, f16 or bf16."""

    def from_host(self, array: np.ndarray) -> Array:
        """An integer or float32 array brought to the device."""

    def to_host(self, array: Array) -> np.ndarray:
        """A float32 numpy copy."""

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array: ...

    def embedding(self, token_ids: Array, table: Array, scale: float = 1.0) -> Array: ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array: ...

    def rotary_angles(self, positions: Array, inv_freq: Array, scaling: float) -> tuple[Array, Array]: ...

    def rotary(self, x: Array, cos: Array, sin: Array) -> Array: ...

    def gated_activation(self, gate: Array, up: Array, activation: str) -> Array: ...

    def store_kv(self, keys: Array, values: Array, key_pages: Array, value_pages: Array, slots: Array) -> None: ...

    def attention(
        self,
        queries: Array,
        key_pages: Array,
        value_pages: Array,
        batch: BatchDescription,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Array: ...

    def add(self, x: Array, y: Array) -> Array:
        """x + y, the residual stream."""

    def scale(self, x: Array, factor: float) -> Array:
        """x · factor."""

    def softcap(self, x: Array, cap: float) -> Array:
        """cap · tanh(x / cap)."""

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """The same elements in another shape."""

    def take_rows(self, x: Array, rows: Array) -> Array:
        """x[rows]."""
