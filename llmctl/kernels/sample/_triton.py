"""Draws of tokens on the device, without a word to the host: samples of logits, and the verification of drafted tokens.

A draw is the largest p(x) / E(x), E exponentially distributed: log p + Gumbel noise, of which only differences count, so that no
sum is needed. The noise comes from Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) under a row's seed
at (token, step, purpose), so a draw depends on nothing else in the batch. `_reference.py` has the same numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmctl.kernels.triton_lib.compilation import Case
from llmctl.kernels.triton_lib.launch import cdiv, empty, power_of_two

_BLOCK, _WARPS = 4096, 8
_TOKENS, _CHANCES = tl.constexpr(0), tl.constexpr(1)


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor, limits: torch.Tensor | None = None
) -> torch.Tensor:
    """A token for each row of logits [R, V], drawn from softmax(logits / temperature): int64 [R]; −1 where a logit is NaN.

    temperatures: float32 [R]; at 0 the largest logit is taken, the smallest id of equal ones. seeds: int64 [R]. steps: int64 [R],
    how many draws of the seed came before. limits: float32 [R], logits below which no token is a candidate.
    """
    (rows, size), block = logits.shape, _block(logits.shape[1])
    best, ids = _candidates(rows, cdiv(size, block), logits.device)
    numbers = (logits.contiguous(), temperatures, seeds, steps, limits)
    best_of_block[(rows, cdiv(size, block))](*numbers, best, ids, size, BLOCK=block, num_warps=_WARPS)
    out = empty((rows,), torch.int64, logits.device)
    best_of_row[(rows,)](best, ids, out, cdiv(size, block), BLOCK=power_of_two(cdiv(size, block)))
    return out


def verify(
    logits: torch.Tensor,
    drafted: torch.Tensor,
    odds: torch.Tensor | None,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes of drafted tokens: those before the first that is rejected, then one more of the target's: int64
    [S, γ + 1], −1 after the last, and how many there are, int32 [S].

    logits  [S, γ + 1, V]        the target's, before every drafted token and after the last
    drafted [S, γ] int64         −1 where a sequence has fewer
    odds    [S, γ, V] float32    what they were drawn from; None for drafts that name a token without odds
    temperatures, seeds, steps [S], as in `sample`; γ + 1 steps are used

    A drafted x is kept with probability min(1, p(x) / q(x)), else a token of norm(max(0, p − q)) follows. Leviathan et al., "Fast
    Inference from Transformers via Speculative Decoding", 2023. At temperature 0 it is kept if it is the target's largest.
    """
    (sequences, count, size), device = logits.shape, logits.device
    block = _block(size)
    blocks = cdiv(size, block)
    sums = empty((2, sequences * count, blocks), torch.float32, device)
    best, ids = _candidates(sequences * count, blocks, device)
    logits, drafted = logits.contiguous(), drafted.contiguous()
    odds = None if odds is None else odds.contiguous()
    grid = (sequences * count, blocks)
    sums_of_block[grid](logits, temperatures, sums, size, COUNT=count, BLOCK=block, num_warps=_WARPS)
    many = {"BLOCKS": power_of_two(blocks), "COUNT": count}
    row_inputs = (logits, drafted, odds, temperatures, seeds, steps, sums, best, ids, size, blocks)
    residual_of_block[grid](*row_inputs, **many, BLOCK=block, num_warps=_WARPS)
    out = empty((sequences, count), torch.int64, device)
    lengths = empty((sequences,), torch.int32, device)
    inputs = (logits, drafted, odds, temperatures, seeds, steps, sums, best, ids, out, lengths, size, blocks)
    accept[(sequences,)](*inputs, **many)
    return out, lengths


def _block(size: int) -> int:
    return min(power_of_two(size), _BLOCK)


def _candidates(rows: int, blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of every block: how good, and its id."""
    return empty((rows, blocks), torch.float32, device), empty((rows, blocks), torch.int32, device)


@triton.jit
def chance(seed, token, step, PURPOSE: tl.constexpr):
    """Uniform numbers within (0, 1), multiples of 2^-24."""
    first = token.to(tl.uint32)
    zero = first * 0
    words = tl.philox(seed, first, zero + step.to(tl.uint32), zero + PURPOSE, zero)
    return ((words[0] >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _noise(seed, token, step):
    """Gumbel noise, −log of exponentially distributed numbers."""
    return -tl.log(-tl.log(chance(seed, token, step, _TOKENS)))


@triton.jit
def _keep_best(scores, token, is_nan, best, ids, at):
    """The largest of a block, the smallest token of equal ones; with a NaN among them infinity, and −1 as its token."""
    top, place = tl.max(scores, 0, return_indices=True)
    wrong = tl.max(is_nan.to(tl.int32), 0) > 0
    tl.store(best + at, tl.where(wrong, float("inf"), top))
    tl.store(ids + at, tl.where(wrong, -1, tl.min(token, 0) + place))


@triton.jit
def best_of_block(logits, temperatures, seeds, steps, limits, best, ids, size, BLOCK: tl.constexpr):
    """One block of one row: its largest logit / temperature + noise."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = token < size
    x = tl.load(logits + row.to(tl.int64) * size + token, mask=there, other=float("-inf")).to(tl.float32)
    is_nan = x != x
    temperature = tl.load(temperatures + row)
    scores = x
    if temperature > 0:
        scores = x / temperature + _noise(tl.load(seeds + row), token, tl.load(steps + row))
    wanted = there & (x > float("-inf"))
    if limits is not None:
        wanted = wanted & (x >= tl.load(limits + row))
    scores = tl.where(wanted, scores, float("-inf"))
    _keep_best(scores, token, is_nan, best, ids, row * tl.num_programs(1) + tl.program_id(1))


@triton.jit
def best_of_row(best, ids, out, blocks, BLOCK: tl.constexpr):
    """The best block of a row."""
    row = tl.program_id(0)
    token = _best(best + row * blocks, ids + row * blocks, blocks, BLOCK)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _best(best, ids, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    scores = tl.load(best + block, mask=block < blocks, other=float("-inf"))
    return tl.load(ids + tl.argmax(scores, 0))


@triton.jit
def sums_of_block(logits, temperatures, sums, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Of one block of one row the largest logit / temperature, and the sum of exponentials relative to it."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * size + token, mask=token < size, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row // COUNT)
    x = x / tl.where(temperature > 0, temperature, 1.0)
    top = tl.max(x, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + at, top)
    tl.store(sums + tl.num_programs(0) * tl.num_programs(1) + at, tl.sum(tl.exp(x - base), 0))


@triton.jit
def _normalizer(sums, row, rows, blocks, BLOCKS: tl.constexpr):
    """log of the sum of exponentials of a row."""
    block = tl.arange(0, BLOCKS)
    tops = tl.load(sums + row * blocks + block, mask=block < blocks, other=float("-inf"))
    parts = tl.load(sums + (rows + row) * blocks + block, mask=block < blocks, other=0.0)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + tl.log(tl.sum(parts * tl.exp(tops - base), 0))


@triton.jit
def residual_of_block(
    logits,
    drafted,
    odds,
    temperatures,
    seeds,
    steps,
    sums,
    best,
    ids,
    size,
    blocks,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row: its best draw of max(0, p − q), of p after the last drafted token; at temperature 0 its largest."""
    row = tl.program_id(0)
    sequence, place = row // COUNT, row % COUNT
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = token < size
    x = tl.load(logits + row.to(tl.int64) * size + token, mask=there, other=float("-inf")).to(tl.float32)
    is_nan = x != x
    temperature = tl.load(temperatures + sequence)
    scores = x
    if temperature > 0:
        p = tl.exp(x / temperature - _normalizer(sums, row, tl.num_programs(0), blocks, BLOCKS))
        left = p
        draft = tl.load(drafted + sequence * (COUNT - 1) + place, mask=place < COUNT - 1, other=-1)
        if draft >= 0:
            if odds is None:
                left = tl.where(token == draft, 0.0, p)
            else:
                at = (sequence * (COUNT - 1) + place).to(tl.int64) * size + token
                left = tl.maximum(p - tl.load(odds + at, mask=there, other=0.0), 0.0)
        # Where rounding leaves nothing of p − q the two are the same, and a token of p does as well: far behind all others.
        least = tl.where(left > 0, tl.log(tl.where(left > 0, left, 1.0)), tl.log(tl.where(p > 0, p, 1e-38)) - 1e4)
        scores = least + _noise(tl.load(seeds + sequence), token, tl.load(steps + sequence) + place)
    scores = tl.where(there & (x > float("-inf")), scores, float("-inf"))
    _keep_best(scores, token, is_nan, best, ids, row * tl.num_programs(1) + tl.program_id(1))


@triton.jit
def accept(
    logits,
    drafted,
    odds,
    temperatures,
    seeds,
    steps,
    sums,
    best,
    ids,
    out,
    lengths,
    size,
    blocks,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One sequence: drafted tokens one after the other until one is rejected, and the token that stands there instead."""
    sequence = tl.program_id(0)
    temperature = tl.load(temperatures + sequence)
    seed, step = tl.load(seeds + sequence), tl.load(steps + sequence)
    kept = 0
    goes_on = 1
    for place in range(0, COUNT):
        row = sequence * COUNT + place
        own = _best(best + row * blocks, ids + row * blocks, blocks, BLOCKS).to(tl.int64)
        draft = tl.load(drafted + sequence * (COUNT - 1) + place, mask=place < COUNT - 1, other=-1)
        taken = (draft == own) & (own >= 0)
        if (temperature > 0) & (draft >= 0):
            x = tl.load(logits + row.to(tl.int64) * size + draft).to(tl.float32) / temperature
            p = tl.exp(x - _normalizer(sums, row, tl.num_programs(0) * COUNT, blocks, BLOCKS))
            q = 1.0
            if odds is not None:
                q = tl.load(odds + (sequence * (COUNT - 1) + place).to(tl.int64) * size + draft)
            taken = (chance(seed, row * 0, step + place, _CHANCES) * q < p) & (own >= 0)
        token = tl.where(taken, draft, own)
        tl.store(out + row, tl.where(goes_on > 0, token, -1))
        kept += goes_on
        goes_on = tl.where(taken, goes_on, 0)
    tl.store(lengths + sequence, kept)


def kernel_cases() -> list[Case]:
    """A vocabulary of 128 256, three drafted tokens."""
    rows = {"temperatures": "*fp32", "seeds": "*i64", "steps": "*i64"}
    found = {"best": "*fp32", "ids": "*i32"}
    drafts = rows | found | {"logits": "*fp32", "drafted": "*i64", "odds": "*fp32", "sums": "*fp32"}
    sizes, count = {"size": "i32", "blocks": "i32"}, {"BLOCKS": 32, "COUNT": 4}
    block = {"BLOCK": _BLOCK}
    logits, limits = {"logits": "*fp32", "size": "i32"}, {"limits": "*fp32"}
    summed = {"temperatures": "*fp32", "sums": "*fp32"}
    return [
        Case("sample.block", best_of_block, rows | found | logits | limits, block, ("logits", "size"), _WARPS),
        Case("sample.row", best_of_row, found | {"out": "*i64", "blocks": "i32"}, {"BLOCK": 32}),
        Case("sample.sums", sums_of_block, logits | summed, block | {"COUNT": 4}, ("logits", "size"), _WARPS),
        Case("sample.residual", residual_of_block, drafts | sizes, count | block, ("logits", "odds", "size"), _WARPS),
        Case("sample.accept", accept, drafts | sizes | {"out": "*i64", "lengths": "*i32"}, count),
    ]
