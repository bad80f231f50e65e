"""What `convert --to safetensors` does: plan, check, write, and tell."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.commands.conversion import tell_left_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmctl.quant.lora import Adapter
    from llmctl.quant.to_folder import FolderPlan, FolderWritten


@dataclass(frozen=True)
class FolderRequest:
    """One conversion to a folder as asked for. family: it is taken for one of. facts: what the JSON report says first."""

    source: Path
    type_name: str
    facts: dict[str, Any]
    output: Path | None = None
    max_shard_bytes: int | None = None
    adapters: Sequence[Adapter] = ()
    family: str | None = None
    dry_run: bool = False
    force: bool = False
    json: bool = False


def carry_out_folder(request: FolderRequest) -> None:
    """Plan and, unless it is a dry run, write; the result goes to stdout, all else to stderr."""
    from llmctl.quant.to_folder import folder_path, plan_folder, write_folder

    started = time.perf_counter()
    console.detail(f"Reading {request.source}")
    plan = plan_folder(request.source, request.type_name, request.adapters, request.family)
    output = folder_path(plan, request.output, force=request.force or request.dry_run)
    for warning in plan.warnings:
        console.warn(warning)
    if plan.left_out:
        tell_left_out(plan.left_out)
    if request.dry_run:
        _show(request, plan, output, None, 0.0)
        return
    with console.progress(f"Writing {output}", plan.nbytes) as bar:
        written = write_folder(
            plan, output, max_shard_bytes=request.max_shard_bytes, force=request.force, progress=bar.update_to
        )
    for warning in written.warnings:
        console.warn(warning)
    _show(request, plan, output, written, time.perf_counter() - started)


def _show(request: FolderRequest, plan: FolderPlan, output: Path, written: FolderWritten | None, seconds: float) -> None:
    types = ", ".join(f"{count} {name}" for name, count in Counter(tensor.source for tensor in plan.tensors).items())
    line = f"{len(plan.tensors)} tensors ({types}) as {plan.form.name}, {console.format_bytes(plan.nbytes)} of weights"
    if written is not None:
        if written.changed:
            more = f" and {len(written.changed) - 3} more" if written.changed[3:] else ""
            console.info(f"Not exact in {plan.form.name}, rounded: {', '.join(written.changed[:3])}{more}")
        console.info(f"{line}; folder {console.format_bytes(written.nbytes)}, {seconds:.1f} s")
    if request.json:
        console.print_json(_document(request, plan, output, written, seconds))
    else:
        console.result(str(output) if written is not None else f"would write {output}: {line}")


def _document(
    request: FolderRequest, plan: FolderPlan, output: Path, written: FolderWritten | None, seconds: float
) -> dict[str, Any]:
    return {
        **request.facts,
        "dry_run": written is None,
        "output": str(output),
        "type": plan.form.name,
        "totals": {
            "tensors": len(plan.tensors),
            "weights": sum(tensor.num_elements for tensor in plan.tensors),
            "bytes": plan.nbytes,
            "folder_bytes": written.nbytes if written is not None else None,
        },
        "files": sorted(plan.files),
        "left_out": plan.left_out,
        "rounded": written.changed if written is not None else None,
        "warnings": [*plan.warnings, *(written.warnings if written is not None else ())],
        "seconds": round(seconds, 3),
    }
