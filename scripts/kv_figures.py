"""Figures of the KV cache: what pages waste, what a shared beginning saves, how far each cache type is from a float32 cache.

python scripts/kv_figures.py waste
python scripts/kv_figures.py reuse MODEL [--prefix 2000]
python scripts/kv_figures.py types MODEL TEXT [--context 512] [--chunks 4]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from llmctl.kernels._native import NativeOps
from llmctl.runtime.cache.block_manager import BlockManager
from llmctl.runtime.cache.memory import BLOCK_SIZE, Demand, LayerShape, bytes_per_token, plan_cache
from llmctl.runtime.engine import Engine
from llmctl.runtime.evaluate import cut, evaluate
from llmctl.runtime.loading import LoadedModel, load_model
from llmctl.runtime.sampling.params import SamplingParams

TYPES = ("f16", "bf16", "fp8", "q8_0", "q5_1", "k=q8_0,v=q4_0", "q4_0")


def page_waste(sequences: int = 64, shortest: int = 32, longest: int = 4096, seed: int = 0) -> tuple[float, float]:
    """Shares of the cache that hold no token: of the pages taken for sequences of log-uniform lengths, and of one contiguous
    stretch of the longest length for each."""
    lengths = np.exp(np.random.default_rng(seed).uniform(np.log(shortest), np.log(longest), sequences)).astype(int)
    blocks = BlockManager(plan_cache([LayerShape(1, 64)], "f16", Demand(longest, sequences)))
    texts = [(blocks.new_pages(), length) for length in lengths.tolist()]
    for pages, length in texts:
        for computed in range(length):  # token by token, as they come
            blocks.grow(pages, computed, computed + 1)
    return blocks.stats(texts)[0].waste, 1 - int(lengths.sum()) / (sequences * longest)


def first_token_s(engine: Engine, ids: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and tokens that were cached."""
    begin = time.perf_counter()
    sequence = engine.add(ids, SamplingParams(temperature=0, max_tokens=1))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begin, sequence.num_cached_tokens


def reuse(model: LoadedModel, prefix: int, tail: int = 10) -> tuple[float, float, int]:
    """Seconds to the first token of two prompts with the same first `prefix` tokens, and how many the second one found."""
    random, engine = np.random.default_rng(0), Engine(model)
    shared = random.integers(0, model.num_tokens, prefix).tolist()
    first_token_s(engine, random.integers(0, model.num_tokens, min(600, prefix)).tolist())  # warm
    times = [first_token_s(engine, [*shared, *random.integers(0, model.num_tokens, tail).tolist()]) for _ in range(2)]
    return times[0][0], times[1][0], times[1][1]


def type_rows(path: Path, text: str, context: int, chunks: int, threads: int | None) -> list[tuple[str, float, float]]:
    """(type, bytes beside f16, KL from a float32 cache), four bits with and without their rotation."""
    options = {"backend": "native", "activations": "float", "ctx_size": context, "threads": threads}
    exact = load_model(path, kv_type="f32", **options)
    pieces, layers, rows = cut(exact.tokenizer, text, context, chunks), exact.config.kv_layers(), []
    for kv_type in (*TYPES, "q4_0 not rotated"):
        name = kv_type.removesuffix(" not rotated")
        NativeOps.rotates_pages = name == kv_type
        comparison = evaluate(load_model(path, kv_type=name, **options), pieces, exact).comparison
        rows.append((kv_type, bytes_per_token(layers, name) / bytes_per_token(layers, "f16"), comparison.kl.value))
        print(f"{rows[-1][0]:18} {rows[-1][1]:6.3f} x f16  KL {rows[-1][2]:.5f}", flush=True)
    NativeOps.rotates_pages = True
    return rows


def main() -> None:
    """One of the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=("waste", "reuse", "types"))
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.figure == "waste":
        paged, contiguous = page_waste()
        print(f"64 sequences of 32 to 4096 tokens: pages of {BLOCK_SIZE} waste {paged:.2%}, contiguous memory {contiguous:.1%}")
    elif options.model is None or (options.figure == "types" and options.text is None):
        parser.error(f"{options.figure} needs a model" + (" and a text" if options.figure == "types" else ""))
    elif options.figure == "reuse":
        cold, warm, found = reuse(load_model(options.model, backend="native", threads=options.threads), options.prefix)
        print(f"first token after {cold:.3f} s, with {found} tokens found after {warm:.4f} s: {cold / warm:.1f} times as fast")
    else:
        type_rows(options.model, options.text.read_text("utf-8"), options.context, options.chunks, options.threads)


if __name__ == "__main__":
    main()
