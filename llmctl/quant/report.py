"""What a conversion did, in numbers: per tensor, per kind of tensor, in all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from llmctl.quant.convert import Plan, PlannedTensor, Written
from llmctl.quant.recipe import is_matrix
from llmctl.quant.rtn import Rounded, relative_error

_LAYER = re.compile(r"^blk\.(\d+)\.")

Measured = tuple[PlannedTensor, Rounded | None]


@dataclass(frozen=True)
class KindLine:
    """The tensors of one kind and type, as attn_q.weight in Q4_0 of all layers.

    error: relative root mean square error over all of them; worst, worst_name: the largest of a single tensor.
    """

    kind: str
    type: str
    count: int
    nbytes: int
    error: float | None
    worst: float | None
    worst_name: str | None


def measured(plan: Plan, written: Written | None) -> list[Measured]:
    """The tensors with their errors, or without if nothing was written."""
    return written.rounded if written is not None else [(tensor, None) for tensor in plan.tensors]


def by_kind(tensors: Iterable[Measured]) -> list[KindLine]:
    """One line for each kind and type, in the order they first occur."""
    groups: dict[tuple[str, str], list[Measured]] = {}
    for tensor, rounded in tensors:
        kind = _LAYER.sub("blk.*.", tensor.source.name)
        groups.setdefault((kind, tensor.format.name), []).append((tensor, rounded))
    return [_line(kind, type_name, group) for (kind, type_name), group in groups.items()]


def _line(kind: str, type_name: str, group: list[Measured]) -> KindLine:
    errors = [(rounded.relative_error, tensor.source.name) for tensor, rounded in group if _has_error(rounded)]
    worst = max(errors, default=(None, None))
    nbytes = sum(tensor.nbytes for tensor, _ in group)
    return KindLine(kind, type_name, len(group), nbytes, total_error(group), *worst)


def _has_error(rounded: Rounded | None) -> bool:
    return rounded is not None and rounded.squared_error is not None


def total_error(tensors: Sequence[Measured]) -> float | None:
    """Relative root mean square error over all weights of the matrices; None if it was not measured.

    Norms are kept in float32 and can be a hundred times larger than any weight: they would hide what rounding costs.
    """
    matrices = [pair for pair in tensors if is_matrix(pair[0].source.name, pair[0].source.shape)]
    found = [rounded for _, rounded in matrices or tensors if _has_error(rounded)]
    if not found:
        return None
    return relative_error(sum(r.squared_error or 0.0 for r in found), sum(r.squared_weight or 0.0 for r in found))


def bits_per_weight(tensors: Iterable[PlannedTensor]) -> float:
    """Stored bits per weight over all tensors."""
    tensors = list(tensors)
    elements = sum(tensor.num_elements for tensor in tensors)
    return 8 * sum(tensor.nbytes for tensor in tensors) / elements if elements else 0.0


def document(plan: Plan, written: Written | None, warnings: Sequence[str], **facts: Any) -> dict[str, Any]:
    """The report as one JSON object. facts: what the command adds (input, method, seconds …)."""
    tensors = measured(plan, written)
    return {
        **facts,
        "output": str(written.output) if written is not None else None,
        "type": plan.type_name,
        "file_type": plan.file_type,
        "totals": {
            "tensors": len(tensors),
            "weights": sum(tensor.num_elements for tensor in plan.tensors),
            "bytes_before": sum(tensor.bytes_before for tensor in plan.tensors),
            "bytes": sum(tensor.nbytes for tensor in plan.tensors),
            "file_bytes": written.file_bytes if written is not None else None,
            "bits_per_weight": bits_per_weight(plan.tensors),
            "relative_rms_error": total_error(tensors),
        },
        "types": _types(plan),
        "substitutions": [
            {"name": t.source.name, "wanted": t.replaced.name, "used": t.format.name, "row_length": t.source.shape[-1]}
            for t in plan.substitutions
            if t.replaced is not None
        ],
        "requantized": [tensor.source.name for tensor in plan.requantized],
        "kept_codes": [_kept(tensor) for tensor in plan.tensors if tensor.keeps_codes],
        "left_out": plan.source.left_out,
        "warnings": list(warnings),
        "tensors": [_entry(tensor, rounded) for tensor, rounded in tensors],
    }


def _kept(tensor: PlannedTensor) -> dict[str, Any]:
    """A weight whose codes are written unchanged. rounding: of its scales (relative) or offsets (in steps); 0 is exact."""
    assert tensor.source.packed is not None
    return {"name": tensor.source.name, "type": tensor.format.name, "rounding": tensor.source.packed.error_in(tensor.format.name)}


def _types(plan: Plan) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for tensor in plan.tensors:
        line = found.setdefault(tensor.format.name, {"tensors": 0, "weights": 0, "bytes": 0})
        line["tensors"] += 1
        line["weights"] += tensor.num_elements
        line["bytes"] += tensor.nbytes
    return found


def _entry(tensor: PlannedTensor, rounded: Rounded | None) -> dict[str, Any]:
    return {
        "name": tensor.source.name,
        "source_name": tensor.source.origin,
        "shape": list(tensor.source.shape),
        "source_type": tensor.source.stored.name,
        "type": tensor.format.name,
        "bytes_before": tensor.bytes_before,
        "bytes": tensor.nbytes,
        "relative_rms_error": rounded.relative_error if rounded is not None else None,
        "rms_error": _rms(tensor, rounded),
    }


def _rms(tensor: PlannedTensor, rounded: Rounded | None) -> float | None:
    if rounded is None or rounded.squared_error is None:
        return None
    return sqrt(rounded.squared_error / max(1, tensor.num_elements))
