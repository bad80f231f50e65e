"""Ctrl-C, SIGTERM, SIGHUP: what is under way ends at a sound point, with no traceback and the terminal as it was."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_ENDING = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


def exit_on_termination() -> None:
    """Let SIGTERM, and SIGHUP of a closed terminal, unwind the program like an exit, so that half-written files go away and
    the terminal is put in order. What is ignored (SIGHUP under nohup) stays ignored."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    for number in _ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, leave)


def end_at_once() -> None:
    """The work is done and its exit code known: from here a signal ends the process with no traceback from the interpreter's
    own shutdown."""
    for number in (signal.SIGINT, *_ENDING):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Within the block the first Ctrl-C calls `action`; the next one is a KeyboardInterrupt again.

    Where SIGINT is ignored (a background job) it stays ignored.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous in (signal.SIG_IGN, None):
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        action()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
