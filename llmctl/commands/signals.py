"""Ctrl-C and SIGTERM: what is under way ends at a sound point, with no traceback and the terminal as it was."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

TERMINATED = 128 + signal.SIGTERM


def exit_on_sigterm() -> None:
    """Let SIGTERM unwind the program like an exit, so that files, terminal and bars are put in order."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)


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
