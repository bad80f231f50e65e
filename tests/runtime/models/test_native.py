"""The native backend's forward pass against the reference backend's, over tiny random models of every kind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from make_tiny_model import ROPES, make_tiny_model

from llmctl.errors import UsageError
from llmctl.runtime.engine import Engine
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import LoadedModel, load_model, open_model
from llmctl.runtime.sampling.params import SamplingParams

TOLERANCE = 1e-4
LENGTH = 70  # several pages, past every tiny window and original context, not a whole number of pages

LLAMA = [
    {},
    {"tie_word_embeddings": False},
    {"num_key_value_heads": 1},
    {"head_dim": 16, "hidden_size": 96, "num_attention_heads": 6},
    *({"head_dim": head_dim, "hidden_size": 96} for head_dim in (2, 20, 50, 80, 112)),
    {"attention_bias": True, "mlp_bias": True},
    {"hidden_act": "gelu_pytorch_tanh"},
    *({"rope": name} for name in ROPES),
]
GEMMA3 = [
    {},
    {"num_key_value_heads": 1},
    {"head_dim": 36},
    {"attention_bias": True},
    {"sliding_window": 3, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    {"final_logit_softcapping": 1.5},
    {"tie_word_embeddings": False},
]
CASES = [("llama", choices) for choices in LLAMA] + [("gemma3", choices) for choices in GEMMA3]
IDS = np.random.default_rng(5).integers(3, 384, LENGTH).tolist()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny model once per set of choices."""

    @functools.cache
    def make(case: int) -> Path:
        family, choices = CASES[case]
        return make_tiny_model(tmp_path_factory.mktemp(family), family, **choices)

    return make


def native(path: Path, *, threads: int = 2, activations: str = "float", kv_type: str = "f32") -> LoadedModel:
    return load_model(path, backend="native", threads=threads, activations=activations, kv_type=kv_type)


@pytest.mark.parametrize("case", range(len(CASES)), ids=str)
def test_logits_equal_the_reference(folder: Callable[..., Path], case: int) -> None:
    expected = compute_logits(load_model(folder(case), backend="reference"), IDS)
    found = compute_logits(native(folder(case)), IDS)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("case", "kv_type"),
    [
        (5, "f16"),
        *itertools.product([0, 9, len(LLAMA), len(LLAMA) + 4], ["f32", "f16", "q8_0"]),
        *itertools.product([0, len(LLAMA)], ["fp8", "k=q8_0,v=q4_0"]),
    ],
)
def test_bits_depend_on_neither_chunks_nor_threads(folder: Callable[..., Path], case: int, kv_type: str) -> None:
    whole = compute_logits(native(folder(case), threads=1, kv_type=kv_type), IDS)
    for chunk, threads in ((1, 2), (7, 1), (33, 3)):
        model = native(folder(case), threads=threads, kv_type=kv_type)
        np.testing.assert_array_equal(compute_logits(model, IDS, chunk=chunk), whole)


# How far logits are from those of a float32 cache, in standard deviations of the logits: at most so much, and no less than a
# third of it. (Weights ten times as large as a trained model's make much of every error.)
KV_TOLERANCES = {"f16": 0.002, "bf16": 0.02, "fp8": 0.25, "q8_0": 0.05, "q5_1": 0.3, "k=q8_0,v=q4_0": 0.4, "q4_0": 0.7}


@pytest.mark.parametrize("kv_type", KV_TOLERANCES)
def test_every_cache_type_is_as_close_as_its_bits_allow_on_both_backends(tmp_path: Path, kv_type: str) -> None:
    """Heads of 64."""
    path = make_tiny_model(tmp_path, "llama", head_dim=64, hidden_size=96)
    exact = compute_logits(load_model(path, backend="reference"), IDS)
    models = native(path, kv_type=kv_type), load_model(path, backend="reference", kv_type=kv_type)
    found = [compute_logits(model, IDS) / exact.std() for model in models]
    for model, logits in zip(models, found, strict=True):
        assert model.kv_type == kv_type
        error = np.sqrt(np.square(logits - exact / exact.std()).mean())
        assert KV_TOLERANCES[kv_type] / 3 < error < KV_TOLERANCES[kv_type]
    if kv_type != "bf16":  # whose queries and weights are rounded as well where products of pairs are native
        apart = np.sqrt(np.square(found[0] - found[1]).mean())
        assert apart < 0.1 * error, "more than a few numbers at the middle of two codes"


@pytest.mark.parametrize("head_dim", [80, 112, 16])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_heads_that_blocks_do_not_divide_are_refused_at_start(tmp_path: Path, backend: str, head_dim: int) -> None:
    path = make_tiny_model(tmp_path, "llama", head_dim=head_dim, hidden_size=96)
    for kv_type in ("q8_0", "q5_1", "q4_0", "k=f16,v=q4_0"):
        with pytest.raises(UsageError, match=f"{kv_type} keeps blocks of 32 numbers, which heads of {head_dim} are not made of"):
            open_model(path, backend=backend, kv_type=kv_type)
    open_model(path, backend=backend, kv_type="fp8")


def test_a_batch_gives_each_sequence_what_it_gets_alone(folder: Callable[..., Path]) -> None:
    model = native(folder(0))
    prompts = [IDS[:5], IDS[10:40], IDS[3:4], IDS[20:61]]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)

    def run(engine: Engine, chosen: list[list[int]]) -> list[list[int]]:
        sequences = [engine.add(prompt, params) for prompt in chosen]
        while engine.has_work:
            engine.step()
        return [sequence.completion_token_ids for sequence in sequences]

    alone = [run(Engine(model), [prompt])[0] for prompt in prompts]
    assert run(Engine(model, max_num_seqs=4, prefill_chunk=16), prompts) == alone


def test_the_engine_computes_only_the_logits_it_needs(folder: Callable[..., Path]) -> None:
    """Prefill in chunks of several sequences asks for one row or none of each."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def greedy(model: LoadedModel) -> list[list[int]]:
        engine = Engine(model, max_num_seqs=3, prefill_chunk=16)
        sequences = [engine.add(prompt, params) for prompt in (IDS, IDS[5:9], IDS[20:60])]
        while engine.has_work:
            engine.step()
        return [sequence.completion_token_ids for sequence in sequences]

    assert greedy(native(folder(0))) == greedy(load_model(folder(0), backend="reference"))


def test_a_chunk_inside_a_prompt_asks_for_no_logits(folder: Callable[..., Path]) -> None:
    model = native(folder(0))
    engine = Engine(model, prefill_chunk=32)
    sequence = engine.add(IDS, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    outputs = [engine.step() for _ in range(3)]
    assert [len(output) for output in outputs] == [0, 0, 1]
    assert sequence.completion_token_ids == [int(compute_logits(model, IDS)[-1].argmax())]
