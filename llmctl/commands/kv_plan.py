"""The plan of `inspect-kv`: what a cache costs, from a config or from numbers, and what of it fits in this machine's memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from llmctl.runtime.cache.memory import LayerShape

DEFAULT_CONTEXT = 2048
KNOWN_SHAPES = {"gpt3-175b": ("96,96,128", 2048), "llama2-7b": ("32,32,128", 4096), "llama3-8b": ("32,8,128", 8192)}
"""Shapes by name, and the context each was trained with. Brown et al., "Language Models are Few-Shot Learners", 2020, table 2.1;
Touvron et al., "Llama 2", 2023; Grattafiori et al., "The Llama 3 Herd of Models", 2024."""
_LIMITS = {"layers": 10_000, "kv heads": 100_000, "head_dim": 1_000_000, "window": 1 << 40}
_MOST_TOKENS = 1 << 40


@dataclass(frozen=True)
class Subject:
    """The layers whose cache is counted. name: where they come from. context: what the model was trained with, if known.
    weight_bytes: of its files, None where there are none."""

    name: str
    layers: tuple[LayerShape, ...]
    context: int | None
    weight_bytes: int | None = None


def kv_types_of(options: list[str] | None) -> list[str]:
    from llmctl.kernels.kv_types import KV_TYPES, parse_kv_types

    asked = [name for option in options or [] for name in parse_kv_types(option)]
    return list(dict.fromkeys(asked)) or list(KV_TYPES)


def shape_subject(options: list[str]) -> Subject:
    """The layers that --shape options name, in order. Errors: UsageError."""
    known = {text: KNOWN_SHAPES.get(text.strip().lower()) for text in options}
    layers = _shape_layers([known[text][0] if known[text] else text for text in options])
    contexts = {entry[1] for entry in known.values() if entry}
    return Subject("--shape " + " ".join(options), layers, contexts.pop() if len(contexts) == 1 else None)


def _shape_layers(options: list[str]) -> tuple[LayerShape, ...]:
    from llmctl.runtime.cache.memory import LayerShape

    layers: list[LayerShape] = []
    for option in options:
        parts = option.split(",")
        if len(parts) not in (3, 4) or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            raise UsageError(
                f"--shape {option}: expected LAYERS,KV_HEADS,HEAD_DIM or LAYERS,KV_HEADS,HEAD_DIM,WINDOW, or one of "
                + ", ".join(KNOWN_SHAPES)
            )
        numbers = [int(part) for part in parts]
        for number, (what, most) in zip(numbers, _LIMITS.items(), strict=False):
            if not 1 <= number <= most:
                raise UsageError(f"--shape {option}: {what} must be 1 to {most}, found {number}")
        layers += [LayerShape(*numbers[1:])] * numbers[0]
    return tuple(layers)


def model_subject(path: Path, family: str | None) -> Subject:
    """The layers of a model, from its config. Errors: as `read_config`."""
    from llmctl.runtime.loading import read_config

    try:
        config = read_config(path, family)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; its cache can be counted with --shape LAYERS,KV_HEADS,HEAD_DIM") from error
    return Subject(str(path), config.kv_layers(), config.max_position_embeddings, _weight_bytes(path))


def _weight_bytes(path: Path) -> int | None:
    """Of the model's files; None for a config without weights."""
    from llmctl.errors import LlmctlError
    from llmctl.runtime.checkpoint import open_checkpoint

    if path.suffix == ".json" and not path.name.endswith(".index.json"):
        return None
    try:
        with open_checkpoint(path) as checkpoint:
            return sum(file.stat().st_size for file in checkpoint.files)
    except LlmctlError:  # a folder with nothing but a config
        return None


def plan_report(subject: Subject, types: list[str], contexts: list[int], batches: list[int]) -> dict[str, Any]:
    """The plan as a JSON object."""
    contexts = contexts or [subject.context or DEFAULT_CONTEXT]
    free = _free_bytes(subject)
    return {
        "source": subject.name,
        "num_layers": len(subject.layers),
        "max_context": subject.context,
        "page_tokens": _page_tokens(),
        "memory": {"free_bytes": free, "weight_bytes": subject.weight_bytes},
        "layers": [_group(shape, count, types) for shape, count in _groups(subject.layers)],
        "types": [_type(subject.layers, t, free) for t in types],
        "totals": [_total(subject.layers, t, c, b, free) for t in types for c in contexts for b in batches],
    }


def _free_bytes(subject: Subject) -> int | None:
    """What this machine has left for a cache, once weights as large as their files are loaded; None where it does not tell."""
    from llmctl.runtime.machine import memory

    machine = memory()
    if machine.available is None:
        return None
    return max(0, min(machine.available, machine.limit or machine.available) - (subject.weight_bytes or 0))


def _type(layers: tuple[LayerShape, ...], kv_type: str, free: int | None) -> dict[str, Any]:
    """longest_context: tokens of one sequence whose cache fits into the memory that is free."""
    from llmctl.runtime.cache.memory import bytes_per_token, fitting_context

    each = bytes_per_token(layers, kv_type)
    longest = None if free is None or each is None else fitting_context(layers, kv_type, free, _MOST_TOKENS)
    runs = each is not None and _runs_here(kv_type)
    return {"kv_type": kv_type, "runs_here": runs, "bytes_per_token": each, "longest_context": longest}


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
        "latent": shape.latent or None,
        "bytes_per_token": {name: layer_bytes_per_token(shape, name) for name in types},
    }


def _total(layers: tuple[LayerShape, ...], kv_type: str, context: int, batch: int, free: int | None) -> dict[str, Any]:
    """Bytes for one combination; null where the type does not fit. largest_layer is of all sequences together. fits: into the
    memory that is free."""
    from llmctl.runtime.cache.memory import Demand, least_bytes, plan_cache

    demand = Demand(context, batch)
    each = [plan_cache([shape], kv_type, demand).nbytes for shape in dict.fromkeys(layers)]
    allocated = plan_cache(layers, kv_type, demand).nbytes
    return {
        "kv_type": kv_type,
        "context": context,
        "batch": batch,
        "largest_layer_bytes": None if None in each else max(each),
        "allocated_bytes": allocated,
        "least_bytes": least_bytes(layers, kv_type, context, batch),
        "fits": None if None in (allocated, free) else allocated <= free,
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


def print_plan(report: dict[str, Any]) -> None:
    """Show it."""
    trained = f", trained with {report['max_context']} tokens" if report["max_context"] else ""
    console.result(f"{report['source']}: {report['num_layers']} layers{trained}")
    for group in report["layers"]:
        console.result(f"  {describe_group(group)}")
    console.result(f"  {formula(report)}")
    console.result()
    _print_types(report)
    console.result()
    console.table(TOTAL_HEADERS, total_rows(report), right=range(1, 6))
    if line := memory_line(report):
        console.result(line)


def describe_group(group: dict[str, Any]) -> str:
    """What the layers of a group keep."""
    window = f", a window of {group['sliding_window']} tokens" if group["sliding_window"] else ""
    if group["latent"]:
        rest = group["head_dim"] - group["latent"]
        return f"{group['count']} x a latent of {group['latent']} and a rotated key of {rest} for all heads, no values{window}"
    return f"{group['count']} x {group['num_kv_heads']} kv heads of {group['head_dim']}{window}"


def formula(report: dict[str, Any]) -> str:
    """How the bytes come about."""
    parts = []
    for group in report["layers"]:
        sides = "" if group["latent"] else f"2 sides x {group['num_kv_heads']} heads x "
        tokens = f"up to {group['sliding_window']} tokens" if group["sliding_window"] else "tokens"
        parts.append(f"{group['count']} layers x {sides}{group['head_dim']} numbers x {tokens}")
    return f"bytes = ({' + '.join(parts)}) x bytes of a number x sequences"


def memory_line(report: dict[str, Any]) -> str | None:
    """What FITS is measured by."""
    free, weights = report["memory"]["free_bytes"], report["memory"]["weight_bytes"]
    if free is None:
        return None
    beside = f" beside {console.format_bytes(weights)} of weights" if weights else ""
    return f"Free on this machine{beside}: {console.format_bytes(free)}"


TOTAL_HEADERS = ("TYPE", "CONTEXT", "BATCH", "LARGEST LAYER", "ALLOCATED", "LEAST", "FITS")


def total_rows(report: dict[str, Any]) -> list[tuple[Any, ...]]:
    """One row for every combination."""
    sizes, fits = ("largest_layer_bytes", "allocated_bytes", "least_bytes"), {True: "yes", False: "no", None: "-"}
    return [
        (t["kv_type"], t["context"], t["batch"], *(_size(t[key]) for key in sizes), fits[t["fits"]]) for t in report["totals"]
    ]


def type_table(report: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Headers and rows: bytes a token adds to a layer of each shape, and to all of them; the longest context that fits."""
    groups = list({(g["num_kv_heads"], g["head_dim"]): g for g in report["layers"]}.values())  # windows apart
    shapes = [f"A LAYER ({g['num_kv_heads']}x{g['head_dim']})" for g in groups]
    rows = [
        (
            entry["kv_type"],
            *(_count(group["bytes_per_token"][entry["kv_type"]]) for group in groups),
            _count(entry["bytes_per_token"]),
            "-" if entry["longest_context"] is None else _tokens(entry["longest_context"]),
            _runs(entry),
        )
        for entry in report["types"]
    ]
    return ("BYTES A TOKEN", *shapes, "ALL LAYERS", "TOKENS THAT FIT", "RUNS HERE"), rows


def _runs(entry: dict[str, Any]) -> str:
    if entry["bytes_per_token"] is None:
        return "no"
    return "yes" if entry["runs_here"] else "not yet"


def heads_line(report: dict[str, Any]) -> str:
    """Why some types cannot keep heads of these sizes; empty where all can."""
    kept = {(g["head_dim"], name): size for g in report["layers"] for name, size in g["bytes_per_token"].items()}
    types = dict.fromkeys(name for (_, name), size in kept.items() if size is None)
    heads = dict.fromkeys(str(head) for (head, _), size in kept.items() if size is None)
    return f"For heads of {', '.join(heads)} there is no {', '.join(types)}: blocks of 32 numbers" if types else ""


def _print_types(report: dict[str, Any]) -> None:
    headers, rows = type_table(report)
    console.table(headers, rows, right=range(1, len(headers) - 1))
    if line := heads_line(report):
        console.result(line)


def _tokens(count: int) -> str:
    return "no end" if count >= _MOST_TOKENS else str(count)


def _count(value: int | None) -> str:
    return "does not fit" if value is None else str(value)


def _size(value: int | None) -> str:
    return "does not fit" if value is None else console.format_bytes(value)
