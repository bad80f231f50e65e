"""A request of `llmctl run` and the model it is put to: what one answer and a whole chat both work on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.commands.draft import DraftRequest, OpenedDraft, open_draft
from llmctl.errors import FormatError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from llmctl.commands.structure import Structure
    from llmctl.runtime.engine import Engine
    from llmctl.runtime.loading import LoadedModel, OpenedModel
    from llmctl.runtime.sampling.params import SamplingParams


@dataclass(frozen=True)
class Request:
    """What the command line asks for, but for the prompt.

    spec: the model, None for the default one. template: the source of --chat-template. raw: --no-chat. sampling: the values
    given, by the names of SamplingParams. loading: keyword arguments of `open_model`. json_lines: events instead of one document.
    structure: what answers must be. banned: what they must not hold. breakers: texts that end a repetition for DRY.
    draft: what --draft asks for. prompt_cache: file that keeps the cache of a prompt.
    """

    spec: str | None
    system: str | None
    template: str | None
    raw: bool
    stop: list[str]
    sampling: dict[str, Any]
    loading: dict[str, Any]
    threads: int | None
    json: bool
    json_lines: bool = False
    structure: Structure | None = None
    banned: list[str] = field(default_factory=list)
    breakers: list[str] = field(default_factory=list)
    draft: DraftRequest | None = None
    prompt_cache: Path | None = None

    @property
    def name(self) -> str:
        """The model as the user calls it."""
        from llmctl.runtime.store import default_model

        return self.spec or default_model()[0]


@dataclass(frozen=True)
class Session:
    """A request whose model is open, and its draft where there is one. params: the request's sampling over from_file (what the
    model's file recommends)."""

    request: Request
    opened: OpenedModel
    params: SamplingParams
    from_file: dict[str, Any]
    draft: OpenedDraft | None = None

    def engine(self, model: LoadedModel, max_num_seqs: int = 1) -> Engine:
        """The engine that answers, with its draft."""
        from llmctl.runtime.engine import Engine

        speculation = self.draft.load(model, max_num_seqs=max_num_seqs) if self.draft else None
        return Engine(model, max_num_seqs=max_num_seqs, speculation=speculation)

    @property
    def template(self) -> str | None:
        """The chat template in force; None where the prompt is raw text."""
        if self.request.raw:
            return None
        return self.request.template or self.opened.tokenizer.chat_templates.get("default")

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """A conversation of this one question, after the system message if there is one."""
        system = [{"role": "system", "content": self.request.system}] if self.request.system is not None else []
        return [*system, {"role": "user", "content": prompt}]


def open_session(request: Request) -> Session:
    """Find the model, pulling it if need be, and open it; no backend is imported yet."""
    from llmctl.runtime.loading import open_model, sampling_defaults
    from llmctl.runtime.store import resolve_model

    path = resolve_model(request.spec, progress=console.progress)
    if request.spec is None:
        console.info(f"Using {request.name}: {path}")
    opened = open_model(path, **request.loading)
    if opened.tokenizer is None:
        raise UnsupportedError(f"{path}: the model has no tokenizer, so it cannot be given text")
    surplus = next((i for i in request.sampling.get("logit_bias", ()) if not 0 <= i < opened.num_tokens), None)
    if surplus is not None:
        raise UsageError(f"--logit-bias: the model has tokens 0 to {opened.num_tokens - 1}, found {surplus}")
    from_file = {k: v for k, v in sampling_defaults(opened.checkpoint).items() if k not in request.sampling}
    params = replace(_merge(request, from_file, path), **_of_the_vocabulary(request, opened))
    draft = open_draft(request.draft, opened, request.loading) if request.draft else None
    session = Session(request, draft.target if draft else opened, params, from_file, draft)
    if session.template is None and request.system is not None:
        raise UsageError(
            f"{path}: without a chat template --system has no place: put it into the prompt, or use --chat-template FILE"
        )
    return session


def _of_the_vocabulary(request: Request, opened: OpenedModel) -> dict[str, Any]:
    """What of SamplingParams depends on the model's tokens."""
    from llmctl.runtime.constraints.banned import BannedStrings
    from llmctl.runtime.constraints.grammar import Grammar
    from llmctl.runtime.constraints.token_texts import breakers

    tokenizer, count, found = opened.tokenizer, opened.num_tokens, []
    if request.structure is not None:
        found.append(Grammar(request.structure.grammar, tokenizer, count, opened.eos_token_ids))
    if request.banned:
        found.append(BannedStrings(tokenizer, count, request.banned))
    dry = {"dry_breakers": breakers(tokenizer, count, request.breakers)} if request.sampling.get("dry_multiplier") else {}
    return {"constraints": tuple(found), **dry}


def _merge(request: Request, from_file: dict[str, Any], path: Path) -> SamplingParams:
    """The sampling in force. Errors: FormatError where the model's file recommends what cannot be."""
    from llmctl.runtime.sampling.params import SamplingParams

    try:
        return SamplingParams(**{**from_file, **request.sampling})
    except (UsageError, TypeError) as error:
        raise FormatError(f"{path}: recommends for sampling what cannot be ({error}); set it on the command line") from None
