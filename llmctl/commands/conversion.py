"""What `convert` and `quantize` share: plan, check, write, and tell."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.commands import console

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llmctl.quant.convert import Plan, Written
    from llmctl.quant.lora import Adapter
    from llmctl.quant.recipe import Recipe

OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", metavar="OUT", help="File to write, or an existing folder.", show_default="NAME-SIZE-TYPE.gguf here"
    ),
]
PreOption = Annotated[
    str | None,
    typer.Option(
        "--pre", metavar="RULE", help="Splitting rule of a byte-level tokenizer: llama-bpe, qwen2, …", show_default="recognised"
    ),
]
DropSurplusOption = Annotated[
    bool, typer.Option("--drop-surplus", help="Leave out tokens of a folder that have no row in the embedding.")
]
SplitOption = Annotated[
    str | None,
    typer.Option("--split-max-size", metavar="SIZE", help="Most bytes of weights in a file: 500M, 2G.", show_default="one file"),
]
ImatrixOption = Annotated[
    Path | None,
    typer.Option(
        "--imatrix",
        metavar="FILE",
        help="Importance matrix, GGUF or .dat: which columns rounding must spare, whatever the text says.",
        show_default=False,
    ),
]
VocabOnlyOption = Annotated[
    bool, typer.Option("--vocab-only", help="Metadata and tokenizer alone; a folder needs no weights for it.")
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="ADAPTER[=SCALE]", help="Folder of a PEFT adapter to add to the weights; can be repeated."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write no model.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")]
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?)B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Request:
    """One conversion as asked for.

    recipe: None keeps the types. vocab_only: no weights. adapters: LoRA adapters to add. family: it is taken for one of.
    measure: work out and show rounding errors. facts: what the JSON report says first.
    """

    source: Path
    recipe: Recipe | None
    facts: dict[str, Any]
    output: Path | None = None
    report: Path | None = None
    pure: bool = False
    measure: bool = False
    imatrix: Path | None = None
    pre: str | None = None
    drop_surplus: bool = False
    max_shard_bytes: int | None = None
    vocab_only: bool = False
    adapters: Sequence[Adapter] = ()
    family: str | None = None
    dry_run: bool = False
    force: bool = False
    json: bool = False


def output_argument(text: str | None, *, is_folder: bool = False) -> Path | None:
    """What -o names. is_folder: a folder is written, else a file or into an existing folder.

    UsageError where it is empty (an unset variable of a script), or ends like a folder that is not there.
    """
    from llmctl.errors import UsageError

    if text is None:
        return None
    if not text:
        raise UsageError("-o: the name of the output is empty")
    if not is_folder and text.endswith(("/", os.sep)) and not Path(text).is_dir():
        raise UsageError(f"-o {text}: there is no such folder; without the last {text[-1]} it names a file")
    return Path(text)


def size_in_bytes(text: str | None, option: str = "--split-max-size") -> int | None:
    """The bytes a size like 500M or 2G stands for (powers of ten, as of disks). UsageError for anything else."""
    from llmctl.errors import UsageError

    if text is None:
        return None
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found["number"]) * _UNITS[found["unit"].upper()]) if found else 0
    if size < 1:
        raise UsageError(f"{option} {text}: expected a size like 500M or 2G")
    return size


def parse_adapters(texts: Sequence[str] | None) -> list[Adapter]:
    """ADAPTER or ADAPTER=SCALE of each. UsageError for a scale that is no number."""
    from llmctl.errors import UsageError
    from llmctl.quant.lora import Adapter

    found = []
    for text in texts or ():
        folder, equals, scale = text.rpartition("=")
        if not equals or Path(text).exists():
            found.append(Adapter(Path(text)))
            continue
        try:
            found.append(Adapter(Path(folder), float(scale)))
        except ValueError as error:
            raise UsageError(f"--lora {text}: expected ADAPTER or ADAPTER=SCALE with a number") from error
        if not isfinite(found[-1].scale):
            raise UsageError(f"--lora {text}: the scale must be finite")
    return found


def carry_out(request: Request) -> None:
    """Plan and, unless it is a dry run, write; the result goes to stdout, all else to stderr."""
    from llmctl.quant.convert import check_target, output_path, plan_warnings, write

    started = time.perf_counter()
    for target in (request.output, request.report):
        if target is not None and not request.dry_run:
            check_target(target, force=request.force)
    console.detail(f"Reading {request.source}")
    plan = _plan(request)
    output = output_path(
        plan, request.output, force=request.force or request.dry_run, max_shard_bytes=request.max_shard_bytes
    )
    _check_report(request, plan, output)
    warnings = list(plan_warnings(plan))
    _tell(warnings, plan)
    if request.dry_run:
        _show_plan(request, plan, output, warnings)
        return
    with console.progress(f"Writing {output}", sum(tensor.nbytes for tensor in plan.tensors)) as bar:
        written = write(
            plan,
            output,
            measure=request.measure,
            strict=request.measure,
            max_shard_bytes=request.max_shard_bytes,
            progress=bar.update_to,
        )
    _tell(written.warnings)
    _show_result(request, plan, written, [*warnings, *written.warnings], time.perf_counter() - started)


def _plan(request: Request) -> Plan:
    from llmctl.quant.convert import make_plan, vocabulary_plan
    from llmctl.quant.imatrix import read_imatrix
    from llmctl.quant.source import open_source, open_vocabulary

    reading: dict[str, Any] = {"pre": request.pre, "drop_surplus": request.drop_surplus, "family": request.family}
    if request.vocab_only:
        return vocabulary_plan(open_vocabulary(request.source, **reading))
    source = open_source(request.source, adapters=request.adapters, **reading)
    source.files = [*source.files, *_other_inputs(request)]
    importance = read_imatrix(request.imatrix) if request.imatrix is not None else None
    return make_plan(source, request.recipe, pure=request.pure, importance=importance)


def _other_inputs(request: Request) -> Iterator[Path]:
    """What is read beside the model, and must not be written over either."""
    if request.imatrix is not None:
        yield request.imatrix
    for adapter in request.adapters:
        yield from (file for file in adapter.folder.iterdir() if file.is_file())


def _check_report(request: Request, plan: Plan, output: Path) -> None:
    """The report must not take the place of anything either."""
    from llmctl.errors import UsageError
    from llmctl.quant.convert import check_output

    if request.report is None:
        return
    if os.path.realpath(request.report) == os.path.realpath(output):  # also under the name of a link
        raise UsageError(f"--report and the output are the same file: {output}")
    check_output(request.report, plan.source, force=request.force or request.dry_run)


def _tell(warnings: Sequence[str], plan: Plan | None = None) -> None:
    for warning in warnings:
        console.warn(warning)
    if plan is not None and plan.source.left_out:
        tell_left_out(plan.source.left_out)


def tell_left_out(names: Sequence[str]) -> None:
    """One line that names what is no part of the text model."""
    from llmctl.quant.left_out import summary

    console.info(f"Not part of the text model, left out: {summary(names)}")


def _show_plan(request: Request, plan: Plan, output: Path, warnings: Sequence[str]) -> None:
    from llmctl.quant.convert import output_files
    from llmctl.quant.report import bits_per_weight, document

    report = document(plan, None, warnings, **request.facts, dry_run=True)
    report["output"] = str(output)
    _save_report(request, report)
    if output.exists() and not request.force:
        console.warn(f"{output} exists already: without --force it will not be replaced")
    if request.json:
        console.print_json(report)
        return
    for line in _table(plan, None):
        console.result(line)
    total = report["totals"]
    count = len(output_files(plan, output, request.max_shard_bytes))
    console.result(
        f"would write {output}{f' in {count} files' if count > 1 else ''}: "
        f"{total['tensors']} tensors, {console.format_bytes(total['bytes'])} of weights, "
        f"{bits_per_weight(plan.tensors):.2f} bits per weight"
    )


def _show_result(request: Request, plan: Plan, written: Written, warnings: Sequence[str], seconds: float) -> None:
    from llmctl.quant.report import document

    report = document(plan, written, warnings, **request.facts, dry_run=False, seconds=round(seconds, 3))
    _save_report(request, report)
    show = console.info if request.measure else console.detail
    for line in _table(plan, written):
        show(line)
    console.info(_summary(report))
    if request.json:
        console.print_json(report)
    else:
        console.result(str(written.output))


def _summary(report: dict[str, Any]) -> str:
    total = report["totals"]
    sizes = f"{console.format_bytes(total['bytes_before'])} → {console.format_bytes(total['bytes'])} of weights"
    error = total["relative_rms_error"]
    rounding = f", relative RMS error {error:.4%}" if error is not None else ""
    file = f"file {console.format_bytes(total['file_bytes'])}, {report['seconds']:.1f} s"
    return f"{total['tensors']} tensors, {sizes}, {total['bits_per_weight']:.2f} bits per weight{rounding}; {file}"


def _table(plan: Plan, written: Written | None) -> list[str]:
    """One line for each kind of tensor and type; with errors once there are any."""
    from llmctl.quant.report import by_kind, measured

    lines = by_kind(measured(plan, written))
    headers, right = ["TENSORS OF KIND", "TYPE", "COUNT", "SIZE"], [2, 3]
    rows = [[line.kind, line.type, line.count, console.format_bytes(line.nbytes)] for line in lines]
    if any(line.error is not None for line in lines):
        headers += ["RMS ERROR", "WORST", "IN"]
        right += [4, 5]
        for row, line in zip(rows, lines, strict=True):
            row += [_percent(line.error), _percent(line.worst), line.worst_name if line.worst else ""]
    return console.format_table(headers, rows, right=right)


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:.3%}" if error else "0"


def _save_report(request: Request, report: dict[str, Any]) -> None:
    if request.report is not None:
        save_json(request.report, report)


def save_json(path: Path, report: dict[str, Any]) -> None:
    """A JSON document as a file."""
    import json

    text = json.dumps({"version": console.JSON_VERSION, **report}, indent=2, ensure_ascii=False)
    save_file(path, text.encode("utf-8", "replace") + b"\n")


def save_file(path: Path, data: bytes) -> None:
    """Write a small file, whole or not at all."""
    from llmctl.runtime.checkpoint.output_file import OutputFile

    file = OutputFile(path)
    try:
        file.write(data)
        file.commit()
    except BaseException:
        file.abort()
        raise
