"""The hidden states between two layers, batch by batch: in memory, or in a file where that is too much.

A plain file, read and written piece by piece, never mapped: what lies in it does not count as this process's memory.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from llmctl.errors import OutputError


class Activations:
    """float32 [T, hidden_size] for each of the batches. folder: where the file goes, None to keep them in memory."""

    def __init__(self, sizes: list[int], hidden_size: int, folder: Path | None = None) -> None:
        self._sizes, self._hidden = sizes, hidden_size
        self._kept: list[torch.Tensor | None] = [None] * len(sizes)
        self._file = None if folder is None else self._open(folder)
        self._starts = [4 * hidden_size * sum(sizes[:index]) for index in range(len(sizes))]

    @staticmethod
    def _open(folder: Path) -> int:
        """A file that is gone when the process is, however it ends."""
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="activations-")
        Path(name).unlink()
        return descriptor

    def read(self, index: int) -> torch.Tensor:
        """Batch number `index`."""
        if self._file is None:
            kept = self._kept[index]
            assert kept is not None, index
            return kept
        found = torch.empty(self._sizes[index], self._hidden)
        view, start = memoryview(found.numpy()).cast("B"), self._starts[index]
        done = 0
        while done < len(view):
            done += os.preadv(self._file, [view[done:]], start + done)
        return found

    def write(self, index: int, x: torch.Tensor) -> None:
        """Replace a batch, from whatever device. OutputError if the disk is full."""
        x = x.cpu()
        if self._file is None:
            self._kept[index] = x
            return
        view, start = memoryview(x.contiguous().numpy()).cast("B"), self._starts[index]
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._file, view[done:], start + done)
        except OSError as error:
            raise OutputError(f"activations could not be written to the disk: {error.strerror}") from error

    def close(self) -> None:
        """Let go of everything."""
        self._kept = []
        if self._file is not None:
            os.close(self._file)
            self._file = None
