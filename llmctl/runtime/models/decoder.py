"""The one forward pass: every decoder-only transformer, written once against the op-set.

A layer is   x += [norm](attention(norm(x)));  x += [norm](mlp(norm(x)))     or   x += attention(norm(x)) + mlp(norm(x))
where the bracketed norms, biases, query/key norms, windows, caps and scales are choices of `ModelConfig`. Nothing here knows
a family, a stored format, or whether arrays are torch's or numpy's.
"""

from __future__ import annotations

from typing import Any

from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.ops import Array, Ops
from llmctl.runtime.cache.kv_cache import KvCache
from llmctl.runtime.models.config import LayerConfig, ModelConfig
from llmctl.runtime.models.experts import SparseMlp
from llmctl.runtime.models.latent_attention import LatentAttention
from llmctl.runtime.models.layers import Attention, GatedMlp, Linear, Norm, PlainMlp
from llmctl.runtime.models.rotary_tables import RotaryTables
from llmctl.runtime.models.weights import ModelWeights


class DecoderLayer:
    """One transformer block."""

    def __init__(self, ops: Ops, config: ModelConfig, choices: LayerConfig, weights: ModelWeights, index: int) -> None:
        prefix = f"model.layers.{index}."
        self.ops, self.config = ops, config
        self.attention = (Attention if config.latent is None else LatentAttention)(ops, config, choices, weights, index)
        self.mlp = _read_mlp(ops, config, choices, weights, prefix)
        names = config.norms
        self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm = (
            name and Norm(ops, config, weights, prefix + name)
            for name in (names.attention, names.attention_out, names.mlp, names.mlp_out)
        )

    def forward(
        self, x: Array, batch: BatchDescription, cache: KvCache, tables: RotaryTables, rows: Array | None = None
    ) -> Array:
        """x [T, hidden_size] → the same, or only its `rows`, though every token's keys and values are stored."""
        return self.feed_forward(*self.attend(x, batch, cache, tables, rows))

    def attend(
        self, x: Array, batch: BatchDescription, cache: KvCache, tables: RotaryTables, rows: Array | None = None
    ) -> tuple[Array, Array | None]:
        """The first half: x with attention added, and where both halves read the same normed input, that."""
        h = _normed(self.attention_norm, x)
        y = self.attention.forward(h, batch, cache, tables, rows)
        x = x if rows is None else self.ops.take_rows(x, rows)
        x = self._add(x, _normed(self.attention_out_norm, y))
        if not self.config.parallel:
            return x, None
        return x, h if rows is None else self.ops.take_rows(h, rows)

    def feed_forward(self, x: Array, h: Array | None = None) -> Array:
        """The second half, of what `attend` returned."""
        y = self.mlp.forward(_normed(self.mlp_norm, x) if h is None else h)
        return self._add(x, _normed(self.mlp_out_norm, y))

    def _add(self, x: Array, y: Array) -> Array:
        factor = self.config.residual_scale
        return self.ops.add(x, y if factor == 1.0 else self.ops.scale(y, factor))


def _read_mlp(
    ops: Ops, config: ModelConfig, choices: LayerConfig, weights: ModelWeights, prefix: str
) -> SparseMlp | GatedMlp | PlainMlp:
    if choices.sparse:
        return SparseMlp(ops, config, weights, prefix)
    return (GatedMlp if config.gated_mlp else PlainMlp)(ops, config, weights, prefix + "mlp.")


def _normed(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm.forward(x)


def embedded(
    ops: Ops, config: ModelConfig, token_ids: Array, table: Array, positions: Array, position_table: Array | None
) -> Array:
    """The residual stream before the first layer [T, hidden_size]. table, position_table: prepared matrices whose rows
    token_ids [T] and positions [T] name."""
    x = ops.embedding(token_ids, table, config.embedding_scale)
    return x if position_table is None else ops.add(x, ops.embedding(positions, position_table))


def read_embeddings(ops: Ops, weights: ModelWeights) -> tuple[Linear, Linear | None]:
    """The tables of tokens and, where a model has learned positions, of those."""
    config = weights.config
    tokens = Linear.read(ops, weights, "model.embed_tokens", (config.vocab_size, config.hidden_size))
    if not config.learned_positions:
        return tokens, None
    return tokens, Linear.read(ops, weights, "model.embed_positions", (config.max_position_embeddings, config.hidden_size))


def read_head(ops: Ops, weights: ModelWeights) -> Linear:
    """The matrix that makes the logits, read anew where it is the embedding too."""
    name = "model.embed_tokens" if weights.config.tie_word_embeddings else "lm_head"
    return Linear.read(ops, weights, name, (weights.config.vocab_size, weights.config.hidden_size))


class Decoder:
    """A model ready to run: weights prepared for one backend."""

    def __init__(self, ops: Ops, weights: ModelWeights, progress: Any = None) -> None:
        """Prepare every weight. progress: called with (done, total) layers; FormatError names a missing or misshapen tensor."""
        config = weights.config
        self.ops, self.config = ops, config
        self.embed_tokens, self.embed_positions = read_embeddings(ops, weights)
        self.layers = []
        for index, choices in enumerate(config.layers):
            self.layers.append(DecoderLayer(ops, config, choices, weights, index))
            if progress:
                progress(index + 1, config.num_layers)
        self.norm = Norm(ops, config, weights, "model.norm")
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else read_head(ops, weights)
        self.tables = RotaryTables(ops, config)

    def forward(self, batch: BatchDescription, cache: KvCache, rows: Array) -> Array:
        """Logits [len(rows), vocab_size] of the batch's tokens numbered `rows`; keys and values go to the cache's pages."""
        return self._end(self.begin(batch), self.layers, batch, cache, rows)

    def begin(self, batch: BatchDescription) -> Array:
        """What the first layer reads [T, hidden_size], with the angles of the batch's positions prepared for all layers."""
        return self._begin(self.ops, batch, self.tables)

    def _begin(self, ops: Ops, batch: BatchDescription, tables: RotaryTables) -> Array:
        tables.prepare(batch)
        positions = self.embed_positions and self.embed_positions.weight
        return embedded(ops, self.config, batch.token_ids, self.embed_tokens.weight, batch.positions, positions)

    def _end(
        self, x: Array, layers: list[DecoderLayer], batch: BatchDescription, cache: KvCache, rows: Array
    ) -> Array:
        """Logits of what the first of these layers, which are the last ones, reads."""
        for layer in layers[:-1]:
            x = layer.forward(x, batch, cache, self.tables)
        # What follows the last attention is computed for the tokens whose logits are wanted.
        x = layers[-1].forward(x, batch, cache, self.tables, rows)
        return self._logits(self.norm.forward(x))

    def expert_counts(self) -> list[list[int]]:
        """Tokens that each expert had so far, for every layer that has experts, in order; of the last layer only tokens whose
        logits were wanted pass any."""
        sparse = [layer.mlp for layer in self.layers if isinstance(layer.mlp, SparseMlp)]
        return [mlp.ops.expert_counts(mlp.experts).tolist() for mlp in sparse]

    def _logits(self, x: Array) -> Array:
        return logits_of(self.ops, self.config, self.lm_head, x)


def logits_of(ops: Ops, config: ModelConfig, head: Linear, x: Array) -> Array:
    """Logits [T, vocab_size] of what the last norm made [T, hidden_size]."""
    logits = head.forward(x)
    if config.logit_scale != 1.0:
        logits = ops.scale(logits, config.logit_scale)
    return logits if config.final_softcap is None else ops.softcap(logits, config.final_softcap)
