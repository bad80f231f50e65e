"""Results that are put off until it is known who reads them, so that one kernel does what several ops ask for.

The decoder asks op by op. A sum is written by the norm that reads it; heads that are normed and turned are stored in the launch
that turns them; what a norm or an activation makes for a product of integers is rounded where it is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmctl.kernels.rms_norm._triton import rms_norm
from llmctl.kernels.rotary._triton import rotary
from llmctl.kernels.triton_lib.activations import QuantizedRows


class Deferred:
    """Numbers that are computed when they are first asked for."""

    value: torch.Tensor | None

    def now(self) -> torch.Tensor:
        """The numbers."""
        if self.value is None:
            self.value = self._compute()
        return self.value

    def _compute(self) -> torch.Tensor:
        raise NotImplementedError


Rows = torch.Tensor | Deferred


def now(x: Rows) -> torch.Tensor:
    """The numbers of either."""
    return x.now() if isinstance(x, Deferred) else x


@dataclass(eq=False)
class Sum(Deferred):
    """x + y, both [T, H]."""

    x: torch.Tensor
    y: torch.Tensor
    value: torch.Tensor | None = None

    def _compute(self) -> torch.Tensor:
        return self.x + self.y


@dataclass(eq=False)
class Rounded(Deferred):
    """Numbers [T, K] that are there, and the same as int8."""

    value: torch.Tensor
    rows: QuantizedRows


@dataclass(eq=False)
class NormedHeads(Deferred):
    """The norm of every head of x [T, heads, head_dim]."""

    x: torch.Tensor
    weight: torch.Tensor
    eps: float
    value: torch.Tensor | None = None

    def _compute(self) -> torch.Tensor:
        return rms_norm(self.x, self.weight, self.eps)


@dataclass(eq=False)
class Turned(Deferred):
    """Heads [T, heads, head_dim], normed before or not, turned by cos and sin."""

    x: torch.Tensor | NormedHeads
    cos: torch.Tensor
    sin: torch.Tensor
    value: torch.Tensor | None = None

    def _compute(self) -> torch.Tensor:
        return rotary(now(self.x), self.cos, self.sin)

    @property
    def bare(self) -> torch.Tensor:
        """Before the norm."""
        return self.x.x if isinstance(self.x, NormedHeads) else self.x

    @property
    def norm(self) -> NormedHeads | None:
        """What is still to be normed; None where nothing is."""
        return self.x if isinstance(self.x, NormedHeads) and self.x.value is None else None


def go_together(queries: Turned, keys: Turned) -> bool:
    """Whether one launch can norm and turn both: neither is done, and both are turned alike."""
    if queries.value is not None or keys.value is not None or queries.cos is not keys.cos:
        return False
    if not (isinstance(queries.x, NormedHeads) or isinstance(keys.x, NormedHeads)):
        return True
    norms = queries.norm, keys.norm
    return None not in norms and norms[0].eps == norms[1].eps and norms[0].weight.ndim == norms[1].weight.ndim
