"""The stored tensors that one quantized module is made of, each checked before it is believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.runtime.checkpoint.checkpoint import Checkpoint, TensorEntry
from llmctl.runtime.checkpoint.packed_integers import GROUP_MULTIPLE, StoredIntegers
from llmctl.runtime.checkpoint.text import quoted

FLOATS = ("F16", "BF16", "F32")
CODES = ("I32",)


@dataclass(frozen=True)
class PackedModule:
    """One weight that is stored as several tensors.

    name: of the weight, as if it were stored plainly. parts: names of the tensors, the one with the codes first.
    shape: torch order. form: how it is stored, for people (INT4, F8_E4M3, MXFP4). native_bytes: of memory once it is prepared
    for the native kernels, about. read: codes with their scales (values where there are no codes of whole numbers): FormatError
    where they are damaged. nbytes: stored, None for all of the parts. matrix: of a stack of matrices one of them, or some of
    its rows, as a module of its own; None where it is no stack.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    form: str
    native_bytes: int
    read: Callable[[], StoredIntegers | QuantTensor | np.ndarray]
    nbytes: int | None = None
    matrix: Callable[[int, slice], PackedModule] | None = None


def rows_module(checkpoint: Checkpoint, name: str, rows: dict[int, str]) -> PackedModule:
    """A matrix whose rows are tensors of their own. rows: number → stored name. FormatError where one is missing or of another
    shape or type than the first."""
    entries = [checkpoint.entry(rows[number]) for number in sorted(rows)]
    first = entries[0]
    if sorted(rows) != list(range(len(rows))):
        missing = next(number for number in range(len(rows)) if number not in rows)
        raise FormatError(f"{checkpoint.path}: beside tensor {quoted(first.name)} there is none with the number {missing}")
    for entry in entries:
        if (entry.shape, entry.format) != (first.shape, first.format) or len(entry.shape) != 1 or entry.format.name not in FLOATS:
            raise FormatError(
                f"{checkpoint.path}: tensor {quoted(entry.name)} is {entry.format.name} of shape {entry.shape}, expected one of "
                f"{', '.join(FLOATS)}, and the same as {quoted(first.name)}"
            )
    names = tuple(entry.name for entry in entries)
    return PackedModule(
        name=name,
        parts=names,
        shape=(len(rows), *first.shape),
        form=first.format.name,
        native_bytes=4 * len(rows) * first.num_elements,
        read=lambda: np.stack([checkpoint.read(part) for part in names]),
    )


def integer_bytes(shape: tuple[int, int], bits: int, group_size: int) -> int:
    """Bytes of a matrix of codes as the kernels read it: 4 or 8 bits, a scale and a zero point a group; float32 where groups
    do not fit them."""
    rows, columns = shape
    size = gcd(columns, columns if group_size == -1 else group_size)
    if size % GROUP_MULTIPLE:
        return 4 * rows * columns
    return rows * (columns * (4 if bits <= 4 else 8) // 8 + 5 * (columns // size))


class Parts:
    """The tensors of one module in a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, module: str) -> None:
        self.checkpoint, self.module = checkpoint, module

    def name(self, suffix: str) -> str:
        """Stored name of a part."""
        return f"{self.module}.{suffix}"

    def where(self, suffix: str) -> str:
        """A part, for messages."""
        return f"{self.checkpoint.path}: tensor {quoted(self.name(suffix))}"

    def has(self, suffix: str) -> bool:
        """Whether the part is there."""
        return self.name(suffix) in self.checkpoint

    def names(self, *suffixes: str) -> tuple[str, ...]:
        """Stored names of those that are there."""
        return tuple(self.name(suffix) for suffix in suffixes if self.has(suffix))

    def shape(self, suffix: str, axes: int) -> tuple[int, ...]:
        """The shape of a part, of which nothing is known but its number of axes."""
        shape = self._entry(suffix).shape
        if len(shape) != axes or not all(shape):
            raise FormatError(f"{self.where(suffix)} has shape {shape}, expected {axes} axes, none of them empty")
        return shape

    def check(self, suffix: str, dtypes: tuple[str, ...], shape: tuple[int, ...], why: str) -> None:
        """FormatError unless the part has one of these dtypes and this shape. why: where the shape comes from."""
        entry = self._entry(suffix)
        if entry.format.name not in dtypes:
            raise FormatError(f"{self.where(suffix)} holds {entry.format.name}, expected {' or '.join(dtypes)}")
        if entry.shape != shape:
            raise FormatError(f"{self.where(suffix)} has shape {entry.shape}, expected {shape} for {why}")

    def _entry(self, suffix: str) -> TensorEntry:
        if not self.has(suffix):
            raise FormatError(f"{self.where(suffix)} is missing, its module is quantized")
        return self.checkpoint.entry(self.name(suffix))

    def dtype(self, suffix: str) -> str:
        """Name of a part's dtype."""
        return self._entry(suffix).format.name

    def read(self, suffix: str) -> np.ndarray:
        """The part over its mapped file."""
        return self.checkpoint.read(self.name(suffix))

    def words(self, suffix: str) -> np.ndarray:
        """The part as unsigned 32-bit words."""
        return self.read(suffix).view("<u4")
