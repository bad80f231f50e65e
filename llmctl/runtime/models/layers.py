"""What a decoder layer is made of: Linear, Norm, Attention, GatedMlp. Each reads its weights by Hugging Face name."""

from __future__ import annotations

from llmctl.errors import FormatError
from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.plain import shifted
from llmctl.kernels.ops import Array, Ops
from llmctl.runtime.cache.kv_cache import KvCache
from llmctl.runtime.models.config import LayerConfig, ModelConfig
from llmctl.runtime.models.rotary_tables import RotaryTables
from llmctl.runtime.models.weights import ModelWeights


def _checked(weights: ModelWeights, name: str, shape: tuple[int, ...]) -> object:
    tensor = weights.read(name)
    if tuple(tensor.shape) != shape:
        raise FormatError(
            f"{weights.checkpoint.path}: tensor {name!r} has shape {tuple(tensor.shape)}, the config asks for {shape}"
        )
    return tensor


class Linear:
    """y = x · weightᵀ + bias, whatever form the weight is stored in."""

    def __init__(self, ops: Ops, weight: Array, bias: Array | None) -> None:
        self.ops, self.weight, self.bias = ops, weight, bias

    @classmethod
    def read(cls, ops: Ops, weights: ModelWeights, name: str, shape: tuple[int, int], bias: bool = False) -> Linear:
        """The module `name` with weight of shape (out_features, in_features)."""
        weight = ops.prepare_weight(_checked(weights, f"{name}.weight", shape))
        weights.release(f"{name}.weight")
        vector = ops.prepare_vector(_checked(weights, f"{name}.bias", shape[:1])) if bias else None
        return cls(ops, weight, vector)

    def forward(self, x: Array) -> Array:
        """x [T, in_features] → [T, out_features]."""
        return self.ops.linear(x, self.weight, self.bias)


class Norm:
    """RMSNorm over the last axis, the family's offset already in the weight."""

    def __init__(self, ops: Ops, config: ModelConfig, weights: ModelWeights, name: str, size: int | None = None) -> None:
        vector = dequantize(_checked(weights, f"{name}.weight", (size or config.hidden_size,)))
        self.ops, self.eps = ops, config.rms_norm_eps
        self.weight = ops.prepare_vector(shifted(vector, config.norm_offset), "float32")

    def forward(self, x: Array) -> Array:
        """x [..., size] → the same shape."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class Attention:
    """Self-attention over the paged cache: multi-head, grouped or multi-query, full or windowed."""

    def __init__(self, ops: Ops, config: ModelConfig, choices: LayerConfig, weights: ModelWeights, index: int) -> None:
        self.ops, self.config, self.choices, self.index = ops, config, choices, index
        prefix, bias = f"model.layers.{index}.self_attn.", config.attention_bias
        hidden, query = config.hidden_size, config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        self.q_proj = Linear.read(ops, weights, prefix + "q_proj", (query, hidden), bias)
        self.k_proj = Linear.read(ops, weights, prefix + "k_proj", (kv, hidden), bias)
        self.v_proj = Linear.read(ops, weights, prefix + "v_proj", (kv, hidden), bias)
        self.o_proj = Linear.read(ops, weights, prefix + "o_proj", (hidden, query), config.attention_out_bias)
        if config.qk_norm:
            self.q_norm = Norm(ops, config, weights, prefix + "q_norm", config.head_dim)
            self.k_norm = Norm(ops, config, weights, prefix + "k_norm", config.head_dim)

    def forward(
        self, x: Array, batch: BatchDescription, cache: KvCache, tables: RotaryTables, rows: Array | None = None
    ) -> Array:
        """x [T, hidden_size] → the same, or only its `rows`; this step's keys and values are stored on the way."""
        ops, config = self.ops, self.config
        queries, keys, values = self._project(x, tables)
        pages = cache.layer(self.index)
        ops.store_kv(keys, values, pages, batch.slot_mapping)
        window = self.choices.sliding_window
        y = ops.attention(queries, pages, batch, config.attention_scale, window, config.attention_softcap)
        y = ops.reshape(y, (-1, config.num_heads * config.head_dim))
        return self.o_proj.forward(y if rows is None else ops.take_rows(y, rows))

    def _project(self, x: Array, tables: RotaryTables) -> tuple[Array, Array, Array]:
        """Queries [T, num_heads, head_dim], keys and values [T, num_kv_heads, head_dim], normed and rotated."""
        ops, config = self.ops, self.config
        queries = ops.reshape(self.q_proj.forward(x), (-1, config.num_heads, config.head_dim))
        keys = ops.reshape(self.k_proj.forward(x), (-1, config.num_kv_heads, config.head_dim))
        values = ops.reshape(self.v_proj.forward(x), (-1, config.num_kv_heads, config.head_dim))
        if config.qk_norm:
            queries, keys = self.q_norm.forward(queries), self.k_norm.forward(keys)
        if self.choices.rope is not None:
            cos, sin = tables.angles(self.choices.rope)
            queries, keys = ops.rotary(queries, cos, sin), ops.rotary(keys, cos, sin)
        return queries, keys, values


class GatedMlp:
    """down(activation(gate(x)) · up(x))."""

    def __init__(self, ops: Ops, config: ModelConfig, weights: ModelWeights, prefix: str) -> None:
        self.ops, self.activation = ops, config.activation
        up, down = (config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size)
        self.gate_proj = Linear.read(ops, weights, prefix + "gate_proj", up, config.mlp_bias)
        self.up_proj = Linear.read(ops, weights, prefix + "up_proj", up, config.mlp_bias)
        self.down_proj = Linear.read(ops, weights, prefix + "down_proj", down, config.mlp_bias)

    def forward(self, x: Array) -> Array:
        """x [T, hidden_size] → the same."""
        gated = self.ops.gated_activation(self.gate_proj.forward(x), self.up_proj.forward(x), self.activation)
        return self.down_proj.forward(gated)
