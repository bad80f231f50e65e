"""The reference ops against their written formula, computed here in float64 numpy, one element at a time where it matters."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmctl.kernels._reference import ReferenceOps, ReferencePages
from llmctl.kernels.attention import BatchDescription, PageMap
from llmctl.kernels.kv_types import KV_TYPES, sides_of
from llmctl.kernels.native import _native as native
from llmctl.kernels.store_kv.rounding import as_kept, rotate

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


TYPES = [*KV_TYPES, "k=q8_0,v=q4_0"]


def stored(kv_type: str, keys: np.ndarray, values: np.ndarray | None, slots: list[int], latent: int = 0) -> ReferencePages:
    """Pages of 3 · 4 slots with these rows in them."""
    pages = OPS.kv_pages(3, 4, keys.shape[1], keys.shape[2], kv_type, latent)
    rows = [side if side is None else torch.from_numpy(side) for side in (keys, values)]
    OPS.store_kv(*rows, pages, SimpleNamespace(slot_mapping=torch.tensor(slots)))
    return pages


@pytest.mark.parametrize("kv_type", TYPES)
def test_store_kv_skips_slot_minus_one_and_touches_nothing_else(kv_type: str) -> None:
    before = normal(12, 2, 64)
    pages = stored(kv_type, before, -before, list(range(12)))
    old = [side.read(torch.arange(12)) for side in (pages.keys, pages.values)]
    keys, values = 4 * normal(3, 2, 64), 4 * normal(3, 2, 64)
    slots = SimpleNamespace(slot_mapping=torch.tensor([11, -1, 2]))
    OPS.store_kv(torch.from_numpy(keys), torch.from_numpy(values), pages, slots)
    for side, was, rows in zip((pages.keys, pages.values), old, (keys, values), strict=True):
        now = side.read(torch.arange(12))
        changed = [i for i in range(12) if not torch.equal(now[i], was[i])]
        assert changed == [2, 11]
        step = np.abs(rows[[2, 0]]).max() / 4
        assert np.abs(now[[2, 11]].numpy() - rows[[2, 0]]).max() < step


@pytest.mark.parametrize("kv_type", TYPES)
def test_pages_hold_what_the_native_ones_do(kv_type: str) -> None:
    """Within a step of the type's, where the middle of two codes is rounded to either side."""
    rows = normal(12, 2, 64)
    keys, values = sides_of(kv_type)
    ours, theirs = stored(kv_type, rows, 2 * rows, list(range(12))), native.KvPages(1, 2, 64, keys, 0, values)
    native.store_kv("generic", theirs, rows, 2 * rows, np.arange(12))
    both = zip((ours.keys, ours.values), native.load_kv("generic", theirs, np.arange(12)), strict=True)
    for side, expected in both:
        found = side.read(torch.arange(12)).numpy()
        assert (np.abs(found - expected) > 1e-5).any(axis=-1).mean() < 0.1
        np.testing.assert_allclose(found, expected, atol=0.5 * np.abs(rows).max())


@pytest.mark.parametrize("kv_type", TYPES)
def test_a_page_is_copied_whole(kv_type: str) -> None:
    rows = normal(12, 2, 64)
    pages = stored(kv_type, rows, -rows, list(range(12)))
    OPS.copy_page(pages, 2, 0)
    for side in (pages.keys, pages.values):
        now = side.read(torch.arange(12))
        assert torch.equal(now[:4], now[8:])
        assert not torch.equal(now[4:8], now[8:])


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_latent_values_are_the_first_of_the_keys(kv_type: str) -> None:
    pages = stored(kv_type, normal(12, 1, 96), None, list(range(12)), latent=64)
    assert torch.equal(pages.values.read(torch.arange(5)), pages.keys.read(torch.arange(5))[..., :64])


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_what_is_not_finite_stays_seen_in_its_row(kv_type: str) -> None:
    rows = normal(12, 2, 64)
    rows[3, 0, 7], rows[5, 1, 9] = np.nan, np.inf
    found = stored(kv_type, rows, rows, list(range(12))).keys.read(torch.arange(12)).isfinite().all(-1)
    assert sorted(map(tuple, (~found).nonzero().tolist())) == [(3, 0), (5, 1)]


@pytest.mark.parametrize("block", [1, 2, 32, 64])
def test_a_rotation_is_hadamards_and_its_own_inverse(block: int) -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = normal(3, 2, 64)
    expected = (x.reshape(-1, block) @ matrix / block**0.5).reshape(x.shape)
    np.testing.assert_allclose(rotate(x, block), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rotate(rotate(x, block), block), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("latent", [(), (48,)])
def test_rounding_without_pages_is_that_of_pages(kv_type: str, latent: tuple[int, ...]) -> None:
    rows = normal(12, 1 if latent else 2, 96) * 30
    rows[3, 0, 7] = np.inf
    pages = stored(kv_type, rows, None if latent else rows, list(range(12)), *latent)
    np.testing.assert_array_equal(as_kept(rows, kv_type, *latent), pages.keys.read(torch.arange(12)).numpy())


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
    pages = OPS.kv_pages(9, block_size, kv_heads, head_dim, "f32")
    for side in (pages.keys, pages.values):
        side.store(torch.arange(36), torch.from_numpy(normal(36, kv_heads, head_dim)))
    key_pages, value_pages = (side.numbers.view(9, block_size, kv_heads, head_dim) for side in (pages.keys, pages.values))
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
    y = OPS.attention(torch.from_numpy(queries), pages, batch, 0.3, window, cap, given)
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
