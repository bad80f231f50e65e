"""Quantization topology of a decoder layer, as data: which projections read the same input, and what a scale of it folds into.

Derived from the choices of `ModelConfig`. Modules are named as checkpoints store them, so fused projections are one module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llmctl.runtime.models.config import ModelConfig


@dataclass(frozen=True)
class ScaleSource:
    """What produces the input of a group, if a factor on its channels can be moved there without a change to the output.

    module: below the layer. kind: "norm", whose weight (and bias) take the factor, or "linear", whose rows do. rows: of a
    linear, first and last + 1; for a fused one a part. heads_per_kv_head: groups of input channels, head by head, that come
    from the same rows (values that several query heads share).
    """

    module: str
    kind: Literal["norm", "linear"]
    rows: tuple[int, int] = (0, 0)
    heads_per_kv_head: int = 1
    head_dim: int = 0

    def channels(self, columns: int) -> np.ndarray:
        """int64 (columns,): for every input channel the one of the source that it is."""
        channels = np.arange(columns)
        if self.heads_per_kv_head == 1:
            return channels
        head, inner = np.divmod(channels, self.head_dim)
        return head // self.heads_per_kv_head * self.head_dim + inner


@dataclass(frozen=True)
class InputGroup:
    """Projections of one layer that read the same input.

    modules: below the layer, in order, the first stands for the input; source: see `ScaleSource`, None if there is none.
    """

    modules: tuple[str, ...]
    source: ScaleSource | None = None

    @property
    def leader(self) -> str:
        """The module at which the input is seen."""
        return self.modules[0]


def layer_topology(config: ModelConfig) -> tuple[InputGroup, ...]:
    """The groups of a layer, in the order in which the forward pass reaches them."""
    inputs = ("self_attn.qkv_proj",) if config.fused_qkv else ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    hidden, down, middle = _mlp(config)
    attention_norm, mlp_norm = (
        ScaleSource(name, "norm") if name else None for name in (config.norms.attention, config.norms.mlp)
    )
    output = InputGroup(("self_attn.o_proj",), _values(config))
    if config.parallel:
        return InputGroup((*inputs, *hidden), attention_norm), output, InputGroup((down,), middle)
    return InputGroup(inputs, attention_norm), output, InputGroup(hidden, mlp_norm), InputGroup((down,), middle)


def _mlp(config: ModelConfig) -> tuple[tuple[str, ...], str, ScaleSource | None]:
    """Modules that read the MLP's input, the last one, and what its input can be scaled by."""
    size = config.intermediate_size
    if not config.gated_mlp:
        return ("mlp.c_fc",), "mlp.c_proj", None  # an activation lies between
    if config.fused_gate_up:
        return ("mlp.gate_up_proj",), "mlp.down_proj", ScaleSource("mlp.gate_up_proj", "linear", (size, 2 * size))
    return ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", ScaleSource("mlp.up_proj", "linear", (0, size))


def _values(config: ModelConfig) -> ScaleSource:
    """The rows that make the values: attention mixes them over tokens, never over channels."""
    size, first = config.num_kv_heads * config.head_dim, 0
    if config.fused_qkv:
        first = (config.num_heads + config.num_kv_heads) * config.head_dim
    module = "self_attn.qkv_proj" if config.fused_qkv else "self_attn.v_proj"
    return ScaleSource(module, "linear", (first, first + size), config.num_heads // config.num_kv_heads, config.head_dim)


def layer_modules(config: ModelConfig) -> Iterator[str]:
    """All projections of a layer."""
    for group in layer_topology(config):
        yield from group.modules
