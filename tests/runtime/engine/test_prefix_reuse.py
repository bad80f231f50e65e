"""Texts that begin alike, and several answers to one prompt: what is reused, and that no answer changes by it."""

from __future__ import annotations

import numpy as np
import pytest
from make_tiny_model import make_tiny_model

from llmctl.runtime.cache.memory import LayerShape
from llmctl.runtime.engine import Engine
from llmctl.runtime.loading import load_model
from llmctl.runtime.sampling.params import SamplingParams

VOCAB = 32
LAYERS = [(LayerShape(1, 1),), (LayerShape(1, 1, 20), LayerShape(1, 1)), (LayerShape(1, 1, 40),)]
PREFIX = [int(i) for i in np.random.default_rng(0).integers(0, VOCAB, 70)]


def counted(ids: list[int]) -> np.ndarray:
    """Logits of the last 40 tokens and of how many there are no more than 40 of."""
    state = 7
    for token_id in ids[-40:]:
        state = (state * 31 + token_id + 1) % 1_000_003
    return np.random.default_rng(state).normal(size=VOCAB)


def greedy(count: int, **more: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def answer(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], int]:
    """The ids and how many of the prompt were cached."""
    sequence = engine.add(prompt, params)
    while engine.has_work:
        engine.step()
    return sequence.completion_token_ids, sequence.num_cached_tokens


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("prefill_chunk", [7, 512])
def test_a_shared_beginning_is_computed_once(stub_model, layers, prefill_chunk):
    model = stub_model(counted, layers=layers)
    engine = Engine(model, prefill_chunk=prefill_chunk)
    for tail in ([1], [2, 3, 4], [5] * 30):
        cold = answer(Engine(model, prefix_cache=False), [*PREFIX, *tail], greedy(12))
        warm = answer(engine, [*PREFIX, *tail], greedy(12))
        assert (warm[0], cold[1]) == (cold[0], 0)
    assert warm[1] == 70
    assert engine.reuse_stats.found_tokens == 140
    assert engine.reuse_stats.tokens == 3 * 70 + 34


@pytest.mark.parametrize("layers", LAYERS)
def test_a_chat_goes_on_from_its_own_answers(stub_model, layers):
    """Every turn's text begins with the whole conversation before it, its answers too."""
    model = stub_model(counted, layers=layers)
    engine, text, computed = Engine(model), PREFIX[:10], 0
    for turn in range(5):
        ids, cached = answer(engine, text, greedy(15))
        assert ids == answer(Engine(model, prefix_cache=False), text, greedy(15))[0]
        assert cached == computed
        computed = len(text) + len(ids) - 1  # the last id was drawn and not read
        text = [*text, *ids, turn, turn, 9]


def test_a_running_text_is_shared_while_it_runs(stub_model):
    engine = Engine(stub_model(counted), max_num_seqs=2)
    first = engine.add(PREFIX, greedy(40))
    engine.step()
    second = engine.add([*PREFIX[:50], 3], greedy(5))
    engine.step()
    assert second.num_cached_tokens == 50
    assert engine.group_stats[0].pages_held == len(first.pages) + 1
    engine.abort(first)
    while engine.has_work:
        engine.step()
    assert second.completion_token_ids == answer(Engine(engine.model), [*PREFIX[:50], 3], greedy(5))[0]


def test_without_a_prefix_cache_nothing_is_found(stub_model):
    engine = Engine(stub_model(counted), prefix_cache=False)
    answer(engine, PREFIX, greedy(2))
    assert answer(engine, PREFIX, greedy(2))[1] == 0


def test_a_sequence_that_gave_way_goes_on_from_what_is_left(stub_model):
    """Three long texts in a pool for hardly two: they preempt each other, and count nothing as found that they had stored."""
    engine = Engine(stub_model(counted), max_num_seqs=3, prefill_chunk=16, num_blocks=9)
    prompts = [[n] * 40 for n in (1, 2, 3)]
    sequences = [engine.add(prompt, greedy(60)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.completion_token_ids == answer(Engine(engine.model), prompt, greedy(60))[0]
        assert sequence.num_cached_tokens == 0


# --- several answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("length", [5, 16, 70])
def test_several_answers_compute_their_prompt_once_and_are_those_of_their_seeds(stub_model, layers, length):
    model, prompt = stub_model(counted, layers=layers), PREFIX[:length]
    engine = Engine(model, max_num_seqs=4)
    params = SamplingParams(temperature=2, top_k=0, top_p=1, min_p=0, seed=5, max_tokens=30, ignore_eos=True)
    total = engine._blocks.num_free
    before = len(model.decoder.steps)
    several = engine.add_several(prompt, params, 4)
    while engine.has_work:
        engine.step()
    steps = model.decoder.steps[before:]
    assert sum(map(sum, steps)) == length + 4 * 29
    for number, sequence in enumerate(several):
        alone = SamplingParams(temperature=2, top_k=0, top_p=1, min_p=0, seed=5 + number, max_tokens=30, ignore_eos=True)
        assert sequence.completion_token_ids == answer(Engine(model), prompt, alone)[0]
    assert len({tuple(sequence.completion_token_ids) for sequence in several}) == 4
    assert engine._blocks.num_free == total


def test_answers_without_a_place_wait_for_one(stub_model):
    engine = Engine(stub_model(counted), max_num_seqs=2)
    several = engine.add_several(PREFIX, greedy(6), 5)
    while engine.has_work:
        engine.step()
    assert {tuple(s.completion_token_ids) for s in several} == {tuple(several[0].completion_token_ids)}
    assert len(several[4].completion_token_ids) == 6
    assert several[4].num_cached_tokens == len(PREFIX) - 1


@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_one_of_several_answers_can_be_stopped_before_the_prompt_is_done(stub_model, aborted):
    engine = Engine(stub_model(counted), max_num_seqs=3, prefill_chunk=16)
    several = engine.add_several(PREFIX, greedy(6), 3)
    engine.step()
    engine.abort(several[aborted])
    while engine.has_work:
        engine.step()
    assert [len(s.completion_token_ids) for s in several] == [0 if i == aborted else 6 for i in range(3)]
    assert [s.finish_reason for s in several] == ["abort" if i == aborted else "length" for i in range(3)]


def test_several_answers_of_no_tokens(stub_model):
    engine = Engine(stub_model(counted))
    several = engine.add_several(PREFIX, greedy(0), 3)
    assert len(engine.step()) == 3
    assert [s.finish_reason for s in several] == ["length"] * 3


# --- real models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request, tmp_path_factory):
    """gemma3's window is 8 tokens."""
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def logprobs(engine: Engine, prompt: list[int]) -> tuple[list[dict[int, float]], int]:
    """Every step's probabilities, all of them, and how much was cached."""
    sequence, seen = engine.add(prompt, greedy(10, num_logprobs=1000)), []
    while engine.has_work:
        seen += [output.token.top_logprobs for output in engine.step()]
    return seen, sequence.num_cached_tokens


@pytest.mark.parametrize(("backend", "kv_type"), [("native", None), ("reference", None), ("native", "f16"), ("native", "q4_0")])
def test_the_bits_are_those_of_a_run_without_a_cache(folder, backend, kv_type):
    """The reference's numbers depend on how many tokens share a call: it reuses whole steps only."""
    model = load_model(folder, backend=backend, kv_type=kv_type, threads=2)
    random = np.random.default_rng(1)
    prefix = random.integers(0, 250, 70).tolist()
    warm = Engine(model, prefill_chunk=32)
    for tail in (3, 20, 41):
        prompt = [*prefix, *random.integers(0, 250, tail).tolist()]
        expected, _ = logprobs(Engine(model, prefill_chunk=32, prefix_cache=False), prompt)
        found, cached = logprobs(warm, prompt)
        assert found == expected
    assert cached == (70 if backend == "native" else 64)
    again, cached = logprobs(warm, prompt)
    assert again == expected
    assert cached == (len(prompt) - 1 if backend == "native" else 96)


def test_a_native_chat_has_the_bits_of_one_that_begins_anew(folder):
    """Answers are generated one token at a time, and found as if they had been a prompt."""
    model, text = load_model(folder, backend="native", threads=2), list(range(5, 40))
    engine = Engine(model)
    for turn in range(4):
        expected, _ = logprobs(Engine(model, prefix_cache=False), text)
        found, cached = logprobs(engine, text)
        assert found == expected
        assert (cached > 0) == (turn > 0)
        text = [*text, *(max(step, key=step.get) for step in found), 7, 8, 9]
