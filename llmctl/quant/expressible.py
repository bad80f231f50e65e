"""Whether GGUF metadata, or a config.json, says all that a model's config does: it is read back by a reader, and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from math import isclose
from typing import Any

import numpy as np

from llmctl.errors import UnsupportedError
from llmctl.quant.source import SourceTensor
from llmctl.runtime.models.config import LayerConfig, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.gguf_config import FACTOR_TENSORS, config_from_gguf
from llmctl.runtime.models.rope import RopeConfig, rope_frequencies

_ELSEWHERE = ("layers", "eos_token_ids")  # compared layer by layer; part of the tokenizer's keys
_TOLERANCE = 1e-6  # metadata is in float32


def check_expressible(
    config: ModelConfig, family: Family, metadata: Mapping[str, Any], tensors: Iterable[SourceTensor]
) -> None:
    """UnsupportedError naming the first choice of `config` that a reader of this metadata and these tensors would not make.

    GGUF has keys for what its authors met; some choices (an activation, a query scale, a pattern of windows) readers know
    by heart from the architecture, and a model that chooses otherwise would be run wrongly, without a word.
    """
    _check_rotary(config, family)
    tensors = list(tensors)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    factors = {tensor.name: tensor.read() for tensor in tensors if tensor.name in FACTOR_TENSORS}
    stored = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in metadata.items()}
    found = family.read_config(config_from_gguf(stored, family, shapes, factors))
    if difference := _first_difference(config, found):
        what, read = difference
        raise UnsupportedError(f"GGUF has no key for {what} of a {family.name} model; a reader would take {read}")


def check_config_json(config: ModelConfig, family: Family, values: dict[str, Any]) -> None:
    """UnsupportedError naming the first choice of `config` that a reader of this config.json would not make."""
    if difference := _first_difference(config, family.read_config(values)):
        what, read = difference
        raise UnsupportedError(f"config.json cannot say {what} of a {family.name} model; a reader would take {read}")


def _first_difference(config: ModelConfig, found: ModelConfig) -> tuple[str, Any] | None:
    """What `config` says that was not read back, and what was found in its place."""
    for field in dataclasses.fields(ModelConfig):
        if field.name in _ELSEWHERE:
            continue
        if difference := _difference(field.name, getattr(config, field.name), getattr(found, field.name)):
            return difference
    for index, (wanted, read) in enumerate(zip(config.layers, found.layers, strict=True)):
        if difference := _layer_difference(index, wanted, read):
            return difference
    return None


def _check_rotary(config: ModelConfig, family: Family) -> None:
    """GGUF's row order for permuted tensors is defined only where the whole head rotates."""
    partial = [layer.rope.rotary_dim for layer in config.layers if layer.rope and layer.rope.rotary_dim != config.head_dim]
    if partial and family.gguf_names.permuted:
        raise UnsupportedError(
            f"GGUF cannot express a {family.name} model that rotates {partial[0]} of {config.head_dim} elements of a head"
        )


def _layer_difference(index: int, wanted: LayerConfig, read: LayerConfig) -> tuple[str, Any] | None:
    if wanted.sliding_window != read.sliding_window:
        return f"sliding_window = {wanted.sliding_window} in layer {index}", read.sliding_window
    if (wanted.rope is None) != (read.rope is None) or (wanted.rope and not same_rope(wanted.rope, read.rope)):
        return f"rope {_shown(wanted.rope)} in layer {index}", _shown(read.rope)
    if wanted.sparse != read.sparse:
        return f"{'experts' if wanted.sparse else 'no experts'} in layer {index}", "none" if wanted.sparse else "some"
    return None


def _difference(name: str, wanted: Any, read: Any) -> tuple[str, Any] | None:
    """The same for one choice, and for the first that differs of those it is made of."""
    if dataclasses.is_dataclass(wanted) and type(wanted) is type(read):
        parts = [field.name for field in dataclasses.fields(wanted)]
        found = (_difference(f"{name}.{part}", getattr(wanted, part), getattr(read, part)) for part in parts)
        return next((one for one in found if one is not None), None)
    return None if _same(wanted, read) else (f"{name} = {wanted}", read)


def _same(wanted: Any, read: Any) -> bool:
    if isinstance(wanted, float) and isinstance(read, (int, float)):
        return isclose(wanted, read, rel_tol=_TOLERANCE)
    return wanted == read


def same_rope(wanted: RopeConfig, read: RopeConfig) -> bool:
    """The same angles, whatever they are called. The dynamic type acts only beyond the context the file states."""
    lengths = (None, wanted.max_position) if wanted.kind == "longrope" else (None,)
    for length in lengths:
        (angles, factor), (found, found_factor) = rope_frequencies(wanted, length), rope_frequencies(read, length)
        if found.shape != angles.shape or not np.allclose(angles, found, rtol=1e-5, atol=0):
            return False
        if not isclose(factor, found_factor, rel_tol=1e-5):
            return False
    return True


def _shown(rope: RopeConfig | None) -> str:
    return "none" if rope is None else f"{rope.kind} with base {rope.theta:g}"

