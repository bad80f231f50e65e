"""llmctl inspect-kv: what the KV cache of a model costs, and what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.commands import console
from llmctl.commands.conversion import ForceOption
from llmctl.commands.kv_views import REPORTS, VIEWS, Look
from llmctl.commands.number_list import SYNTAX, number_list
from llmctl.commands.options import (
    ActivationsOption,
    AsOption,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    QuietOption,
    ThreadsOption,
)
from llmctl.commands.run_options import FileOption, NoChatOption, PromptArgument, PromptOption
from llmctl.errors import UsageError

if TYPE_CHECKING:
    from llmctl.commands.session import Request

_USUAL_VIEWS = ("live", "attention")


def inspect_kv(
    model: ModelArgument = None,
    words: PromptArgument = None,
    prompt: PromptOption = None,
    file: FileOption = None,
    session: Annotated[
        Path | None,
        typer.Option(
            "--session",
            metavar="SAVED",
            help="Look at the text that --prompt-cache or /save has kept, and at its cache.",
            show_default=False,
        ),
    ] = None,
    view: Annotated[
        list[str] | None,
        typer.Option(
            "--view",
            metavar="|".join(VIEWS),
            help="What to show; a list or repeatable.",
            show_default="plan without a prompt, live,attention with one",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write a report (.html), the attention maps (.png), or .json.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option("--ctx-size", "-c", help=f"Tokens of context: {SYNTAX}.", show_default="the model's own"),
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", help=f"Sequences: {SYNTAX}. Live: so many go on from the prompt.", show_default="1"),
    ] = None,
    kv_type: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-type", help="Element type of the cache; a list or repeatable. Live: the first.", show_default="all"
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=0,
            help="Tokens generated before the live view, and compared by what-if.",
            show_default="0 and 32",
        ),
    ] = None,
    needles: Annotated[
        int, typer.Option("--needles", min=0, max=100, help="What-if: numbers hidden in the text, to see which caches find them.")
    ] = 2,
    kv_policy: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-policy",
            metavar="sliding|sinks|snapkv|full",
            help="Ways to drop tokens; a list or repeatable, full for none. Live: the first.",
            show_default="all, live: full",
        ),
    ] = None,
    kv_budget: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-budget",
            metavar="SHARE",
            help="How much of the text they keep; a list or repeatable. Live: the first.",
            show_default="0.25",
        ),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option("--max-memory", metavar="SIZE", help="What-if: recommend what fits into 2G.", show_default=False),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="LAYERS,KV_HEADS,HEAD_DIM[,WINDOW]|NAME",
            help="Count these layers instead of a model's, or gpt3-175b, llama2-7b, llama3-8b. WINDOW: tokens they see. "
            "Repeatable for models that mix layers.",
        ),
    ] = None,
    force: ForceOption = False,
    no_chat: NoChatOption = False,
    as_family: AsOption = None,
    threads: ThreadsOption = None,
    activations: ActivationsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what the KV cache of a model costs, and with a prompt what is in it.

    plan: bytes per token and layer, totals for context x batch x type, what fits here; MODEL may be a bare config.json. live: the
    pages of the prompt, and the ranges of its keys and values. attention: where each head looks, and the tokens that get most.
    what-if: what other cache types would save and change. ALLOCATED is what the engine takes: pages for every token, in layers
    with a sliding window for the window and for a step of the prompt. LEAST is what the next token sees.
    """
    from llmctl.commands.conversion import size_in_bytes
    from llmctl.commands.kv_plan import kv_types_of, model_subject, plan_report, shape_subject
    from llmctl.commands.kv_views import deliver, inspect_text
    from llmctl.commands.prompt_input import split_arguments, whole_prompt

    spec, argument = split_arguments(model, words, prompt)
    has_text = argument is not None or file is not None or session is not None
    if session is not None and (argument is not None or file is not None):
        raise UsageError("either a prompt or --session: both were given")
    if shape and (spec is not None or has_text):
        raise UsageError(f"either MODEL or --shape: both {spec or 'a text'} and --shape {shape[0]} were given")
    if shape and as_family is not None:
        raise UsageError("--as is for a MODEL: --shape says all there is to say")
    if not has_text:
        _refuse_without_text({"--kv-policy": kv_policy, "--kv-budget": kv_budget, "--max-tokens": max_tokens})
    policies = _policies(kv_policy)
    look = Look(
        views=_views(view, has_text=has_text, wants_advice=max_memory is not None),
        contexts=number_list(context or [], "--ctx-size", minimum=1),
        batches=number_list(batch or ["1"], "--batch", minimum=1),
        types=kv_types_of(kv_type),
        has_types=kv_type is not None,
        new_tokens=max_tokens,
        needles=needles,
        policies=[name for name in policies if name != "full"],
        live_policy=policies[0] if kv_policy else "full",
        shares=_shares(kv_budget),
        within=size_in_bytes(max_memory, "--max-memory"),
    )
    _check_output(output, look, force=force)
    if shape:
        deliver(plan_report(shape_subject(shape), look.types, look.contexts, look.batches), look, output, json=json)
        return
    path = _resolve(spec)
    if has_text:
        request = _request(path, look, no_chat, threads, [backend, device, dtype, activations, as_family])
        text = None if session is not None else whole_prompt(file, argument) or ""
        document = inspect_text(request, look, text, session)
    else:
        document = plan_report(model_subject(path, as_family), look.types, look.contexts, look.batches)
    deliver(document, look, output, json=json)


def _refuse_without_text(values: dict[str, object]) -> None:
    """UsageError for an option that the plan does not look at."""
    if given := next((name for name, value in values.items() if value is not None), None):
        raise UsageError(f"{given} is about a text, not the plan: give a prompt, --file or --session")


def _views(options: list[str] | None, *, has_text: bool, wants_advice: bool) -> tuple[str, ...]:
    """The views asked for, in the order of VIEWS. Errors: UsageError."""
    asked = [name.strip().lower() for option in options or [] for name in option.split(",")]
    unknown = next((name for name in asked if name not in VIEWS), None)
    if unknown is not None:
        raise UsageError(f"--view {unknown}: there is no such view; expected {', '.join(VIEWS)}")
    chosen = {*(asked or (_USUAL_VIEWS if has_text else VIEWS[:1])), *(VIEWS[-1:] if wants_advice else ())}
    if not has_text and (needing := [name for name in VIEWS[1:] if name in chosen]):
        raise UsageError(f"the {needing[0]} view needs a text: a prompt, --file or --session")
    return tuple(name for name in VIEWS if name in chosen)


def _policies(options: list[str] | None) -> list[str]:
    """The policies to try, each once. Errors: UsageError."""
    from llmctl.runtime.cache.policy import POLICIES

    asked = [name.strip().lower() for option in options or POLICIES for name in option.split(",")]
    unknown = next((name for name in asked if name not in POLICIES), None)
    if unknown is not None:
        raise UsageError(f"--kv-policy {unknown}: expected {', '.join(POLICIES)}")
    return list(dict.fromkeys(asked))


def _shares(options: list[str] | None) -> list[float]:
    """Shares of a text. Errors: UsageError."""
    found = []
    for part in (part.strip() for option in options or ["0.25"] for part in option.split(",")):
        try:
            share = float(part)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise UsageError(f"--kv-budget {part}: expected a share of the text, above 0 and at most 1")
        found.append(share)
    return list(dict.fromkeys(found))


def _check_output(output: Path | None, look: Look, *, force: bool) -> None:
    """Refuse what could not be written before anything is computed. Errors: UsageError, OutputError."""
    from llmctl.quant.convert import check_target

    if output is None:
        return
    kind = output.suffix.lower()
    if kind not in REPORTS:
        raise UsageError(f"-o {output}: expected a name that ends in {', '.join(REPORTS)}")
    if kind == ".png" and "attention" not in look.views:
        raise UsageError(f"-o {output}: the picture is of the attention view, which was not asked for")
    check_target(output, force=force)


def _resolve(spec: str | None) -> Path:
    from llmctl.runtime.store import DEFAULT_MODEL, resolve_model

    path = resolve_model(spec, progress=console.progress)
    if spec is None:
        console.info(f"Using {path}, the model of LLMCTL_MODEL or else {DEFAULT_MODEL}")
    return path


def _request(path: Path, look: Look, no_chat: bool, threads: int | None, choices: list[Any]) -> Request:
    """The model and how it runs, as for an answer."""
    from llmctl.commands.session import Request

    loading = dict(zip(("backend", "device", "dtype", "activations", "family"), choices, strict=True))
    loading |= {"kv_type": look.types[0] if look.has_types else None, "ctx_size": max(look.contexts, default=None)}
    return Request(str(path), None, None, no_chat, [], {}, loading, threads, json=False)
