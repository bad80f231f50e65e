"""SamplingParams: how the next token is chosen, checked when it is made."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmctl.errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is sampled. UsageError names the value that cannot be.

    temperature: 0 is greedy; so is anything below 1e-5, where dividing would overflow. top_k: 0 means all. top_p, min_p:
    1.0 and 0.0 mean off. repetition_penalty divides positive logits and multiplies negative ones of tokens seen among the
    last `repetition_window` tokens, prompt included; presence and frequency penalties are subtracted over the same window
    (0 off, −1 all). seed: None draws one. max_tokens: None means until the end token or the context is full. logit_bias:
    token id → number added first. num_logprobs: alternatives to report per token, None for none.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("top_k", "repetition_window", "seed", "max_tokens", "num_logprobs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise UsageError(f"{name} must be a whole number, found {value!r}")
        _check("temperature", self.temperature, 0, math.inf)
        _check("top_k", self.top_k, 0, math.inf)
        _check("top_p", self.top_p, 0, 1)
        _check("min_p", self.min_p, 0, 1)
        _check("repetition_penalty", self.repetition_penalty, 0, math.inf, open_low=True)
        _check("repetition_window", self.repetition_window, -1, math.inf)
        _check("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _check("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        if self.seed is not None:
            _check("seed", self.seed, 0, 2**64)
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, 0, math.inf)
        if self.num_logprobs is not None:
            _check("num_logprobs", self.num_logprobs, 0, math.inf)
        for token_id, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit bias of token {token_id} must be a number or -inf, found {bias}")

    @property
    def has_penalties(self) -> bool:
        """True when tokens seen before are less likely, or more."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken without a draw."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def keeps_all(self) -> bool:
        """True when every token may be drawn."""
        return self.top_k == 0 and self.top_p >= 1.0 and self.min_p == 0.0


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # Compared, not converted: a file may hold an integer that is beyond any float.
    finite = -math.inf < value < math.inf
    if not finite or value < low or value > high or (open_low and value == low) or abs(value) > sys.float_info.max:
        bounds = f"above {low}" if open_low else f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise UsageError(f"{name} must be {'a finite number' if low == -math.inf else bounds}, found {value}")
