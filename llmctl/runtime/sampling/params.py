"""SamplingParams: how the next token is chosen, checked when it is made."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from llmctl.errors import UsageError

STEPS = ("penalties", "dry", "top_k", "typical", "top_p", "min_p", "xtc", "temperature")
"""What shapes a draw after logit bias and constraints, in the order in which it is applied unless `samplers` says otherwise."""
MIROSTAT_STEPS = ("penalties", "dry", "temperature", "mirostat")
"""The order with mirostat, which makes its own cut in place of the others."""
GREEDY_BELOW = 1e-5
_PENALTIES = ("penalties", "dry")


class Constraint(Protocol):
    """What one sequence may say: a grammar, forbidden strings. It has a state, so every sequence has its own."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""

    def forbid(self, logits: np.ndarray) -> None:
        """Set the logits [V] of the tokens that may not come next to −inf, in place."""

    def accept(self, token_id: int) -> None:
        """Take note of the token that came."""


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is sampled. UsageError names the value that cannot be.

    temperature: 0 is greedy; so is anything below 1e-5, where dividing would overflow. top_k: 0 means all. top_p, typical_p,
    min_p: 1.0, 1.0 and 0.0 mean off. repetition_penalty divides positive logits and multiplies negative ones of tokens seen
    among the last `repetition_window` tokens, prompt included; presence and frequency penalties are subtracted over the same
    window (0 off, −1 all). dry_*: see `penalties.apply_dry`; a multiplier of 0 means off, a window of −1 all. xtc_*: see
    `steps.xtc`; a probability of 0 means off. mirostat_tau: surprise aimed at, in bits, None for off; mirostat_eta: how fast it
    is approached. samplers: the steps taken, in order; one that is left out is off. seed: None draws one. max_tokens: None
    means until the end token or the context is full. logit_bias: token id → number added first. constraints: makers of what
    every sequence must keep to, applied after the bias. num_logprobs: alternatives to report per token, None for none.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_window: int = -1
    dry_breakers: frozenset[int] = frozenset()
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat_tau: float | None = None
    mirostat_eta: float = 0.1
    samplers: tuple[str, ...] = STEPS
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    constraints: tuple[Callable[[], Constraint], ...] = ()
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("top_k", "repetition_window", "dry_allowed_length", "dry_window", "seed", "max_tokens", "num_logprobs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise UsageError(f"{name} must be a whole number, found {value!r}")
        for name, (low, high) in _BOUNDS.items():
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), low, high)
        _check("repetition_penalty", self.repetition_penalty, 0, math.inf, open_low=True)
        for token_id, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit bias of token {token_id} must be a number or -inf, found {bias}")
        _check_order(self.samplers)

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that change something, in order."""
        on = {
            "penalties": self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0,
            "dry": self.dry_multiplier > 0.0,
            "top_k": self.top_k > 0,
            "typical": self.typical_p < 1.0,
            "top_p": self.top_p < 1.0,
            "min_p": self.min_p > 0.0,
            "xtc": self.xtc_probability > 0.0,
            "temperature": self.temperature != 1.0,
            "mirostat": True,
        }
        order = self.samplers if self.mirostat_tau is None else MIROSTAT_STEPS
        return tuple(step for step in order if on[step])

    @property
    def penalty_steps(self) -> tuple[str, ...]:
        """Those of the steps that change logits by the tokens so far."""
        return tuple(step for step in self.steps if step in _PENALTIES)

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken without a draw."""
        steps = self.steps
        one_is_left = (self.temperature < GREEDY_BELOW and "temperature" in steps) or (self.top_k == 1 and "top_k" in steps)
        # Typical and XTC may drop the most likely one; penalties after a cut find less to choose from.
        penalties_first = steps[: len(self.penalty_steps)] == self.penalty_steps
        return one_is_left and penalties_first and not {"typical", "xtc"} & {*steps}


_BOUNDS = {
    "temperature": (0, math.inf),
    "top_k": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_window": (-1, math.inf),
    "presence_penalty": (-math.inf, math.inf),
    "frequency_penalty": (-math.inf, math.inf),
    "dry_multiplier": (0, math.inf),
    "dry_base": (1, math.inf),
    "dry_allowed_length": (1, math.inf),
    "dry_window": (-1, math.inf),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "mirostat_tau": (0, math.inf),
    "mirostat_eta": (0, 1),
    "seed": (0, 2**64),
    "max_tokens": (0, math.inf),
    "num_logprobs": (0, math.inf),
}


def _check_order(samplers: tuple[str, ...]) -> None:
    unknown = next((name for name in samplers if name not in STEPS), None)
    if unknown is not None:
        raise UsageError(f"samplers: there is no step {unknown!r}; there are: {', '.join(STEPS)}")
    twice = next((name for name in samplers if samplers.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"samplers: {twice} is named twice")


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # Compared, not converted: a file may hold an integer that is beyond any float.
    finite = -math.inf < value < math.inf
    if not finite or value < low or value > high or (open_low and value == low) or abs(value) > sys.float_info.max:
        bounds = f"above {low}" if open_low else f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise UsageError(f"{name} must be {'a finite number' if low == -math.inf else bounds}, found {value}")
