"""The views of `inspect-kv` put together: one JSON object, shown in the terminal or written as a report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmctl.commands.kv_text import InspectedText
    from llmctl.commands.session import Request, Session
    from llmctl.runtime.cache.memory import LayerShape
    from llmctl.runtime.cache.policy import PolicyKind
    from llmctl.runtime.inspection.attention import AttentionSurvey
    from llmctl.runtime.inspection.what_if import Choice, Needle
    from llmctl.runtime.loading import LoadedModel

VIEWS = ("plan", "live", "attention", "what-if")
REPORTS = (".html", ".htm", ".png", ".json")
DEFAULT_ANSWER = 32


@dataclass(frozen=True)
class Look:
    """What is to be looked at. contexts, batches, types: of the plan. has_types: they were asked for. new_tokens: generated
    before the live view and compared in the what-if view, None for what is usual. policies, shares: what is tried of dropping
    tokens, and how much of the text is kept. live_policy: whose cache the live view shows, with the first share. within:
    bytes."""

    views: tuple[str, ...]
    contexts: list[int]
    batches: list[int]
    types: list[str]
    has_types: bool
    new_tokens: int | None
    needles: int
    policies: list[str]
    live_policy: PolicyKind
    shares: list[float]
    within: int | None


def inspect_text(request: Request, look: Look, prompt: str | None, saved: Path | None) -> dict[str, Any]:
    """Run a prompt or a saved text, and describe it in the views asked for. Errors: as the model, the text and the engine."""
    from llmctl.commands.answer import load_weights
    from llmctl.commands.kv_plan import model_subject, plan_report
    from llmctl.commands.kv_text import pieces, prompt_text, saved_text
    from llmctl.commands.session import open_session
    from llmctl.runtime.engine.engine import check_prompt

    session = open_session(request)
    text = prompt_text(session, prompt or "") if saved is None else saved_text(session, saved)
    check_prompt(text.token_ids, session.opened.num_tokens, session.opened.context_length)
    subject = model_subject(session.opened.checkpoint.path, request.loading["family"])
    document = plan_report(subject, look.types, look.contexts, look.batches)
    model, _ = load_weights(session.opened, request.threads)
    parts = {"token_ids": text.token_ids, "pieces": pieces(model, text.token_ids)}
    document["text"] = {"source": text.source, "num_tokens": len(text.token_ids), **parts}
    return {**document, **_views(session, model, look, text)}


def _views(session: Session, model: LoadedModel, look: Look, text: InspectedText) -> dict[str, Any]:
    from llmctl.commands.kv_attention import attention_document

    found: dict[str, Any] = {"live": None, "attention": None, "what_if": None}
    survey = _survey(model, text) if "attention" in look.views else None
    if "live" in look.views:
        found["live"] = _live(model, look, text, survey)
    if survey is not None:
        windows = [layer.sliding_window for layer in model.config.kv_layers()]
        found["attention"] = attention_document(survey, windows)
        found["maps"] = survey.maps
    if "what-if" in look.views:
        found["what_if"] = _what_if(session, model, look, text)
    return found


def _survey(model: LoadedModel, text: InspectedText) -> AttentionSurvey:
    from llmctl.runtime.inspection.attention import survey_attention

    with console.progress("Following the attention", unit="part") as bar:
        return survey_attention(model, text.token_ids, bar.update_to)


def _live(model: LoadedModel, look: Look, text: InspectedText, survey: AttentionSurvey | None) -> dict[str, Any]:
    from llmctl.commands.kv_kept import kept_document
    from llmctl.commands.kv_live import live_document
    from llmctl.commands.kv_text import pieces, put_back_saved
    from llmctl.runtime.inspection.live import look_at_cache
    from llmctl.runtime.inspection.ranges import survey_ranges
    from llmctl.runtime.inspection.what_if import Choice

    policy = Choice(model.kv_type, look.live_policy, look.shares[0]).policy(len(text.token_ids))
    cache = look_at_cache(
        replace(model, kv_policy=policy),
        text.token_ids,
        sequences=max(look.batches),
        new_tokens=look.new_tokens or 0,
        prepare=put_back_saved(text, model),
    )
    if survey is None:
        with console.progress("Looking at keys and values", unit="part") as bar:
            keys, values = survey_ranges(model, text.token_ids, bar.update_to)
    else:
        keys, values = survey.keys, survey.values
    kept = None if policy.budget is None else kept_document(cache.kept, str(policy), model.config.kv_layers())
    texts = [pieces(model, ids) for ids in cache.token_ids]
    return {**live_document(cache, model.kv_type, keys, values, kept), "texts": texts}


def _what_if(session: Session, model: LoadedModel, look: Look, text: InspectedText) -> dict[str, Any]:
    from llmctl.commands.kv_text import needles, pieces
    from llmctl.commands.kv_what_if import what_if_document
    from llmctl.runtime.inspection.what_if import Choice, Question, fitting_types, unrounded, what_if

    question = Question(
        text.token_ids,
        max(1, DEFAULT_ANSWER if look.new_tokens is None else look.new_tokens),
        _fitting(needles(session, text, look.needles), model.context_length),
        max(look.contexts, default=None),
        max(look.batches),
        look.within,
    )
    types = fitting_types(model, look.types)
    choices = [*map(Choice, types), *_policies(look, text, model.config.kv_layers(), model.kv_type)]
    with unrounded(model), console.progress("Trying other caches", unit="run") as bar:
        found = what_if(model, question, choices, bar.update_to)
    return what_if_document(question, found, pieces(model, found.answer))


def _policies(look: Look, text: InspectedText, layers: Sequence[LayerShape], kv_type: str) -> list[Choice]:
    """The policies to try, but for those that would drop nothing, which is said."""
    from llmctl.runtime.inspection.what_if import Choice

    if look.policies and all(layer.sliding_window is not None for layer in layers):
        console.info("All layers have windows of their own: policies have nothing to drop")
        return []
    choices = [Choice(kv_type, kind, share) for kind in look.policies for share in look.shares]
    idle = [choice.kind for choice in choices if not choice.drops(len(text.token_ids))]
    if idle:
        named = ", ".join(dict.fromkeys(idle))
        console.info(f"Of {len(text.token_ids)} tokens {named} would drop none, with one budget or another")
    return [choice for choice in choices if choice.drops(len(text.token_ids))]


def _fitting(found: list[Needle], context: int) -> list[Needle]:
    """The needles, if the text has room for them; else none, which is said."""
    longest = max((len(needle.token_ids) for needle in found), default=0)
    if longest < context:
        return found
    console.warn(f"the needles are left out: with one the text has {longest} tokens, the context holds {context}")
    return []


def deliver(document: dict[str, Any], look: Look, output: Path | None, *, json: bool) -> None:
    """Write the report, if one is asked for, and show the rest: with --json the document, with -o the file's name."""
    from llmctl.commands.conversion import save_file

    maps = document.pop("maps", None)
    if output is not None:
        save_file(output, _report(document, look, maps, output.suffix.lower()))
    if json:
        console.print_json(document)
    elif output is not None:
        console.result(str(output))
    else:
        _show(document, look)


def _report(document: dict[str, Any], look: Look, maps: Any, kind: str) -> bytes:
    from llmctl.commands.kv_page import atlas_png, html_report

    if kind == ".png":
        return atlas_png(maps)
    if kind == ".json":
        return console.json_line(document).encode("utf-8") + b"\n"
    return html_report(document, look.views, maps).encode("utf-8", "replace")


def _show(document: dict[str, Any], look: Look) -> None:
    from llmctl.commands.kv_attention import print_attention
    from llmctl.commands.kv_live import print_live
    from llmctl.commands.kv_plan import print_plan
    from llmctl.commands.kv_what_if import print_what_if

    show = {
        "plan": lambda: print_plan(document),
        "live": lambda: print_live(document["live"], document["live"]["texts"]),
        "attention": lambda: print_attention(document["attention"], document["text"]["pieces"]),
        "what-if": lambda: print_what_if(document["what_if"], document["text"]["pieces"]),
    }
    for number, name in enumerate(look.views):
        if number:
            console.result()
        show[name]()
