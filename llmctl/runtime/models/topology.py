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

    modules: below the layer, in order. source: see `ScaleSource`, None if there is none. along: what reads the same input but is
    never quantized, as a router: a scale must go into it too. seen_at: the module at which the input is seen, the first of
    `modules` if it is not named. stand_in: the one whose input stands for this one where nothing was seen, as for an expert that
    no token chose. stage: groups of one stage do not depend on each other.
    """

    modules: tuple[str, ...]
    source: ScaleSource | None = None
    along: tuple[str, ...] = ()
    seen_at: str | None = None
    stand_in: str | None = None
    stage: int = 0

    @property
    def leader(self) -> str:
        """The module at which the input is seen."""
        return self.seen_at or self.modules[0]

    @property
    def in_mlp(self) -> bool:
        """Whether it belongs to the second half of a layer whose halves follow each other."""
        return self.stage >= _EXPERTS


def layer_topology(config: ModelConfig, index: int) -> tuple[InputGroup, ...]:
    """What is solved together in layer `index`, in the order in which the forward pass reaches it."""
    groups = [*_attention(config), *(_sparse(config) if config.layers[index].sparse else _dense(config))]
    if config.parallel:  # both halves read the same normed input
        inputs, output, hidden, down = groups
        together = InputGroup((*inputs.modules, *hidden.modules), inputs.source)
        groups = [together, output, down]
    return tuple(groups)


def scale_groups(config: ModelConfig, index: int) -> tuple[InputGroup, ...]:
    """What shares the scales of an input: the same groups where they have a source, but all experts, the shared one and the
    router as one, since one norm makes what they read."""
    groups = layer_topology(config, index)
    if not config.layers[index].sparse or config.experts is None:
        return tuple(group for group in groups if group.source is not None)
    names = config.experts.names
    reading = [group for group in groups if group.stage == _EXPERTS]
    along = (names.router, *((names.shared_gate,) if config.experts.shared_gate else ()))
    modules = tuple(module for group in reading for module in group.modules)
    norm = _norm(config.norms.mlp)
    together = [] if norm is None else [InputGroup(modules, norm, along, names.router)]
    others = [group for group in groups if group.source is not None and group.stage != _EXPERTS]
    before = [group for group in others if group.stage < _EXPERTS]
    return (*before, *together, *others[len(before) :])


_EXPERTS = 3  # the stage of what reads an MLP's input


def _norm(name: str | None) -> ScaleSource | None:
    return ScaleSource(name, "norm") if name else None


def _attention(config: ModelConfig) -> Iterator[InputGroup]:
    prefix, norm = "self_attn.", _norm(config.norms.attention)
    output = prefix + "o_proj"
    if config.latent is not None:
        query = "q_proj" if config.latent.query_rank is None else "q_a_proj"
        yield InputGroup((prefix + query, prefix + "kv_a_proj_with_mqa"), norm)
        if config.latent.query_rank is not None:
            yield InputGroup((prefix + "q_b_proj",), stage=1)
        yield InputGroup((output,), stage=2)
        return
    names = ("qkv_proj",) if config.fused_qkv else ("q_proj", "k_proj", "v_proj")
    yield InputGroup(tuple(prefix + name for name in names), norm)
    yield InputGroup((output,), _values(config), stage=2)


def _dense(config: ModelConfig) -> Iterator[InputGroup]:
    prefix, size, norm = "mlp.", config.intermediate_size, _norm(config.norms.mlp)
    if not config.gated_mlp:
        yield InputGroup((prefix + "c_fc",), norm, stage=_EXPERTS)
        yield InputGroup((prefix + "c_proj",), stage=_EXPERTS + 1)  # an activation lies between
    elif config.fused_gate_up:
        yield InputGroup((prefix + "gate_up_proj",), norm, stage=_EXPERTS)
        source = ScaleSource(prefix + "gate_up_proj", "linear", (size, 2 * size))
        yield InputGroup((prefix + "down_proj",), source, stage=_EXPERTS + 1)
    else:
        yield from _gated((prefix + "gate_proj", prefix + "up_proj"), prefix + "down_proj", size, norm)


def _gated(
    inputs: tuple[str, str], down: str, size: int, norm: ScaleSource | None, stand_in: str | None = None, *, linear: bool = True
) -> list[InputGroup]:
    """linear: what the up projection makes goes into the product as it is."""
    source = ScaleSource(inputs[1], "linear", (0, size)) if linear else None
    return [
        InputGroup(inputs, norm, stand_in=stand_in, stage=_EXPERTS),
        InputGroup((down,), source, stage=_EXPERTS + 1),
    ]


def _sparse(config: ModelConfig) -> list[InputGroup]:
    """A group of its own for what each expert reads, which is what the tokens that chose it bring."""
    experts = config.experts
    assert experts is not None, "a sparse layer without experts"
    names, found = experts.names, []
    for number in range(experts.num_experts):
        gate, up, down = (name.format(number) for name in (names.gate, names.up, names.down))
        linear = config.activation != "clamped_swiglu"
        found += _gated((gate, up), down, experts.intermediate_size, None, names.router, linear=linear)
    if experts.shared_size is not None:
        gate, up, down = (f"{names.shared}.{part}_proj" for part in ("gate", "up", "down"))
        found += _gated((gate, up), down, experts.shared_size, None)
    return sorted(found, key=lambda group: group.stage)


def _values(config: ModelConfig) -> ScaleSource:
    """The rows that make the values: attention mixes them over tokens, never over channels."""
    size, first = config.num_kv_heads * config.head_dim, 0
    if config.fused_qkv:
        first = (config.num_heads + config.num_kv_heads) * config.head_dim
    module = "self_attn.qkv_proj" if config.fused_qkv else "self_attn.v_proj"
    return ScaleSource(module, "linear", (first, first + size), config.num_heads // config.num_kv_heads, config.head_dim)


def layer_modules(config: ModelConfig, index: int) -> Iterator[str]:
    """All projections of a layer that are quantized."""
    for group in layer_topology(config, index):
        yield from group.modules
