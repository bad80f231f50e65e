"""Rows of plain numbers into blocks: by the native encoders where the extension is there, else by their definition in numpy.

Both give the same bytes; numpy takes some twenty times as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmctl.kernels.formats.codecs import quantize
from llmctl.kernels.formats.plain import PLAIN_DTYPES
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format
from llmctl.kernels.native import instruction_set, why_missing

_STORED = {PLAIN_DTYPES[name]: name for name in ("F32", "F16", "BF16")}


class Encoder:
    """Encodes with a pool of threads of its own, made when it is first needed."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool: Any = None

    def encode(
        self, rows: np.ndarray, form: Format, importance: np.ndarray | None = None, *, isa: str | None = None
    ) -> QuantTensor | np.ndarray:
        """rows (R, K) in another format; arguments, result and errors are those of `codecs.quantize`.

        UsageError where LLMCTL_ISA names nothing that this machine has.

        isa: instruction set to use instead of the best, for tests.
        """
        if form.is_plain or rows.dtype not in _STORED or not rows.size or why_missing() is not None:
            return quantize(rows, form, importance)
        blocks = np.empty((len(rows), form.row_bytes(rows.shape[1])), np.uint8)
        stored = np.ascontiguousarray(rows).view(np.uint8)
        failed = self._native(form.name, _STORED[rows.dtype], stored, blocks, importance, isa)
        if failed is not None:
            quantize(rows[: failed + 1], form, importance)  # says what is wrong with it
            raise AssertionError(f"row {failed} cannot be encoded as {form.name} by the native encoder alone")
        return QuantTensor(form, rows.shape, blocks)

    def _native(self, *arguments: Any) -> int | None:
        from llmctl.kernels.native import _native

        if self._pool is None:
            instruction_set()  # what LLMCTL_ISA says is settled now
            self._pool = _native.ThreadPool(self._threads)
        return _native.encode(self._pool, *arguments)
