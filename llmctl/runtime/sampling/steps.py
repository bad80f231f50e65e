"""The steps between logits and draw (`params.STEPS`): each takes what may still be drawn and leaves less of it, or other odds.

As long as nothing was dropped a step works on the whole vocabulary; afterwards on the few tokens left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmctl.runtime.sampling import ranking
from llmctl.runtime.sampling.params import GREEDY_BELOW, SamplingParams
from llmctl.runtime.sampling.penalties import apply_dry, apply_penalties
from llmctl.runtime.sampling.ranking import log_normalizer, relative


class Pool(NamedTuple):
    """What may be drawn: the whole vocabulary, its logits by id (ids None); or some ids, most likely first, with theirs."""

    ids: np.ndarray | None
    logits: np.ndarray

    def total(self) -> float:
        """What probabilities in units of the largest one add up to."""
        if self.ids is None:
            return math.exp(log_normalizer(self.logits) - float(self.logits.max()))
        return float(relative(self.logits).sum())

    def ranked(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids and logits, most likely first, more of them every time."""
        return ranking.ranked(self.logits) if self.ids is None else iter([(self.ids, self.logits)])

    def head(self, count: Callable[[np.ndarray], int]) -> Pool:
        """The most likely tokens, as many as `count` says of their logits. It says the length of what it is given where more
        would be needed to tell."""
        for ids, kept in self.ranked():
            keep = count(kept)
            if keep < len(ids):
                break
        return Pool(ids[:keep], kept[:keep])


def change(pool: Pool, apply: Callable[[np.ndarray], None], vocab_size: int) -> Pool:
    """The pool after `apply` changed single logits of a whole vocabulary in place."""
    if pool.ids is None:
        logits = pool.logits.copy()
        apply(logits)
        return Pool(None, logits)
    logits = np.full(vocab_size, -np.inf, np.float32)
    logits[pool.ids] = pool.logits
    apply(logits)
    order = np.lexsort((pool.ids, -logits[pool.ids]))
    return Pool(pool.ids[order], logits[pool.ids[order]])


def top_k(pool: Pool, k: int) -> Pool:
    """The k most likely."""
    if pool.ids is None:
        return Pool(*ranking.best(pool.logits, k))
    return Pool(pool.ids[:k], pool.logits[:k])


def top_p(pool: Pool, p: float) -> Pool:
    """The fewest of the most likely whose probabilities reach p (Holtzman et al., "The Curious Case …", 2020)."""
    limit = p * pool.total() if pool.ids is None else None
    return pool.head(lambda kept: _reaching(kept, p, limit))


def min_p(pool: Pool, p: float) -> Pool:
    """Those with at least p times the probability of the most likely (Nguyen et al., "Turning Up the Heat", 2024)."""
    log_p = math.log(p)
    return pool.head(lambda kept: _within(kept, log_p))


def top_p_min_p(pool: Pool, p: float, share: float) -> Pool:
    """`top_p` and then `min_p`: the second spares the first the long tail of a whole vocabulary."""
    limit, log_share = p * pool.total() if pool.ids is None else None, math.log(share)
    return pool.head(lambda kept: min(_reaching(kept, p, limit), _within(kept, log_share)))


def _reaching(kept: np.ndarray, p: float, limit: float | None) -> int:
    """How many add up to the limit, in units of the most likely one; None where p times all of these is meant."""
    sums = relative(kept).cumsum()
    return 1 + int(np.count_nonzero(sums[:-1] < (p * sums[-1] if limit is None else limit)))


def _within(kept: np.ndarray, log_share: float) -> int:
    return max(1, int(np.count_nonzero(kept >= kept[0] + log_share)))


def typical(pool: Pool, p: float) -> Pool:
    """The fewest whose probabilities reach p, of those whose surprise is nearest to the mean (Meister et al., "Locally Typical
    Sampling", 2023)."""
    surprise = log_normalizer(pool.logits) - pool.logits.astype(np.float64)
    weights = np.exp(-surprise)
    entropy = float((weights * np.minimum(surprise, 1e300)).sum())
    for places, _ in ranking.ranked(-np.abs(surprise - entropy).astype(np.float32)):
        keep = 1 + int(np.count_nonzero(weights[places].cumsum()[:-1] < p))
        if keep < len(places):
            break
    chosen = np.sort(places[:keep])
    chosen = chosen[np.argsort(-pool.logits[chosen], kind="stable")]
    return Pool(chosen if pool.ids is None else pool.ids[chosen], pool.logits[chosen])


def xtc(pool: Pool, threshold: float) -> Pool:
    """All but the tokens with at least this probability, the least likely of which stays ("exclude top choices",
    github.com/oobabooga/text-generation-webui pull 6335)."""
    limit = threshold * pool.total()
    top = pool.head(lambda kept: int(np.count_nonzero(relative(kept) >= limit)))
    surplus = len(top.logits) - 1
    if surplus < 1:
        return pool
    if pool.ids is not None:
        return Pool(pool.ids[surplus:], pool.logits[surplus:])
    logits = pool.logits.copy()
    logits[top.ids[:surplus]] = -np.inf
    return Pool(None, logits)


def temperature(pool: Pool, value: float) -> Pool:
    """Logits divided by the temperature; only the most likely token where that is next to nothing."""
    if value < GREEDY_BELOW:
        return top_k(pool, 1)
    return Pool(pool.ids, pool.logits / np.float32(value))


def mirostat(pool: Pool, limit: float) -> Pool:
    """Those whose surprise is at most so many bits, and at least one (Basu et al., "Mirostat", 2021, version 2)."""
    least = math.log(pool.total()) - limit * math.log(2)
    return pool.head(lambda kept: max(1, int(np.count_nonzero(kept.astype(np.float64) - float(kept[0]) >= least))))


def take(step: str, pool: Pool, params: SamplingParams, token_ids: Sequence[int], vocab_size: int) -> Pool:
    """One of the steps that need neither chance nor memory."""
    if step == "penalties":
        return change(pool, lambda logits: apply_penalties(logits, params, token_ids), vocab_size)
    if step == "dry":
        return change(pool, lambda logits: apply_dry(logits, params, token_ids), vocab_size)
    function, *fields = _PLAIN[step]
    return function(pool, *(getattr(params, field) for field in fields))


_PLAIN: dict[str, tuple[Any, ...]] = {
    "top_k": (top_k, "top_k"),
    "typical": (typical, "typical_p"),
    "top_p": (top_p, "top_p"),
    "min_p": (min_p, "min_p"),
    "top_p+min_p": (top_p_min_p, "top_p", "min_p"),
    "temperature": (temperature, "temperature"),
}
"""A step's function and what SamplingParams has for it."""


def fused(names: Sequence[str]) -> tuple[str, ...]:
    """The steps with those in one that can be taken together."""
    joined: list[str] = []
    for name in names:
        if name == "min_p" and joined[-1:] == ["top_p"]:
            joined[-1] = "top_p+min_p"
        else:
            joined.append(name)
    return tuple(joined)
