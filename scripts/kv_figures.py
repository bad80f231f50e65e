"""Figures of the KV cache: what pages waste, what a shared beginning saves, how far each cache type is from a float32 cache.

python scripts/kv_figures.py waste
python scripts/kv_figures.py reuse MODEL [--prefix 2000]
python scripts/kv_figures.py types MODEL TEXT [--context 512] [--chunks 4]
python scripts/kv_figures.py needle MODEL TEXT [--context 4096] [--depths 40] [--budget 0.25] [--only snapkv]
python scripts/kv_figures.py policies MODEL TEXT [--context 2048] [--chunks 4] [--budget 0.25]
python scripts/kv_figures.py speed MODEL [--context 8000] [--budget 0.25] [--rounds 7]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from kv_policies import compression_share, decode_speed, distances, needle

from llmctl.kernels._native import NativeOps
from llmctl.runtime.cache.block_manager import BlockManager
from llmctl.runtime.cache.memory import BLOCK_SIZE, Demand, LayerShape, bytes_per_token, plan_cache
from llmctl.runtime.cache.policy import KvPolicy
from llmctl.runtime.engine import Engine
from llmctl.runtime.evaluate import cut, evaluate
from llmctl.runtime.loading import LoadedModel, load_model
from llmctl.runtime.sampling.params import SamplingParams

WITH_TEXT = ("types", "needle", "policies")
DEFAULT_CONTEXT = {"needle": 4096, "policies": 2048, "speed": 7900}
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


def budgets(tokens: int, share: float, kinds: list[str]) -> list[KvPolicy]:
    """Policies that keep the same number of a prompt's tokens."""
    return [KvPolicy(kind, round(share * tokens)) for kind in kinds]


def policy_rows(model: LoadedModel, text: str, context: int, chunks: int, share: float) -> None:
    """KL and top tokens of the second half of chunks, of whose first half a share is kept."""
    prompt = context // 2
    policies = [*budgets(prompt, share, ["sliding", "sinks", "snapkv"])]
    policies += [replace(policies[-1], pooling="average"), replace(policies[-1], kernel=7), replace(policies[-1], kernel=13)]
    pieces = cut(model.tokenizer, text, context, chunks)
    for policy, found in zip(policies, distances(model, pieces, prompt, policies), strict=True):
        pooling = f" ({policy.pooling} of {policy.kernel})" if policy.compresses else ""
        print(f"{policy!s:22}{pooling:16} KL {found.kl:.5f}  same top token {found.same_top:.2%}", flush=True)


def print_speed(model: LoadedModel, depth: int, share: float, rounds: int) -> None:
    """Decoding beside what bytes allow, and what compressing costs."""
    full, less, allowed = decode_speed(model, depth, 32, share, rounds)
    print(f"decode at {depth}: {full:.1f} t/s, {share:.0%} kept: {less:.1f} t/s, {less / full:.2f} x; bytes allow {allowed:.2f}")
    print(f"{(less / full - 1) / (allowed - 1):.0%} of what is to be gained, {less / full / allowed:.0%} of the speed-up")
    prompt, more = compression_share(model, min(depth, 4096), share, 3)
    print(f"a prompt of {min(depth, 4096)}: {prompt:.2f} s, compressing it {more:+.3f} s ({more / prompt:+.1%})")


def of_policies(options: argparse.Namespace) -> None:
    """The tables about policies."""
    context = options.context or DEFAULT_CONTEXT[options.figure]
    choices = {"backend": "native", "threads": options.threads, "kv_type": options.kv_type, "ctx_size": context + 256}
    if options.figure == "policies":
        choices["ctx_size"] = context
    model = load_model(options.model, **choices)
    if options.figure == "speed":
        return print_speed(model, context, options.budget, options.rounds)
    text = options.text.read_text("utf-8")
    if options.figure == "policies":
        return policy_rows(model, text, context, options.chunks, options.budget)
    kinds = options.only or ["sliding", "sinks", "snapkv"]
    return needle(model, text, context, options.depths, budgets(context, options.budget, kinds))


def main() -> None:
    """One of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=("waste", "reuse", "types", "needle", "policies", "speed"))
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--context", type=int)
    parser.add_argument("--depths", type=int, default=40)
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--only", action="append", choices=("sliding", "sinks", "snapkv"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kv-type")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.figure == "waste":
        paged, contiguous = page_waste()
        print(f"64 sequences of 32 to 4096 tokens: pages of {BLOCK_SIZE} waste {paged:.2%}, contiguous memory {contiguous:.1%}")
    elif options.model is None or (options.figure in WITH_TEXT and options.text is None):
        parser.error(f"{options.figure} needs a model" + (" and a text" if options.figure in WITH_TEXT else ""))
    elif options.figure == "reuse":
        cold, warm, found = reuse(load_model(options.model, backend="native", threads=options.threads), options.prefix)
        print(f"first token after {cold:.3f} s, with {found} tokens found after {warm:.4f} s: {cold / warm:.1f} times as fast")
    elif options.figure in DEFAULT_CONTEXT:
        of_policies(options)
    else:
        type_rows(options.model, options.text.read_text("utf-8"), options.context or 512, options.chunks, options.threads)


if __name__ == "__main__":
    main()
