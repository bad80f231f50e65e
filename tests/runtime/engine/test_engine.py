"""The loop with logits the test writes: limits, ends, sharing of pages, preemption, seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_loop import VOCAB, completion, drain, mixed

from llmctl.errors import ContextLengthError, UsageError
from llmctl.kernels.ops import StepInterrupted
from llmctl.runtime.cache.memory import BLOCK_SIZE, LayerShape
from llmctl.runtime.engine import Engine
from llmctl.runtime.engine.engine import check_prompt
from llmctl.runtime.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def always(token_id: int):
    return lambda ids: np.eye(VOCAB)[token_id]


def greedy_by_hand(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(mixed(ids).argmax()))
    return ids[len(prompt) :]


def free_pages(engine: Engine) -> int:
    return engine._blocks.num_free


# --- one sequence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill_chunk", [1, 3, 16, 17, 512])
def test_chunks_of_the_prompt_change_nothing(stub_model, prefill_chunk):
    engine = Engine(stub_model(mixed), prefill_chunk=prefill_chunk)
    prompt = [5, 3, 9, 1] * 10
    assert completion(engine, prompt, SamplingParams(temperature=0, max_tokens=40)) == greedy_by_hand(prompt, 40)


def test_a_prompt_runs_in_chunks_and_decoding_one_token_at_a_time(stub_model):
    model = stub_model(mixed)
    completion(Engine(model, prefill_chunk=16), [1] * 40, SamplingParams(temperature=0, max_tokens=4))
    assert model.decoder.steps == [[16], [16], [8], [1], [1], [1]]


@pytest.mark.parametrize("temperature", [0.0, 1e-8])
def test_zero_and_tiny_temperatures_are_greedy(stub_model, temperature):
    engine = Engine(stub_model(lambda ids: np.array([0.5, 3.1, 2.7]), vocab_size=3))
    for seed in range(20):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=3, num_logprobs=3)
        sequence = engine.add([0], params)
        while engine.has_work:
            for output in engine.step():
                assert np.isfinite([output.token.logprob, *output.token.top_logprobs.values()]).all()
        assert sequence.completion_token_ids == [1, 1, 1]


def test_a_negative_temperature_is_refused():
    with pytest.raises(UsageError, match=r"temperature must be at least 0, found -1"):
        SamplingParams(temperature=-1)


def test_a_prompt_longer_than_the_context_is_an_error_naming_both_numbers(stub_model):
    engine = Engine(stub_model(mixed, context_length=256))
    with pytest.raises(ContextLengthError, match=r"300 tokens.*256"):
        engine.add([1] * 300, GREEDY)
    assert not engine.has_work


def test_generation_stops_at_the_context_with_reason_length(stub_model):
    engine = Engine(stub_model(mixed, context_length=256))
    sequence = engine.add([1] * 250, SamplingParams(temperature=0, max_tokens=50))
    drain(engine)
    assert sequence.finish_reason == "length"
    assert len(sequence.completion_token_ids) == 6
    assert len(sequence.token_ids) == 256


def test_a_prompt_that_leaves_room_for_one_token(stub_model):
    engine = Engine(stub_model(mixed, context_length=256))
    assert completion(engine, [1] * 255, GREEDY) == greedy_by_hand([1] * 255, 1)
    with pytest.raises(ContextLengthError, match=r"256 tokens.*256"):
        engine.add([1] * 256, GREEDY)


def test_the_check_before_loading_is_the_engines(stub_model):
    with pytest.raises(ContextLengthError, match=r"300 tokens.*256"):
        check_prompt([1] * 300, VOCAB, 256)
    with pytest.raises(UsageError, match="empty"):
        check_prompt([], VOCAB, 256)
    with pytest.raises(UsageError, match="token id 32 is outside the vocabulary of 32"):
        check_prompt([31, 32], VOCAB, 256)
    check_prompt([31], VOCAB, 256)


@pytest.mark.parametrize("prompt", [[], [-1], [VOCAB]])
def test_prompts_that_cannot_be_are_refused(stub_model, prompt):
    engine = Engine(stub_model(mixed))
    with pytest.raises(UsageError):
        engine.add(prompt, GREEDY)
    assert not engine.has_work


@pytest.mark.parametrize("end", [5, 7])
def test_every_end_token_of_the_union_ends(stub_model, end):
    engine = Engine(stub_model(always(end), eos_token_ids=(5, 7)))
    sequence = engine.add([1], GREEDY)
    drain(engine)
    assert (sequence.completion_token_ids, sequence.finish_reason) == ([end], "stop")


def test_end_tokens_can_be_ignored(stub_model):
    engine = Engine(stub_model(always(5), eos_token_ids=(5,)))
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3)
    assert completion(engine, [1], params) == [5, 5, 5]


def test_the_end_token_wins_over_the_limit_it_coincides_with(stub_model):
    engine = Engine(stub_model(always(5), eos_token_ids=(5,)))
    sequence = engine.add([1], SamplingParams(temperature=0, max_tokens=1))
    drain(engine)
    assert sequence.finish_reason == "stop"


def test_zero_tokens_asked_for(stub_model):
    engine = Engine(stub_model(mixed))
    sequence = engine.add([1], SamplingParams(max_tokens=0))
    outputs = engine.step()
    assert [(o.sequence, o.token, o.finish_reason) for o in outputs] == [(sequence, None, "length")]
    assert not engine.has_work
    assert engine.model.decoder.steps == []


def test_rows_beyond_the_tokenizer_are_never_drawn(stub_model):
    engine = Engine(stub_model(always(31), num_tokens=20))
    sequence = engine.add([1], SamplingParams(temperature=5, top_k=0, top_p=1, min_p=0, seed=1, max_tokens=200))
    drain(engine)
    assert max(sequence.completion_token_ids) < 20


def test_idle_steps_do_nothing(stub_model):
    engine = Engine(stub_model(mixed))
    assert engine.step() == []
    assert not engine.has_work


# --- several sequences ------------------------------------------------------------------------------------------------

PROMPTS = [[1, 2], [3, 4, 5, 6, 7], [8] * 33, [9], [2, 1] * 20, [30] * 16]


def test_a_batch_gives_the_ids_of_one_at_a_time(stub_model):
    model = stub_model(mixed)
    engine = Engine(model, max_num_seqs=4, prefill_chunk=8)
    sequences = [engine.add(prompt, SamplingParams(temperature=0, max_tokens=20)) for prompt in PROMPTS]
    drain(engine)
    assert [s.completion_token_ids for s in sequences] == [greedy_by_hand(prompt, 20) for prompt in PROMPTS]
    assert max(len(step) for step in model.decoder.steps) == 4, "they did not share steps"
    assert max(sum(step) for step in model.decoder.steps) <= 8


def test_decoding_does_not_wait_for_a_long_prompt(stub_model):
    model = stub_model(mixed)
    engine = Engine(model, max_num_seqs=2, prefill_chunk=8)
    long, short = engine.add([1] * 80, GREEDY), engine.add([2], SamplingParams(temperature=0, max_tokens=5))
    for _ in range(5):
        engine.step()
    assert short.finish_reason == "length"
    assert long.num_computed == 5 * 7
    assert model.decoder.steps == [[1, 7]] * 5


def test_when_pages_run_out_the_ids_are_the_same_as_alone(stub_model, monkeypatch):
    engine = Engine(stub_model(mixed), max_num_seqs=6, prefill_chunk=8, num_blocks=5)
    preempted = []
    original = engine._scheduler._preempt
    monkeypatch.setattr(engine._scheduler, "_preempt", lambda s: (preempted.append(s), original(s)))
    total = free_pages(engine)
    sequences = [engine.add(prompt, SamplingParams(temperature=0, max_tokens=30)) for prompt in PROMPTS]
    drain(engine)
    assert preempted, "five pages should not have been enough for all"
    assert [s.completion_token_ids for s in sequences] == [greedy_by_hand(prompt, 30) for prompt in PROMPTS]
    assert free_pages(engine) == total


def test_sampled_sequences_survive_preemption_with_their_seeds(stub_model, monkeypatch):
    def run(prompts: list[list[int]], **engine_options) -> list[list[int]]:
        engine = Engine(stub_model(mixed), **engine_options)
        params = [SamplingParams(temperature=1.5, top_k=0, seed=100 + i, max_tokens=30) for i in range(len(PROMPTS))]
        sequences = [engine.add(p, params[PROMPTS.index(p)]) for p in prompts]
        drain(engine)
        return [s.completion_token_ids for s in sequences]

    alone = [run([prompt])[0] for prompt in PROMPTS]
    assert run(PROMPTS, max_num_seqs=6) == alone
    assert run(PROMPTS, max_num_seqs=6, prefill_chunk=5, num_blocks=5) == alone
    assert run(PROMPTS[::-1], max_num_seqs=3) == alone[::-1]


def test_a_seed_decides_and_without_one_answers_differ(stub_model):
    def draw(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=3, top_k=0, top_p=1, min_p=0, seed=seed, max_tokens=20)
        return completion(Engine(stub_model(mixed)), [1], params)

    assert draw(1) == draw(1) != draw(2)
    assert draw(None) != draw(None)


def test_abort_frees_the_pages_and_leaves_the_others_alone(stub_model):
    engine = Engine(stub_model(mixed), max_num_seqs=2, prefill_chunk=8)
    total = free_pages(engine)
    params = SamplingParams(temperature=0, max_tokens=20)
    first, second, queued = (engine.add(prompt, params) for prompt in ([1] * 20, [2] * 20, [3] * 20))
    for _ in range(4):
        engine.step()
    held = len(first.pages)
    assert held > 0
    free = free_pages(engine)
    engine.abort(first)
    assert free_pages(engine) == free + held
    engine.abort(queued)
    engine.abort(queued)  # twice is once
    drain(engine)
    assert (first.finish_reason, second.finish_reason, queued.finish_reason) == ("abort", "length", "abort")
    assert second.completion_token_ids == greedy_by_hand([2] * 20, 20)
    assert free_pages(engine) == total
    assert queued.completion_token_ids == []


def test_abort_after_the_end_changes_nothing(stub_model):
    engine = Engine(stub_model(mixed))
    total = free_pages(engine)
    sequence = engine.add([1], SamplingParams(temperature=0, max_tokens=2))
    drain(engine)
    engine.abort(sequence)
    assert sequence.finish_reason == "length"
    assert free_pages(engine) == total


def test_the_cache_may_be_smaller_than_the_context(stub_model):
    engine = Engine(stub_model(mixed, context_length=256), num_blocks=2)
    with pytest.raises(ContextLengthError, match=f"40 tokens.*{2 * BLOCK_SIZE}"):
        engine.add([1] * 40, GREEDY)
    assert len(completion(engine, [1] * 20, GREEDY)) == 12


def test_a_step_can_be_bounded(stub_model):
    model = stub_model(mixed)
    engine = Engine(model, prefill_chunk=16)
    sequence = engine.add([1] * 20, SamplingParams(temperature=0, max_tokens=2))
    engine.step(max_tokens=5)
    assert sequence.num_computed == 5
    engine.step(max_tokens=100)  # the engine's own bound still holds
    assert sequence.num_computed == 20
    assert model.decoder.steps == [[5], [15]]


MIXED_LAYERS = (LayerShape(1, 1, 20), LayerShape(1, 1), LayerShape(1, 1, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), st.integers(1, 25), st.integers(0, 12)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(5, 9),
    st.sampled_from([(LayerShape(1, 1),), MIXED_LAYERS]),
)
def test_whatever_arrives_whenever_gets_its_own_answer(stub_model, requests, max_num_seqs, prefill_chunk, num_blocks, layers):
    model = stub_model(mixed, eos_token_ids=(4,), layers=layers)
    engine = Engine(model, max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk, num_blocks=num_blocks)
    total, sequences, events = free_pages(engine), [], {}
    for prompt, max_tokens, steps_before in requests:
        for _ in range(steps_before):
            _record(engine.step(), events)
        sequences.append(engine.add(prompt, SamplingParams(temperature=0, max_tokens=max_tokens)))
    for _ in range(3_000):
        if not engine.has_work:
            break
        _record(engine.step(), events)
    assert not engine.has_work
    for sequence, (prompt, max_tokens, _) in zip(sequences, requests, strict=True):
        expected = greedy_by_hand(prompt, max_tokens)
        expected = expected[: expected.index(4) + 1] if 4 in expected else expected
        assert sequence.completion_token_ids == expected
        assert events[sequence] == expected
        assert sequence.finish_reason == ("stop" if expected[-1] == 4 else "length")
    assert free_pages(engine) == total


def _record(outputs, events) -> None:
    for output in outputs:
        events.setdefault(output.sequence, []).append(output.token.token_id)


def test_an_interrupted_step_counts_nothing(stub_model, monkeypatch):
    """Its tokens run again, and the answer is that of an engine nobody interrupted."""
    model = stub_model(mixed)
    engine = Engine(model, prefill_chunk=4)
    sequence = engine.add([1] * 10, SamplingParams(temperature=0, max_tokens=3))
    forward, calls = model.decoder.forward, []

    def stopped(*arguments):
        calls.append(forward(*arguments))  # keys and values are stored, all of them
        if len(calls) % 2:
            raise StepInterrupted
        return calls[-1]

    monkeypatch.setattr(model.decoder, "forward", stopped)
    assert engine.step() == []
    assert sequence.num_computed == 0
    while engine.has_work:
        engine.step()
    assert sequence.completion_token_ids == greedy_by_hand([1] * 10, 3)
    assert len(calls) == 10
