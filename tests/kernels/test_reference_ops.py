"""The reference ops against their written formula, computed here in float64 numpy, one element at a time where it matters."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels.attention import BatchDescription, PageMap

OPS = ReferenceOps()
RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def close(ours: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(ours.numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 16)])
def test_rms_norm_follows_its_formula(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), normal(shape[-1])
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    close(OPS.rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-5), expected)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 16)])
def test_layer_norm_follows_its_formula(shape: tuple[int, ...], has_bias: bool) -> None:
    x, weight, bias = normal(*shape) + 3, normal(shape[-1]), normal(shape[-1])
    wide = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight + bias * has_bias
    vectors = torch.from_numpy(weight), torch.from_numpy(bias) if has_bias else None
    close(OPS.layer_norm(torch.from_numpy(x), *vectors, 1e-5), expected)


def test_growth_follows_its_formula() -> None:
    x, positions = normal(4, 3, 5), np.array([0, 9, 10, 35])
    expected = x * (1 + 0.3 * np.log(1 + positions // 10))[:, None, None]
    close(OPS.growth(torch.from_numpy(x), torch.from_numpy(positions), 0.3, 10), expected)


def test_activation_is_the_gated_one_without_a_gate() -> None:
    x = torch.from_numpy(normal(3, 9))
    for name in ("silu", "gelu", "gelu_pytorch_tanh"):
        assert torch.equal(OPS.activation(x, name), OPS.gated_activation(x, torch.ones_like(x), name))


def test_rms_norm_of_zeros_is_zero_not_nan() -> None:
    zeros = torch.zeros(2, 8)
    assert torch.equal(OPS.rms_norm(zeros, torch.ones(8), 1e-6), zeros)


@pytest.mark.parametrize("rotary_dim", [8, 6, 2])
def test_rotary_turns_pairs_and_leaves_the_rest(rotary_dim: int) -> None:
    x, positions = normal(4, 3, 8), np.array([0, 1, 5, 1000])
    inv_freq = np.float32(1) / np.float32(100) ** (np.arange(0, rotary_dim, 2, dtype=np.float32) / rotary_dim)
    cos, sin = OPS.rotary_angles(torch.from_numpy(positions), torch.from_numpy(inv_freq), 1.5)
    y = OPS.rotary(torch.from_numpy(x), cos, sin).numpy()
    half = rotary_dim // 2
    for t, position in enumerate(positions):
        for i in range(half):
            angle = float(np.float32(position) * inv_freq[i])
            turned = 1.5 * np.exp(1j * angle) * (x[t, :, i] + 1j * x[t, :, i + half])
            np.testing.assert_allclose(y[t, :, i] + 1j * y[t, :, i + half], turned, rtol=1e-4, atol=1e-5)
    assert np.array_equal(y[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_activation_follows_its_formula(activation: str) -> None:
    from math import erf, exp, pi, sqrt, tanh

    formulas = {
        "silu": lambda v: v / (1 + exp(-v)),
        "gelu": lambda v: 0.5 * v * (1 + erf(v / sqrt(2))),
        "gelu_pytorch_tanh": lambda v: 0.5 * v * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 * v**3))),
    }
    gate, up = normal(3, 5), normal(3, 5)
    expected = np.vectorize(formulas[activation])(gate.astype(np.float64)) * up
    close(OPS.gated_activation(torch.from_numpy(gate), torch.from_numpy(up), activation), expected)


def test_clamped_swiglu_follows_its_formula() -> None:
    gate, up = 9 * normal(40, 5), 9 * normal(40, 5)
    wide, other = np.minimum(gate.astype(np.float64), 7), np.clip(up.astype(np.float64), -7, 7)
    expected = (other + 1) * wide / (1 + np.exp(-1.702 * wide))
    close(OPS.gated_activation(torch.from_numpy(gate), torch.from_numpy(up), "clamped_swiglu"), expected)


def test_gated_is_times_a_sigmoid() -> None:
    x, gate = normal(4, 6), normal(4, 1)
    close(OPS.gated(torch.from_numpy(x), torch.from_numpy(gate)), x / (1 + np.exp(-gate)))


def test_embedding_scales_rows() -> None:
    table = normal(10, 4)
    rows = OPS.embedding(torch.tensor([3, 3, 0]), torch.from_numpy(table), 2.5)
    close(rows, table[[3, 3, 0]] * 2.5)


def test_store_kv_skips_slot_minus_one_and_touches_nothing_else() -> None:
    pages = torch.full((3, 4, 2, 5), 9.0), torch.full((3, 4, 2, 5), 9.0)
    keys, values = torch.from_numpy(normal(3, 2, 5)), torch.from_numpy(normal(3, 2, 5))
    OPS.store_kv(keys, values, pages, SimpleNamespace(slot_mapping=torch.tensor([11, -1, 2])))
    for page, rows in zip(pages, (keys, values), strict=True):
        flat = page.view(12, 2, 5)
        assert torch.equal(flat[11], rows[0])
        assert torch.equal(flat[2], rows[2])
        untouched = [i for i in range(12) if i not in (11, 2)]
        assert bool((flat[untouched] == 9.0).all())


def plain_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention of the last len(q) positions over all keys, query by query, head by head."""
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        position = len(k) - len(q) + i
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(q.shape[1]):
            scores = k[first : position + 1, h // group].astype(np.float64) @ q[i, h] * scale
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            sink = 0.0 if sinks is None else np.exp(sinks[h] - scores.max())
            out[i, h] = (weights / (weights.sum() + sink)) @ v[first : position + 1, h // group]
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_over_scattered_pages(
    window: int | None, cap: float | None, heads: int, kv_heads: int, with_sinks: bool
) -> None:
    """Two sequences with shuffled pages, one decoding, one in the middle of its prompt."""
    block_size, head_dim = 4, 8
    key_pages, value_pages = (torch.from_numpy(normal(9, block_size, kv_heads, head_dim)) for _ in range(2))
    tables = [[7, 2, 5], [0, 8]]
    context_lens, num_queries = [11, 6], [1, 4]
    queries = normal(sum(num_queries), heads, head_dim)
    batch = BatchDescription(
        token_ids=None,
        positions=None,
        inv_freqs=[],
        cu_seqlens_q=[0, 1, 5],
        page_maps=[PageMap(None, context_lens, [torch.tensor(table) for table in tables])],
        block_size=block_size,
    )
    sinks = np.linspace(-3, 3, heads, dtype=np.float32) if with_sinks else None
    given = torch.from_numpy(sinks) if with_sinks else None
    y = OPS.attention(torch.from_numpy(queries), (key_pages, value_pages), batch, 0.3, window, cap, given)
    begin = 0
    for table, length, count in zip(tables, context_lens, num_queries, strict=True):
        k = key_pages[table].reshape(-1, kv_heads, head_dim)[:length].numpy()
        v = value_pages[table].reshape(-1, kv_heads, head_dim)[:length].numpy()
        expected = plain_attention(queries[begin : begin + count], k, v, 0.3, window, cap, sinks)
        close(y[begin : begin + count], expected)
        begin += count


def test_linear_reads_quantized_and_plain_weights_alike() -> None:
    from llmctl.kernels.formats.codecs import dequantize, quantize
    from llmctl.kernels.formats.spec import FORMATS

    x, weight, bias = normal(3, 64), normal(5, 64), normal(5)
    stored = quantize(weight, FORMATS["Q8_0"])
    y = OPS.linear(torch.from_numpy(x), OPS.prepare_weight(stored), OPS.prepare_vector(bias))
    close(y, x.astype(np.float64) @ dequantize(stored).T.astype(np.float64) + bias, 1e-4)
