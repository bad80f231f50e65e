"""A function over many items on a few threads, with one progress for all, that an interrupt ends within a slice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Progress = Callable[[int, int], None]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Stopped(Exception):
    """Raised inside a worker when nobody waits for its result any more."""


class Workers:
    """Threads for work that is numpy's or a hash's, which let go of the interpreter.

    threads: how many; 1 works in the caller's own. progress: called with (bytes done, bytes in all), never by two at a time.
    total: bytes that will be reported by `advance`.
    """

    def __init__(self, threads: int = 1, progress: Progress | None = None, total: int = 0) -> None:
        self._threads, self._progress, self._total = threads, progress, total
        self._done = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def advance(self, count: int) -> None:
        """Called by the functions after each slice of `count` bytes. Raises Stopped once the caller has given up."""
        if self._stopped.is_set():
            raise Stopped
        if self._progress is not None:
            with self._lock:
                self._done += count
                self._progress(self._done, self._total)

    def in_order(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """function(item) for each item, in order. Its first exception is raised here and ends the rest."""
        if self._threads == 1:
            yield from map(function, items)
            return
        pool = ThreadPoolExecutor(self._threads)
        try:
            yield from pool.map(function, items)
        except BaseException:
            self._stopped.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
