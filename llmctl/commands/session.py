"""A request of `llmctl run` and the model it is put to: what one answer and a whole chat both work on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.errors import FormatError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from llmctl.runtime.loading import OpenedModel
    from llmctl.runtime.sampling.params import SamplingParams


@dataclass(frozen=True)
class Request:
    """What the command line asks for, but for the prompt.

    spec: the model, None for the default one. template: the source of --chat-template. raw: --no-chat. sampling: the values
    given, by the names of SamplingParams. loading: keyword arguments of `open_model`.
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

    @property
    def name(self) -> str:
        """The model as the user calls it."""
        from llmctl.runtime.store import DEFAULT_MODEL

        return self.spec or os.environ.get("LLMCTL_MODEL") or DEFAULT_MODEL


@dataclass(frozen=True)
class Session:
    """A request whose model is open. params: the request's sampling over from_file (what the model's file recommends)."""

    request: Request
    opened: OpenedModel
    params: SamplingParams
    from_file: dict[str, Any]

    @property
    def template(self) -> str | None:
        """The chat template in force; None where the prompt is raw text."""
        if self.request.raw:
            return None
        return self.request.template or self.opened.tokenizer.chat_templates.get("default")


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
    session = Session(request, opened, _merge(request, from_file, path), from_file)
    if session.template is None and request.system is not None:
        raise UsageError(
            f"{path}: without a chat template --system has no place: put it into the prompt, or use --chat-template FILE"
        )
    return session


def _merge(request: Request, from_file: dict[str, Any], path: Path) -> SamplingParams:
    """The sampling in force. Errors: FormatError where the model's file recommends what cannot be."""
    from llmctl.runtime.sampling.params import SamplingParams

    try:
        return SamplingParams(**{**from_file, **request.sampling})
    except (UsageError, TypeError) as error:
        raise FormatError(f"{path}: recommends for sampling what cannot be ({error}); set it on the command line") from None
