"""moe as part of a native program: the same as the reference op, whatever the number of tokens, chunks and threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import row_programs
import torch

from llmctl.kernels._native import NativeOps
from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels.formats.codecs import quantize
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.moe import Experts, Routing
from llmctl.kernels.ops import Ops

HIDDEN, INNER, COUNT, TOKENS, SHARED = 64, 96, 6, 500, 48
ROUTING = Routing(COUNT, 2, renormalize=True)
BIASES = ("gate_bias", "up_bias", "down_bias")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


TABLE, ROUTER = normal(TOKENS, HIDDEN, seed=1), normal(COUNT, HIDDEN, seed=2)


def experts_of(ops: Ops, form: str = "F32", *, apart: bool = False, biases: bool = False) -> Experts:
    """Experts prepared from three-dimensional weights, or from a matrix each."""
    sides = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    parts: dict[str, Any] = {}
    for seed, (name, shape) in enumerate(sides.items()):
        values = normal(COUNT, *shape, seed=10 + seed) * shape[1] ** -0.5
        stored = [quantize(one, FORMATS[form]) for one in values] if apart else quantize(values, FORMATS[form])
        parts[name] = [ops.prepare_weight(one) for one in stored] if apart else ops.prepare_weight(stored)
        if biases:
            parts[f"{name}_bias"] = ops.prepare_vector(normal(COUNT, shape[0], seed=20 + seed))
    return Experts(**parts, counts=np.zeros(COUNT, np.int64))


Forward = Callable[[Ops, Any], Any]


def mixture(experts: Experts, routing: Routing = ROUTING, activation: str = "silu") -> Forward:
    def forward(ops: Ops, x: Any) -> Any:
        return ops.moe(x, ops.linear(x, ops.prepare_weight(ROUTER)), experts, routing, activation)

    return forward


def block(experts: Experts, *, shared: bool = True, gated: bool = True, residual: bool = True) -> Forward:
    """What a layer makes of it: the mixture with an expert that all tokens share, behind a gate, and the residual."""

    def forward(ops: Ops, x: Any) -> Any:
        def linear(x: Any, rows: int, columns: int, seed: int) -> Any:
            return ops.linear(x, ops.prepare_weight(normal(rows, columns, seed=seed) * np.float32(columns**-0.5)))

        h = ops.rms_norm(x, ops.prepare_vector(1 + normal(HIDDEN, seed=30) / 4), 1e-5)
        y = mixture(experts)(ops, h)
        if shared:
            gate, up = linear(h, SHARED, HIDDEN, 31), linear(h, SHARED, HIDDEN, 32)
            other = linear(ops.gated_activation(gate, up, "silu"), HIDDEN, SHARED, 33)
            y = ops.add(y, ops.gated(other, linear(h, 1, HIDDEN, 34)) if gated else other)
        return ops.add(x, y) if residual else y

    return forward


BLOCKS = [{}, {"gated": False}, {"shared": False}, {"residual": False}]


def computed(ops: NativeOps, forward: Forward, sizes: tuple[int, ...] | None = None) -> np.ndarray:
    return row_programs.computed(ops, TABLE, lambda x: forward(ops, x), sizes)


def expected(forward: Callable[[Experts], Forward], **choices: Any) -> np.ndarray:
    ops = ReferenceOps()
    return forward(experts_of(ops, **choices))(ops, torch.from_numpy(TABLE)).numpy()


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_a_program_equals_the_reference(activation: str, biases: bool) -> None:
    ops = NativeOps(2, "float")
    found = computed(ops, mixture(experts_of(ops, biases=biases), activation=activation))
    wanted = expected(lambda experts: mixture(experts, activation=activation), biases=biases)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", BIASES)
def test_every_bias_matters(bias: str) -> None:
    """With one of them left out the reference is another function."""
    ops = NativeOps(2, "float")
    experts = experts_of(ops, biases=True)
    whole = computed(ops, mixture(experts))
    without = Experts(**{**vars(experts), bias: None})
    assert np.abs(computed(ops, mixture(without)) - whole).max() > 0.1


CUTS = ((2, (1,) * 9 + (TOKENS - 9,)), (1, (7, 1, 290, 2, 200)), (3, (333, 20, 147)))


@pytest.mark.parametrize("choices", BLOCKS, ids=str)
def test_a_whole_block_equals_the_reference(choices: dict[str, bool]) -> None:
    found = computed(NativeOps(2, "float"), block(experts_of(NativeOps(1, "float")), **choices))
    wanted = expected(lambda experts: block(experts, **choices))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("choices", BLOCKS, ids=str)
def test_bits_of_a_whole_block(choices: dict[str, bool]) -> None:
    experts = experts_of(NativeOps(1), "Q8_0", biases=True)
    whole = computed(NativeOps(1), block(experts, **choices))
    for threads, sizes in CUTS:
        np.testing.assert_array_equal(computed(NativeOps(threads), block(experts, **choices), sizes), whole)


@pytest.mark.parametrize("form", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_bits_depend_on_neither_chunks_nor_threads(form: str, activations: str) -> None:
    ops = NativeOps(1, activations)
    whole = computed(ops, mixture(experts_of(ops, form, biases=True)))
    for threads, sizes in CUTS:
        ops = NativeOps(threads, activations)
        found = computed(ops, mixture(experts_of(ops, form, biases=True)), sizes)
        np.testing.assert_array_equal(found, whole)


def test_a_matrix_an_expert_is_the_same_as_one_weight() -> None:
    ops = NativeOps(2)
    whole, apart = (computed(ops, mixture(experts_of(ops, "Q8_0", apart=apart))) for apart in (False, True))
    np.testing.assert_array_equal(whole, apart)


def test_tokens_are_counted_by_expert() -> None:
    ops, reference = NativeOps(2, "float"), ReferenceOps()
    native, plain = experts_of(ops), experts_of(reference)
    computed(ops, mixture(native), (1, 9, TOKENS - 10))
    mixture(plain)(reference, torch.from_numpy(TABLE))
    assert plain.counts.sum() == TOKENS * ROUTING.top_k
    assert native.counts.tolist() == plain.counts.tolist()


def test_what_is_not_as_wide_as_the_experts_is_refused() -> None:
    ops = NativeOps(1)
    experts = experts_of(ops)
    with pytest.raises(ValueError, match="not as wide as the experts"):
        computed(ops, lambda ops, x: ops.moe(x, x, experts, ROUTING, "silu"))
    short = Experts(**{**vars(experts), "gate_bias": normal(COUNT, INNER - 1)})
    with pytest.raises(ValueError, match="one bias a row"):
        computed(ops, mixture(short))
