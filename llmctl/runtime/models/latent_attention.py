"""Multi-head latent attention, absorbed: the cache keeps one latent and one rotated key a token, whatever the number of heads.

A head's key is k_b · latent beside the shared rotated part, its value v_b · latent. Instead of unfolding either for every token
seen, its query is multiplied by k_b's transpose and its weighted sum of latents by v_b: attention then is multi-query over
[latent | rotated key], and its values are the latents themselves. DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.ops import Array, Ops
from llmctl.runtime.cache.kv_cache import KvCache
from llmctl.runtime.checkpoint.names import halves_order
from llmctl.runtime.models.config import LayerConfig, ModelConfig
from llmctl.runtime.models.layers import Linear, Norm, checked
from llmctl.runtime.models.rotary_tables import RotaryTables
from llmctl.runtime.models.weights import ModelWeights

LATENT_EPS = 1e-6
"""What the norms of the two latents add, whatever the model's others do."""


class LatentAttention:
    """Self-attention whose keys and values come from one latent a token."""

    def __init__(self, ops: Ops, config: ModelConfig, choices: LayerConfig, weights: ModelWeights, index: int) -> None:
        assert config.latent is not None, "latent attention without its sizes"
        self.ops, self.config, self.choices, self.index, self.latent = ops, config, choices, index, config.latent
        self._prefix, self.sinks = f"model.layers.{index}.self_attn.", None
        self._read_queries(weights)
        self._read_latent(weights)
        heads, latent = config.num_heads, self.latent
        self.k_b = self._read_heads(weights, "k_b_proj", (heads, latent.rank, latent.nope_dim))
        self.v_b = self._read_heads(weights, "v_b_proj", (heads, latent.value_dim, latent.rank))
        shape = (config.hidden_size, heads * latent.value_dim)
        self.o_proj = Linear.read(ops, weights, self._prefix + "o_proj", shape, config.attention_out_bias)

    def _read_queries(self, weights: ModelWeights) -> None:
        """The projections of what does not rotate and of what does, for all heads; before them that to the queries' latent."""
        ops, config, latent = self.ops, self.config, self.latent
        self.q_a_proj = self.q_a_norm = None
        name, width = "q_proj", config.hidden_size
        if latent.query_rank is not None:
            name, width = "q_b_proj", latent.query_rank
            shape = (width, config.hidden_size)
            self.q_a_proj = Linear.read(ops, weights, self._prefix + "q_a_proj", shape, config.attention_bias)
            self.q_a_norm = self._norm(weights, "q_a_layernorm", width)
        rows = np.arange(config.num_heads * config.head_dim).reshape(config.num_heads, config.head_dim)
        nope, rope = rows[:, : latent.nope_dim].reshape(-1), rows[:, latent.nope_dim :].reshape(-1)
        parts = [nope, rope[self._turned(config.num_heads)]]
        self.q_nope, self.q_rope = Linear.read_parts(ops, weights, self._prefix + name, (rows.size, width), parts)

    def _read_latent(self, weights: ModelWeights) -> None:
        """The projections to the latent and to the part of the key that rotates, stored as one."""
        config, latent = self.config, self.latent
        name, shape = self._prefix + "kv_a_proj_with_mqa", (latent.rank + latent.rope_dim, config.hidden_size)
        parts = [slice(0, latent.rank), latent.rank + self._turned(1)]
        self.kv_a, self.k_rope = Linear.read_parts(self.ops, weights, name, shape, parts, config.attention_bias)
        self.kv_a_norm = self._norm(weights, "kv_a_layernorm", latent.rank)

    def _read_heads(self, weights: ModelWeights, name: str, shape: tuple[int, int, int]) -> Array:
        matrices = self.ops.prepare_weight(checked(weights, f"{self._prefix}{name}.weight", shape))
        weights.release(f"{self._prefix}{name}.weight")
        return matrices

    def _norm(self, weights: ModelWeights, name: str, size: int) -> Norm:
        return Norm(self.ops, replace(self.config, rms_norm_eps=LATENT_EPS), weights, self._prefix + name, (size,))

    def _turned(self, heads: int) -> np.ndarray:
        """The order of the rotating rows of so many heads that has halves, which is how they are rotated here."""
        size = heads * self.latent.rope_dim
        return halves_order(size, heads) if self.config.rope_interleaved else np.arange(size)

    def forward(
        self, x: Array, batch: BatchDescription, cache: KvCache, tables: RotaryTables, rows: Array | None = None
    ) -> Array:
        """x [T, hidden_size] → the same, or only its `rows`; this step's latents are stored on the way."""
        ops, config, latent = self.ops, self.config, self.latent
        assert self.choices.rope is not None, "latent attention without positions"
        cos, sin = tables.angles(self.choices.rope)
        pages, batch = cache.layer(self.index), batch.of_group(cache.group(self.index))
        ops.store_kv(self._keys(x, cos, sin), None, pages, batch)
        queries = self._queries(x, cos, sin)
        shape, softcap = cache.shape(self.index), config.attention_softcap
        window, anchors = shape.sliding_window, shape.anchors
        y = ops.attention(queries, pages, batch, config.attention_scale, window, softcap, self.sinks, anchors)
        cache.keep_queries(self.index, queries, batch)
        y = ops.head_linear(y if rows is None else ops.take_rows(y, rows), self.v_b)
        return self.o_proj.forward(ops.reshape(y, (-1, config.num_heads * latent.value_dim)))

    def _keys(self, x: Array, cos: Array, sin: Array) -> Array:
        """[T, 1, rank + rope_dim]: the latent, and the rotated key that all heads share."""
        ops, latent = self.ops, self.latent
        keys = ops.reshape(self.kv_a_norm.forward(self.kv_a.forward(x)), (-1, 1, latent.rank))
        rope = ops.rotary(ops.reshape(self.k_rope.forward(x), (-1, 1, latent.rope_dim)), cos, sin)
        return ops.join_heads(keys, rope)

    def _queries(self, x: Array, cos: Array, sin: Array) -> Array:
        """[T, num_heads, rank + rope_dim]: what meets the latents, and what meets the rotated keys."""
        ops, heads, latent = self.ops, self.config.num_heads, self.latent
        q = x if self.q_a_norm is None else self.q_a_norm.forward(self.q_a_proj.forward(x))
        nope = ops.reshape(self.q_nope.forward(q), (-1, heads, latent.nope_dim))
        rope = ops.rotary(ops.reshape(self.q_rope.forward(q), (-1, heads, latent.rope_dim)), cos, sin)
        return ops.join_heads(ops.head_linear(nope, self.k_b), rope)
