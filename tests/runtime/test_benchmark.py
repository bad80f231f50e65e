"""What a benchmark times, on a model whose clock the test moves: a token costs a microsecond."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from llmctl.errors import ContextLengthError, LlmctlError
from llmctl.runtime.benchmark import BenchResult, BenchTest, run_test

MICROSECOND = 1000


class Clocked:
    """A stub model under a simulated clock; `prompts` are the ids of every sequence's first step."""

    def __init__(self, model, monkeypatch) -> None:
        self.model, self.now, self.prompts = model, 0, []
        self._forward = model.decoder.forward
        model.decoder.forward = self._timed
        monkeypatch.setattr("llmctl.runtime.benchmark.time.perf_counter_ns", lambda: self.now)

    def _timed(self, batch, cache, rows):
        self.now += MICROSECOND * len(batch.token_ids)
        if batch.positions[0] == 0:
            self.prompts.append(batch.token_ids.tolist())
        return self._forward(batch, cache, rows)

    @property
    def steps(self) -> list[int]:
        return [sum(step) for step in self.model.decoder.steps]


@pytest.fixture
def clocked(stub_model, monkeypatch):
    """A model of the given context."""

    def make(context_length: int = 4096, **options: object) -> Clocked:
        model = stub_model(lambda ids: np.arange(32), context_length=context_length, **options)
        return Clocked(model, monkeypatch)

    return make


@pytest.mark.parametrize(
    ("test", "steps"),
    [
        (BenchTest(512, 0), [512]),
        (BenchTest(1000, 0), [512, 488]),
        (BenchTest(0, 4), [1, 1, 1, 1]),
        (BenchTest(0, 1), [1]),
        (BenchTest(20, 3), [20, 1, 1, 1]),
        (BenchTest(100, 0, 700), [512, 188, 100]),
        (BenchTest(600, 0, 700), [512, 188, 512, 88]),
        (BenchTest(0, 3, 700), [512, 188, 1, 1, 1]),
        (BenchTest(5, 2, 16), [16, 5, 1, 1]),
    ],
)
def test_what_runs_and_what_of_it_is_timed(clocked, test, steps):
    bench = clocked()
    result = run_test(bench.model, test, 2, warm_up=False)
    assert bench.steps == steps * 2
    assert result.samples_ns == [MICROSECOND * test.num_tokens] * 2
    assert result.samples_ts == pytest.approx([1e6, 1e6])
    assert (result.avg_ns, result.stddev_ns) == (MICROSECOND * test.num_tokens, 0)


def test_the_warm_up_is_not_counted_and_does_one_token_without_the_depth(clocked):
    bench = clocked()
    result = run_test(bench.model, BenchTest(20, 3, 40), 1)
    assert bench.steps == [20, 1, 40, 20, 1, 1, 1]
    assert len(result.samples_ns) == 1
    bench = clocked()
    run_test(bench.model, BenchTest(0, 3, 40), 1)
    assert bench.steps == [1, 40, 1, 1, 1]


def test_end_tokens_do_not_end_it(clocked):
    bench = clocked(eos_token_ids=(31,))  # the only token this model ever says
    run_test(bench.model, BenchTest(0, 50), 1, warm_up=False)
    assert bench.steps == [1] * 50


def test_ids_are_random_but_fixed_by_the_seed(clocked):
    def prompts(seed: int) -> list[list[int]]:
        bench = clocked(num_tokens=20)
        run_test(bench.model, BenchTest(200, 0), 2, seed=seed, warm_up=False)
        return bench.prompts

    first = prompts(0)
    assert first == prompts(0) != prompts(1)
    assert first[0] != first[1]
    assert set(first[0]) == set(range(20))  # all that the tokenizer has, and nothing beyond


def test_a_test_may_fill_the_context_and_not_more(clocked):
    for test in (BenchTest(99, 0), BenchTest(0, 99), BenchTest(40, 20, 39), BenchTest(0, 59, 40)):
        bench = clocked(context_length=100)
        assert len(run_test(bench.model, test, 1).samples_ns) == 1
    with pytest.raises(ContextLengthError, match=re.escape("pp60 @ d40 needs a context of 101 tokens, the model has 100")):
        run_test(clocked(context_length=100).model, BenchTest(60, 0, 40), 1)


def test_a_model_that_computes_no_numbers_is_an_error(stub_model):
    with pytest.raises(LlmctlError, match="not numbers"):
        run_test(stub_model(lambda ids: np.full(32, np.nan)), BenchTest(2, 3), 1)


def test_progress_counts_repetitions(clocked):
    seen: list[int] = []
    run_test(clocked().model, BenchTest(4, 0), 3, progress=seen.append)
    assert seen == [1, 2, 3]


@pytest.mark.parametrize(
    ("test", "name"),
    [
        (BenchTest(512, 0), "pp512"),
        (BenchTest(0, 128), "tg128"),
        (BenchTest(512, 128), "pp512+tg128"),
        (BenchTest(512, 0, 512), "pp512 @ d512"),
        (BenchTest(1, 2, 3), "pp1+tg2 @ d3"),
    ],
)
def test_names(test, name):
    assert test.name == name


def test_mean_and_deviation_are_llama_benchs():
    result = BenchResult(BenchTest(100, 0), "2026-01-01T00:00:00Z", [50_000, 100_000, 200_000])
    rates = [1e9 * 100 / ns for ns in result.samples_ns]
    mean, count = sum(rates) / 3, 3
    squares = sum(rate * rate for rate in rates)
    assert result.samples_ts == pytest.approx(rates)
    assert result.avg_ts == pytest.approx(mean)
    assert result.stddev_ts == pytest.approx(math.sqrt(squares / (count - 1) - mean * mean * count / (count - 1)))
    assert result.avg_ns == 116_666
    assert result.stddev_ns == 76_376
    single = BenchResult(BenchTest(100, 0), "", [50_000])
    assert (single.stddev_ns, single.stddev_ts) == (0, 0.0)
