"""What a long run has finished, layer by layer on disk, so that another one can go on where it was killed.

A layer's file appears whole or not at all. `state.json` says what the run was asked for: results of another request are never
mixed in.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np

from llmctl.errors import FormatError, OutputError, UsageError
from llmctl.runtime.checkpoint.output_file import OutputFile

_STATE, _FACTS = "state.json", "facts"
_Taken = TypeVar("_Taken")


class WorkFolder:
    """`.NAME.work` beside the output. resume: go on with what is there, else it is removed."""

    def __init__(self, output: Path, request: dict[str, Any], *, resume: bool) -> None:
        """request: JSON values that decide the result. UsageError if the run there was of another request, or there is none to
        go on with; OutputError if the folder cannot be made or another process works in it."""
        target = Path(os.path.realpath(output))
        self.path = target.with_name(f".{target.name}.work")
        stated = self._stated()
        if resume:
            self._check(stated, request, output)
        self.left_over = not resume and stated is not None
        if not resume:
            shutil.rmtree(self.path, ignore_errors=True)
        try:
            self.path.mkdir(exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(f"{output}: another process is making this model") from error
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be made: {error.strerror}") from error
        self._save(_STATE, json.dumps(request, indent=1, sort_keys=True).encode())

    def _stated(self) -> dict[str, Any] | None:
        try:
            return json.loads((self.path / _STATE).read_text("utf-8"))
        except (OSError, ValueError):
            return None

    def _check(self, stated: dict[str, Any] | None, request: dict[str, Any], output: Path) -> None:
        if stated is None:
            raise UsageError(f"--resume: there is no unfinished run for {output} ({self.path} is not there)")
        wanted = json.loads(json.dumps(request))
        different = sorted(key for key in stated.keys() | wanted.keys() if stated.get(key) != wanted.get(key))
        if different:
            raise UsageError(
                f"--resume: the unfinished run for {output} was of another request; different: {', '.join(different)}. "
                "Ask for the same again, or leave --resume out to begin anew"
            )

    def _save(self, name: str, data: bytes | memoryview) -> None:
        file = OutputFile(self.path / name)
        try:
            file.write(data)
            file.commit()
        except BaseException:
            file.abort()
            raise

    def has(self, layer: int) -> bool:
        """Whether the layer is finished."""
        return self._file(layer).is_file()

    def save(self, layer: int, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
        """Keep a finished layer."""
        buffer = io.BytesIO()
        np.savez(buffer, **arrays, **{_FACTS: np.frombuffer(json.dumps(facts).encode(), np.uint8)})
        self._save(self._file(layer).name, buffer.getbuffer())

    def names(self, layer: int) -> list[str]:
        """Arrays of a finished layer."""
        return self._of(layer, lambda file: [name for name in file.files if name != _FACTS])

    def read(self, layer: int, name: str) -> np.ndarray:
        """One array of a finished layer."""
        return self._of(layer, lambda file: file[name])

    def facts(self, layer: int) -> dict[str, Any]:
        """What was kept beside the arrays."""
        return self._of(layer, lambda file: json.loads(file[_FACTS].tobytes()))

    def _of(self, layer: int, take: Callable[[Any], _Taken]) -> _Taken:
        """Of the layer's file. FormatError if that is damaged."""
        path = self._file(layer)
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                return take(file)
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise FormatError(f"{path}: cannot be read ({error}); leave --resume out to begin anew") from error

    def _file(self, layer: int) -> Path:
        return self.path / f"layer-{layer:05d}.npz"

    def remove(self) -> None:
        """The work is done: nothing is left of the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Leave it for another run."""
        with contextlib.suppress(OSError):
            os.close(self._lock)
