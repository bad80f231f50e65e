"""A model's rope as transformers writes it: `rope_theta` and `rope_scaling`, which versions 4 and 5 both read.

GGUF keeps llama3 scaling as a tensor of divisors. The numbers they came from are found again; divisors of another origin are
written as the longrope type with both its lists alike, which says the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from llmctl.quant.expressible import same_rope
from llmctl.runtime.models.hf_config import MAX_COUNT
from llmctl.runtime.models.rope import RopeConfig, rope_frequencies

# low_freq_factor, high_freq_factor: Llama 3's, then what is left to try.
_BANDS = ((1.0, 4.0), (1.0, 2.0), (1.0, 8.0), (1.0, 16.0), (1.0, 32.0), (2.0, 4.0), (2.0, 8.0), (0.5, 2.0))
_ORIGINAL_LENGTHS = tuple(1 << bits for bits in range(5, 21))


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """The value of `rope_scaling`; None where nothing is scaled."""
    if rope.kind == "default":
        return None
    if rope.kind == "factors":
        return _llama3(rope) or _explicit(rope)
    numbers = {key: round_trip(value) for key, value in rope.parameters.items() if key not in ("type", "rope_theta")}
    scaling = {**numbers, "rope_type": rope.kind}
    if rope.kind in ("yarn", "longrope", "llama3"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    return scaling


def round_trip(value: Any) -> Any:
    """A number of float32 as the shortest decimal that is read as the same one (1e-05, not 9.999999747378752e-06)."""
    if isinstance(value, list):
        return [round_trip(one) for one in value]
    if not isinstance(value, float) or float(np.float32(value)) != value:
        return value
    return float(str(np.float32(value)))


def _llama3(rope: RopeConfig) -> dict[str, Any] | None:
    """The llama3 scaling that has these divisors, if one has."""
    divisors = np.asarray(rope.parameters["factors"], np.float64)
    factor = round_trip(float(np.float32(divisors.max())))
    if factor <= 1:
        return None
    for original, low, high in _guesses(rope, divisors, factor):
        numbers = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
        found = {"rope_type": "llama3", **numbers, "original_max_position_embeddings": original}
        if same_rope(rope, RopeConfig("llama3", rope.theta, rope.rotary_dim, original, rope.max_position, found)):
            return found
    return None


def _guesses(rope: RopeConfig, divisors: np.ndarray, factor: float) -> Iterator[tuple[int, float, float]]:
    """(original length, low, high) to try. Between the bands the blend tells the length, where a frequency lies there."""
    plain = RopeConfig("default", rope.theta, rope.rotary_dim, rope.max_position, rope.max_position)
    turns = rope_frequencies(plain)[0].astype(np.float64) / (2 * np.pi)  # of one token
    blend = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = np.flatnonzero((blend > 1e-4) & (blend < 1 - 1e-4))
    for low, high in _BANDS:
        if len(between):
            length = float(np.median((blend[between] * (high - low) + low) / turns[between]))
            if 1 <= length <= MAX_COUNT:
                yield round(length), low, high
        else:
            yield from ((length, low, high) for length in _ORIGINAL_LENGTHS)


def _explicit(rope: RopeConfig) -> dict[str, Any]:
    factors = round_trip(rope.parameters["factors"])
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": rope.max_position,
    }
