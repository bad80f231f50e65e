"""llmctl quantize: the same model with fewer bits a weight, as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    carry_out,
    output_argument,
)
from llmctl.commands.options import AsOption, JsonOption, ModelArgument, QuietOption, VerboseOption

if TYPE_CHECKING:
    from llmctl.quant.recipe import Recipe

_METHODS = ("rtn",)
_PLANNED_METHODS = ("ptq", "gptq", "awq")
_TYPES = {4: "Q4_0", 8: "Q8_0"}
_DEFAULT_BITS = 4


def quantize(
    model: ModelArgument = None,
    method: Annotated[
        str, typer.Option("--method", "-m", metavar="METHOD", help="rtn: round each weight to the nearest value.")
    ] = "rtn",
    bits: Annotated[
        int | None, typer.Option("--bits", "-b", metavar="4|8", help="Bits a weight: 4 is Q4_0, 8 is Q8_0.", show_default="4")
    ] = None,
    type: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="Q4_K_M, Q8_0 …: see llmctl convert.", show_default="by --bits")
    ] = None,
    output: OutputOption = None,
    pure: Annotated[bool, typer.Option("--pure", help="One type for all matrices, the head included.")] = False,
    imatrix: ImatrixOption = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the errors of all tensors as JSON.", show_default=False)
    ] = None,
    as_family: AsOption = None,
    pre: PreOption = None,
    drop_surplus: DropSurplusOption = False,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Make a smaller checkpoint: a GGUF file with 4 or 8 bits a weight, from a folder or a GGUF file, in one pass.

    Prints the path of the file written; what rounding cost goes to stderr.
    """
    from llmctl.runtime.store import resolve_model

    _check_method(method)
    recipe = _recipe(bits, type)
    path = resolve_model(model, progress=console.progress)
    facts = {"command": "quantize", "input": str(path), "method": method.lower(), "pure": pure}
    facts["imatrix"] = str(imatrix) if imatrix else None
    carry_out(
        Request(
            path,
            recipe,
            facts,
            output=output_argument(output),
            report=report,
            pure=pure,
            measure=True,
            imatrix=imatrix,
            family=as_family,
            pre=pre,
            drop_surplus=drop_surplus,
            dry_run=dry_run,
            force=force,
            json=json,
        )
    )


def _check_method(method: str) -> None:
    from llmctl.errors import UnsupportedError, UsageError

    if method.lower() in _METHODS:
        return
    if method.lower() in _PLANNED_METHODS:
        raise UnsupportedError(f"--method {method} is not there yet; methods are {', '.join(_METHODS)}")
    raise UsageError(f"--method {method}: there is no such method; methods are {', '.join(_METHODS)}")


def _recipe(bits: int | None, type: str | None) -> Recipe:
    """The recipe that --bits and --type ask for together."""
    from llmctl.errors import UnsupportedError, UsageError
    from llmctl.quant.recipe import recipe_by_name

    if type is None:
        bits = _DEFAULT_BITS if bits is None else bits
        if bits not in _TYPES:
            known = ", ".join(f"{count} ({name})" for count, name in _TYPES.items())
            raise UnsupportedError(f"--bits {bits} is not there yet; bits are {known}")
        type = _TYPES[bits]
    recipe = recipe_by_name(type)
    if recipe is None or recipe.matrices.is_plain:
        raise UsageError(f"--type {type} has no fewer bits; llmctl convert --type {type} writes it")
    if bits is not None and str(bits) not in recipe.name:  # Q4_K_M, IQ4_NL
        raise UsageError(f"--bits {bits} and --type {recipe.name} contradict each other; leave one out")
    return recipe
