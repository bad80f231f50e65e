"""llmctl inspect-kv: what the KV cache of a model costs, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.commands import console
from llmctl.commands.number_list import SYNTAX, number_list
from llmctl.commands.options import AsOption, JsonOption, ModelArgument, QuietOption
from llmctl.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from llmctl.runtime.cache.memory import LayerShape

DEFAULT_CONTEXT = 2048
_LIMITS = {"layers": 10_000, "kv heads": 100_000, "head_dim": 1_000_000, "window": 1 << 40}


@dataclass(frozen=True)
class Subject:
    """The layers whose cache is counted. name: where they come from. context: what the model was trained with, if known."""

    name: str
    layers: tuple[LayerShape, ...]
    context: int | None


def inspect_kv(
    model: ModelArgument = None,
    context: Annotated[
        list[str] | None,
        typer.Option("--ctx-size", "-c", help=f"Tokens of context: {SYNTAX}.", show_default="the model's own"),
    ] = None,
    batch: Annotated[list[str] | None, typer.Option("--batch", help=f"Sequences: {SYNTAX}.", show_default="1")] = None,
    kv_type: Annotated[
        list[str] | None,
        typer.Option("--kv-type", help="Element type of the cache; a list or repeatable.", show_default="all"),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="LAYERS,KV_HEADS,HEAD_DIM[,WINDOW]",
            help="Count these layers instead of a model's. WINDOW: tokens they see. Repeatable for models that mix layers.",
        ),
    ] = None,
    as_family: AsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what the KV cache of a model costs: bytes per token and layer, totals for context x batch x type.

    MODEL may also be a bare config.json. ALLOCATED is what the engine takes: pages for every token, in layers with a sliding
    window for the window and for a step of the prompt. LEAST is what the next token sees.
    """
    types, contexts = _types(kv_type), number_list(context or [], "--ctx-size", minimum=1)
    batches = number_list(batch or ["1"], "--batch", minimum=1)
    if shape and model is not None:
        raise UsageError(f"either MODEL or --shape: both {model} and --shape {shape[0]} were given")
    if shape and as_family is not None:
        raise UsageError("--as is for a MODEL: --shape says all there is to say")
    subject = Subject("--shape", _shape_layers(shape), None) if shape else _model_subject(model, as_family)
    contexts = contexts or [subject.context or DEFAULT_CONTEXT]
    report = _report(subject, types, contexts, batches)
    if json:
        console.print_json(report)
    else:
        _print(report)


def _types(options: list[str] | None) -> list[str]:
    from llmctl.kernels.kv_types import KV_TYPES, parse_kv_types

    asked = [name for option in options or [] for name in parse_kv_types(option)]
    return list(dict.fromkeys(asked)) or list(KV_TYPES)


def _shape_layers(options: list[str]) -> tuple[LayerShape, ...]:
    """--shape options as layers, in order. Errors: UsageError."""
    from llmctl.runtime.cache.memory import LayerShape

    layers: list[LayerShape] = []
    for option in options:
        parts = option.split(",")
        if len(parts) not in (3, 4) or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            raise UsageError(f"--shape {option}: expected LAYERS,KV_HEADS,HEAD_DIM or LAYERS,KV_HEADS,HEAD_DIM,WINDOW")
        numbers = [int(part) for part in parts]
        for number, (what, most) in zip(numbers, _LIMITS.items(), strict=False):
            if not 1 <= number <= most:
                raise UsageError(f"--shape {option}: {what} must be 1 to {most}, found {number}")
        layers += [LayerShape(*numbers[1:])] * numbers[0]
    return tuple(layers)


def _model_subject(spec: str | None, family: str | None) -> Subject:
    """The layers of a model, from its config. Errors: as `resolve_model` and `read_config`."""
    from llmctl.runtime.loading import read_config
    from llmctl.runtime.store import DEFAULT_MODEL, resolve_model

    path: Path = resolve_model(spec, progress=console.progress)
    if spec is None:
        console.info(f"Using {path}, the model of LLMCTL_MODEL or else {DEFAULT_MODEL}")
    try:
        config = read_config(path, family)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; its cache can be counted with --shape LAYERS,KV_HEADS,HEAD_DIM") from error
    return Subject(str(path), config.kv_layers(), config.max_position_embeddings)


def _report(subject: Subject, types: list[str], contexts: list[int], batches: list[int]) -> dict[str, Any]:
    from llmctl.runtime.cache.memory import bytes_per_token

    return {
        "source": subject.name,
        "num_layers": len(subject.layers),
        "max_context": subject.context,
        "page_tokens": _page_tokens(),
        "layers": [_group(shape, count, types) for shape, count in _groups(subject.layers)],
        "types": [
            {"kv_type": t, "runs_here": _runs_here(t), "bytes_per_token": bytes_per_token(subject.layers, t)} for t in types
        ],
        "totals": [_total(subject.layers, t, c, b) for t in types for c in contexts for b in batches],
    }


def _groups(layers: tuple[LayerShape, ...]) -> list[tuple[LayerShape, int]]:
    """Shapes and how many layers have each, in order of first appearance."""
    return [(shape, layers.count(shape)) for shape in dict.fromkeys(layers)]


def _group(shape: LayerShape, count: int, types: list[str]) -> dict[str, Any]:
    from llmctl.runtime.cache.memory import layer_bytes_per_token

    return {
        "count": count,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "sliding_window": shape.sliding_window,
        "bytes_per_token": {name: layer_bytes_per_token(shape, name) for name in types},
    }


def _total(layers: tuple[LayerShape, ...], kv_type: str, context: int, batch: int) -> dict[str, Any]:
    """Bytes for one combination; null where the type does not fit. largest_layer is of all sequences together."""
    from llmctl.runtime.cache.memory import Demand, least_bytes, plan_cache

    demand = Demand(context, batch)
    each = [plan_cache([shape], kv_type, demand).nbytes for shape in dict.fromkeys(layers)]
    return {
        "kv_type": kv_type,
        "context": context,
        "batch": batch,
        "largest_layer_bytes": None if None in each else max(each),
        "allocated_bytes": plan_cache(layers, kv_type, demand).nbytes,
        "least_bytes": least_bytes(layers, kv_type, context, batch),
    }


def _page_tokens() -> int:
    from llmctl.runtime.cache.memory import BLOCK_SIZE

    return BLOCK_SIZE


def _runs_here(kv_type: str) -> bool:
    """Whether a backend that can be used on this machine has such pages."""
    from llmctl.kernels.backend import capabilities
    from llmctl.kernels.kv_types import sides_of

    names = {side.upper() for side in sides_of(kv_type)}
    return any(names <= set(c.formats) for c in capabilities() if c.op == "store_kv" and c.available)


def _print(report: dict[str, Any]) -> None:
    trained = f", trained with {report['max_context']} tokens" if report["max_context"] else ""
    console.result(f"{report['source']}: {report['num_layers']} layers{trained}")
    for group in report["layers"]:
        window = f", a window of {group['sliding_window']} tokens" if group["sliding_window"] else ""
        console.result(f"  {group['count']} x {group['num_kv_heads']} kv heads of {group['head_dim']}{window}")
    console.result()
    _print_types(report)
    console.result()
    sizes = ("largest_layer_bytes", "allocated_bytes", "least_bytes")
    rows = [(t["kv_type"], t["context"], t["batch"], *(_size(t[key]) for key in sizes)) for t in report["totals"]]
    console.table(("TYPE", "CONTEXT", "BATCH", "LARGEST LAYER", "ALLOCATED", "LEAST"), rows, right=range(1, 6))


def _print_types(report: dict[str, Any]) -> None:
    """One row a type: bytes a token adds to a layer of each shape, and to all of them."""
    shapes = [f"A LAYER ({g['num_kv_heads']}x{g['head_dim']})" for g in _distinct_rows(report["layers"])]
    rows = [
        (
            entry["kv_type"],
            *(_count(group["bytes_per_token"][entry["kv_type"]]) for group in _distinct_rows(report["layers"])),
            _count(entry["bytes_per_token"]),
            "yes" if entry["runs_here"] else "not yet",
        )
        for entry in report["types"]
    ]
    console.table(("BYTES A TOKEN", *shapes, "ALL LAYERS", "RUNS HERE"), rows, right=range(1, len(shapes) + 2))


def _distinct_rows(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that differ in more than their window."""
    return list({(group["num_kv_heads"], group["head_dim"]): group for group in groups}.values())


def _count(value: int | None) -> str:
    return "does not fit" if value is None else str(value)


def _size(value: int | None) -> str:
    return "does not fit" if value is None else console.format_bytes(value)
