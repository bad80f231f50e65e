"""What a failed command says and returns: one stderr line, an exit code, a traceback only with LLMCTL_DEBUG=1."""

from __future__ import annotations

import os
import sys

from llmctl.commands import console
from llmctl.errors import LlmctlError, OutputError

_UNMAPPED = ("failed to map segment", "annot allocate memory", "cannot map zero-fill")
FAILED, WRONG_USAGE, INTERRUPTED, READER_LEFT = 1, 2, 130, 141


def report(failure: BaseException) -> int:
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
    if isinstance(failure, MemoryError) or _is_unmapped(failure):
        failure.__traceback__ = None  # its frames hold the model, and the message needs memory as well
        console.error("not enough memory")
        return FAILED
    return _explain_typer(failure)


def _is_unmapped(failure: BaseException) -> bool:
    """True for a library that found no room in the address space, which the loader calls an import error."""
    return isinstance(failure, ImportError) and any(words in str(failure) for words in _UNMAPPED)


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
