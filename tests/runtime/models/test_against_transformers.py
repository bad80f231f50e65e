"""Logits of tiny random models against transformers (eager attention, float32), over every position.

The configs are uneven on purpose (scripts/make_tiny_model.py). Length-dependent rope types follow transformers: one forward
over a prompt uses the table of the whole prompt for all its positions; a token decoded later uses the table of the length
it was decoded at, and keys already in the cache stay as they are. So a prompt that crosses the original context in decoding
differs, in transformers as here, from the same tokens as one prompt; both ways are compared.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_tiny_model import ORIGINAL_CONTEXT, ROPES, make_tiny_model
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.models.gemma3 import modeling_gemma3

from llmctl.runtime.engine.engine import Engine
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model, read_config
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.sampler import SampledToken

TOLERANCE = 1e-4
LENGTH = 3 * ORIGINAL_CONTEXT // 2 + 1  # beyond the original context and the window, not a whole number of pages
BELOW = 3 * ORIGINAL_CONTEXT // 4
WINDOWED = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}

LLAMA = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "multi_query": {"num_key_value_heads": 1},
    "multi_head": {"num_key_value_heads": 6},
    "head_dim_from_hidden": {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "both_biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "one_layer": {"num_hidden_layers": 1},
    "eps": {"rms_norm_eps": 0.1},
}
GEMMA3 = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "multi_query": {"num_key_value_heads": 1},
    "multi_head": {"num_key_value_heads": 6},
    "attention_bias": {"attention_bias": True},
    "window_3": {"sliding_window": 3, **WINDOWED},
    "window_1": {"sliding_window": 1, **WINDOWED},
    "window_longer_than_text": {"sliding_window": 4 * LENGTH, **WINDOWED},
    "all_sliding": {"layer_types": ["sliding_attention"] * 4},
    "all_full": {"layer_types": ["full_attention"] * 4},
    "query_scale": {"query_pre_attn_scalar": 7},
    "final_softcap": {"final_logit_softcapping": 1.5},
}
MISTRAL = {
    "window_3": {"sliding_window": 3},
    "no_window": {"sliding_window": None},
    "window_longer_than_context": {"sliding_window": 4096},
}
ROPE_CASES = {f"rope_{name}": {"rope": name} for name in ROPES}
CASES = [
    pytest.param(family, choices, id=f"{family}-{name}")
    for family, cases in (("llama", LLAMA), ("gemma3", GEMMA3))
    for name, choices in {**cases, **ROPE_CASES}.items()
] + [pytest.param("mistral", choices, id=f"mistral-{name}") for name, choices in MISTRAL.items()]
# The defaults themselves, and choices that change which weights are drawn.
STANDARD = {"tied", "untied", "one_layer", "rope_default"}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny matrices are faster without threads, and much faster where other work shares the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain_logits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], np.ndarray]:
    """Family → logits of its default tiny model in transformers."""

    @functools.cache
    def logits(family: str) -> np.ndarray:
        return reference_logits(make_tiny_model(tmp_path_factory.mktemp(family), family), token_ids(LENGTH))

    return logits


def token_ids(length: int, seed: int = 5) -> list[int]:
    """Random ids without repeats of structure; 384 is the tiny models' vocabulary."""
    return np.random.default_rng(seed).integers(3, 384, length).tolist()


def reference_model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(folder: Path, ids: list[int]) -> np.ndarray:
    """Logits [T, vocab_size] of one full forward in transformers, nothing cached."""
    with torch.no_grad():
        return reference_model(folder)(torch.tensor([ids]), use_cache=False).logits[0].numpy()


class Forced(LogitsProcessor):
    """Makes generate() follow a given text, so that cached decoding can be compared position by position."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids[input_ids.shape[1]]] = 0
        return forced


def reference_decoding(folder: Path, ids: list[int], prompt: int) -> np.ndarray:
    """Logits [T − prompt, vocab_size] from which transformers draws ids[prompt:], one cached step at a time."""
    out = reference_model(folder).generate(
        torch.tensor([ids[:prompt]]),
        attention_mask=torch.ones(1, prompt, dtype=torch.long),
        logits_processor=LogitsProcessorList([Forced(ids)]),
        max_new_tokens=len(ids) - prompt,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert out.sequences[0].tolist() == ids
    return torch.cat(out.logits).numpy()


def our_logits(folder: Path, ids: list[int], chunk: int | None = None) -> np.ndarray:
    return compute_logits(load_model(folder), ids, chunk=chunk)


class ForcedSampler:
    """Stands in for the sampler: follows a given text and keeps the logits it was offered."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.offered = ids, []

    def sample(self, logits: np.ndarray, token_ids: list[int], proposal: object = None) -> SampledToken:
        self.offered.append(logits.copy())
        return SampledToken(self.ids[len(token_ids)])


def our_decoding(folder: Path, ids: list[int], prompt: int, prefill_chunk: int) -> np.ndarray:
    """What `reference_decoding` gives, from the engine."""
    stretches = any(layer.rope.kind == "dynamic" for layer in read_config(folder).layers)  # beyond the trained context
    model = load_model(folder, ctx_size=len(ids) + 1 if stretches else None)
    engine = Engine(model, prefill_chunk=prefill_chunk)
    sequence = engine.add(ids[:prompt], SamplingParams(temperature=0, max_tokens=len(ids) - prompt, ignore_eos=True))
    sequence.sampler = ForcedSampler(ids)
    while engine.has_work:
        engine.step()
    assert sequence.token_ids == ids
    return np.stack(sequence.sampler.offered)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("family", "choices"), CASES)
def test_logits_equal_transformers(tmp_path: Path, family: str, choices: dict[str, Any]) -> None:
    folder = make_tiny_model(tmp_path, family, **choices)
    ids = token_ids(LENGTH)
    expected = reference_logits(folder, ids)
    assert np.std(expected) > 0.3  # logits that say something, so that the tolerance is a real bound
    assert_close(our_logits(folder, ids), expected)
    assert_close(our_logits(folder, ids, chunk=7), expected)


@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_below_the_original_context(tmp_path: Path, family: str, rope: str) -> None:
    folder = make_tiny_model(tmp_path, family, rope=rope)
    assert_close(our_logits(folder, token_ids(BELOW)), reference_logits(folder, token_ids(BELOW)))


@pytest.mark.parametrize("prefill_chunk", [512, 5])
@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_decoding_across_the_original_context(tmp_path: Path, family: str, rope: str, prefill_chunk: int) -> None:
    folder = make_tiny_model(tmp_path, family, rope=rope)
    ids = token_ids(LENGTH)
    assert_close(our_decoding(folder, ids, BELOW, prefill_chunk), reference_decoding(folder, ids, BELOW))


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_decoding_differs_from_one_forward_where_the_type_depends_on_length(tmp_path: Path, rope: str) -> None:
    """Keeps the module docstring honest: the two semantics the tests above compare are really two."""
    folder = make_tiny_model(tmp_path, "llama", rope=rope)
    ids = token_ids(LENGTH)
    gap = np.abs(reference_decoding(folder, ids, BELOW)[-1] - reference_logits(folder, ids)[-2])
    assert gap.max() > 100 * TOLERANCE


@pytest.mark.parametrize(("family", "choices"), [case for case in CASES if case.id.partition("-")[2] not in STANDARD])
def test_every_choice_moves_the_logits(
    tmp_path: Path, plain_logits: Callable[[str], np.ndarray], family: str, choices: dict[str, Any]
) -> None:
    """A choice that changes nothing could be ignored by us without any test noticing."""
    chosen = reference_logits(make_tiny_model(tmp_path, family, **choices), token_ids(LENGTH))
    assert np.abs(chosen - plain_logits(family)).max() > 100 * TOLERANCE


def reference_greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        min_new_tokens=max_tokens,
        max_new_tokens=max_tokens,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("max_num_seqs", "prefill_chunk"), [(4, 512), (4, 3), (2, 4), (1, 512)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_ids_of_unequal_prompts_in_any_batch(
    tmp_path: Path, family: str, max_num_seqs: int, prefill_chunk: int
) -> None:
    folder = make_tiny_model(tmp_path, family, eos_token_id=None)
    prompts = [token_ids(length, seed=length) for length in (2, 5, 1, 23)]
    engine = Engine(load_model(folder), max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk)
    sequences = [engine.add(prompt, SamplingParams(temperature=0, max_tokens=12)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    reference = reference_model(folder)
    expected = [reference_greedy(reference, prompt, 12) for prompt in prompts]
    assert [sequence.completion_token_ids for sequence in sequences] == expected


OLD_SPELLINGS = {
    "llama": {"rope_theta": 20_000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "gemma3": {
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 20_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 3,
    },
}


@pytest.mark.parametrize("family", sorted(OLD_SPELLINGS))
def test_configs_as_written_before_transformers_5(tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    new_keys = ("rope_parameters", "layer_types", "_sliding_window_pattern", "sliding_window_pattern")
    old = {key: value for key, value in config.items() if key not in new_keys} | OLD_SPELLINGS[family]
    unscaled = reference_logits(folder, token_ids(LENGTH))
    (folder / "config.json").write_text(json.dumps(old))
    expected = reference_logits(folder, token_ids(LENGTH))
    assert np.abs(expected - unscaled).max() > 100 * TOLERANCE
    assert_close(our_logits(folder, token_ids(LENGTH)), expected)


def test_attention_softcap_of_gemma3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5 keeps attn_logit_softcapping in the config but no longer hands it to its own attention function."""
    original = modeling_gemma3.eager_attention_forward

    def capped(module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        return original(module, *arguments, **{**named, "softcap": module.attn_logit_softcapping})

    folder = make_tiny_model(tmp_path, "gemma3", attn_logit_softcapping=2.0)
    ids = token_ids(LENGTH)
    uncapped = reference_logits(folder, ids)
    monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", capped)
    expected = reference_logits(folder, ids)
    assert np.abs(expected - uncapped).max() > 100 * TOLERANCE
    assert_close(our_logits(folder, ids), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_precision_files_are_computed_in_float32(tmp_path: Path, family: str, dtype: str) -> None:
    folder = make_tiny_model(tmp_path, family, dtype=dtype)
    ids = token_ids(LENGTH)
    assert_close(our_logits(folder, ids), reference_logits(folder, ids))
