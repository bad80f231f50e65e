"""--draft: what it names, whether it fits the model, and the engine's speculation made of it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.commands import console
from llmctl.errors import LlmctlError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from llmctl.kernels.formats.spec import Format
    from llmctl.runtime.engine.speculation import Speculation, SpeculationStats
    from llmctl.runtime.loading import LoadedModel, OpenedModel

_SELF, _NGRAM = "self:", "ngram"
_WORTH_A_WORD, _MANY_ROUNDS = 0.95, 8

DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="DRAFT",
        help="Draft tokens that the model then checks, several at once: a smaller MODEL of the same vocabulary, ngram (from the "
        "text so far) or self:TYPE (the model itself as Q4_0, Q4_K_M …). No answer's odds change; greedy ones stay the same.",
        show_default=False,
    ),
]
NumDraftTokensOption = Annotated[
    int | None,
    typer.Option("--num-draft-tokens", min=1, max=64, help="Draft always so many at once.", show_default="as many as pay"),
]


@dataclass(frozen=True)
class DraftRequest:
    """What the command line asks for. spec: a model, "ngram" or "self:TYPE". num_tokens: a fixed number, None to adapt."""

    spec: str
    num_tokens: int | None = None


@dataclass(frozen=True)
class OpenedDraft:
    """A draft that was found and fits. target: the model it drafts for, with the memory that is left to it; opened: the draft,
    of a model; formats: what its matrices are rounded to first."""

    request: DraftRequest
    target: OpenedModel
    opened: OpenedModel | None = None
    formats: dict[str, Format] | None = None

    def load(self, target: LoadedModel, *, max_num_seqs: int = 1) -> Speculation:
        """Prepare the draft's weights with as many threads as the target's."""
        from llmctl.runtime.engine.drafter import NgramDrafter
        from llmctl.runtime.engine.model_drafter import ModelDrafter
        from llmctl.runtime.engine.speculation import LONGEST_DRAFT, Speculation

        fixed = self.request.num_tokens
        longest = LONGEST_DRAFT if fixed is None else fixed
        if self.opened is None:
            return Speculation(NgramDrafter(), longest=longest, fixed=fixed is not None)
        begin = time.perf_counter()
        model = self.opened.load(threads=target.ops.threads, formats=self.formats)
        cost = _nbytes(self.opened, self.formats) / max(1, target.checkpoint.total_bytes)
        drafter = ModelDrafter(
            model, num_tokens=target.num_tokens, cost=cost, longest=longest, max_num_seqs=max_num_seqs
        )
        console.detail(f"draft: {self.request.spec}, loaded in {time.perf_counter() - begin:.2f} s")
        return Speculation(drafter, longest=longest, fixed=fixed is not None)


def draft_request(spec: str | None, num_tokens: int | None) -> DraftRequest | None:
    """What --draft and --num-draft-tokens ask for. Errors: UsageError for what --draft cannot mean."""
    if spec is None:
        if num_tokens is not None:
            raise UsageError("--num-draft-tokens is for --draft: name what drafts")
        return None
    if spec.lstrip("-").isdigit():
        raise UsageError(
            f"--draft {spec}: --draft names what drafts (a model, {_NGRAM}, {_SELF}TYPE); "
            f"the number of drafted tokens is --num-draft-tokens {spec}"
        )
    return DraftRequest(spec, num_tokens)


def open_draft(request: DraftRequest, target: OpenedModel, loading: dict[str, Any]) -> OpenedDraft:
    """Find the draft and compare it with the model, before any weight is read. loading: of `open_model`, as for the target.

    Errors: UnsupportedError for a model that knows other tokens, UsageError for a TYPE that is none, OutOfMemoryError.
    """
    from llmctl.runtime.loading import share_memory

    if request.spec == _NGRAM:
        return OpenedDraft(request, target)
    is_own = request.spec.startswith(_SELF)
    formats = _own_formats(target, request.spec.removeprefix(_SELF)) if is_own else None
    draft = target if is_own else _open_model(request.spec, target, loading)
    target, draft = share_memory(target, draft, _nbytes(draft, formats), loading.get("ctx_size"))
    return OpenedDraft(request, target, draft, formats)


def _nbytes(draft: OpenedModel, formats: dict[str, Format] | None) -> int:
    """Of a draft's weights, as stored or rounded."""
    total = 0
    for name in draft.weights.names():
        stored, form = draft.weights.stored(name), (formats or {}).get(name)
        columns = stored.shape[-1] if form else 1
        total += stored.nbytes if form is None else form.row_bytes(columns) * (stored.num_elements // columns)
    return total


def _open_model(spec: str, target: OpenedModel, loading: dict[str, Any]) -> OpenedModel:
    from llmctl.runtime.cache.policy import FULL
    from llmctl.runtime.gpu_placement import USUAL_GPU
    from llmctl.runtime.loading import open_model
    from llmctl.runtime.store import resolve_model
    from llmctl.runtime.tokenizer.same_tokens import first_difference

    path = resolve_model(spec, progress=console.progress)
    own = {"family": None, "kv_policy": FULL, "gpu": USUAL_GPU}
    trained = open_model(path, **{**loading, **own, "ctx_size": None})
    size = min(trained.context_length, target.context_length)
    opened = open_model(path, **{**loading, **own, "ctx_size": size})
    if opened.tokenizer is None or target.tokenizer is None:
        raise UnsupportedError(f"{path if opened.tokenizer is None else target.checkpoint.path}: has no tokenizer to compare")
    if difference := first_difference(target.tokenizer, opened.tokenizer):
        raise UnsupportedError(
            f"--draft {spec}: its vocabulary is not that of {target.checkpoint.path}: {difference}. A draft needs the same one"
        )
    return opened


def _own_formats(target: OpenedModel, type_name: str) -> dict[str, Format]:
    """The types of the model's matrices in a mix, by Hugging Face name. Errors: UsageError."""
    from llmctl.quant.recipe import ModelFacts, choose_types, recipe_by_name

    try:
        recipe = recipe_by_name(type_name)
    except LlmctlError as error:
        raise UsageError(f"--draft {_SELF}{type_name}: {error}") from None
    if recipe is None or recipe.matrices.is_plain:
        raise UsageError(f"--draft {_SELF}{type_name}: a draft needs fewer bits than the model: {_SELF}Q4_0, {_SELF}Q4_K_M …")
    if recipe.needs_importance:
        raise UsageError(f"--draft {_SELF}{type_name}: {recipe.name} has too few bits to do without an importance matrix")
    weights, config = target.weights, target.config
    facts = ModelFacts(
        weights.family.gguf_arch,
        layers=config.num_layers,
        experts=config.experts.num_experts if config.experts else 0,
        heads_per_kv_head=config.num_heads // config.num_kv_heads,
        tied=config.tie_word_embeddings,
        importance=False,
    )
    named = {name: weights.family.gguf_names.to_gguf(name) for name in weights.names()}
    shapes = {gguf: weights.stored(name).shape for name, gguf in named.items() if gguf is not None}
    choices = choose_types(shapes.items(), recipe, facts)
    return {
        name: choices[gguf].format
        for name, gguf in named.items()
        if gguf is not None and len(weights.stored(name).shape) == 2 and not choices[gguf].format.is_plain
    }


def describe_speculation(stats: SpeculationStats) -> list[str]:
    """What drafting did for one answer, or for all of a batch together."""
    if not stats.drafted:
        return ["draft: nothing was drafted"]
    held = f"draft: {stats.accepted} of {stats.drafted} drafted tokens accepted ({stats.acceptance_rate:.0%})"
    passes, tokens = stats.rounds + stats.plain_steps, stats.round_tokens + stats.plain_tokens
    lines = [f"{held}, {passes} passes of the model for {tokens} tokens"]
    if stats.speedup is not None:
        lines.append(f"draft: {stats.speedup:.2f} x the speed of plain decoding")
    return lines


def describe_loss(stats: SpeculationStats, what: str) -> str | None:
    """Told to people who draft at a loss; None where it is none worth the word, or measured by too little."""
    if stats.speedup is None or stats.speedup >= _WORTH_A_WORD or stats.rounds < _MANY_ROUNDS:
        return None
    return f"Drafting made {what} slower ({stats.speedup:.2f} x plain decoding): leave out --draft."


def speculation_fields(stats: SpeculationStats) -> dict[str, Any]:
    """The same for JSON."""
    return {**asdict(stats), "acceptance_rate": stats.acceptance_rate, "speedup": stats.speedup}
