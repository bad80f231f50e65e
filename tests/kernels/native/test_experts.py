"""Experts in native code without torch: bits for any batch and any threads, and a plain sum in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.kernels.formats.codecs import dequantize, quantize
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.linear._native import pack_weight
from llmctl.kernels.moe import Routing
from llmctl.kernels.moe._native import make_moe, native_routing
from llmctl.kernels.native import _native as native

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 8, 64, 96, 300
ROUTING = Routing(EXPERTS, 2, renormalize=True)
each_isa = pytest.mark.parametrize("isa", native.available_isas())


@pytest.fixture(scope="module")
def weights() -> list:
    """gate, up, down in Q4_0."""
    rng = np.random.default_rng(0)
    shapes = [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    return [quantize(rng.standard_normal((EXPERTS, *shape)).astype(np.float32) / 8, FORMATS["Q4_0"]) for shape in shapes]


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, np.ndarray]:
    """x and router logits; one expert has more tokens than one piece of work holds, others few or none."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    logits = rng.standard_normal((TOKENS, EXPERTS)).astype(np.float32)
    logits[:280, 3] += 20
    logits[:, 6] -= 20
    return x, logits


@each_isa
@pytest.mark.parametrize("int8", [True, False])
def test_a_token_does_not_depend_on_the_others_or_on_threads(isa: str, int8: bool, weights: list, batch: tuple) -> None:
    packed = [pack_weight(weight) for weight in weights]
    x, logits = batch
    together = make_moe(native.ThreadPool(3), *packed, ROUTING, "silu", int8=int8, isa=isa).run(x, logits)
    alone = make_moe(native.ThreadPool(1), *packed, ROUTING, "silu", int8=int8, isa=isa)
    for first, last in ((0, 1), (1, 9), (9, 150), (299, 300), (0, 300)):
        assert np.array_equal(alone.run(x[first:last], logits[first:last]), together[first:last])


@each_isa
def test_equals_the_weighted_sum(isa: str, weights: list, batch: tuple) -> None:
    x, logits = batch
    experts, shares = native.route(native_routing(ROUTING), logits)
    gate, up, down = (dequantize(weight).astype(np.float64) for weight in weights)
    expected = np.zeros((TOKENS, HIDDEN))
    for t in range(TOKENS):
        for expert, share in zip(experts[t], shares[t], strict=True):
            g, u = gate[expert] @ x[t], up[expert] @ x[t]
            expected[t] += share * (down[expert] @ (g / (1 + np.exp(-g)) * u))
    got = make_moe(native.ThreadPool(2), *map(pack_weight, weights), ROUTING, "silu", int8=False, isa=isa).run(x, logits)
    assert np.linalg.norm(got - expected) < 1e-5 * np.linalg.norm(expected)
