"""llmctl quantize: the same model with fewer bits a weight, as a GGUF file or a folder of packed integers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    size_in_bytes,
)
from llmctl.commands.options import AsOption, Device, JsonOption, ModelArgument, QuietOption, ThreadsOption, VerboseOption

if TYPE_CHECKING:
    from llmctl.quant.recipe import Recipe

_METHODS = ("rtn", "ptq", "gptq", "awq")
_FORMATS = ("gguf", "gptq", "awq", "compressed-tensors")
_OWN_FORMAT = {"rtn": "gguf", "ptq": "compressed-tensors", "gptq": "gptq", "awq": "awq"}
_TYPES = {2: "Q2_K", 3: "Q3_K_M", 4: "Q4_0", 5: "Q5_K_M", 6: "Q6_K", 8: "Q8_0"}
_DEFAULT_BITS = 4


def quantize(
    model: ModelArgument = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-m",
            metavar="METHOD",
            help="rtn: round to the nearest value; ptq: with scales fitted to activations; gptq: errors made up for; "
            "awq: important channels scaled first.",
        ),
    ] = "rtn",
    bits: Annotated[
        int | None, typer.Option("--bits", "-b", metavar="2|3|4|5|6|8", help="Bits a weight.", show_default="4")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size", "-g", min=-1, help="Columns that share a scale; -1: the row.", show_default="128, 64 or 32"
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help=f"{', '.join(_FORMATS)}.", show_default="the method's own"),
    ] = None,
    type: Annotated[
        str | None,
        typer.Option("--type", metavar="TYPE", help="Of a GGUF file, as in llmctl convert.", show_default="by --bits"),
    ] = None,
    target_size: Annotated[
        str | None,
        typer.Option("--target-size", metavar="SIZE", help="Most bytes of a GGUF file; chooses types.", show_default=False),
    ] = None,
    target_bpw: Annotated[
        float | None,
        typer.Option("--target-bpw", metavar="BITS", min=2.0, max=16.0, help="The same in bits a weight.", show_default=False),
    ] = None,
    output: OutputOption = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="Without zero points or with.", show_default="awq with, else without"),
    ] = None,
    per_tensor: Annotated[bool, typer.Option("--per-tensor", help="One scale for each matrix (rtn and ptq).")] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="FILE|FOLDER",
            help="Text, or .jsonl with a text or a conversation a line.",
            show_default="a small set that comes along",
        ),
    ] = None,
    num_samples: Annotated[int, typer.Option("--num-samples", min=1, help="Most rows of text.")] = 128,
    seq_len: Annotated[int, typer.Option("--seq-len", min=2, help="Tokens of a row; longer texts are split.")] = 512,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Which rows are taken, where there are more.")] = 0,
    damping: Annotated[
        float | None,
        typer.Option("--damping", min=0.0, max=1.0, help="Of GPTQ: a part of the mean E[x²].", show_default="0.05"),
    ] = None,
    activation_order: Annotated[
        bool | None,
        typer.Option("--activation-order/--no-activation-order", help="Of GPTQ's columns.", show_default="yes"),
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="One type for all matrices, the head included (GGUF).")] = False,
    imatrix: ImatrixOption = None,
    save_imatrix: Annotated[
        Path | None,
        typer.Option(
            "--save-imatrix", metavar="FILE", help="Write the importance measured on the way: GGUF, or .dat.", show_default=False
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write what became of the tensors: .json or .html.", show_default=False),
    ] = None,
    max_ram: Annotated[
        str | None,
        typer.Option("--max-ram", metavar="SIZE", help="Most memory for calibration: 2G, 800M.", show_default="what is free"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped or killed.")] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Measure the result on text it has not seen.")] = True,
    threads: ThreadsOption = None,
    device: Annotated[
        Device, typer.Option("--device", help="Where calibration text runs through the model. auto: on CUDA where torch sees it.")
    ] = "auto",
    pre: PreOption = None,
    drop_surplus: DropSurplusOption = False,
    as_family: AsOption = None,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Make a smaller checkpoint of a folder or a GGUF file, in one pass.

    Prints the path of what was written; what it cost goes to stderr. Methods but rtn run calibration text through the model,
    one layer at a time.
    """
    from llmctl.runtime.store import resolve_model

    method = _method(method)
    form = _format(format, method)
    of_text = {"--calibration": calibration, "--save-imatrix": save_imatrix, "--max-ram": max_ram}
    of_text |= {f"--device {device}": device == "cuda"}
    of_gptq = {"--damping": damping is not None, "--activation-order": activation_order is not None}
    of_grids = {"--group-size": group_size, "--symmetric": symmetric is not None, "--per-tensor": per_tensor}
    of_budget = {"--target-size": target_size, "--target-bpw": target_bpw}
    _check_budget(method, of_budget, {"--type": type, "--bits": bits, "--pure": pure})
    of_gguf = {**of_budget, "--type": type, "--pure": pure, "--pre": pre, "--drop-surplus": drop_surplus}
    of_gguf |= {"--imatrix": imatrix} if method == "rtn" else {}
    _check_together(method, form, of_text, of_gptq, of_grids, of_gguf)
    recipe = _recipe(bits, type) if form == "gguf" else None
    ram = size_in_bytes(max_ram, "--max-ram")
    size = size_in_bytes(target_size, "--target-size")
    path = resolve_model(model, progress=console.progress)
    facts: dict[str, Any] = {"command": "quantize", "input": str(path), "method": method, "pure": pure}
    facts["imatrix"] = str(imatrix) if imatrix else None
    if method == "rtn" and form == "gguf":
        _check_plain(resume, report)
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
                pre=pre,
                drop_surplus=drop_surplus,
                family=as_family,
                dry_run=dry_run,
                force=force,
                json=json,
            )
        )
        return
    from llmctl.commands.calibrated import Calibrated, carry_out_calibrated

    carry_out_calibrated(
        Calibrated(
            path=path,
            method=method,
            form=form,
            facts=facts,
            recipe=recipe,
            pure=pure,
            target_size=size,
            target_bpw=target_bpw,
            bits=_DEFAULT_BITS if bits is None else bits,
            group_size=group_size,
            symmetric=method != "awq" if symmetric is None else symmetric,
            per_tensor=per_tensor,
            damping=damping,
            activation_order=activation_order is not False,
            calibration=calibration,
            num_samples=num_samples,
            seq_len=seq_len,
            seed=seed,
            imatrix=imatrix,
            save_imatrix=save_imatrix,
            report=report,
            max_ram=ram,
            resume=resume,
            check=check,
            threads=threads,
            device=device,
            family=as_family,
            output=output_argument(output, is_folder=form != "gguf"),
            dry_run=dry_run,
            force=force,
            json=json,
        )
    )


def _method(method: str) -> str:
    from llmctl.errors import UsageError

    if method.lower() not in _METHODS:
        raise UsageError(f"--method {method}: there is no such method; methods are {', '.join(_METHODS)}")
    return method.lower()


def _format(format: str | None, method: str) -> str:
    from llmctl.errors import UsageError

    if format is None:
        return _OWN_FORMAT[method]
    if format.lower() not in _FORMATS:
        raise UsageError(f"--format {format}: there is no such format; formats are {', '.join(_FORMATS)}")
    return format.lower()


def _check_together(method: str, form: str, *groups: dict[str, Any]) -> None:
    """UsageError for options that would be of no effect."""
    from llmctl.errors import UsageError

    of_text, of_gptq, of_grids, of_gguf = ([name for name, value in group.items() if value] for group in groups)
    if method == "rtn" and of_text:
        raise UsageError(f"{of_text[0]}: rtn looks at no text; --method ptq, gptq or awq does")
    if method != "gptq" and of_gptq:
        raise UsageError(f"{of_gptq[0]} is for --method gptq, not {method}")
    if form == "gguf" and of_grids:
        raise UsageError(f"{of_grids[0]}: the types of GGUF files have their own groups; --type chooses one")
    if form != "gguf" and of_gguf:
        raise UsageError(f"{of_gguf[0]} is for GGUF files, not --format {form}")
    if method in ("gptq", "awq") and "--per-tensor" in of_grids:
        raise UsageError(f"--per-tensor is for --method rtn and ptq, not {method}")
    if method != "rtn" and (others := [name for name in of_gguf if name in ("--pre", "--drop-surplus")]):
        raise UsageError(f"{others[0]} is for --method rtn, not {method}")


def _check_budget(method: str, of_budget: dict[str, Any], others: dict[str, Any]) -> None:
    """UsageError for a size that cannot be aimed at."""
    from llmctl.errors import UsageError

    asked = [name for name, value in of_budget.items() if value is not None]
    if not asked:
        return
    if method == "rtn":
        raise UsageError(f"{asked[0]} measures on text what types are worth: --method gptq, awq or ptq does, rtn does not")
    if contradicted := [*asked[1:], *(name for name, value in others.items() if value)]:
        raise UsageError(f"{asked[0]} and {contradicted[0]} contradict each other; leave one out")


def _check_plain(resume: bool, report: Path | None) -> None:
    from llmctl.errors import UsageError

    if resume:
        raise UsageError("--resume: rounding to a GGUF file takes seconds and leaves nothing to go on with")
    if report is not None and report.suffix.lower() == ".html":
        raise UsageError("--report FILE.html is for calibrated methods; rtn writes JSON")


def _recipe(bits: int | None, type: str | None) -> Recipe:
    """The recipe that --bits and --type ask for together."""
    from llmctl.errors import UnsupportedError, UsageError
    from llmctl.quant.recipe import recipe_by_name

    if type is None:
        bits = _DEFAULT_BITS if bits is None else bits
        if bits not in _TYPES:
            known = ", ".join(f"{count} ({name})" for count, name in _TYPES.items())
            raise UnsupportedError(f"--bits {bits} is not there; bits of GGUF files are {known}")
        type = _TYPES[bits]
    recipe = recipe_by_name(type)
    if recipe is None or recipe.matrices.is_plain:
        raise UsageError(f"--type {type} has no fewer bits; llmctl convert --type {type} writes it")
    if bits is not None and str(bits) not in recipe.name:  # Q4_K_M, IQ4_NL
        raise UsageError(f"--bits {bits} and --type {recipe.name} contradict each other; leave one out")
    return recipe
