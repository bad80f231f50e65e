"""What a decoder layer is made of: Linear, Norm, Attention, GatedMlp, PlainMlp. Each reads its weights by Hugging Face name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.plain import shifted
from llmctl.kernels.ops import Array, Ops
from llmctl.runtime.cache.kv_cache import KvCache
from llmctl.runtime.checkpoint.names import halves_order, take_rows
from llmctl.runtime.models.config import LayerConfig, ModelConfig
from llmctl.runtime.models.rotary_tables import RotaryTables
from llmctl.runtime.models.weights import ModelWeights, StoredWeight

Rows = np.ndarray | slice | None


def checked(weights: ModelWeights, name: str, shape: tuple[int, ...]) -> Any:
    """The tensor of this name; FormatError where it has another shape."""
    tensor = weights.read(name)
    if tuple(tensor.shape) != shape:
        raise FormatError(
            f"{weights.checkpoint.path}: tensor {name!r} has shape {tuple(tensor.shape)}, the config asks for {shape}"
        )
    return tensor


def _rows(tensor: Any, rows: np.ndarray | slice | None) -> Any:
    """These rows, None for all; of a weight that is only described the description."""
    return tensor if rows is None or isinstance(tensor, StoredWeight) else take_rows(tensor, rows)


def stacked(sizes: Sequence[int]) -> list[Rows]:
    """The rows of parts of these sizes, one above the other."""
    return [slice(end - size, end) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]


class Linear:
    """y = x · weightᵀ + bias, whatever form the weight is stored in."""

    def __init__(self, ops: Ops, weight: Array, bias: Array | None) -> None:
        self.ops, self.weight, self.bias = ops, weight, bias

    @classmethod
    def read(cls, ops: Ops, weights: ModelWeights, name: str, shape: tuple[int, int], bias: bool = False) -> Linear:
        """The module `name` with weight of shape (out_features, in_features)."""
        return cls.read_parts(ops, weights, name, shape, [None], bias)[0]

    @classmethod
    def read_parts(
        cls, ops: Ops, weights: ModelWeights, name: str, shape: tuple[int, int], parts: Sequence[Rows], bias: bool = False
    ) -> list[Linear]:
        """Modules stored as one. parts: the rows of each of them, in its own order; None for all."""
        weight = checked(weights, f"{name}.weight", shape)
        matrices = [ops.prepare_weight(_rows(weight, rows)) for rows in parts]
        weights.release(f"{name}.weight")
        vector = checked(weights, f"{name}.bias", shape[:1]) if bias else None
        vectors = [ops.prepare_vector(_rows(vector, rows)) if bias else None for rows in parts]
        return [cls(ops, *pair) for pair in zip(matrices, vectors, strict=True)]

    def forward(self, x: Array) -> Array:
        """x [T, in_features] → [T, out_features]."""
        return self.ops.linear(x, self.weight, self.bias)


class Norm:
    """RMSNorm or LayerNorm over the last axis, the family's offset already in the weight."""

    def __init__(
        self,
        ops: Ops,
        config: ModelConfig,
        weights: ModelWeights,
        name: str,
        shape: tuple[int, ...] | None = None,
        order: Rows = None,
    ) -> None:
        """shape: of the weight, (hidden_size,) by default. order: of its numbers, None for as they are stored."""
        vector = dequantize(checked(weights, f"{name}.weight", shape or (config.hidden_size,)))
        vector = vector if order is None else vector.reshape(-1)[order].reshape(vector.shape)
        self.ops, self.eps = ops, config.rms_norm_eps
        self.weight, self.bias = ops.prepare_vector(shifted(vector, config.norm_offset), "float32"), None
        self.layer_norm = config.layer_norm
        if config.norm_bias and shape is None:  # norms of heads have none
            self.bias = ops.prepare_vector(dequantize(checked(weights, f"{name}.bias", vector.shape)), "float32")

    def forward(self, x: Array) -> Array:
        """x [..., size] → the same shape."""
        if self.layer_norm:
            return self.ops.layer_norm(x, self.weight, self.bias, self.eps)
        return self.ops.rms_norm(x, self.weight, self.eps)


class Attention:
    """Self-attention over the paged cache: multi-head, grouped or multi-query, full or windowed."""

    def __init__(self, ops: Ops, config: ModelConfig, choices: LayerConfig, weights: ModelWeights, index: int) -> None:
        self.ops, self.config, self.choices, self.index = ops, config, choices, index
        prefix, query = f"model.layers.{index}.self_attn.", config.num_heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj = self._read_inputs(weights, prefix)
        self.o_proj = Linear.read(ops, weights, prefix + "o_proj", (config.hidden_size, query), config.attention_out_bias)
        self.sinks = None
        if config.attention_sinks:
            self.sinks = ops.prepare_vector(checked(weights, prefix + "sinks.weight", (config.num_heads,)), "float32")
        if config.qk_norm:
            heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
            self.q_norm, self.k_norm = (self._read_norm(weights, prefix + name, count) for name, count in heads.items())

    def _read_inputs(self, weights: ModelWeights, prefix: str) -> list[Linear]:
        """The projections of q, k and v."""
        ops, config = self.ops, self.config
        bias, hidden = config.attention_bias, config.hidden_size
        sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        if config.fused_qkv:
            return Linear.read_parts(ops, weights, prefix + "qkv_proj", (sum(sizes), hidden), stacked(sizes), bias)
        orders = [self._halves(size) for size in sizes[:2]] + [None]
        return [
            Linear.read_parts(ops, weights, prefix + name, (size, hidden), [order], bias)[0]
            for name, size, order in zip(("q_proj", "k_proj", "v_proj"), sizes, orders, strict=True)
        ]

    def _read_norm(self, weights: ModelWeights, name: str, heads: int) -> Norm:
        """The norm of so many heads; its numbers follow the order of the rows whose results it is over."""
        head_dim = self.config.head_dim
        shapes = {"head": (head_dim,), "each": (heads, head_dim), "all": (heads * head_dim,)}
        shape = shapes[self.config.qk_norm]
        return Norm(self.ops, self.config, weights, name, shape, self._halves(math.prod(shape)))

    def _halves(self, size: int) -> Rows:
        """The order of rows that brings pairs of a head to its halves, which is how they are rotated here."""
        rope, head_dim = self.choices.rope, self.config.head_dim
        turned = rope is not None and self.config.rope_interleaved
        return halves_order(size, size // head_dim, rope.rotary_dim) if turned else None

    def forward(
        self, x: Array, batch: BatchDescription, cache: KvCache, tables: RotaryTables, rows: Array | None = None
    ) -> Array:
        """x [T, hidden_size] → the same, or only its `rows`; this step's keys and values are stored on the way."""
        ops, config = self.ops, self.config
        queries, keys, values = self._project(x, tables)
        if config.query_growth is not None and self.choices.rope is not None:
            original = self.choices.rope.original_max_position
            queries = ops.growth(queries, batch.positions, config.query_growth, original)
        pages, batch = cache.layer(self.index), batch.of_group(cache.group(self.index))
        ops.store_kv(keys, values, pages, batch)
        shape, softcap = cache.shape(self.index), config.attention_softcap
        window, anchors = shape.sliding_window, shape.anchors
        y = ops.attention(queries, pages, batch, config.attention_scale, window, softcap, self.sinks, anchors)
        cache.keep_queries(self.index, queries, batch)
        y = ops.reshape(y, (-1, config.num_heads * config.head_dim))
        return self.o_proj.forward(y if rows is None else ops.take_rows(y, rows))

    def _project(self, x: Array, tables: RotaryTables) -> tuple[Array, Array, Array]:
        """Queries [T, num_heads, head_dim], keys and values [T, num_kv_heads, head_dim], normed and rotated."""
        ops, config = self.ops, self.config
        queries, keys = self.q_proj.forward(x), self.k_proj.forward(x)
        if config.qk_norm == "all":
            queries, keys = self.q_norm.forward(queries), self.k_norm.forward(keys)
        queries = ops.reshape(queries, (-1, config.num_heads, config.head_dim))
        keys = ops.reshape(keys, (-1, config.num_kv_heads, config.head_dim))
        values = ops.reshape(self.v_proj.forward(x), (-1, config.num_kv_heads, config.head_dim))
        if config.qk_norm in ("head", "each"):
            queries, keys = self.q_norm.forward(queries), self.k_norm.forward(keys)
        if self.choices.rope is not None:
            cos, sin = tables.angles(self.choices.rope)
            queries, keys = ops.rotary(queries, cos, sin), ops.rotary(keys, cos, sin)
        return queries, keys, values


class GatedMlp:
    """down(activation(gate(x)) · up(x))."""

    def __init__(self, ops: Ops, config: ModelConfig, weights: ModelWeights, prefix: str, size: int | None = None) -> None:
        """size: rows of gate and up, None for the config's."""
        self.ops, self.activation = ops, config.activation
        size, hidden, bias = size or config.intermediate_size, config.hidden_size, config.mlp_bias
        if config.fused_gate_up:
            both = Linear.read_parts(ops, weights, prefix + "gate_up_proj", (2 * size, hidden), stacked([size, size]), bias)
        else:
            both = [Linear.read(ops, weights, prefix + name, (size, hidden), bias) for name in ("gate_proj", "up_proj")]
        self.gate_proj, self.up_proj = both
        self.down_proj = Linear.read(ops, weights, prefix + "down_proj", (hidden, size), bias)

    def forward(self, x: Array) -> Array:
        """x [T, hidden_size] → the same."""
        gated = self.ops.gated_activation(self.gate_proj.forward(x), self.up_proj.forward(x), self.activation)
        return self.down_proj.forward(gated)


class PlainMlp:
    """c_proj(activation(c_fc(x)))."""

    def __init__(self, ops: Ops, config: ModelConfig, weights: ModelWeights, prefix: str) -> None:
        self.ops, self.activation = ops, config.activation
        size, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.c_fc = Linear.read(ops, weights, prefix + "c_fc", (size, hidden), bias)
        self.c_proj = Linear.read(ops, weights, prefix + "c_proj", (hidden, size), bias)

    def forward(self, x: Array) -> Array:
        """x [T, hidden_size] → the same."""
        return self.c_proj.forward(self.ops.activation(self.c_fc.forward(x), self.activation))
