"""Where attention goes, against the weights that transformers gives out itself, for every kind of attention there is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from make_tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from llmctl.errors import LlmctlError
from llmctl.runtime.inspection import attention, probe
from llmctl.runtime.inspection.attention import NUM_LAST, NUM_RECENT, NUM_SINKS, survey_attention
from llmctl.runtime.loading import load_model

LENGTH = 77  # past every window; no whole number of pages, bins or chunks
IDS = np.random.default_rng(5).integers(3, 384, LENGTH).tolist()
FAMILIES = ("qwen3", "gemma2", "gemma3", "gpt_oss", "mixtral", "deepseek_v2", "deepseek_v3", "cohere2", "ministral3", "gpt2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(family: str) -> Path:
        choices = {"sliding_window": 8} if family == "mixtral" else {}
        return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family, tokenizer="bpe", **choices)

    return make


@functools.cache
def expected(path: Path, length: int) -> np.ndarray:
    """Weights [layers, heads, T, T]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        found = model(torch.tensor([IDS[:length]]), use_cache=False, output_attentions=True).attentions
    return torch.cat(found).numpy()


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_masses_are_those_of_transformers(folder, family, backend):
    weights = expected(folder(family), LENGTH).astype(np.float64)
    model = load_model(folder(family), backend=backend, kv_type="f32", threads=2)
    found = survey_attention(model, IDS)
    distances = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :]
    is_sink = np.broadcast_to(np.arange(LENGTH) < NUM_SINKS, weights.shape)
    is_recent = (distances >= 0) & (distances < NUM_RECENT) & ~is_sink
    learned = 1 - weights.sum(-1)
    close(found.received, weights.mean(2))
    close(found.last, weights[:, :, -NUM_LAST:].mean(2))
    close(found.sink, np.where(is_sink, weights, 0).sum(-1).mean(-1))
    close(found.recent, np.where(is_recent, weights, 0).sum(-1).mean(-1))
    close(found.learned, learned.mean(-1))
    every = np.concatenate([weights, learned[..., None].clip(0)], -1)
    np.testing.assert_allclose(found.entropy, -(every * np.log(every.clip(1e-30))).sum(-1).mean(-1), atol=2e-5)


def test_the_families_have_what_makes_attention_differ(folder):
    """Else the comparison above would prove less than it says."""
    configs = {name: load_model(folder(name), backend="native").config for name in FAMILIES}
    assert configs["qwen3"].num_heads != configs["qwen3"].num_kv_heads
    assert configs["gemma2"].attention_softcap
    assert configs["gpt_oss"].attention_sinks
    assert configs["deepseek_v3"].latent
    assert configs["mixtral"].experts
    windows = {layer.sliding_window for layer in configs["gemma3"].layers}
    assert None in windows
    assert min(w for w in windows if w) < LENGTH


def test_maps_are_means_over_their_bins(folder):
    weights = expected(folder("gemma3"), LENGTH).astype(np.float64)
    found = survey_attention(load_model(folder("gemma3"), backend="native", kv_type="f32"), IDS)
    edges = found.edges.tolist()
    assert (edges[0], edges[-1], len(edges)) == (0, LENGTH, found.maps.shape[-1] + 1)
    for row in range(len(edges) - 1):
        rows = weights[:, :, edges[row] : edges[row + 1]]
        for column in range(len(edges) - 1):
            wanted = rows[..., edges[column] : edges[column + 1]].sum(-1).mean(-1)
            close(found.maps[:, :, row, column], wanted)


@pytest.mark.parametrize("name", ["_MOST_WEIGHTS", "MOST_BINS", "_UNSHARED", "_CHUNK", "_MOST_NUMBERS"])
def test_pieces_of_any_size_give_the_same(folder, monkeypatch, name):
    model = load_model(folder("deepseek_v3"), backend="native", kv_type="f32")
    whole = survey_attention(model, IDS)
    monkeypatch.setattr(probe if hasattr(probe, name) else attention, name, 7)
    parts = survey_attention(model, IDS)
    for field in ("received", "last", "sink", "recent", "entropy"):
        close(getattr(parts, field), getattr(whole, field))
    assert [h.high for layer in parts.keys for h in layer] == [h.high for layer in whole.keys for h in layer]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_shortest_texts(folder, length):
    found = survey_attention(load_model(folder("qwen3"), backend="native", kv_type="f32"), IDS[:length])
    close(found.received, expected(folder("qwen3"), length).mean(2))
    assert found.maps.shape[-1] == length
    assert found.entropy.shape == found.sink.shape


def test_keys_are_those_that_the_cache_keeps(folder):
    """With four bits a head's weights are other ones, as they are in the run."""
    choices = {"backend": "native"}
    fine, coarse = (survey_attention(load_model(folder("qwen3"), kv_type=t, **choices), IDS) for t in ("f32", "q4_0"))
    assert np.abs(fine.received - coarse.received).max() > 1e-4


def test_ranges_find_the_channel_that_stands_out(folder, monkeypatch):
    model = load_model(folder("qwen3"), backend="native", kv_type="f32")
    plain, real = survey_attention(model, IDS), attention.probe

    def louder(*arguments):
        for seen in real(*arguments):
            if seen.layer == 1:
                seen.values[:, 1, 3] *= 50
            yield seen

    monkeypatch.setattr(attention, "probe", louder)
    found = survey_attention(model, IDS)
    assert found.values[1][1].outliers[0] == 3
    assert found.values[1][1].high > plain.values[1][1].high
    assert found.values[1][0] == plain.values[1][0]
    assert found.keys == plain.keys


def test_numbers_that_are_none_are_an_error(folder):
    model = load_model(folder("qwen3"), backend="reference")
    model.decoder.layers[1].attention.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(LlmctlError, match=r"layer 1 .* not numbers"):
        survey_attention(model, IDS)


def test_the_model_computes_as_before_afterwards(folder):
    from llmctl.runtime.engine.model_runner import compute_logits

    model = load_model(folder("gpt_oss"), backend="reference", kv_type="f32")
    before = compute_logits(model, IDS)
    survey_attention(model, IDS)
    assert all(layer.attention.ops is model.ops for layer in model.decoder.layers)
    np.testing.assert_array_equal(compute_logits(model, IDS), before)
