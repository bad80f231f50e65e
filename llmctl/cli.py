"""The entry point: runs a command, and turns whatever it raises into one stderr line and an exit code.

0 done, 1 the work failed, 2 wrong usage, 130 interrupted, 141 the reader of stdout left. A traceback is shown only with
LLMCTL_DEBUG=1. Typer itself is imported inside `main`, so that an early Ctrl-C is as quiet as a late one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from llmctl.commands import console
from llmctl.errors import LlmctlError, OutputError

FAILED, WRONG_USAGE, INTERRUPTED, READER_LEFT = 1, 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (sys.argv without it) and return the process's exit code."""
    try:
        console.prepare_streams()
        code = _invoke(list(sys.argv[1:] if arguments is None else arguments))
        console.finish()
        return code
    except BaseException as failure:
        return _report(failure)


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


def _report(failure: BaseException) -> int:
    """Tell why the command failed and choose its exit code; stdout is left so that the exit adds no noise."""
    code = FAILED
    try:
        code = _explain(failure)
    except KeyboardInterrupt:
        code = INTERRUPTED
    try:
        console.finish()
    except (OSError, OutputError):
        console.abandon(sys.stdout)
    return code


def _explain(failure: BaseException) -> int:
    if isinstance(failure, SystemExit):
        return failure.code if isinstance(failure.code, int) else FAILED if failure.code else 0
    if isinstance(failure, BrokenPipeError):
        return READER_LEFT
    if isinstance(failure, KeyboardInterrupt):
        if console.is_terminal(sys.stderr):
            console.raw("\n")  # the terminal has just shown ^C
        return INTERRUPTED
    if os.environ.get("LLMCTL_DEBUG") == "1":
        _print_traceback(failure)
    if isinstance(failure, LlmctlError):
        console.error(str(failure))
        return failure.exit_code
    if isinstance(failure, OSError):
        console.error(_describe_os_error(failure))
        return FAILED
    if isinstance(failure, MemoryError):
        console.error("not enough memory")
        return FAILED
    return _explain_typer(failure)


def _explain_typer(failure: BaseException) -> int:
    import typer

    usage_error = typer.BadParameter.__mro__[1]  # typer's own class in newer releases, click's in older ones
    if isinstance(failure, typer.Abort):
        return INTERRUPTED
    if isinstance(failure, usage_error):
        console.error(_describe_usage_error(failure))
        return WRONG_USAGE
    kind = type(failure).__name__
    console.error(f"unexpected {kind}: {failure} (a fault of llmctl: please report it, with what LLMCTL_DEBUG=1 adds)")
    return FAILED


def _describe_usage_error(failure: BaseException) -> str:
    """Typer's sentence, in our form: no full stop before the pointer to the help of the very command."""
    message = failure.format_message().replace("Value error, ", "").rstrip(".")
    message = message[:1].lower() + message[1:]
    context = getattr(failure, "ctx", None)
    return f"{message} (see '{context.command_path} --help')" if context is not None else message


def _describe_os_error(failure: OSError) -> str:
    """The system's reason, led by the file it is about; without a file it is stdout that failed, if its flush fails."""
    if failure.filename is not None:
        return f"{os.fsdecode(failure.filename)}: {failure.strerror}"
    try:
        console.finish()
    except OutputError as output:
        return str(output)
    return failure.strerror or str(failure)


def _print_traceback(failure: BaseException) -> None:
    import traceback

    console.raw("".join(traceback.format_exception(failure)))
