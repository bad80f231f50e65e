"""AWQ as AutoAWQ's GEMM version writes it: 4-bit codes in a word's own order, along the weight's rows."""

from __future__ import annotations

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.packed_bits import awq_columns, awq_rows
from llmctl.runtime.checkpoint.packed_integers import StoredIntegers, check_scales
from llmctl.runtime.checkpoint.packed_parts import CODES, FLOATS, PackedModule, Parts, integer_bytes
from llmctl.runtime.checkpoint.packed_settings import Settings
from llmctl.runtime.checkpoint.text import quoted

_PER_WORD = 8


class AwqReader:
    """Finds and reads the modules of a checkpoint with AWQ's layout."""

    marker = "qweight"

    def __init__(self, settings: Settings) -> None:
        """Raises FormatError and UnsupportedError for settings that cannot be followed."""
        version = settings.value("version") or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise UnsupportedError(
                f"{settings.where}: the AWQ layout {quoted(version)} is not read; write the model again with version gemm"
            )
        if settings.bits() != 4:
            raise UnsupportedError(f"{settings.where}: AWQ codes have 4 bits, found {settings.bits()}")
        self.group_size = settings.group_size()
        self.unquantized = _names(settings)
        self.has_zeros = settings.flag("zero_point", True)

    def module(self, parts: Parts) -> PackedModule:
        """The module of these parts, its shapes checked. Nothing but headers is read."""
        if parts.dtype("qweight") == "I16":
            raise UnsupportedError(
                f"{parts.where('qweight')} has the layout gemv_fast of llm-awq, which is not read; write the model again with "
                "AutoAWQ's version gemm"
            )
        if named := next((name for name in self.unquantized if name in parts.module), None):
            raise FormatError(f"{parts.where('qweight')} is quantized, but modules_to_not_convert names {quoted(named)}")
        rows = parts.shape("scales", 2)[1]
        columns = parts.shape("qweight", 2)[0]
        size = columns if self.group_size == -1 else self.group_size
        if columns % size or columns % _PER_WORD or rows % _PER_WORD:
            raise FormatError(
                f"{parts.where('qweight')}: {rows} x {columns} weights are not whole groups of {size} and words of {_PER_WORD}"
            )
        why = f"4-bit codes of {rows} x {columns} weights in groups of {self.group_size}"
        parts.check("qweight", CODES, (columns, rows // _PER_WORD), why)
        parts.check("scales", FLOATS, (columns // size, rows), why)
        if self.has_zeros or parts.has("qzeros"):
            parts.check("qzeros", CODES, (columns // size, rows // _PER_WORD), why)
        shape = (rows, columns)
        return PackedModule(
            name=parts.name("weight"),
            parts=parts.names("qweight", "qzeros", "scales"),
            shape=shape,
            form="INT4",
            native_bytes=integer_bytes(shape, 4, self.group_size),
            read=lambda: self._read(parts, shape),
        )

    def _read(self, parts: Parts, shape: tuple[int, int]) -> StoredIntegers:
        scales = check_scales(parts.where("scales"), parts.read("scales"))
        zeros = np.ascontiguousarray(awq_columns(parts.words("qzeros")).T) if parts.has("qzeros") else None
        return StoredIntegers(
            bits=4,
            group_size=self.group_size,
            shape=shape,
            load_words=lambda: awq_rows(parts.words("qweight")),
            scales=np.ascontiguousarray(scales.T),
            zero_points=zeros,
        ).simplified()


def _names(settings: Settings) -> list[str]:
    names = settings.value("modules_to_not_convert") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise FormatError(f"{settings.where}: modules_to_not_convert must be a list of names, found {quoted(names)}")
    return names
