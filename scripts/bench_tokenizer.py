"""How long a tokenizer takes to be ready, and how fast it is then. Prints one table.

    python scripts/bench_tokenizer.py MODEL [MODEL ...]

Ready is the time from open_checkpoint(MODEL) to the first ids of a short prompt, each time in a fresh process: without
the disk cache (first), and with it (cached). "imports" is what a process spends before that on numpy, "all" counts from
the start of Python's own work on our imports. The best of several runs is shown, and CPU time beside it, which other work
on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_RUNS = 7

_CHILD = """
import json, sys, time
begin = time.perf_counter(), time.process_time()
import numpy
after_numpy = time.perf_counter(), time.process_time()
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.tokenizer import load_tokenizer
imported = time.perf_counter(), time.process_time()
checkpoint = open_checkpoint(sys.argv[1])
opened = time.perf_counter(), time.process_time()
tokenizer = load_tokenizer(checkpoint)
tokenizer.encode("Why is the sky blue? It's 42.")
ready = time.perf_counter(), time.process_time()
print(json.dumps({
    "vocab_size": tokenizer.vocab_size,
    "open": opened[0] - imported[0],
    "ready": ready[0] - imported[0], "ready_cpu": ready[1] - imported[1],
    "imports": imported[0] - begin[0], "numpy": after_numpy[0] - begin[0],
    "all": ready[0] - begin[0],
}))
"""


def measure(model: str, home: Path, *, cached: bool) -> dict[str, float]:
    """The best of several fresh processes."""
    results = []
    for _ in range(_RUNS + cached):
        if not cached:
            for entry in (home / "cache" / "tokenizers").glob("*.bin"):
                entry.unlink()
        environment = os.environ | {"LLMCTL_HOME": str(home)}
        done = subprocess.run([sys.executable, "-c", _CHILD, model], capture_output=True, text=True, env=environment, check=True)
        results.append(json.loads(done.stdout))
    results = results[cached:]  # the first run filled the cache
    return {name: min(result[name] for result in results) for name in results[0]}


def throughput(model: str, text: str) -> tuple[float, float]:
    """Characters per second encoded and tokens per second decoded (one after the other, as in a stream)."""
    from llmctl.runtime.checkpoint import open_checkpoint
    from llmctl.runtime.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(model))
    begin = time.process_time()
    ids = tokenizer.encode(text)
    middle = time.process_time()
    tokenizer.decode(ids)
    return len(text) / (middle - begin), len(ids) / (time.process_time() - middle)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="GGUF file or Hugging Face folder")
    parser.add_argument("--text", type=Path, help="UTF-8 text to measure encoding with (default: this script, many times)")
    options = parser.parse_args()
    text = (options.text or Path(__file__)).read_text(encoding="utf-8")
    text *= max(1, 500_000 // len(text))
    print("| model | tokens | run | open ms | ready ms | ready CPU ms | imports ms (numpy) | all ms |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for model in options.models:
        with tempfile.TemporaryDirectory() as home:
            for cached in (False, True):
                best = measure(model, Path(home), cached=cached)
                cells = [Path(model).name, f"{best['vocab_size']}", "cached" if cached else "first"]
                cells += [f"{1000 * best[name]:.1f}" for name in ("open", "ready", "ready_cpu")]
                cells += [f"{1000 * best['imports']:.0f} ({1000 * best['numpy']:.0f})", f"{1000 * best['all']:.0f}"]
                print("| " + " | ".join(cells) + " |", flush=True)
    print()
    for model in options.models:
        encoded, decoded = throughput(model, text)
        print(f"{Path(model).name}: encodes {encoded / 1e6:.2f} M characters/s, decodes {decoded / 1e3:.0f} k tokens/s")


if __name__ == "__main__":
    main()
