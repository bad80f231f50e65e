"""Which tokens a sequence's cache keeps: all, the last ones, the first and the last ones, or those its prompt's end looks at.

full     every token.
sliding  a token sees itself and those before it, `budget` in all.
sinks    the same, of which the first `sinks` tokens of the text are always some (Xiao et al., "Efficient Streaming Language
         Models with Attention Sinks", 2023).
snapkv   a prompt is computed in full; then every layer keeps `budget` of its tokens for each kv head, those that the prompt's
         last `window` queries look at most, and these last tokens themselves (Li et al., "SnapKV", 2024, arXiv 2404.14469). What
         is generated is added and kept. A prompt within its budget is left as it is.

sliding and sinks hold for every token from the first on, so that pages fall free while a prompt is computed. Whatever is kept
keeps its position. Layers with a window of their own keep that, and a layer with one compressed vector a token counts as one
head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from llmctl.errors import UsageError
from llmctl.runtime.cache.memory import BLOCK_SIZE, LayerShape

PolicyKind = Literal["full", "sliding", "sinks", "snapkv"]
Pooling = Literal["max", "average"]
POLICIES: tuple[str, ...] = get_args(PolicyKind)


@dataclass(frozen=True)
class KvPolicy:
    """A policy and its numbers.

    budget: tokens, or a share (a float up to 1) of the prompt for snapkv, of the context for sliding and sinks; None for full.
    sinks: first tokens kept by "sinks". window, kernel, pooling: of snapkv: the queries that vote, and over how many
    neighbouring tokens (an odd number) votes are pooled, and how. The paper's kernel of 7 keeps 3 tokens behind one that is
    looked at; a number with a token a digit has 7 and more behind the word that names it. 21 was chosen among kernels of 7 to 41,
    of means and of both, on manuals with other numbers and questions than those that figures are taken on: of 20 numbers in
    4,090 tokens a quarter kept 3 with a kernel of 7, 16 with 13, and all 20 from 17 on; 21 left the answers' digits likeliest.
    Errors: UsageError for numbers that do not fit together.
    """

    kind: PolicyKind = "full"
    budget: int | float | None = None
    sinks: int = 4
    window: int = 32
    kernel: int = 21
    pooling: Pooling = "max"

    def __post_init__(self) -> None:
        if self.kind not in POLICIES:
            raise UsageError(f"--kv-policy {self.kind}: expected {', '.join(POLICIES)}")
        if (self.kind == "full") != (self.budget is None):
            wanted = "takes no --kv-budget" if self.kind == "full" else "needs a --kv-budget: tokens, or a share such as 0.25"
            raise UsageError(f"--kv-policy {self.kind} {wanted}")
        if not 1 <= self.sinks <= BLOCK_SIZE or self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise UsageError(
                f"a cache policy has 1 to {BLOCK_SIZE} sinks, a window of at least 1 and an odd kernel; "
                f"found {self.sinks}, {self.window} and {self.kernel}"
            )
        if isinstance(self.budget, int) and self.budget < self.least:
            raise UsageError(f"--kv-budget {self.budget}: {self.kind} keeps at least {self.least} tokens")
        if isinstance(self.budget, float) and not 0 < self.budget <= 1:
            raise UsageError(f"--kv-budget {self.budget}: a share is above 0 and at most 1")

    @property
    def least(self) -> int:
        """Tokens that are kept whatever the budget is."""
        return {"full": 0, "sliding": 1, "sinks": self.sinks + 1, "snapkv": self.window}[self.kind]

    @property
    def compresses(self) -> bool:
        """Whether prompts are compressed after they were computed."""
        return self.kind == "snapkv"

    def tokens(self, of: int) -> int:
        """The budget in tokens, of a prompt or a context of so many."""
        if self.budget is None:
            return of
        return self.budget if isinstance(self.budget, int) else max(self.least, math.ceil(self.budget * of))

    def shapes(self, layers: Sequence[LayerShape], context: int) -> tuple[LayerShape, ...]:
        """What layers keep that would keep so much without the policy. context: tokens that a share is of.

        UsageError where every layer has a window of its own, so that the policy would do nothing.
        """
        if self.kind != "full" and all(layer.sliding_window is not None for layer in layers):
            raise UsageError(f"--kv-policy {self.kind}: all layers of this model have windows, there is nothing to drop")
        if self.kind not in ("sliding", "sinks"):
            return tuple(layers)
        first = self.sinks if self.kind == "sinks" else 0
        kept = {"sliding_window": self.tokens(context) - first, "anchors": first}
        return tuple(layer if layer.sliding_window is not None else replace(layer, **kept) for layer in layers)

    def __str__(self) -> str:
        if self.budget is None:
            return self.kind
        return f"{self.kind}, {self.budget} tokens" if isinstance(self.budget, int) else f"{self.kind}, {self.budget:.0%}"


FULL = KvPolicy()


def parse_kv_policy(kind: str | None, budget: str | None) -> KvPolicy:
    """The policy of a command line: None where an option was not given. Errors: UsageError."""
    kind = "full" if kind is None else kind.strip().lower()
    if kind not in POLICIES:
        raise UsageError(f"--kv-policy {kind}: expected {', '.join(POLICIES)}")
    return KvPolicy(kind, None if budget is None else _budget(budget))  # type: ignore[arg-type]


def _budget(text: str) -> int | float:
    try:
        return int(text) if text.strip().isdecimal() else float(text)
    except ValueError:
        raise UsageError(f"--kv-budget {text}: expected a number of tokens, or a share such as 0.25") from None
