#!/usr/bin/env python3
"""How generation grows with the batch: tokens per second of 1, 2, 4 … sequences that run together.

    python scripts/bench_batch.py MODEL --batch 1,2,4,8,16,32 --depth 128 -n 32 -t 2 [--json]

Every sequence has DEPTH tokens in the cache before its N are timed. Rates are of all sequences together. The best of the
repetitions is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from llmctl.commands.console import format_table
from llmctl.commands.number_list import number_list
from llmctl.errors import LlmctlError
from llmctl.runtime.engine import Engine
from llmctl.runtime.loading import LoadedModel, load_model
from llmctl.runtime.sampling.params import SamplingParams


def batch_seconds(model: LoadedModel, batch: int, depth: int, count: int) -> float:
    """Of `count` tokens for each of `batch` sequences, greedily, after `depth` tokens of prompt."""
    engine = Engine(model, max_num_seqs=batch)
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=0, ignore_eos=True)
    sequences = [engine.add(random.integers(0, model.num_tokens, depth).tolist(), params) for _ in range(batch)]
    while any(sequence.num_uncomputed > 1 for sequence in sequences):
        engine.step()
    begin, start = time.perf_counter(), sum(sequence.num_computed for sequence in sequences)
    while sum(sequence.num_computed for sequence in sequences) < start + batch * count:
        engine.step()
    return time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> int:
    """Measure from the command line and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", default="1,2,4,8,16,32")
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("-n", "--count", type=int, default=32)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        batches = number_list([options.batch], "--batch", minimum=1)
        model = load_model(options.model, backend=options.backend, threads=options.threads)
    except LlmctlError as error:
        print(f"bench_batch: {error}", file=sys.stderr)
        return 1
    rates = {}
    for batch in batches:
        times = [batch_seconds(model, batch, options.depth, options.count) for _ in range(options.repetitions)]
        rates[batch] = batch * options.count / min(times)
    if options.json:
        print(json.dumps({str(batch): rate for batch, rate in rates.items()}))
        return 0
    first = rates[batches[0]]
    rows = [(batch, f"{rate:.1f}", f"{rate / batch:.1f}", f"{rate / first:.2f} ×") for batch, rate in rates.items()]
    print("\n".join(format_table(("BATCH", "TOKENS/S", "EACH", "GROWTH"), rows, right=(0, 1, 2, 3))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
