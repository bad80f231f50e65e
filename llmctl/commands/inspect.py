"""llmctl inspect: what is in a checkpoint, from its header alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.commands import console
from llmctl.commands.options import AsOption, JsonOption, ModelArgument, QuietOption

if TYPE_CHECKING:
    from llmctl.runtime.checkpoint import Checkpoint
    from llmctl.runtime.checkpoint.gguf import GgufCheckpoint

_SHOWN_ITEMS = 8  # of an array longer than twice that
_SHOWN_CHARACTERS = 100


def inspect(
    model: ModelArgument = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor (--json always does).")] = False,
    as_family: AsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what is in a checkpoint: kind, architecture, sizes, tensors by type, metadata."""
    from llmctl.runtime.checkpoint import open_checkpoint
    from llmctl.runtime.store import resolve_model

    with open_checkpoint(resolve_model(model, progress=console.progress)) as checkpoint:
        report = _report(checkpoint, as_family)
    if json:
        console.print_json(report)
    else:
        _print(report, tensors)


def _report(checkpoint: Checkpoint, family: str | None) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        **_layout(checkpoint),
        "parameters": checkpoint.total_elements,
        "tensor_bytes": checkpoint.total_bytes,
        "bits_per_weight": _bits(checkpoint.total_bytes, checkpoint.total_elements),
        "active": _active(checkpoint, family),
        "files": [{"path": str(file), "bytes": file.stat().st_size} for file in checkpoint.files],
        "types": _types(checkpoint),
        "tensors": [
            {
                "name": entry.name,
                "type": entry.format.name,
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "file": str(entry.file),
                "offset": entry.offset,
            }
            for entry in checkpoint.entries()
        ],
    }


def _active(checkpoint: Checkpoint, family: str | None) -> dict[str, Any] | None:
    """What one token reads; None for a model that is none of those that run here. family: to take it for one of, which is an
    error where it is none."""
    from llmctl.errors import LlmctlError
    from llmctl.kernels.backend import choose_compute
    from llmctl.runtime.cache.memory import bytes_per_token
    from llmctl.runtime.models.active import active_weights
    from llmctl.runtime.models.registry import chosen_family
    from llmctl.runtime.models.weights import ModelWeights

    try:
        weights = ModelWeights(checkpoint, chosen_family(family))
        active, kv_type = active_weights(weights), choose_compute().kv_type
    except LlmctlError:
        if family is not None:
            raise
        return None
    kv = bytes_per_token(weights.config.kv_layers(), kv_type)
    return {"parameters": active.parameters, "bytes": active.nbytes, "kv_type": kv_type, "kv_bytes_per_token": kv}


def _layout(checkpoint: Checkpoint) -> dict[str, Any]:
    """What one kind of file states and the other does not."""
    if checkpoint.kind == "gguf":
        return {
            "architecture": checkpoint.metadata.get("general.architecture"),
            "gguf_version": checkpoint.version,
            "alignment": checkpoint.alignment,
            "metadata": _gguf_metadata(checkpoint),
        }
    return {
        "architecture": checkpoint.config.get("model_type"),
        "metadata": checkpoint.metadata,
        "config": checkpoint.config,
        "generation_config": checkpoint.generation_config,
    }


def _gguf_metadata(checkpoint: GgufCheckpoint) -> dict[str, Any]:
    """The metadata, long arrays abbreviated, single precision numbers with the digits that they have."""
    import numpy as np

    values = {key: _abbreviated(value) for key, value in checkpoint.metadata.items()}
    for key, value_type in checkpoint.metadata_types.items():
        if value_type.name == "F32":
            values[key] = float(str(np.float32(values[key])))
    return values


def _abbreviated(value: Any) -> Any:
    """The value, a long array replaced by its item type, its length and its first items."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return value
    if len(value) <= 2 * _SHOWN_ITEMS:
        return [_abbreviated(item) for item in value]
    first = [_abbreviated(item) for item in value[:_SHOWN_ITEMS]]
    return {"array": _item_type(value), "length": len(value), "first": first}


def _item_type(value: Any) -> str:
    if isinstance(value, list):
        return "array"
    return str(value.dtype) if hasattr(value, "dtype") else "string"


def _types(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Weights, elements and bytes of each stored type, the type with most bytes first; packed weights count as one each."""
    totals: dict[str, dict[str, Any]] = {}
    for weight in checkpoint.weight_sizes():
        total = totals.setdefault(weight.form, {"type": weight.form, "tensors": 0, "parameters": 0, "bytes": 0})
        total["tensors"] += 1
        total["parameters"] += weight.num_elements
        total["bytes"] += weight.nbytes
    for total in totals.values():
        total["bits_per_weight"] = _bits(total["bytes"], total["parameters"])
    return sorted(totals.values(), key=lambda total: -total["bytes"])


def _bits(count: int, elements: int) -> float | None:
    return 8 * count / elements if elements else None


def _print(report: dict[str, Any], tensors: bool) -> None:
    _print_summary(report)
    console.result()
    rows = [
        (t["type"], t["tensors"], t["parameters"], console.format_bytes(t["bytes"]), _two_digits(t["bits_per_weight"]))
        for t in report["types"]
    ]
    console.table(("TYPE", "TENSORS", "PARAMETERS", "SIZE", "BITS/WEIGHT"), rows, right=(1, 2, 3, 4))
    for title in ("metadata", "config", "generation_config"):
        if report.get(title):
            console.result()
            console.table((title.upper(), ""), [(_escaped(k), _shown(v)) for k, v in report[title].items()])
    if tensors:
        console.result()
        listed = [(_escaped(t["name"]), t["type"], _shape(t["shape"]), t["bytes"]) for t in report["tensors"]]
        console.table(("TENSOR", "TYPE", "SHAPE", "BYTES"), listed, right=(3,))


def _print_summary(report: dict[str, Any]) -> None:
    file_bytes = sum(file["bytes"] for file in report["files"])
    version = f" version {report['gguf_version']}, alignment {report['alignment']}" if "gguf_version" in report else ""
    architecture = report["architecture"]
    rows = [
        ("path", _escaped(report["path"])),
        ("kind", report["kind"] + version),
        ("architecture", "not stated" if architecture is None else _escaped(str(architecture))),
        ("files", f"{len(report['files'])}, {console.format_bytes(file_bytes)} ({file_bytes} bytes)"),
        ("tensors", f"{len(report['tensors'])}, {console.format_bytes(report['tensor_bytes'])}"),
        ("parameters", f"{report['parameters']} ({_millions(report['parameters'])})"),
        ("bits/weight", _two_digits(report["bits_per_weight"])),
        *_active_row(report),
    ]
    for name, value in rows:
        console.result(f"{name:<12}  {value}")


def _active_row(report: dict[str, Any]) -> list[tuple[str, str]]:
    active, every = report["active"], report["parameters"]
    if active is None:
        return []
    share = f"{100 * active['parameters'] / every:.0f} %" if every else "none"
    read = f"{active['parameters']} ({share}), {console.format_bytes(active['bytes'])} read a token"
    kept = f" and {console.format_bytes(active['kv_bytes_per_token'])} for each before it ({active['kv_type']} cache)"
    return [("active", read + kept)]


def _shown(value: Any) -> str:
    """A metadata value on one line of bounded length, nothing in it that a terminal would obey."""
    if isinstance(value, dict) and value.keys() == {"array", "length", "first"}:
        return f"{value['array']}[{value['length']}]: {_cut(', '.join(map(_quoted, value['first'])))}, …"
    if isinstance(value, list):
        return _cut(f"[{', '.join(map(_quoted, value))}]")
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        return f"{_quoted(value[:_SHOWN_CHARACTERS])}… ({len(value)} characters)"
    return _cut(_quoted(value))


def _quoted(value: Any) -> str:
    """A value as Python writes it: strings quoted and escaped; numpy's numbers bare, f32 in its own shortest digits."""
    return str(value) if hasattr(value, "dtype") else repr(value)


def _cut(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN_CHARACTERS else f"{text[: 2 * _SHOWN_CHARACTERS]}…"


def _escaped(text: str) -> str:
    """The text itself if all of it can be printed, else quoted and escaped; never longer than a value."""
    return _cut(text if text.isprintable() else repr(text))


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _two_digits(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
