"""llmctl verify: whether a model file is what it claims to be, and how far two of them are apart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.commands import console
from llmctl.commands import verify_output as shown
from llmctl.commands.options import AsOption, JsonOption, ModelArgument, QuietOption, ThreadsOption

if TYPE_CHECKING:
    from llmctl.quant.verify import Report


def verify(
    model: ModelArgument = None,
    manifest_file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="For --write-manifest: where, if not beside the weights.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="OTHER", help="Compare the weights with another model's, tensor by tensor, instead."),
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option("--manifest", metavar="FILE", help="Hashes to check.", show_default="the manifest beside the weights"),
    ] = None,
    write_manifest: Annotated[
        bool, typer.Option("--write-manifest", help="If all is well, write the sha256 of every file and tensor as JSON.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a manifest that exists.")] = False,
    as_family: AsOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check a model: structure, finite values in every block, ranges, keys and shapes, tokenizer, hashes.

    Ends with 1 if anything is wrong; warnings are not. With --against: if the two have not the same tensors.
    """
    from llmctl.errors import UsageError
    from llmctl.runtime.machine import default_threads
    from llmctl.runtime.store import resolve_model

    if manifest_file is not None and not write_manifest:
        raise UsageError(f"{manifest_file}: a second path is for --write-manifest; --manifest and --against name other files")
    if (against is not None) + (manifest is not None) + write_manifest > 1:
        raise UsageError("--against, --manifest and --write-manifest exclude each other")
    if force and not write_manifest:
        raise UsageError("--force is for --write-manifest: nothing else is written")
    path = resolve_model(model, progress=console.progress)
    threads = default_threads() if threads is None else threads
    if against is not None:
        _compare(path, resolve_model(against, progress=console.progress), threads, json, as_family)
    elif write_manifest:
        _write_manifest(path, manifest_file, threads, force, json, as_family)
    else:
        _verify(path, manifest, threads, json, as_family)


def _verify(path: Path, manifest: Path | None, threads: int, json: bool, family: str | None) -> None:
    started = time.perf_counter()
    report = _run(path, threads, manifest=manifest, family=family)
    shown.show(report, json, seconds=round(time.perf_counter() - started, 3))


def _run(path: Path, threads: int, **options: Any) -> Report:
    from llmctl.quant.verify import verify as run

    with console.progress(f"Checking {path}") as bar:
        return run(path, threads=threads, progress=bar.update_to, **options)


def _write_manifest(path: Path, output: Path | None, threads: int, force: bool, json: bool, family: str | None) -> None:
    from llmctl.quant import manifest as manifests
    from llmctl.quant.convert import check_target
    from llmctl.quant.workers import Workers
    from llmctl.runtime.checkpoint import open_checkpoint

    started = time.perf_counter()
    with open_checkpoint(path) as checkpoint:
        target = output if output is not None else manifests.default_path(checkpoint)
        check_target(target, force=force)
        report = _run(path, threads, use_manifest=False, family=family)
        if not report.ok:
            shown.show(report, json, seconds=round(time.perf_counter() - started, 3))
        total = manifests.hashed_bytes(checkpoint, tensors=True)
        with console.progress(f"Hashing {path}", total) as bar:
            document = manifests.make_manifest(checkpoint, Workers(threads, bar.update_to, total))
        manifests.write_manifest(document, target, checkpoint)
    shown.show_written(report, target, json, seconds=round(time.perf_counter() - started, 3))


def _compare(path: Path, reference: Path, threads: int, json: bool, family: str | None) -> None:
    from llmctl.errors import FormatError
    from llmctl.quant.compare import compare

    with console.progress(f"Comparing {path} with {reference}") as bar:
        result = compare(path, reference, threads=threads, progress=bar.update_to, family=family)
    shown.show_comparison(result, json)
    if not result.same_tensors:
        lacking = [*result.only_here, *result.only_there, *result.misshapen]
        raise FormatError(f"{path}: {len(lacking)} tensors are not in both files or not of one shape")
