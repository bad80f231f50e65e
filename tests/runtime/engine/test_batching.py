"""Real forward passes: a batch gives what each of its sequences gives alone, whatever its lengths and page order."""

from __future__ import annotations

import pytest
from make_tiny_model import make_tiny_model

from llmctl.runtime.engine import Engine
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model
from llmctl.runtime.sampling.params import SamplingParams

SHORT, LONG = [7, 300], [5, 9, 1, 200, 33]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request, tmp_path_factory):
    """A tiny random model in float32 with a float32 cache; gemma3's window of 8 is shorter than what is generated."""
    return load_model(make_tiny_model(tmp_path_factory.mktemp(request.param), request.param))


def run(model, prompts: list[list[int]], params: SamplingParams, **options: int) -> list[list[int]]:
    engine = Engine(model, max_num_seqs=len(prompts), **options)
    sequences = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return [sequence.completion_token_ids for sequence in sequences]


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def test_prompts_of_two_and_five_tokens_together_and_alone(model):
    together = run(model, [SHORT, LONG], GREEDY)
    assert together == [run(model, [SHORT], GREEDY)[0], run(model, [LONG], GREEDY)[0]]
    assert together == run(model, [LONG, SHORT], GREEDY)[::-1]


def test_greedy_ids_are_those_of_whole_passes(model):
    """Generation through pages and single steps against the whole text computed afresh for every token."""
    expected = list(LONG)
    for _ in range(GREEDY.max_tokens):
        expected.append(int(compute_logits(model, expected)[-1].argmax()))
    assert run(model, [SHORT, LONG], GREEDY)[1] == expected[len(LONG) :]


def test_every_sequence_begins_at_position_zero(model, monkeypatch):
    """Rotations are relative, so ids alone would not show a shift: the description of the batch is looked at."""
    steps, forward = [], model.decoder.forward

    def watch(batch, cache, rows):
        steps.append((batch.token_ids.tolist(), batch.positions.tolist(), batch.context_lens))
        return forward(batch, cache, rows)

    monkeypatch.setattr(model.decoder, "forward", watch)
    first, second = run(model, [SHORT, LONG], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert steps == [
        ([*SHORT, *LONG], [0, 1, 0, 1, 2, 3, 4], [2, 5]),  # no padding between them
        ([first[0], second[0]], [2, 5], [3, 6]),
    ]


def test_preemption_and_chunks_change_no_id(model):
    prompts = [SHORT, LONG, list(range(40)), [11] * 17]
    alone = [run(model, [prompt], GREEDY)[0] for prompt in prompts]
    assert run(model, prompts, GREEDY, prefill_chunk=7) == alone
    assert run(model, prompts, GREEDY, prefill_chunk=7, num_blocks=6) == alone


def test_seeds_give_the_same_ids_in_a_batch_and_alone(model):
    params = SamplingParams(temperature=1.2, top_k=0, seed=3, max_tokens=24, ignore_eos=True)
    assert run(model, [SHORT, LONG], params) == [run(model, [SHORT], params)[0], run(model, [LONG], params)[0]]


def test_end_tokens_are_the_union_of_every_source(tmp_path):
    """generation_config.json, config.json and the tokenizer each name others; a number counts like a list."""
    folder = make_tiny_model(tmp_path, "llama", tokenizer="bpe")
    generation = folder / "generation_config.json"
    generation.write_text('{"eos_token_id": [5]}', encoding="utf-8")
    assert load_model(folder).eos_token_ids >= {5, 2}
    generation.write_text('{"eos_token_id": 5}', encoding="utf-8")
    ends = load_model(folder).eos_token_ids
    assert ends >= {5, 2}
    assert load_model(folder).tokenizer.eos_token_ids[0] in ends
