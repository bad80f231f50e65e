"""The entry point: runs a command, and turns whatever it raises into one stderr line and an exit code.

0 done, 1 the work failed, 2 wrong usage, 130 interrupted, 141 the reader of stdout left. Everything is imported inside
`main`, so that an early Ctrl-C is as quiet as a late one.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Without arguments it is the process's own, signals included."""
    if arguments is not None:
        return _run(arguments)
    try:
        from llmctl.commands import signals

        signals.exit_on_termination()
        code = _run(sys.argv[1:])
        signals.end_at_once()
        return code
    except KeyboardInterrupt:
        return 130


def _run(arguments: Sequence[str]) -> int:
    try:
        from llmctl.commands import console, failures, limits  # noqa: F401 (failures: no memory may be left to import it later)

        console.prepare_streams()
        limits.require_address_space()
        code = _invoke(list(arguments))
        console.finish()
        return code
    except BaseException as failure:
        from llmctl.commands.failures import report

        return report(failure)


def _invoke(arguments: list[str]) -> int:
    import typer

    from llmctl.commands.group import app

    if "_LLMCTL_COMPLETE" in os.environ:  # set by the shell's completion script only
        app(prog_name="llmctl")
    command = typer.main.get_command(app)
    try:
        with command.make_context("llmctl", arguments) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0
