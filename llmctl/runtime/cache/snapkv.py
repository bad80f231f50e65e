"""Which tokens of a prompt SnapKV keeps, from what the queries at its end look at, and how a sequence remembers it.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, arXiv 2404.14469, listing 1. A kv head's votes
are summed over the query heads that share it, then pooled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from llmctl.runtime.cache.policy import KvPolicy, Pooling


def pooled(votes: np.ndarray, kernel: int, pooling: Pooling) -> np.ndarray:
    """votes float32 [heads, n] → of every place the largest, or the mean, of `kernel` places around it; outside is nothing (of
    a mean: 0)."""
    outside = -np.inf if pooling == "max" else 0.0
    padded = np.pad(votes, ((0, 0), (kernel // 2, kernel // 2)), constant_values=outside)
    around = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=1)
    return around.max(-1) if pooling == "max" else around.mean(-1, dtype=np.float32)


def largest(scores: np.ndarray, count: int) -> np.ndarray:
    """The places [heads, count] of the largest of scores [heads, n], ascending; of equals those that come first."""
    threshold = -np.partition(-scores, count - 1, axis=1)[:, count - 1 : count]
    above, equal = scores > threshold, scores == threshold
    room = count - above.sum(axis=1, keepdims=True)
    taken = above | (equal & (np.cumsum(equal, axis=1) <= room))
    return np.nonzero(taken)[1].reshape(len(scores), count)


def select(votes: np.ndarray, keep: int, policy: KvPolicy) -> np.ndarray:
    """The positions int64 [kv heads, keep] that are kept of a prompt, ascending. votes: float32 [kv heads, tokens]: what the last
    `policy.window` queries give to each token."""
    num_heads, num_tokens = votes.shape
    before = num_tokens - policy.window
    last = np.broadcast_to(np.arange(before, num_tokens), (num_heads, policy.window))
    if keep == policy.window:
        return last.copy()
    chosen = largest(pooled(votes[:, :before], policy.kernel, policy.pooling), keep - policy.window)
    return np.concatenate([chosen, last], axis=1)


@dataclass(frozen=True)
class Compression:
    """What becomes of a sequence's prompt: of its first `num_tokens` tokens each kv head of a layer keeps `num_kept`, for which
    the last `window` queries are needed.

    positions: layer → int64 [kv heads, num_kept], empty before it was done.
    """

    num_tokens: int
    num_kept: int
    window: int
    positions: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether the cache holds what is kept, and no more."""
        return bool(self.positions)

    @property
    def first_observed(self) -> int:
        """The first token whose queries are needed."""
        return self.num_tokens - self.window

    @property
    def num_dropped(self) -> int:
        """Tokens that a compressed layer has no more."""
        return self.num_tokens - self.num_kept if self.is_done else 0


def planned(policy: KvPolicy, num_tokens: int) -> Compression | None:
    """What is to be done with a prompt of so many tokens; None where it keeps them all."""
    keep = policy.tokens(num_tokens)
    return Compression(num_tokens, keep, policy.window) if policy.compresses and keep < num_tokens else None
