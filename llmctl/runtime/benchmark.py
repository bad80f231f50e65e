"""How fast a model runs: prompts and generation of random ids through the engine, timed as llama-bench does.

Sampling is part of a step here (greedy, so that it is little); llama-bench leaves it out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone

import numpy as np

from llmctl.errors import ContextLengthError
from llmctl.runtime.engine import Engine, Sequence
from llmctl.runtime.engine.speculation import Speculation
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.sampling.params import SamplingParams

PREFILL_CHUNK = 512
"""Tokens of a prompt that run in one step: what llama-bench calls n_batch and n_ubatch."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class BenchTest:
    """What is timed: a prompt of n_prompt tokens, then n_gen tokens one by one, after n_depth tokens that are not timed."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg128, pp512+tg128, pp512 @ d1024."""
        parts = [f"pp{self.n_prompt}"] * (self.n_prompt > 0) + [f"tg{self.n_gen}"] * (self.n_gen > 0)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def num_tokens(self) -> int:
        """Tokens that are timed."""
        return self.n_prompt + self.n_gen

    @property
    def context_needed(self) -> int:
        """Context the engine must have: everything that runs, and the token drawn last."""
        return self.n_depth + self.num_tokens + 1


@dataclass
class BenchResult:
    """Nanoseconds of every repetition, and what follows from them. started: UTC, ISO 8601."""

    test: BenchTest
    started: str
    samples_ns: list[int] = field(default_factory=list)

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of every repetition."""
        return [1e9 * self.test.num_tokens / ns for ns in self.samples_ns]

    @property
    def avg_ns(self) -> int:
        """Mean duration."""
        return sum(self.samples_ns) // len(self.samples_ns)

    @property
    def stddev_ns(self) -> int:
        """Standard deviation of the durations (of a sample, n − 1; 0 for one repetition)."""
        return int(_deviation([float(ns) for ns in self.samples_ns]))

    @property
    def avg_ts(self) -> float:
        """Mean of the rates, not the rate of the mean."""
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        """Standard deviation of the rates (of a sample, n − 1; 0 for one repetition)."""
        return _deviation(self.samples_ts)


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def run_test(
    model: LoadedModel,
    test: BenchTest,
    repetitions: int,
    *,
    warm_up: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
    speculation: Speculation | None = None,
) -> BenchResult:
    """Time one test. seed: of the token ids. progress: called with the number of finished repetitions. speculation: what drafts
    the generated tokens, not used before.

    The warm-up run, which is not counted, does the whole prompt and one token. Errors: ContextLengthError, LlmctlError where the
    model computes no numbers.
    """
    require_context(test, model.context_length)
    engine = Engine(model, prefill_chunk=PREFILL_CHUNK, prefix_cache=False, speculation=speculation)
    result = BenchResult(test, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
    random = np.random.default_rng(seed)
    if warm_up:
        _time_once(engine, BenchTest(test.n_prompt, min(test.n_gen, 1)), random)
    for repetition in range(repetitions):
        result.samples_ns.append(_time_once(engine, test, random))
        if progress:
            progress(repetition + 1)
    return result


def require_context(test: BenchTest, context_length: int) -> None:
    """ContextLengthError, naming both numbers, for a test that does not fit."""
    if test.context_needed > context_length:
        raise ContextLengthError(
            f"{test.name} needs a context of {test.context_needed} tokens, the model has {context_length}: "
            "ask for fewer with -p, -n or -d"
        )


def _time_once(engine: Engine, test: BenchTest, random: np.random.Generator) -> int:
    """Nanoseconds of the timed part of one run."""
    length = max(test.n_depth + test.n_prompt, 1)  # generation from nothing begins with one token
    ids = random.integers(0, engine.model.num_tokens, length).tolist()
    sequence = engine.add(ids, SamplingParams(temperature=0, ignore_eos=True))
    try:
        _run_until(engine, sequence, test.n_depth)
        begin = time.perf_counter_ns()
        _run_until(engine, sequence, test.n_depth + test.num_tokens)
        return time.perf_counter_ns() - begin
    finally:
        engine.abort(sequence)


def _run_until(engine: Engine, sequence: Sequence, num_tokens: int) -> None:
    """Step until exactly so many tokens of the sequence have been computed. Errors: that of a token that cannot be chosen."""
    while sequence.num_computed < num_tokens:
        before = sequence.num_computed
        for output in engine.step(num_tokens - sequence.num_computed):
            if output.error is not None:
                raise output.error
        assert sequence.num_computed > before, "the engine does not get on"
