"""Ops that work on rows: norms, activations, the residual stream. Against the reference, at sizes that fill no block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmctl.kernels import _triton_elementwise as elementwise
from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels.layer_norm import _reference as layer_reference
from llmctl.kernels.layer_norm import _triton as layer_triton
from llmctl.kernels.rms_norm import _reference as rms_reference
from llmctl.kernels.rms_norm import _triton as rms_triton
from llmctl.kernels.swiglu import ACTIVATIONS, GATED_ACTIVATIONS
from llmctl.kernels.swiglu import _reference as swiglu_reference
from llmctl.kernels.swiglu import _triton as swiglu_triton
from llmctl.kernels.triton_lib.activations import quantize_rows

Guard = Callable[[torch.Tensor], torch.Tensor]
DTYPES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 128), (1, 1000)])
def test_rms_norm_is_the_reference(shape: tuple[int, ...], dtype: torch.dtype, guarded: Guard) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1])
    y = rms_triton.rms_norm(guarded(x), guarded(weight), 1e-5)
    torch.testing.assert_close(y, rms_reference.rms_norm(x, weight, 1e-5), rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_of_a_sum_keeps_the_sum(dtype: torch.dtype, guarded: Guard) -> None:
    x, addend, weight = torch.randn(3, 100).to(dtype), torch.randn(3, 100).to(dtype), torch.randn(100)
    total, y = rms_triton.add_rms_norm(guarded(x), guarded(addend), guarded(weight), 1e-5)
    step = 0.0 if dtype != torch.bfloat16 else 2**-7  # the interpreter cuts bf16 off where a GPU rounds
    torch.testing.assert_close(total, x + addend, rtol=step, atol=0.0)
    torch.testing.assert_close(y, rms_reference.rms_norm(total, weight, 1e-5), rtol=DTYPES[dtype], atol=DTYPES[dtype])


def test_every_head_has_its_own_weight(guarded: Guard) -> None:
    x, weight = torch.randn(2, 3, 16), torch.randn(3, 16)
    y = rms_triton.rms_norm(guarded(x), guarded(weight), 1e-5)
    torch.testing.assert_close(y, rms_reference.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=2e-6)


def test_no_rows_are_no_launch() -> None:
    assert rms_triton.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_is_the_reference(dtype: torch.dtype, has_bias: bool, guarded: Guard) -> None:
    x, weight, bias = (torch.randn(3, 100) + 2).to(dtype), torch.randn(100), torch.randn(100) if has_bias else None
    y = layer_triton.layer_norm(guarded(x), guarded(weight), None if bias is None else guarded(bias), 1e-5)
    tolerance = 2 * DTYPES[dtype]
    torch.testing.assert_close(y, layer_reference.layer_norm(x, weight, bias, 1e-5), rtol=tolerance, atol=tolerance)


def test_layer_norm_of_heads_has_a_weight_for_each(guarded: Guard) -> None:
    x, weight = torch.randn(2, 3, 16), torch.randn(3, 16)
    y = layer_triton.layer_norm(guarded(x), guarded(weight), None, 1e-5)
    torch.testing.assert_close(y, layer_reference.layer_norm(x, weight, None, 1e-5), rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("name", GATED_ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activation_is_the_reference(name: str, dtype: torch.dtype, guarded: Guard) -> None:
    gate, up = (6 * torch.randn(3, 700)).to(dtype), (6 * torch.randn(3, 700)).to(dtype)
    y = swiglu_triton.gated_activation(guarded(gate), guarded(up), name)
    expected = swiglu_reference.gated_activation(gate.double(), up.double(), name).to(dtype)
    largest = float((gate.double() * up.double()).abs().max())  # what cancels in 1 + erf is as wrong as that
    torch.testing.assert_close(y, expected, rtol=2 * DTYPES[dtype], atol=max(2 * DTYPES[dtype], largest * 2**-24))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_the_reference(name: str, guarded: Guard) -> None:
    x = 6 * torch.randn(3, 700)
    y = swiglu_triton.activation(guarded(x), name)
    torch.testing.assert_close(y, swiglu_reference.activation(x, name), rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_gated_and_growth_are_the_reference(dtype: torch.dtype, guarded: Guard) -> None:
    x, gate = (40 * torch.randn(3, 5, 300)).to(dtype), torch.randn(3, 1).to(dtype)
    positions = torch.tensor([0, 8191, 70000])
    pairs = [
        (elementwise.softcap(guarded(x), 30.0), ReferenceOps.softcap(x.float(), 30.0)),
        (elementwise.gated(guarded(x[:, 0]), guarded(gate)), ReferenceOps.gated(x[:, 0].float(), gate.float())),
        (elementwise.growth(guarded(x), guarded(positions), 0.1, 8192), ReferenceOps.growth(x.float(), positions, 0.1, 8192)),
    ]
    for y, expected in pairs:
        torch.testing.assert_close(y, expected.to(dtype), rtol=2 * DTYPES[dtype], atol=2 * DTYPES[dtype])


def test_nothing_is_done_for_no_numbers() -> None:
    none = torch.empty(0, 8)
    assert swiglu_triton.gated_activation(none, none, "silu").shape == (0, 8)
    assert layer_triton.layer_norm(none, torch.ones(8), None, 1e-5).shape == (0, 8)
    assert elementwise.softcap(none, 3.0).shape == elementwise.gated(none, none[:, :1]).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_is_rounded_on_the_way_is_what_quantize_rows_makes_of_the_result(dtype: torch.dtype, guarded: Guard) -> None:
    x, addend, weight = torch.randn(3, 96).to(dtype), torch.randn(3, 96).to(dtype), torch.randn(96)
    total, y, rounded = rms_triton.rounded_rms_norm(guarded(x), guarded(addend), guarded(weight), 1e-5)
    assert torch.equal(total, x + addend)
    assert torch.equal(y, rms_triton.rms_norm(total, weight, 1e-5))
    gated, gated_rows = swiglu_triton.rounded_gated_activation(guarded(x), guarded(addend), "silu")
    assert torch.equal(gated, swiglu_triton.gated_activation(x, addend, "silu"))
    for values, found in ((y, rounded), (gated, gated_rows)):
        expected = quantize_rows(values)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scales, expected.scales)
        torch.testing.assert_close(found.sums, expected.sums, rtol=1e-6, atol=1e-6)
