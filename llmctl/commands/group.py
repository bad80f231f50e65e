"""The command table, and a Typer group that imports a command's module only when that command is called."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from llmctl.commands import console


class Command(NamedTuple):
    """Where a command lives: a function, or a Typer app of sub-commands, in a module of llmctl.commands."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "run": Command("run", "run", "Ask a model, or chat with it."),
    "quantize": Command("quantize", "quantize", "Make a smaller checkpoint with low-bit weights."),
    "convert": Command("convert", "convert", "Turn a Hugging Face folder into a GGUF file."),
    "bench": Command("bench", "bench", "Measure prompt and generation speed."),
    "eval": Command("eval", "evaluate", "Measure how well a model predicts a text: perplexity, divergence from another."),
    "inspect": Command("inspect", "inspect", "Show what is in a checkpoint: metadata, tensors, sizes."),
    "inspect-kv": Command("inspect_kv", "inspect_kv", "Show what the KV cache of a model costs, and what is in it."),
    "verify": Command("verify", "verify", "Check a model file: structure, values, keys, hashes; compare two files."),
    "models": Command("models", "app", "Pull, list, show and remove models."),
    "completion": Command("completion", "completion", "Print the completion script of a shell."),
    "doctor": Command("doctor", "doctor", "Show what this machine has and what works on it."),
}


class LazyGroup(TyperGroup):
    """The root group: names and help lines come from COMMANDS, modules are imported on use."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.commands[cmd_name] = load_command(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            ctx.fail(f"There is no command '{name}'." + (f" Did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


def load_command(name: str) -> Any:
    """The click command behind a name of COMMANDS; imports its module."""
    _show_log()
    entry = COMMANDS[name]
    target = getattr(importlib.import_module(f"llmctl.commands.{entry.module}"), entry.attribute)
    command = typer.main.get_command(target if isinstance(target, typer.Typer) else _single(name, target))
    command.name = name
    return command


def _show_log() -> None:
    """What the layers below have to say in passing becomes a warning on stderr."""
    import logging

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: console.warn(record.getMessage())
    logging.getLogger("llmctl").handlers = [handler]


def _single(name: str, function: Callable[..., Any]) -> typer.Typer:
    from typer.core import TyperCommand

    from llmctl.commands.config import configured

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name=name, cls=configured(TyperCommand))(function)
    return app


def _print_version(value: bool) -> None:
    if value:
        from llmctl import __version__

        console.result(f"llmctl {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=LazyGroup, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}, name="llmctl"
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Quantize, convert and run language models on the machine in front of you."""
    if ctx.invoked_subcommand is None:
        console.result(ctx.get_help())
