"""Sequence: one request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from llmctl.runtime.cache.block_manager import SequencePages
from llmctl.runtime.cache.snapkv import Compression
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.rejection import Proposal
from llmctl.runtime.sampling.sampler import Sampler

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(eq=False)
class Sequence:
    """Token ids of one request and how far they have been computed.

    token_ids: prompt followed by completion. num_computed: leading tokens whose keys and values are in the cache.
    num_cached_tokens: tokens of the prompt that were there already when it began. pages: its cache pages, None before they are
    first asked for. was_begun: it has run before, even if it waits again. draft: tokens that may follow, computed in the next
    step to be judged there. finish_reason: None while it runs. compression: what becomes of the prompt once it is computed, None
    for nothing.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    sampler: Sampler
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    num_cached_tokens: int = 0
    was_begun: bool = False
    pages: SequencePages | None = None
    draft: list[Proposal] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    compression: Compression | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def completion_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed(self) -> int:
        """Tokens that must still run before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def to_compress(self) -> Compression | None:
        """The compression that is still to be done."""
        return None if self.compression is None or self.compression.is_done else self.compression

    @property
    def reusable(self) -> list[int]:
        """The tokens that need not be computed where the cache has them: not those whose queries are looked at."""
        return self.token_ids if self.compression is None else self.token_ids[: self.compression.first_observed + 1]

    def most_in_step(self, budget: int) -> int:
        """Tokens for the next step, of which there is room for `budget`: a prompt that is compressed ends one."""
        waiting = self.num_uncomputed if self.to_compress is None else self.to_compress.num_tokens - self.num_computed
        return min(waiting, budget)

    def forget_computed(self) -> None:
        """All has to be computed again."""
        self.num_computed, self.draft = 0, []
        if self.compression is not None:
            self.compression = replace(self.compression, positions={})

    def rope_length(self, position: int) -> int:
        """Sequence length that length-dependent rope types see at a position: the whole prompt inside it, then what is there.

        It depends on the position alone, so chunk borders and recomputation do not change a token's angles.
        """
        return max(self.num_prompt_tokens, position + 1)
