"""What a smaller cache would do to a text: memory, and how far the model's predictions move.

A full cache in float32 answers greedily; every other cache is then given the same text and answer, and its predictions along the
answer are compared with those. So all are judged at the same places, whatever each would have said itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from llmctl.kernels.kv_types import KV_TYPES
from llmctl.runtime.cache.kept import KeptTokens
from llmctl.runtime.cache.memory import Demand, bytes_per_token, plan_cache
from llmctl.runtime.cache.policy import FULL, KvPolicy, PolicyKind
from llmctl.runtime.engine import Engine
from llmctl.runtime.engine.model_runner import LogitsReader
from llmctl.runtime.evaluate import score_place
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.sampling.params import SamplingParams

EXACT = "f32"
"""The type of the cache that all others are compared with."""
MOST_KL, LEAST_AGREEMENT = 0.01, 0.99
"""What is recommended where no limit of memory is given stays within these."""
_NEEDLE_TOKENS = 16


@dataclass(frozen=True)
class Needle:
    """A text with something to be found in it. depth: where, as a share of the text. token_ids: the text, which ends with the
    question and the beginning of an answer. wanted: what the answer must begin with, but for white space."""

    depth: float
    token_ids: list[int]
    wanted: str


@dataclass(frozen=True)
class Choice:
    """A cache to try: a type, and for a policy that drops tokens the share of the text's tokens that it keeps."""

    kv_type: str
    kind: PolicyKind = "full"
    share: float = 1.0

    def policy(self, num_tokens: int) -> KvPolicy:
        """The policy for a text of so many tokens: all kinds keep as many of them."""
        if self.kind == "full":
            return FULL
        shared = KvPolicy(self.kind, self.share)
        return replace(shared, budget=shared.tokens(num_tokens))

    def drops(self, num_tokens: int) -> bool:
        """Whether it would drop anything of such a text."""
        return self.policy(num_tokens).tokens(num_tokens) < num_tokens


@dataclass(frozen=True)
class Outcome:
    """What a cache does to the text. nbytes: of the tokens it keeps of the text and its answer. context_bytes: of the pages that
    an engine allocates for all sequences of the context asked for; a policy that computes prompts in full needs those. kl: mean
    and largest, nats; same_top: share of the places where the likeliest token is that of the full cache; found: needle by needle
    whether the answer was there. budget: tokens kept, None for all. dropped [T]: for each token of the text the share of the
    heads that have dropped it, of the layers without a window of their own; None where none is dropped.
    """

    choice: Choice
    budget: int | None
    nbytes: int
    context_bytes: int
    kl: float
    kl_max: float
    same_top: float
    found: list[bool]
    dropped: np.ndarray | None


@dataclass(frozen=True)
class WhatIf:
    """answer: token ids of the full cache's own; its places are where the others are compared. recommended: the number of an
    outcome, None where none is within the limit. within: bytes, None for no limit."""

    answer: list[int]
    depths: list[float]
    outcomes: list[Outcome]
    within: int | None
    recommended: int | None


@dataclass(frozen=True)
class Question:
    """What is tried on which text: the text, how many tokens to answer, the needles, and the memory that counts: of so many
    sequences of so much context (None: text and answer), within a limit."""

    token_ids: list[int]
    num_tokens: int = 32
    needles: Sequence[Needle] = ()
    context: int | None = None
    sequences: int = 1
    within: int | None = None


def fitting_types(model: LoadedModel, types: Sequence[str] = KV_TYPES) -> list[str]:
    """Those that the model's heads can be kept in."""
    layers = model.config.kv_layers()
    has_latent = any(layer.latent for layer in layers)
    return [t for t in types if bytes_per_token(layers, t) is not None and not (has_latent and "=" in t)]


def what_if(
    model: LoadedModel,
    question: Question,
    choices: Sequence[Choice],
    progress: Callable[[int, int], None] | None = None,
) -> WhatIf:
    """Try every choice. progress: called with (done, total) parts of the work. Errors: as the engine."""
    total, done = (1 + len(choices)) * (1 + len(question.needles)) - len(question.needles), 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    full = replace(model, kv_type=EXACT, kv_policy=FULL)
    answer = _greedy(full, question.token_ids, question.num_tokens)
    exact = _run(full, question.token_ids, answer)[0]
    step()
    outcomes = [_outcome(model, question, choice, answer, exact, step) for choice in choices]
    depths = [needle.depth for needle in question.needles]
    return WhatIf(answer, depths, outcomes, question.within, recommend(outcomes, question.within))


@contextmanager
def unrounded(model: LoadedModel) -> Iterator[None]:
    """Within, activations are not rounded to eight bits, where the backend does that: any small change would move some of them
    to other numbers, and hide what the cache alone does."""
    before = getattr(model.ops, "activations", None)
    if before is None:
        yield
        return
    try:
        model.ops.activations = "float"
        yield
    finally:
        model.ops.activations = before


def recommend(outcomes: Sequence[Outcome], within: int | None) -> int | None:
    """The number of the best cache: within the limit the one that finds most and moves least. Without a limit the smallest one
    that finds as much as any and stays within MOST_KL and LEAST_AGREEMENT."""
    if within is not None:
        fitting = [i for i, each in enumerate(outcomes) if each.context_bytes <= within]
        return min(fitting, key=lambda i: (-sum(outcomes[i].found), outcomes[i].kl), default=None)
    most = max((sum(each.found) for each in outcomes), default=0)
    good = [
        i
        for i, each in enumerate(outcomes)
        if each.kl <= MOST_KL and each.same_top >= LEAST_AGREEMENT and sum(each.found) == most
    ]
    return min(good, key=lambda i: (outcomes[i].context_bytes, outcomes[i].kl), default=None)


def _outcome(
    model: LoadedModel, question: Question, choice: Choice, answer: list[int], exact: np.ndarray, step: Callable[[], None]
) -> Outcome:
    length, whole = len(question.token_ids), len(question.token_ids) + len(answer)
    tried = _with(model, choice, length)
    rows, kept = _run(tried, question.token_ids, answer)
    step()
    places = zip(rows, exact, [*answer[1:], answer[-1]], strict=True)
    scores = [score_place((row, other), target) for row, other, target in places]
    found = []
    for needle in question.needles:
        found.append(_finds(_with(model, choice, len(needle.token_ids)), needle))
        step()
    return Outcome(
        choice,
        tried.kv_policy.budget,
        kept.nbytes,
        _allocated(_with(model, choice, question.context or whole), question.context or whole, question.sequences),
        float(np.mean([score.kl for score in scores])),
        float(max(score.kl for score in scores)),
        float(np.mean([score.same_top for score in scores])),
        found,
        None if choice.kind == "full" else kept.dropped(model.config.kv_layers(), length),
    )


def _with(model: LoadedModel, choice: Choice, num_tokens: int) -> LoadedModel:
    """The same weights over another cache, for a text of so many tokens."""
    return replace(model, kv_type=choice.kv_type, kv_policy=choice.policy(num_tokens))


def _allocated(model: LoadedModel, context: int, sequences: int) -> int:
    return plan_cache(model.kv_layers(context), model.kv_type, Demand(context, sequences)).nbytes or 0


def _run(model: LoadedModel, token_ids: list[int], answer: list[int]) -> tuple[np.ndarray, KeptTokens]:
    """Logits [n, num_tokens] after every token of the answer, each computed by itself, as in a run; what is then kept."""
    reader = LogitsReader(model, len(token_ids) + len(answer))
    rows = reader.rows([*token_ids, *answer], len(token_ids), 1)
    logits = np.concatenate([np.array(part[:, : model.num_tokens]) for part in rows])
    assert reader.kept is not None
    return logits, reader.kept


def _greedy(model: LoadedModel, token_ids: list[int], count: int) -> list[int]:
    """The likeliest answer, at least one token long."""
    context = min(model.context_length, len(token_ids) + count)
    engine = Engine(replace(model, context_length=max(context, len(token_ids) + 1)), prefix_cache=False)
    sequence = engine.add(token_ids, SamplingParams(temperature=0, max_tokens=count))
    while engine.has_work:
        engine.step()
    return sequence.completion_token_ids


def _finds(model: LoadedModel, needle: Needle) -> bool:
    assert model.tokenizer is not None
    answer = _greedy(model, needle.token_ids, _NEEDLE_TOKENS)
    return model.tokenizer.decode(answer).strip().startswith(needle.wanted)
