"""moe: the reference against a sum written out, native code against the reference on every instruction set."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from test_routing import ROUTINGS

from llmctl.kernels.formats.codecs import dequantize, quantize
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.linear._native import pack_weight
from llmctl.kernels.moe import Experts, Routing
from llmctl.kernels.moe._native import make_moe
from llmctl.kernels.moe._reference import moe, route
from llmctl.kernels.native import _native as native
from llmctl.kernels.swiglu import GATED_ACTIVATIONS

HIDDEN, INTERMEDIATE = 96, 160
PARTS = ("gate", "up", "down")
MIXTRAL = ROUTINGS["mixtral"]
each_isa = pytest.mark.parametrize("isa", native.available_isas())


@cache
def weight(part: str, name: str, experts: int = 8, intermediate: int = INTERMEDIATE) -> QuantTensor | np.ndarray:
    """gate, up or down of random experts in one format."""
    shape = (HIDDEN, intermediate) if part == "down" else (intermediate, HIDDEN)
    values = np.random.default_rng(PARTS.index(part)).standard_normal((experts, *shape)).astype(np.float32)
    return quantize(values * shape[1] ** -0.5, FORMATS[name])


def weights(name: str, experts: int = 8) -> dict[str, QuantTensor | np.ndarray]:
    return {part: weight(part, name, experts) for part in PARTS}


def inputs(tokens: int, experts: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((tokens, HIDDEN)).astype(np.float32),
        rng.standard_normal((tokens, experts)).astype(np.float32),
    )


def expected(parts: dict, x: np.ndarray, logits: np.ndarray, routing: Routing, activation: str) -> np.ndarray:
    experts = reference_experts({part: dequantize(parts[part]) for part in PARTS})
    return moe(torch.from_numpy(x), torch.from_numpy(logits), experts, routing, activation).numpy()


def reference_experts(parts: dict[str, np.ndarray], **biases: np.ndarray) -> Experts:
    tensors = {name: torch.from_numpy(array) for name, array in {**parts, **biases}.items()}
    return Experts(**tensors, counts=np.zeros(len(parts["gate"]), np.int64))


def packed(parts: dict) -> list:
    return [pack_weight(parts[part]) for part in PARTS]


def run(parts: dict, x: np.ndarray, logits: np.ndarray, routing: Routing = MIXTRAL, threads: int = 2, **options) -> np.ndarray:
    options = {"activation": "silu", **options}
    return make_moe(native.ThreadPool(threads), *packed(parts), routing, **options).run(x, logits)


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def test_reference_is_the_weighted_sum_of_the_chosen_experts() -> None:
    x, logits = map(torch.from_numpy, inputs(5))
    experts, shares = route(logits, MIXTRAL)
    y = moe(x, logits, reference_experts(weights("F32")), MIXTRAL, "silu")
    parts = {name: torch.from_numpy(part) for name, part in weights("F32").items()}
    for t in range(5):
        total = torch.zeros(HIDDEN)
        for e, share in zip(experts[t], shares[t], strict=True):
            gate, up = parts["gate"][e] @ x[t], parts["up"][e] @ x[t]
            total += share * (parts["down"][e] @ (gate * gate.sigmoid() * up))
        np.testing.assert_allclose(y[t], total, rtol=1e-4, atol=1e-5)


@each_isa
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("name", ["F32", "F16", "Q4_0", "Q8_0"])
def test_float_activations_equal_the_reference(isa: str, tokens: int, name: str) -> None:
    x, logits = inputs(tokens)
    got = run(weights(name), x, logits, int8=False, isa=isa)
    assert relative_error(got, expected(weights(name), x, logits, MIXTRAL, "silu")) < 2e-5


@each_isa
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_int8_activations_come_near(isa: str, name: str) -> None:
    x, logits = inputs(33)
    got = run(weights(name), x, logits, isa=isa)
    assert 1e-6 < relative_error(got, expected(weights(name), x, logits, MIXTRAL, "silu")) < 2e-2


@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    x, logits = inputs(4)
    got = run(weights("F32"), x, logits, activation=activation)
    assert relative_error(got, expected(weights("F32"), x, logits, MIXTRAL, activation)) < 2e-5


@pytest.mark.parametrize("name", ["olmoe", "one", "deepseek-v2", "deepseek-v3"])
def test_every_routing(name: str) -> None:
    routing = ROUTINGS[name]
    x, logits = inputs(20, experts=16)
    parts = weights("F32", experts=16)
    got = run(parts, x, logits, routing)
    assert relative_error(got, expected(parts, x, logits, routing, "silu")) < 2e-5


def test_odd_sizes_and_mixed_formats() -> None:
    parts = {
        "gate": weight("gate", "Q4_0", intermediate=72),
        "up": weight("up", "F16", intermediate=72),
        "down": weight("down", "F32", intermediate=72),
    }
    x, logits = inputs(11)
    assert relative_error(run(parts, x, logits, int8=False), expected(parts, x, logits, MIXTRAL, "silu")) < 2e-5
    assert relative_error(run(parts, x, logits), expected(parts, x, logits, MIXTRAL, "silu")) < 2e-2


def test_experts_may_be_weights_of_their_own() -> None:
    parts, (x, logits) = weights("Q8_0"), inputs(6)
    apart = [
        [pack_weight(QuantTensor(tensor.format, tensor.shape[1:], blocks)) for blocks in tensor.blocks]
        for tensor in parts.values()
    ]
    got = make_moe(native.ThreadPool(2), *apart, MIXTRAL, "silu").run(x, logits)
    assert np.array_equal(got, run(parts, x, logits))


def test_no_tokens_and_no_numbers() -> None:
    x, logits = inputs(3)
    assert run(weights("Q8_0"), x[:0], logits[:0]).shape == (0, HIDDEN)
    x[1, 5] = np.nan
    logits[2] = np.nan
    y = run(weights("Q8_0"), x, logits)
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()
    assert np.isnan(y[2]).all()


def test_what_does_not_belong_together_is_refused() -> None:
    gate, up, down = packed(weights("Q8_0"))
    pool = native.ThreadPool(1)
    for wrong, message in (((gate, up, gate), "hidden size"), ((gate, down, down), "hidden size"), ((gate, [], down), "expert")):
        with pytest.raises(ValueError, match=message):
            make_moe(pool, *wrong, MIXTRAL, "silu")
    with pytest.raises(ValueError, match="activation must be"):
        make_moe(pool, gate, up, down, MIXTRAL, "relu")
    experts = make_moe(pool, gate, up, down, MIXTRAL, "silu")
    x, logits = inputs(2)
    with pytest.raises(ValueError, match="hidden size"):
        experts.run(x[:, :-1].copy(), logits)
    with pytest.raises(ValueError, match="one router logit"):
        experts.run(x, logits[:, :-1].copy())
