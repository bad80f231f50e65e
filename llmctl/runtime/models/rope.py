"""Rotary position frequencies: every type, every spelling, one table.

Spellings met in config.json: `rope_theta` + `rope_scaling {type | rope_type, …}` (transformers 4), `rope_parameters {…}` and
`rope_parameters {layer_type: {…}}` (transformers 5). All become one `RopeConfig`.

Sources: linear and dynamic NTK as in transformers' rope utilities; yarn: Peng et al., "YaRN", 2023; longrope: Ding et al.,
"LongRoPE", 2024; llama3: the Llama 3.1 model card's reference code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.hf_config import HfConfig, positive_number

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
_ALIASES = {"none": "default", "su": "longrope", "mrope": "default"}
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "factors": ("factors",),
}
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor")
_NUMBERS_OR_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # zero is as good as absent
_LISTS = ("short_factor", "long_factor", "factors")


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles for one kind of layer.

    kind: one of ROPE_TYPES ("factors" is GGUF's explicit divisor per frequency).
    theta: base. rotary_dim: elements of a head that rotate. original_max_position / max_position: tokens.
    parameters: the type's own numbers, as the config spells them.
    """

    kind: str
    theta: float
    rotary_dim: int
    original_max_position: int
    max_position: int
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def depends_on_length(self) -> bool:
        """True when frequencies change with the length of the sequence (dynamic, longrope)."""
        return self.kind in ("dynamic", "longrope")

    @staticmethod
    def from_hf(config: dict[str, Any], layer_type: str | None = None) -> RopeConfig:
        """Read a Hugging Face config, for one layer type where the parameters are nested.

        Raises UnsupportedError for an unknown type, FormatError for a missing or senseless number.
        """
        parameters = _parameters(config, layer_type)
        both = HfConfig({**config, **{key: value for key, value in parameters.items() if value is not None}})
        stated = next((value for key in ("rope_type", "type") if (value := parameters.get(key)) is not None), "default")
        if not isinstance(stated, str):
            raise FormatError(f"config.json: rope_type must be a string, found {quoted(stated)}")
        kind = stated.lower()
        kind = _ALIASES.get(kind, kind)
        if kind not in ROPE_TYPES:
            raise UnsupportedError(f"config.json: unknown rope type {quoted(kind)}; known: {', '.join(ROPE_TYPES[:-1])}")
        _check(kind, parameters)
        max_position = HfConfig(config).integer("max_position_embeddings", 2048)
        rope = RopeConfig(
            kind=kind,
            theta=both.positive("rope_theta", 10000.0),
            rotary_dim=_rotary_dim(both),
            original_max_position=both.integer("original_max_position_embeddings", max_position),
            max_position=max_position,
            parameters=parameters,
        )
        _check_table(rope)
        return rope


def _parameters(config: dict[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The rope parameters whatever key they stand under; nested ones picked by layer type."""
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        found = _object(config.get(key), key) or found
    if any(key.endswith("_attention") for key in found) or (found and all(isinstance(one, dict) for one in found.values())):
        if layer_type not in found:
            raise FormatError(f"config.json: rope_parameters has no entry for layer type {layer_type!r}")
        return dict(_object(found[layer_type], f"rope_parameters of {layer_type}"))
    return dict(found)


def _object(value: Any, what: str) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    if value is not None and not isinstance(value, dict):
        raise FormatError(f"config.json: {what} must be an object, found {quoted(value)}")
    return value or {}


def _rotary_dim(both: HfConfig) -> int:
    """Elements of a head that rotate, in pairs."""
    head_dim, share = both.head_dim(), both.positive("partial_rotary_factor", 1.0)
    if share > 1 or int(head_dim * share) < 2 or int(head_dim * share) % 2:
        raise FormatError(f"config.json: {share:g} of {head_dim} elements of a head rotate, expected an even number of them")
    return int(head_dim * share)


def _check(kind: str, parameters: dict[str, Any]) -> None:
    """Every number the type's formula takes is a positive one, and those it needs are there."""
    for name in _REQUIRED.get(kind, ()):
        if parameters.get(name) is None:
            raise FormatError(f"config.json: rope type {kind!r} needs {name!r}, which is missing")
    for name in (*_NUMBERS, *_NUMBERS_OR_ZERO):
        if parameters.get(name) not in ((None, 0) if name in _NUMBERS_OR_ZERO else (None,)):
            positive_number(parameters[name], f"rope {name}")
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise FormatError("config.json: rope high_freq_factor must be above low_freq_factor")
    for name in _LISTS:
        value = parameters.get(name)
        if value is not None and not isinstance(value, list):
            raise FormatError(f"config.json: rope {name} must be a list of numbers, found {quoted(value)}")
        for one in value or ():
            positive_number(one, f"each number of rope {name}")


def _check_table(rope: RopeConfig) -> None:
    """Positive numbers may yet make no table: a base of one, two borders that are the same, a list of another length."""
    for length in (None, rope.original_max_position + 1):
        try:
            with np.errstate(all="ignore"):
                inv_freq, scaling = rope_frequencies(rope, length)
        except (ArithmeticError, ValueError) as error:
            raise FormatError(f"config.json: the numbers of rope type {rope.kind!r} make no frequencies: {error}") from None
        if not (np.isfinite(inv_freq).all() and math.isfinite(scaling)):
            raise FormatError(f"config.json: the numbers of rope type {rope.kind!r} make frequencies that are not finite")


def rope_frequencies(rope: RopeConfig, seq_len: int | None = None) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 [rotary_dim / 2] and the factor on cos and sin.

    seq_len: tokens in the sequence; it matters only where `rope.depends_on_length` (None: as at start-up).
    """
    builder = _BUILDERS[rope.kind]
    inv_freq, scaling = builder(rope, seq_len)
    if inv_freq.shape != (rope.rotary_dim // 2,):
        raise FormatError(
            f"config.json: rope type {rope.kind!r} gives {inv_freq.size} frequencies, expected {rope.rotary_dim // 2}"
        )
    return inv_freq.astype(np.float32), scaling


def _plain(theta: float, dim: int) -> np.ndarray:
    return np.float32(1.0) / np.power(np.float32(theta), np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


def _default(rope: RopeConfig, seq_len: int | None) -> tuple[np.ndarray, float]:
    return _plain(rope.theta, rope.rotary_dim), 1.0


def _linear(rope: RopeConfig, seq_len: int | None) -> tuple[np.ndarray, float]:
    return _plain(rope.theta, rope.rotary_dim) / np.float32(rope.parameters["factor"]), 1.0


def _dynamic(rope: RopeConfig, seq_len: int | None) -> tuple[np.ndarray, float]:
    """NTK-aware base that grows once the sequence is longer than max_position."""
    factor, dim = float(rope.parameters["factor"]), rope.rotary_dim
    length = max(seq_len or 0, rope.max_position)
    growth = factor * length / rope.max_position - (factor - 1)
    return _plain(rope.theta * growth ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: RopeConfig, seq_len: int | None) -> tuple[np.ndarray, float]:
    """Long wavelengths divided by factor, short ones kept, a linear blend between."""
    p = rope.parameters
    factor, low, high = float(p["factor"]), float(p["low_freq_factor"]), float(p["high_freq_factor"])
    inv_freq = _plain(rope.theta, rope.rotary_dim)
    wavelength = 2 * math.pi / inv_freq
    blend = np.clip((rope.original_max_position / wavelength - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - blend) * inv_freq / np.float32(factor) + blend * inv_freq, 1.0


def _yarn(rope: RopeConfig, seq_len: int | None) -> tuple[np.ndarray, float]:
    """Interpolate low frequencies, keep high ones, ramp between the two rotation counts."""
    p, dim = rope.parameters, rope.rotary_dim
    factor = float(p.get("factor") or rope.max_position / rope.original_max_position)
    low, high = _yarn_range(rope)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1).astype(np.float32)
    inv_freq = _plain(rope.theta, dim)
    return inv_freq / np.float32(factor) * ramp + inv_freq * (1 - ramp), _yarn_scaling(p, factor)


def _yarn_range(rope: RopeConfig) -> tuple[float, float]:
    p, dim = rope.parameters, rope.rotary_dim

    def dimension(rotations: float) -> float:
        return dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(float(p.get("beta_fast") or 32)), dimension(float(p.get("beta_slow") or 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def _yarn_scaling(p: dict[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(float(p["mscale"])) / mscale(float(p["mscale_all_dim"]))
    return mscale(1.0)


def _longrope(rope: RopeConfig, seq_len: int | None) -> tuple[np.ndarray, float]:
    """Explicit divisors, one set up to the original length and another beyond."""
    p, original = rope.parameters, rope.original_max_position
    chosen = p["long_factor"] if seq_len and seq_len > original else p["short_factor"]
    factor = float(p.get("factor") or rope.max_position / original)
    scaling = p.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _divided(rope, chosen), float(scaling)


def _factors(rope: RopeConfig, seq_len: int | None) -> tuple[np.ndarray, float]:
    return _divided(rope, rope.parameters["factors"]), 1.0


def _divided(rope: RopeConfig, divisors: Any) -> np.ndarray:
    divisors = np.asarray(divisors, dtype=np.float32)
    inv_freq = _plain(rope.theta, rope.rotary_dim)
    return inv_freq / divisors if divisors.shape == inv_freq.shape else divisors


_BUILDERS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
}
