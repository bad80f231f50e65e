"""The native backend: C++ kernels on the CPU, without torch.

The forward pass runs once on values without numbers; what it asked for becomes a program that one call replays for every step,
prefill and decode alike (native/plan.py, native/program.hpp).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llmctl.errors import OutOfMemoryError, UnsupportedError
from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.kv_types import sides_of
from llmctl.kernels.linear._native import pack_weight
from llmctl.kernels.native import _native
from llmctl.kernels.native.graph import Graph, Value
from llmctl.kernels.native.plan import build
from llmctl.kernels.ops import StepInterrupted

if TYPE_CHECKING:
    from llmctl.kernels.formats.packed_int import PackedIntTensor
    from llmctl.kernels.formats.quant_tensor import QuantTensor
    from llmctl.kernels.moe import Experts, Routing

_BLOCK_SIZE = 16
HEAD_DIM_STEP = 8
"""The kernels attend heads of whole steps."""
_SHORT_STEP = 4
"""Tokens up to which a step is too short to be interrupted."""
_WANTED: Any = object()
"""Stands for the rows of a step while there is none: a program is given them with every step."""
_POSITIONS: Any = object()
"""Stands for the positions of a step's tokens."""


@dataclass(frozen=True, eq=False)
class _Reordered:
    """A weight whose stored column j meets x[order[j]]."""

    packed: Any
    order: np.ndarray


class NativeOps:
    """`Ops` over native programs. activations: "int8" (per 32 numbers, for quantized weights) or "float".

    Operations outside `compile` have no numbers to work on: they raise.
    """

    name, device, dtype, is_row_invariant = "native", "cpu", "float32", True
    rotates_pages = True
    """Whether caches of four bits are rotated; others never are. Changed only to see what it is good for."""

    def __init__(self, threads: int, activations: str = "int8") -> None:
        self.threads, self.activations = threads, activations
        self._pool = _start_threads(threads)
        self._graph: Graph | None = None
        self._interrupted = False

    def prepare_weight(self, weight: np.ndarray | QuantTensor | PackedIntTensor) -> Any:
        packed, order = pack_weight(weight, self._pool), getattr(weight, "column_order", None)
        return packed if order is None else _Reordered(packed, order)

    def prepare_vector(self, vector: np.ndarray | QuantTensor, dtype: str | None = None) -> np.ndarray:
        return np.array(dequantize(vector), np.float32)

    @staticmethod
    def read_vector(vector: np.ndarray) -> np.ndarray:
        return vector

    def kv_pages(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, kv_type: str, latent: int = 0) -> Any:
        assert block_size == _BLOCK_SIZE, block_size
        padded = -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP
        try:
            keys, values = sides_of(kv_type)
            return _native.KvPages(num_blocks, num_kv_heads, padded, keys, latent, values, self.rotates_pages)
        except MemoryError as error:
            wanted = (1 if latent else 2) * num_blocks * block_size * num_kv_heads * padded
            raise OutOfMemoryError(
                f"no memory for the KV cache ({wanted} {kv_type} numbers in each layer): --ctx-size makes it smaller"
            ) from error

    @staticmethod
    def copy_page(pages: Any, source: int, target: int) -> None:
        pages.copy_page(source, target)

    def page_layout(self, kv_type: str) -> str:
        # The version is that of the layout: raised when pages of the same shape come to hold other bytes.
        return f"native-1 {_native.active_isa()} {kv_type} {self.activations} rotated={self.rotates_pages}"

    @staticmethod
    def read_page(pages: Any, page: int) -> bytes:
        return pages.page(page)

    @staticmethod
    def write_page(pages: Any, page: int, data: bytes) -> None:
        pages.set_page(page, data)

    def move_tokens(self, pages: Any, sources: np.ndarray, targets: np.ndarray) -> None:
        _native.move_tokens(_native.active_isa(), self._pool, pages, sources, targets)

    @staticmethod
    def read_keys(pages: Any, slots: np.ndarray) -> np.ndarray:
        return _native.load_kv(_native.active_isa(), pages, slots)[0]

    def attention_votes(
        self,
        queries: np.ndarray,
        pages: Any,
        block_table: np.ndarray,
        length: int,
        scale: float,
        softcap: float | None = None,
        sinks: np.ndarray | None = None,
    ) -> np.ndarray:
        isa, choices = _native.active_isa(), (scale, softcap or 0.0, sinks)
        return _native.attention_votes(isa, self._pool, pages, queries, block_table, length, *choices)

    def compile(
        self, forward: Callable[[BatchDescription, Value], Value], rotary_halves: list[int]
    ) -> Callable[[BatchDescription, np.ndarray], np.ndarray]:
        """Record `forward` and return its replay; the logits it returns are valid until the next call."""
        self._graph = graph = Graph()
        try:
            logits = forward(_symbolic_batch(graph, rotary_halves), _WANTED)
        finally:
            self._graph = None
        program = _native.Program(self._pool, self.activations == "int8")
        result = build(program, graph, logits)

        def run(batch: BatchDescription, rows: np.ndarray) -> np.ndarray:
            self._interrupted = False
            try:
                return program.run(
                    batch.token_ids,
                    batch.positions,
                    [m.slot_mapping for m in batch.page_maps],
                    rows,
                    batch.cu_seqlens_q,
                    [m.context_lens for m in batch.page_maps],
                    [m.block_tables for m in batch.page_maps],
                    batch.inv_freqs,
                    result,
                    self._poll_for(len(batch.token_ids)),
                )
            except MemoryError as error:
                raise OutOfMemoryError(
                    f"no memory to compute {len(batch.token_ids)} tokens at once: close other programs, or take a smaller model"
                ) from error

        return run

    def interrupt(self) -> None:
        self._interrupted = True

    def _poll_for(self, num_tokens: int) -> Callable[[], None] | None:
        """What a step of so many tokens asks now and then. Only the main thread runs signal handlers: others need not stop
        for the GIL."""
        is_main = num_tokens > _SHORT_STEP and threading.current_thread() is threading.main_thread()
        return self._raise_if_interrupted if is_main else None

    def _raise_if_interrupted(self) -> None:
        if self._interrupted:
            raise StepInterrupted

    def _record(self, op: str, inputs: tuple[Value, ...], *shapes: tuple[int, ...], **attributes: Any) -> list[Value]:
        assert self._graph is not None, f"{op} outside compile()"
        return self._graph.add(op, inputs, *shapes, **attributes).outputs

    def linear(self, x: Value, weight: Any, bias: np.ndarray | None = None) -> Value:
        if isinstance(weight, _Reordered):
            x, weight = self._take_columns(x, weight.order), weight.packed
        return self._record("linear", (x,), (weight.rows,), weight=weight, bias=bias)[0]

    def head_linear(self, x: Value, weight: Any) -> Value:
        return self._record("head_linear", (x,), (weight.matrices, weight.rows), weight=weight)[0]

    def embedding(self, token_ids: Value, table: Any, scale: float = 1.0) -> Value:
        order, table = (table.order, table.packed) if isinstance(table, _Reordered) else (None, table)
        of_positions = token_ids is _POSITIONS
        x = self._record("embedding", (), (table.columns,), weight=table, factor=scale, source=int(of_positions))[0]
        return x if order is None else self._take_columns(x, np.argsort(order).astype(np.int32))

    def _take_columns(self, x: Value, order: np.ndarray) -> Value:
        """x[:, order]; what was asked for already is not computed twice, so that q, k and v stay products of one input."""
        assert self._graph is not None, "take_columns outside compile()"
        for node in self._graph.nodes:
            if node.op == "take_columns" and node.inputs[0].key == x.key and np.array_equal(node.attributes["order"], order):
                return node.outputs[0]
        return self._record("take_columns", (x,), x.shape, order=order)[0]

    def rms_norm(self, x: Value, weight: np.ndarray, eps: float) -> Value:
        return self._record("rms_norm", (x,), x.shape, weight=weight, factor=eps)[0]

    def layer_norm(self, x: Value, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> Value:
        return self._record("layer_norm", (x,), x.shape, weight=weight, bias=bias, factor=eps)[0]

    def rotary_angles(self, positions: Value, inv_freq: Value, scaling: float) -> tuple[Value, Value]:
        shape = inv_freq.shape
        cos, sin = self._record("rotary_angles", (), shape, shape, source=inv_freq.index, factor=scaling)
        return cos, sin

    def rotary(self, x: Value, cos: Value, sin: Value) -> Value:
        return self._record("rotary", (x, cos, sin), x.shape)[0]

    def gated_activation(self, gate: Value, up: Value, activation: str) -> Value:
        return self._record("gated_activation", (gate, up), gate.shape, activation=activation)[0]

    def activation(self, x: Value, activation: str) -> Value:
        return self._record("gated_activation", (x,), x.shape, activation=activation)[0]

    @staticmethod
    def expert_counts(experts: Experts) -> np.ndarray:
        return experts.counts

    def moe(self, x: Value, router_logits: Value, experts: Experts, routing: Routing, activation: str) -> Value:
        for part in (experts.gate, experts.up, experts.down):
            if any(isinstance(one, _Reordered) for one in (part if isinstance(part, list) else [part])):
                raise UnsupportedError(
                    "experts whose columns are in another order (GPTQ with activation order) have no native kernel: "
                    "--backend reference computes them"
                )
        attributes = {"experts": experts, "routing": routing, "activation": activation}
        return self._record("moe", (x, router_logits), x.shape, **attributes)[0]

    def gated(self, x: Value, gate: Value) -> Value:
        return self._record("gated", (x, gate), x.shape)[0]

    def store_kv(self, keys: Value, values: Value | None, pages: Any, batch: BatchDescription) -> None:
        stored = tuple(self._fit_heads(side, pages.head_dim) for side in (keys, values) if side is not None)
        self._record("store_kv", stored, pages=pages, group=batch.group)

    def _fit_heads(self, x: Value, head_dim: int) -> Value:
        """Heads as the attention has them: the zeros that fill them up add nothing to a score, and are cut off again."""
        heads, width = x.shape
        return x if width == head_dim else self._record("fit_heads", (x,), (heads, head_dim))[0]

    def attention(
        self,
        queries: Value,
        pages: Any,
        batch: BatchDescription,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: np.ndarray | None = None,
        anchors: int = 0,
    ) -> Value:
        attributes = {"pages": pages, "scale": scale, "window": sliding_window, "softcap": softcap, "sinks": sinks}
        attributes |= {"group": batch.group, "anchors": anchors}
        fitted = self._fit_heads(queries, pages.head_dim)
        heads, width = fitted.shape
        y = self._record("attention", (fitted,), (heads, pages.latent or width), **attributes)[0]
        return self._fit_heads(y, pages.latent or queries.shape[-1])

    def add(self, x: Value, y: Value) -> Value:
        return self._record("add", (x, y), x.shape)[0]

    def scale(self, x: Value, factor: float) -> Value:
        return self._record("scale", (x,), x.shape, factor=factor)[0]

    def growth(self, x: Value, positions: Value, rate: float, length: int) -> Value:
        return self._record("growth", (x,), x.shape, factor=rate, length=length)[0]

    def softcap(self, x: Value, cap: float) -> Value:
        return self._record("softcap", (x,), x.shape, factor=cap)[0]

    def reshape(self, x: Value, shape: tuple[int, ...]) -> Value:
        assert shape[0] == -1, shape
        return Value(x.node, x.index, shape[1:])

    def join_heads(self, x: Value, y: Value) -> Value:
        (heads, width), (_, more) = x.shape, y.shape
        return self._record("join_heads", (x, y), (heads, width + more))[0]

    def take_rows(self, x: Value, rows: Any) -> Value:
        assert rows is _WANTED, rows
        return self._record("take_rows", (x,), x.shape, is_rows=True)[0]


def _start_threads(threads: int) -> Any:
    try:
        return _native.ThreadPool(threads)
    except (MemoryError, RuntimeError) as error:
        raise OutOfMemoryError(
            f"{threads} threads could not be started ({error}): ask for fewer with --threads, or raise the limits (ulimit -u, -v)"
        ) from error


def _symbolic_batch(graph: Graph, rotary_halves: list[int]) -> BatchDescription:
    """A batch whose arrays are known by name only: a program reads them from each step's input."""
    return BatchDescription(
        token_ids=None,
        positions=_POSITIONS,
        inv_freqs=graph.add("inv_freqs", (), *((half,) for half in rotary_halves)).outputs,
        cu_seqlens_q=[],
        page_maps=[],
        block_size=_BLOCK_SIZE,
    )
