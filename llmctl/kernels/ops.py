"""The op-set: everything the forward pass may ask of a backend.

The decoder is written once against this protocol. Arrays are opaque to it (torch tensors for `reference` and `triton`, numpy
promises of arrays for `native`); only the backend that made an array may look inside. Shapes and formulas stand in each
op's folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from llmctl.kernels.attention import BatchDescription
    from llmctl.kernels.formats.packed_int import PackedIntTensor
    from llmctl.kernels.formats.quant_tensor import QuantTensor
    from llmctl.kernels.moe import Experts, Routing

Array = Any


class StepInterrupted(Exception):
    """`Ops.interrupt` ended a forward pass: it has no result, and nothing of it counts."""


class Ops(Protocol):
    """One backend on one device in one compute dtype, with `threads` CPU threads.

    is_row_invariant: a token's numbers have the same bits whatever other tokens share the call.
    """

    name: str
    device: str
    dtype: str
    threads: int
    is_row_invariant: bool

    def prepare_weight(self, weight: np.ndarray | QuantTensor | PackedIntTensor) -> Array:
        """A matrix (out_features, in_features) in the layout this backend's linear and embedding read, or the matrices
        (heads, out_features, in_features) of its head_linear, or (experts, out_features, in_features) of a layer for its moe."""

    def prepare_vector(self, vector: np.ndarray | QuantTensor, dtype: str | None = None) -> Array:
        """A norm weight (dtype "float32") or a bias (compute dtype), of experts a bias each; any stored format."""

    def read_vector(self, vector: Array) -> np.ndarray:
        """The numbers of a prepared vector, float32."""

    def kv_pages(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, kv_type: str, latent: int = 0
    ) -> Array:
        """Uninitialised pages for one layer's keys and values, in a layout of the backend's own. latent: above zero, the values
        are so many of the keys' first numbers, and are not kept beside them."""

    def copy_page(self, pages: Array, source: int, target: int) -> None:
        """Make one of `kv_pages` hold what another one holds."""

    def page_layout(self, kv_type: str) -> str | None:
        """A name for how pages are laid out and how their numbers come about: pages of one name may be put into others. None
        where pages cannot be taken out."""

    def read_page(self, pages: Array, page: int) -> bytes:
        """The bytes of one of `kv_pages`."""

    def write_page(self, pages: Array, page: int, data: bytes) -> None:
        """Put back what `read_page` gave. Errors: ValueError for another number of bytes."""

    def move_tokens(self, pages: Array, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy stored rows of `kv_pages` as they are: of head h that of slot sources[h, i] to targets[i], i ascending. sources
        int64 [num_kv_heads, n], targets int64 [n]. Rows that are written before they are read as a source are no matter of this
        op: the caller orders them."""

    def read_keys(self, pages: Array, slots: np.ndarray) -> np.ndarray:
        """The keys of these slots [n] of `kv_pages`, float32 [n, num_kv_heads, head_dim]."""

    def attention_votes(
        self,
        queries: np.ndarray,
        pages: Array,
        block_table: np.ndarray,
        length: int,
        scale: float,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> np.ndarray:
        """What the last queries of a sequence look at: see attention_votes/__init__.py."""

    def compile(
        self, forward: Callable[[BatchDescription, Array], Array], rotary_halves: list[int]
    ) -> Callable[[BatchDescription, np.ndarray], np.ndarray]:
        """A forward pass made ready to run: a function of a batch of numpy arrays and of the numbers of the tokens whose
        logits are wanted. forward: (batch, rows) → logits, over this backend's arrays. rotary_halves: lengths of the
        batches' `inv_freqs`. The float32 logits [rows, vocab_size] are valid until the next call. In the main thread a signal
        handler may end a call by an exception; keys and values of its tokens may then be stored or not."""

    def interrupt(self) -> None:
        """Let the forward pass under way in the main thread end with StepInterrupted, as soon as the backend looks: for signal
        handlers. One that is nearly done, a short one, and all of a backend that cannot look, run to their end."""

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array: ...

    def head_linear(self, x: Array, weight: Array) -> Array: ...

    def embedding(self, token_ids: Array, table: Array, scale: float = 1.0) -> Array: ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array: ...

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array: ...

    def rotary_angles(self, positions: Array, inv_freq: Array, scaling: float) -> tuple[Array, Array]: ...

    def rotary(self, x: Array, cos: Array, sin: Array) -> Array: ...

    def gated_activation(self, gate: Array, up: Array, activation: str) -> Array: ...

    def activation(self, x: Array, activation: str) -> Array: ...

    def moe(self, x: Array, router_logits: Array, experts: Experts, routing: Routing, activation: str) -> Array: ...

    def expert_counts(self, experts: Experts) -> np.ndarray:
        """`Experts.counts` of these, up to date: a backend may count where it computes."""

    def gated(self, x: Array, gate: Array) -> Array:
        """x [T, H] times the sigmoid of gate [T, 1]."""

    def store_kv(self, keys: Array, values: Array | None, pages: Array, batch: BatchDescription) -> None: ...

    def attention(
        self,
        queries: Array,
        pages: Array,
        batch: BatchDescription,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        anchors: int = 0,
    ) -> Array: ...

    def add(self, x: Array, y: Array) -> Array:
        """x + y, the residual stream."""

    def scale(self, x: Array, factor: float) -> Array:
        """x · factor."""

    def growth(self, x: Array, positions: Array, rate: float, length: int) -> Array:
        """x [T, …] times 1 + rate · log(1 + positions // length), positions [T]."""

    def softcap(self, x: Array, cap: float) -> Array:
        """cap · tanh(x / cap)."""

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        """The same elements in another shape."""

    def join_heads(self, x: Array, y: Array) -> Array:
        """x [T, num_heads, n] and y [T, num_heads, m] side by side, [T, num_heads, n + m]."""

    def take_rows(self, x: Array, rows: Array) -> Array:
        """x[rows]."""
