"""The native norm and element-wise kernels, every instruction set of the machine: against torch in float64, any length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from llmctl.kernels.native import _native as native
from llmctl.kernels.swiglu._reference import gated_activation

LENGTHS = [1, 3, 15, 16, 17, 48, 63, 64, 65, 80, 127, 576, 1000]
ULP = 2.0**-23
every_isa = pytest.mark.parametrize("isa", native.available_isas())
every_length = pytest.mark.parametrize("n", LENGTHS)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[-1]).standard_normal(shape, dtype=np.float32)


def exact(function: Callable[[torch.Tensor], torch.Tensor], x: np.ndarray) -> np.ndarray:
    return function(torch.from_numpy(x).double()).numpy()


@every_isa
@every_length
def test_rms_norm(isa: str, n: int) -> None:
    x, weight = normal(2, n)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean() + 1e-5) * weight
    np.testing.assert_allclose(native.rms_norm(isa, x, weight, 1e-5), expected, rtol=1e-6, atol=1e-7)


@every_isa
@every_length
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(isa: str, n: int, has_bias: bool) -> None:
    """Of numbers whose mean is many times what they differ by."""
    x, weight, offset = normal(3, n)
    x, bias = x + 30, offset if has_bias else None
    wide = x.astype(np.float64) - x.astype(np.float64).mean()
    expected = wide / np.sqrt((wide**2).mean() + 1e-5) * weight + (offset if has_bias else 0)
    np.testing.assert_allclose(native.layer_norm(isa, x, weight, bias, 1e-5), expected, rtol=1e-5, atol=2e-5)


@every_isa
def test_rms_norm_of_zeros_is_zero_not_nan(isa: str) -> None:
    np.testing.assert_array_equal(native.rms_norm(isa, np.zeros(20, np.float32), np.ones(20, np.float32), 1e-6), 0)


@every_isa
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (128, 64), (80, 40), (16, 4), (24, 12), (64, 8), (8, 1), (256, 127)])
def test_rotary_has_the_bits_of_the_formula(isa: str, head_dim: int, half: int) -> None:
    head, angles = normal(head_dim), 3 * normal(half)
    cos, sin = np.cos(angles), np.sin(angles)
    expected = head.copy()
    expected[:half] = head[:half] * cos - head[half : 2 * half] * sin
    expected[half : 2 * half] = head[half : 2 * half] * cos + head[:half] * sin
    np.testing.assert_array_equal(native.rotary(isa, head, cos, sin), expected)


@every_isa
@every_length
def test_add_and_scale_have_the_bits_of_numpy(isa: str, n: int) -> None:
    x, y = normal(2, n)
    np.testing.assert_array_equal(native.add(isa, x, y), x + y)
    np.testing.assert_array_equal(native.scale(isa, x, 0.3), x * np.float32(0.3))


ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
}
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@every_isa
@every_activation
@every_length
def test_gated_activation_of_any_length(isa: str, activation: str, n: int) -> None:
    gate, up = normal(2, n)
    expected = exact(ACTIVATIONS[activation], gate) * up
    np.testing.assert_allclose(native.gated_activation(isa, gate, up, activation), expected, rtol=2e-6, atol=2e-7)


@every_isa
def test_silu_to_a_few_units_in_the_last_place(isa: str) -> None:
    x = np.linspace(-86, 100, 300_001, dtype=np.float32)
    expected = exact(functional.silu, x)
    ours = native.gated_activation(isa, x, np.ones_like(x), "silu")
    assert np.abs(ours[x != 0] / expected[x != 0] - 1).max() < 3.5 * ULP


@every_isa
@pytest.mark.parametrize(("activation", "ulps"), [("gelu_pytorch_tanh", 12), ("gelu", 2)])
def test_gelu_where_it_does_not_vanish(isa: str, activation: str, ulps: float) -> None:
    """Relative on the right; on the left 1 + erf(x) cancels, in the reference too, so the error is absolute."""
    x = np.linspace(-10, 10, 300_001, dtype=np.float32)
    expected = exact(ACTIVATIONS[activation], x)
    error = np.abs(native.gated_activation(isa, x, np.ones_like(x), activation) - expected)
    assert error[x > 0].max() <= (ulps * ULP * expected[x > 0]).max()
    assert (error / np.maximum(np.abs(x), 1e-30)).max() < ulps * ULP


@every_isa
@every_activation
def test_activations_at_the_ends(isa: str, activation: str) -> None:
    x = np.array([0, -0.0, np.inf, -np.inf, 1e30, -1e30, 3.4e38, -3.4e38, 1e-30, -1e-30, 88.8, -88.8, -200], np.float32)
    ours = native.gated_activation(isa, x, np.ones_like(x), activation)
    expected = np.where(x > 1, x, np.where(x < -1, 0, x / 2))
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-30)
    assert np.isnan(native.gated_activation(isa, np.full(17, np.nan, np.float32), np.ones(17, np.float32), activation)).all()


@every_isa
@every_length
def test_clamped_swiglu_of_any_length(isa: str, n: int) -> None:
    gate, up = 5 * normal(2, n)
    expected = exact(lambda x: gated_activation(x[0], x[1], "clamped_swiglu"), np.stack([gate, up]))
    np.testing.assert_allclose(native.gated_activation(isa, gate, up, "clamped_swiglu"), expected, rtol=2e-6, atol=2e-7)


@every_isa
def test_clamped_swiglu_at_the_ends(isa: str) -> None:
    inf, nan = np.inf, np.nan
    gate, up = np.array([[inf, -inf, 7, 7, 0, nan, 1], [1, 1, inf, -inf, 1, 1, nan]], np.float32)
    largest = 7 / (1 + np.exp(-7 * 1.702))
    expected = [2 * largest, 0, 8 * largest, -6 * largest, 0, nan, nan]
    np.testing.assert_allclose(native.gated_activation(isa, gate, up, "clamped_swiglu"), expected, rtol=1e-6, atol=1e-30)


@every_isa
@pytest.mark.parametrize("cap", [1.0, 0.5, 30.0])
def test_softcap_to_a_few_units_in_the_last_place(isa: str, cap: float) -> None:
    """The whole of tanh: small, around the change of formula, saturated."""
    x = np.concatenate([np.linspace(-12, 12, 200_001), [1e-30, -1e-20, 0.0, 1e30, -1e30, np.inf, -np.inf]]).astype(np.float32)
    x *= np.float32(cap)
    expected = exact(lambda t: cap * torch.tanh(t / cap), x)
    ours = native.softcap(isa, x, cap)
    assert np.abs(ours - expected)[expected == 0].max() == 0
    assert np.abs(ours[expected != 0] / expected[expected != 0] - 1).max() < 3 * ULP
    assert np.isnan(native.softcap(isa, np.full(1, np.nan, np.float32), cap)).all()


@every_isa
@every_length
def test_an_element_does_not_depend_on_its_place(isa: str, n: int) -> None:
    """The last, incomplete vector computes what whole ones do."""
    x, y = normal(2, n + 16)
    for activation in ACTIVATIONS:
        whole = native.gated_activation(isa, x, y, activation)
        np.testing.assert_array_equal(native.gated_activation(isa, x[16:], y[16:], activation), whole[16:])
    np.testing.assert_array_equal(native.softcap(isa, x[16:], 2.0), native.softcap(isa, x, 2.0)[16:])


@every_isa
def test_lengths_that_do_not_match_are_refused(isa: str) -> None:
    short, long = np.ones(3, np.float32), np.ones(4, np.float32)
    with pytest.raises(ValueError, match="same length"):
        native.add(isa, short, long)
    with pytest.raises(ValueError, match="activation must be"):
        native.gated_activation(isa, long, long, "relu")
