"""Rope scaling as transformers writes it, of models as GGUF has them."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.quant.rope_json import rope_scaling, round_trip
from llmctl.runtime.models.gguf_config import llama3_divisors
from llmctl.runtime.models.rope import RopeConfig


def with_divisors(divisors: np.ndarray, theta: float = 500_000.0) -> RopeConfig:
    """What a reader of rope_freqs.weight knows."""
    return RopeConfig("factors", theta, 2 * len(divisors), 131_072, 131_072, {"factors": divisors.tolist()})


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "low", "high", "original"),
    [
        (128, 500_000.0, 8.0, 1.0, 4.0, 8192),  # Llama 3.1
        (64, 500_000.0, 32.0, 1.0, 4.0, 8192),  # Llama 3.2 1B
        (128, 1_000_000.0, 16.0, 1.0, 8.0, 4096),
        (32, 10_000.0, 4.0, 2.0, 4.0, 2048),
    ],
)
def test_llama3_numbers_are_found_again(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> None:
    numbers = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    divisors = llama3_divisors(RopeConfig("llama3", theta, head_dim, original, 131_072, numbers))
    assert divisors[0] == 1
    assert divisors[-1] == factor
    found = rope_scaling(with_divisors(divisors, theta))
    assert found is not None
    assert found["rope_type"] == "llama3"
    again = llama3_divisors(RopeConfig("llama3", theta, head_dim, found["original_max_position_embeddings"], 131_072, found))
    np.testing.assert_allclose(again, divisors, rtol=2e-6)
    if (low, high) == (1.0, 4.0):
        assert found == {"rope_type": "llama3", **numbers, "original_max_position_embeddings": original}


@pytest.mark.parametrize("divisors", [np.ones(16), np.linspace(1, 9, 16), np.full(16, 3e38), np.full(16, 1e-30), np.r_[1, 5e30]])
def test_other_divisors_are_kept_as_they_are(divisors: np.ndarray) -> None:
    divisors = divisors.astype(np.float32)
    found = rope_scaling(with_divisors(divisors))
    assert found is not None
    if found["rope_type"] == "longrope":
        assert np.float32(found["long_factor"]).tolist() == np.float32(found["short_factor"]).tolist() == divisors.tolist()
        assert found["attention_factor"] == 1.0


def test_numbers_of_float32_are_written_short() -> None:
    assert round_trip(float(np.float32(1e-5))) == 1e-5
    assert round_trip(0.1) == 0.1
    assert round_trip([float(np.float32(1.1)), 2]) == [1.1, 2]
    assert np.float32(round_trip(float(np.float32(np.pi)))) == np.float32(np.pi)
    assert round_trip(True) is True
