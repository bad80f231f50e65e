"""Rejection sampling of drafted tokens: whatever the draft proposes, what comes out is distributed as the target's own draw.

Tokens of which the draft gives no odds need none of this: the target draws as ever, and what was computed after them holds if it
draws the same.

A proposal x, drawn from q, is taken with probability min(1, p(x) / q(x)); otherwise a token is drawn from norm(max(0, p − q)),
which never is x. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Proposal:
    """A drafted token and the distribution q it was drawn from.

    ids, probabilities: [n], every token with q > 0; None where the draft names a token without odds.
    confidence: what the draft thinks of its token, between 0 and 1.
    """

    token_id: int
    ids: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    confidence: float = 1.0

    def of(self, ids: np.ndarray) -> np.ndarray:
        """q at these token ids, float64."""
        assert self.ids is not None
        assert self.probabilities is not None
        order = np.argsort(self.ids)
        places = np.minimum(np.searchsorted(self.ids, ids, sorter=order), len(order) - 1)
        places = order[places]
        return np.where(self.ids[places] == ids, self.probabilities[places], 0.0)


def choose(ids: np.ndarray, weights: np.ndarray, proposal: Proposal, generator: np.random.Generator) -> int:
    """The place in `ids` of the token to take: that of the proposal, which has odds, or another.

    ids: [n], every token the target may draw. weights: [n] float64, in proportion to p. Two uniform numbers are drawn at most.
    """
    p, q = weights / weights.sum(), proposal.of(ids)
    place = np.flatnonzero(ids == proposal.token_id)
    if len(place) and generator.random() * q[place[0]] < p[place[0]]:
        return int(place[0])
    residual = np.maximum(p - q, 0.0)
    if residual.sum() == 0.0:  # p and q are the same but for rounding
        residual = p
    cumulative = residual.cumsum()
    return min(int(cumulative.searchsorted(generator.random() * cumulative[-1], side="right")), len(ids) - 1)
