"""What `convert --to gptq|awq|compressed-tensors` does: plan, check, write, and tell."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console

if TYPE_CHECKING:
    from llmctl.quant.packed_folder import PackedPlan


@dataclass(frozen=True)
class PackedRequest:
    """One conversion as asked for. target: the layout. facts: what the JSON report says first."""

    source: Path
    target: str
    facts: dict[str, Any]
    output: Path | None = None
    max_shard_bytes: int | None = None
    dry_run: bool = False
    force: bool = False
    json: bool = False


def carry_out_packed(request: PackedRequest) -> None:
    """Plan and, unless it is a dry run, write; the result goes to stdout, all else to stderr."""
    from llmctl.quant.packed_folder import packed_path, plan_packed, write_packed

    started = time.perf_counter()
    console.detail(f"Reading {request.source}")
    plan = plan_packed(request.source, request.target)
    output = packed_path(plan, request.output, force=request.force or request.dry_run)
    for warning in plan.warnings:
        console.warn(warning)
    if request.dry_run:
        _show(request, plan, output, None, 0.0)
        return
    with console.progress(f"Writing {output}", plan.nbytes) as bar:
        written = write_packed(
            plan, output, max_shard_bytes=request.max_shard_bytes, force=request.force, progress=bar.update_to
        )
    _show(request, plan, output, written, time.perf_counter() - started)


def _show(request: PackedRequest, plan: PackedPlan, output: Path, written: int | None, seconds: float) -> None:
    line = (
        f"{len(plan.modules)} modules ({_kinds(plan)}) from {plan.source} as {plan.layout.name}, no value changed, "
        f"and {len(plan.plain)} tensors copied"
    )
    if written is not None:
        console.info(f"{line}; folder {console.format_bytes(written)}, {seconds:.1f} s")
    if request.json:
        console.print_json(_document(request, plan, output, written, seconds))
    else:
        console.result(str(output) if written is not None else f"would write {output}: {line}")


def _kinds(plan: PackedPlan) -> str:
    counts = Counter((scheme.bits, scheme.group_size) for scheme in plan.modules.values())
    kinds = [kind for kind, _ in counts.most_common()]
    return ", ".join(f"{bits} bits in {f'groups of {size}' if size > 0 else 'whole rows'}" for bits, size in kinds)


def _document(request: PackedRequest, plan: PackedPlan, output: Path, written: int | None, seconds: float) -> dict[str, Any]:
    return {
        **request.facts,
        "dry_run": written is None,
        "output": str(output),
        "layout": plan.layout.name,
        "source_layout": plan.source,
        "totals": {
            "modules": len(plan.modules),
            "copied_tensors": len(plan.plain),
            "bytes": plan.nbytes,
            "folder_bytes": written,
        },
        "modules": [
            {
                "name": module,
                "shape": list(scheme.shape),
                "bits": scheme.bits,
                "group_size": scheme.group_size,
                "symmetric": scheme.symmetric,
                "activation_order": scheme.ordered,
            }
            for module, scheme in plan.modules.items()
        ],
        "files": sorted(plan.files),
        "lossless": True,
        "warnings": plan.warnings,
        "seconds": round(seconds, 3),
    }
