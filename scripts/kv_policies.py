"""Figures of the cache's policies, for kv_figures.py: a number found in a long text, distance from the full cache, speed."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import numpy as np

from llmctl.kernels.sample import argmax
from llmctl.runtime.cache.memory import bytes_per_token
from llmctl.runtime.cache.policy import FULL, KvPolicy
from llmctl.runtime.engine import Engine
from llmctl.runtime.engine.model_runner import LogitsReader
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.sampling.params import SamplingParams

NEEDLE = "\nThe secret number is {}. Remember it.\n"
QUESTION = "\n\nQuestion: What is the secret number?\nAnswer: The secret number is"
DIGITS = 7


def needle_prompts(model: LoadedModel, text: str, tokens: int, depths: int) -> list[tuple[list[int], str]]:
    """Prompts of so many tokens with a number at depths evenly from the beginning to the end, each with its number."""
    tokenizer, prompts = model.tokenizer, []
    question, filler = tokenizer.encode(QUESTION, add_special=False), tokenizer.encode(text, add_special=False)
    begin = [tokenizer.bos_token_id] if tokenizer.add_bos else []
    random = np.random.default_rng(0)
    for depth in range(depths):
        number = str(random.integers(10 ** (DIGITS - 1), 10**DIGITS))
        needle = tokenizer.encode(NEEDLE.format(number), add_special=False)
        room = tokens - len(begin) - len(needle) - len(question)
        start = int(random.integers(0, max(1, len(filler) - room)))
        around, place = filler[start : start + room], round(room * depth / max(1, depths - 1))
        prompts.append(([*begin, *around[:place], *needle, *around[place:], *question], number))
    return prompts


def finds(engine: Engine, ids: list[int], number: str) -> bool:
    """Whether the greedy answer begins with the number."""
    sequence = engine.add(ids, SamplingParams(temperature=0, max_tokens=DIGITS + 6))
    while engine.has_work:
        engine.step()
    answer = engine.model.tokenizer.decode(sequence.completion_token_ids)
    return number in "".join(c for c in answer if c.isdigit() or c.isspace()).replace(" ", "")


def needle(model: LoadedModel, text: str, tokens: int, depths: int, policies: list[KvPolicy]) -> None:
    """Print for every policy in how many of the places where the full cache finds the number it is found."""
    engines, rows = [Engine(replace(model, kv_policy=each)) for each in (FULL, *policies)], []
    for number, (ids, answer) in enumerate(needle_prompts(model, text, tokens, depths)):
        rows.append([finds(engines[0], ids, answer)])
        for engine in engines[1:]:
            if engine.model.kv_policy.compresses:  # a prompt that is computed in full was just computed
                engine.put_in(*_whole_pages(ids, *engines[0].take_out(ids)))
            rows[-1].append(finds(engine, ids, answer))
        print(f"depth {number:2} of {depths}: {['found' if each else '-' for each in rows[-1]]}", flush=True)
    found = np.array(rows)
    full = found[:, 0]
    enough = "" if full.sum() >= 20 else ": too few"
    print(f"{full.sum()} of {depths} depths found with the full cache ({tokens} tokens){enough}")
    for policy, hits in zip(policies, found[:, 1:].T, strict=True):
        missed = np.flatnonzero(full & ~hits).tolist()
        print(f"{policy!s:22} {(hits & full).sum() / max(1, full.sum()):7.1%} of them; missed depths {missed}")


def _whole_pages(ids: list[int], count: int, firsts: list[int], pages: list[list[bytes]]):
    return ids[:count], firsts, pages


@dataclass
class Distance:
    """KL from the full cache, in nats, and share of equal top tokens, over the places after prompts."""

    kl: float
    same_top: float


def distances(
    model: LoadedModel, pieces: list[list[int]], prompt: int, policies: list[KvPolicy]
) -> list[Distance]:
    """How far the text's continuation is predicted from what the full cache predicts. pieces: ids; their first `prompt` are the
    prompt."""
    sums = np.zeros((len(policies), 2))
    count = 0
    for ids in pieces:
        full = _rows(model, FULL, ids, prompt)
        count += len(full)
        for number, policy in enumerate(policies):
            sums[number] += _compare(full, _rows(model, policy, ids, prompt))
    return [Distance(kl / count, same / count) for kl, same in sums]


def _rows(model: LoadedModel, policy: KvPolicy, ids: list[int], prompt: int) -> np.ndarray:
    """Logits [n, vocabulary] after every token behind the prompt."""
    reader = LogitsReader(replace(model, kv_policy=policy), len(ids))
    return np.concatenate([rows[:, : model.num_tokens].copy() for rows in reader.rows(ids, prompt, 64)])


def _compare(full: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    kl, same = 0.0, 0
    for p, q in zip(full.astype(np.float64), other.astype(np.float64), strict=True):
        p, q = p - p.max(), q - q.max()
        log_p, log_q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
        kl += float((np.exp(log_p) * (log_p - log_q)).sum())
        same += argmax(p) == argmax(q)
    return kl, same


def decode_speed(model: LoadedModel, depth: int, tokens: int, budget: float, rounds: int) -> tuple[float, float, float]:
    """(tokens a second with the full cache, with SnapKV, times as fast as the bytes allow), in turns; medians of the rounds."""
    policy = KvPolicy("snapkv", budget)
    engines = [Engine(replace(model, kv_policy=each), prefix_cache=False) for each in (FULL, policy)]
    ids = np.random.default_rng(0).integers(0, model.num_tokens, depth).tolist()
    params = SamplingParams(temperature=0, ignore_eos=True)
    sequences = [engine.add(ids, params) for engine in engines]
    for engine, sequence in zip(engines, sequences, strict=True):
        while sequence.num_computed < depth + 2:
            engine.step()
    rates = np.array([[_rate(engine, tokens) for engine in engines] for _ in range(rounds)])
    layers, kept = model.config.kv_layers(), engines[1].kept(sequences[1])
    weights = model.checkpoint.total_bytes
    seen = bytes_per_token([layer for layer in layers if layer.sliding_window is None], model.kv_type) or 0
    windowed = [layer for layer in layers if layer.sliding_window is not None]
    windows = sum((bytes_per_token([each], model.kv_type) or 0) * min(each.sliding_window or 0, depth) for each in windowed)
    whole = next(i for i, layer in enumerate(layers) if layer.sliding_window is None)
    allowed = (weights + windows + seen * depth) / (weights + windows + seen * kept.num_kept(whole))
    full, less = np.median(rates, axis=0)
    print(f"each round: {', '.join(f'{b / a:.2f}' for a, b in rates)}")
    return float(full), float(less), allowed


def _rate(engine: Engine, tokens: int) -> float:
    begin = time.perf_counter()
    for _ in range(tokens):
        engine.step()
    return tokens / (time.perf_counter() - begin)


def compression_share(model: LoadedModel, tokens: int, budget: float, rounds: int) -> tuple[float, float]:
    """Seconds of a prompt's computation, and what compressing it adds, medians in turns."""
    engines = [Engine(replace(model, kv_policy=each), prefix_cache=False) for each in (FULL, KvPolicy("snapkv", budget))]
    ids = np.random.default_rng(0).integers(0, model.num_tokens, tokens).tolist()
    seconds = []
    for _ in range(rounds):
        seconds.append([_prompt_s(engine, ids) for engine in engines])
    full = statistics.median(each[0] for each in seconds)
    return full, statistics.median(each[1] - each[0] for each in seconds)


def _prompt_s(engine: Engine, ids: list[int]) -> float:
    begin = time.perf_counter()
    sequence = engine.add(ids, SamplingParams(temperature=0, ignore_eos=True, max_tokens=2))
    while sequence.num_computed < len(ids):
        engine.step()
    seconds = time.perf_counter() - begin
    engine.abort(sequence)
    return seconds
