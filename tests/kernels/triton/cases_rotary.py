"""rotary in Triton, and rope with norms and stores in one: against the reference's ops one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels.rotary import _triton as rotary_triton
from llmctl.kernels.rotary._reference import rotary, rotary_angles
from llmctl.kernels.rotary._triton import HeadNorms
from llmctl.kernels.store_kv._triton_pages import TritonPages

Guard = Callable[[torch.Tensor], torch.Tensor]
OPS = ReferenceOps()
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary_angles(torch.arange(tokens) * 97, 100.0 ** -(torch.arange(half) / half), 1.25)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("shape", "half"), [((5, 3, 24), 12), ((1, 1, 40), 8), ((70, 2, 10), 3)])
def test_rotary_is_the_reference(shape: tuple[int, ...], half: int, dtype: torch.dtype, guarded: Guard) -> None:
    x, (cos, sin) = torch.randn(shape).to(dtype), angles(shape[0], half)
    y = rotary_triton.rotary(guarded(x), guarded(cos), guarded(sin))
    expected = rotary(x.float(), cos, sin)
    torch.testing.assert_close(y.float(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert torch.equal(y[..., 2 * half :], x[..., 2 * half :])


def test_no_tokens_are_no_launch() -> None:
    assert rotary_triton.rotary(torch.empty(0, 2, 8), *angles(0, 4)).shape == (0, 2, 8)


@pytest.mark.parametrize("norm_heads", [0, 1, 6], ids=["no norm", "one norm", "a norm for each"])
@pytest.mark.parametrize("half", [0, 16, 12])
@pytest.mark.parametrize("kv_type", ["f32", "k=q8_0,v=fp8"])
def test_one_launch_is_the_ops_one_after_the_other(kv_type: str, half: int, norm_heads: int, guarded: Guard) -> None:
    tokens, heads, kv_heads, width = 9, 6, 2, 32
    queries, keys, values = (torch.randn(tokens, count, width) for count in (heads, kv_heads, kv_heads))
    slots = torch.tensor([3, 40, -1, 0, 17, 31, 32, -1, 47])
    pages = TritonPages.make(3, 16, kv_heads, width, kv_type, "cpu")
    for part in pages.parts:
        part.fill_(0xFF)
    turn = angles(tokens, half) if half else None
    weights = [torch.rand(width) + 0.5 if norm_heads == 1 else torch.rand(n, width) + 0.5 for n in (heads, kv_heads)]
    norms = HeadNorms(*weights, 1e-5) if norm_heads else None
    y = rotary_triton.rotary_store(guarded(queries), guarded(keys), guarded(values), turn, pages, guarded(slots), norms)
    if norm_heads:
        queries, keys = (OPS.rms_norm(x, weight, 1e-5) for x, weight in zip((queries, keys), weights, strict=True))
    if turn is not None:
        queries, keys = (rotary(x, *turn) for x in (queries, keys))
    torch.testing.assert_close(y, queries, rtol=1e-5, atol=1e-5)
    kept = slots >= 0
    step = 1e-5 if kv_type == "f32" else 0.04  # of q8_0 at ±4, where rounding may fall otherwise
    torch.testing.assert_close(pages.keys.read(slots[kept]), keys[kept], rtol=1e-5, atol=step)
    torch.testing.assert_close(pages.values.read(slots[kept]), values[kept], rtol=0.07 if kv_type != "f32" else 0, atol=0.002)
    others = [slot for slot in range(48) if slot not in slots.tolist()]
    assert pages.keys.read(torch.tensor(others)).isnan().all()
