"""The numbers a file holds, slice by slice as they are stored: finite scales in every block, finite plain numbers, nothing
absurdly large, no code without a meaning, not all zeros.

Blocks are not decoded for it: a block is finite if its scales are, since a scale in float16 times a code fits float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmctl.kernels.formats.codecs import dequantize_blocks
from llmctl.kernels.formats.iquants import iq1_m_scale
from llmctl.kernels.formats.layouts import LAYOUTS
from llmctl.kernels.formats.mapped import release_mapped
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.quant.findings import Finding, Level
from llmctl.quant.workers import Workers
from llmctl.runtime.checkpoint.checkpoint import Checkpoint, TensorEntry

CHECK = "values"
_SLICE_BYTES = 1 << 20
_ABSURD = 1e5  # no weight, norm or bias of a known model comes near
_ABSURD_BITS = 10  # a scale so many powers of two above the usual one of its tensor, …
_ABSURD_REACH = 100.0  # … if numbers of the block can then be as large as this

# Plain format → (type of its bits, mask of the magnitude, least magnitude that is not finite): magnitudes order as bits do.
_FLOATS: dict[str, tuple[type, int, int]] = {
    "F64": (np.uint64, (1 << 63) - 1, 0x7FF << 52),
    "F32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E5M2": (np.uint8, 0x7F, 0x7C),
}
# Plain format → its only code that is no number.
_ONE_NAN = {"F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80, "F8_E8M0": 0xFF}

# Block format → the largest multiples of its float16 fields that a number can be.
_REACH: dict[str, dict[str, int]] = {
    **{"Q4_0": {"d": 8}, "Q4_1": {"d": 15, "m": 1}, "Q5_0": {"d": 16}, "Q5_1": {"d": 31, "m": 1}, "Q8_0": {"d": 128}},
    **{"Q2_K": {"d": 15 * 3, "dmin": 15}, "Q3_K": {"d": 32 * 4}, "Q6_K": {"d": 128 * 32}},
    **{"Q4_K": {"d": 63 * 15, "dmin": 63}, "Q5_K": {"d": 63 * 31, "dmin": 63}},
    **{"IQ4_NL": {"d": 127}, "IQ4_XS": {"d": 32 * 127}, "IQ3_XXS": {"d": 481}, "IQ3_S": {"d": 31 * 15}},
    **{"IQ2_XXS": {"d": 167}, "IQ2_XS": {"d": 167}, "IQ2_S": {"d": 167}, "IQ1_S": {"d": 17}, "IQ1_M": {"d": 17}},
    **{"TQ1_0": {"d": 1}, "TQ2_0": {"d": 2}},
}


def check_values(checkpoint: Checkpoint, entry: TensorEntry, workers: Workers) -> list[Finding]:
    """The faults of one tensor's numbers. Memory is a slice; the pages that were read are let go."""
    tensor = checkpoint.read(entry.name)
    flat = (tensor.blocks if isinstance(tensor, QuantTensor) else tensor).reshape(-1)
    scan = _scan(entry)
    for part in _slices(flat, entry.format.bytes_per_block if isinstance(tensor, QuantTensor) else 1):
        scan.look(part)
        release_mapped(part)
        workers.advance(part.nbytes)
    return list(scan.findings())


def _slices(flat: np.ndarray, unit: int) -> Iterator[np.ndarray]:
    """Pieces of about _SLICE_BYTES, of whole blocks of `unit` items."""
    step = max(1, _SLICE_BYTES // (flat.itemsize * unit)) * unit
    for start in range(0, len(flat), step):
        yield flat[start : start + step]


class _Scan:
    """What the slices of a tensor had in them so far. Of whole numbers every value is one: nothing is looked at."""

    bad_what = "numbers are NaN or infinite"

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.count = 0
        self.bad, self.first_bad = 0, 0
        self.largest, self.at_largest = 0.0, 0
        self.all_zero = True

    def look(self, part: np.ndarray) -> None:
        """One more slice: numbers, or the bytes of whole blocks."""

    def findings(self) -> Iterator[Finding]:
        """What is wrong with the tensor as a whole."""
        if self.bad:
            place = self._place(self.first_bad)
            yield self._finding("error", f"{self.bad} of {self.count} {self.bad_what}, the first {place}")
        if self.largest >= _ABSURD:
            yield self._finding("warning", f"numbers up to {self.largest:.3g}, the largest {self._place(self.at_largest)}")
        if self.count and self.all_zero and not self.entry.name.endswith("bias"):
            yield self._finding("warning", "all zeros")

    def _finding(self, level: Level, message: str) -> Finding:
        return Finding(level, CHECK, f"{self.entry.format.name}: {message}", self.entry.name)

    def _note_bad(self, wrong: np.ndarray) -> None:
        """wrong: bool for each number or block of the slice."""
        if not self.bad:
            self.first_bad = self.count + int(wrong.argmax())
        self.bad += int(np.count_nonzero(wrong))

    def _note_largest(self, value: float, index: int) -> None:
        """value: at `index` of the slice."""
        if value > self.largest:
            self.largest, self.at_largest = value, self.count + index

    def _place(self, index: int) -> str:
        columns = self.entry.shape[-1] if self.entry.shape else 1
        return f"in row {index // columns}, column {index % columns}"


class _Numbers(_Scan):
    """Floating-point numbers whose bits without the sign order as their magnitudes."""

    def look(self, part: np.ndarray) -> None:
        bits, mask, limit = _FLOATS[self.entry.format.name]
        magnitudes = part.view(bits) & bits(mask)
        largest = magnitudes.max()
        if largest >= limit:
            wrong = magnitudes >= limit
            self._note_bad(wrong)
            magnitudes[wrong] = 0
            self.all_zero = False
            largest = magnitudes.max()
        self.all_zero = self.all_zero and not largest
        value = float(np.array([largest], bits).view(part.dtype)[0])
        if value > self.largest:
            self._note_largest(value, int((magnitudes == largest).argmax()))
        self.count += len(part)


class _SmallFloats(_Scan):
    """Eight-bit floats of which a single code is no number."""

    def look(self, part: np.ndarray) -> None:
        name, bits = self.entry.format.name, part.view(np.uint8)
        wrong = bits == _ONE_NAN[name]
        if wrong.any():
            self._note_bad(wrong)
        self.all_zero = self.all_zero and name != "F8_E8M0" and not bits.any()
        self.count += len(part)


class _Blocks(_Scan):
    """Quantized blocks: their scales and offsets."""

    bad_what = "blocks have a scale that is NaN or infinite"

    def __init__(self, entry: TensorEntry) -> None:
        super().__init__(entry)
        self.exponents = np.zeros(32, np.int64)  # how many blocks have a d of each exponent of float16
        self.odd, self.first_odd = 0, 0
        self.top_exponent, self.at_top = -1, 0

    def look(self, part: np.ndarray) -> None:
        records = part.view(LAYOUTS[self.entry.format.name])
        wrong = self._wrong(records)
        if wrong.any():
            self._note_bad(wrong)
            self.all_zero = False
        self._note_sizes(records, wrong)
        self._note_codes(records)
        self.all_zero = self.all_zero and not dequantize_blocks(self.entry.format, part).any()
        self.count += len(records)

    def findings(self) -> Iterator[Finding]:
        yield from super().findings()
        if self.odd:
            place = self._place(self.first_odd)
            yield self._finding("error", f"{self.odd} of {self.count} blocks have codes that mean nothing, the first {place}")
        yield from self._outliers()

    def _wrong(self, records: np.ndarray) -> np.ndarray:
        """bool (n,): whether a scale of the block is no number."""
        name = self.entry.format.name
        if name == "MXFP4":
            # 255 is the NaN of E8M0 (OCP Microscaling Formats 1.0, section 5.4.1); 6 · 2^(253 − 127) is beyond float32.
            return records["e"] >= 253
        if name == "NVFP4":
            return ((records["d"] & 0x7F) == 0x7F).any(axis=1)  # the NaN of E4M3
        wrong = np.zeros(len(records), bool)
        for field in _REACH[name]:
            wrong |= _magnitudes(records, field) >= 0x7C00
        return wrong

    def _note_sizes(self, records: np.ndarray, wrong: np.ndarray) -> None:
        name = self.entry.format.name
        if name == "MXFP4":
            exponents = np.where(wrong, 0, records["e"])
            self._note_largest(6 * 2.0 ** (float(exponents.max()) - 127), int(exponents.argmax()))
        for field, reach in _REACH.get(name, {}).items():
            magnitudes = _magnitudes(records, field)
            magnitudes[wrong] = 0
            at = int(magnitudes.argmax())
            self._note_largest(reach * float(magnitudes[at : at + 1].view(np.float16)[0]), at)
            if field == "d":
                self._note_exponents(magnitudes, at)

    def _note_exponents(self, magnitudes: np.ndarray, at: int) -> None:
        self.exponents += np.bincount(magnitudes[magnitudes != 0] >> 10, minlength=32)
        if (exponent := int(magnitudes[at] >> 10)) > self.top_exponent:
            self.top_exponent, self.at_top = exponent, self.count + at

    def _note_codes(self, records: np.ndarray) -> None:
        """Ternary blocks have three codes of the four that two bits can be."""
        if self.entry.format.name != "TQ2_0":
            return
        pairs = records["qs"].reshape(len(records), -1)
        odd = (pairs & (pairs >> 1) & 0x55).any(axis=1)
        if odd.any() and not self.odd:
            self.first_odd = self.count + int(odd.argmax())
        self.odd += int(np.count_nonzero(odd))

    def _outliers(self) -> Iterator[Finding]:
        """Scales a thousand times the usual one: what a flipped bit of an exponent leaves."""
        total = int(self.exponents.sum())
        if not total or self.largest < _ABSURD_REACH:
            return
        usual = int(np.searchsorted(np.cumsum(self.exponents), (total + 1) // 2))
        far = int(self.exponents[usual + _ABSURD_BITS :].sum())
        if far:
            times, place = 1 << (self.top_exponent - usual), self._place(self.at_top)
            message = f"{far} of {self.count} blocks have a scale far above the others, up to {times} times the usual one {place}"
            yield self._finding("warning", message)

    def _place(self, index: int) -> str:
        size = self.entry.format.elements_per_block
        row, block = divmod(index, self.entry.shape[-1] // size)
        return f"in row {row}, columns {block * size} to {(block + 1) * size - 1}"


def _magnitudes(records: np.ndarray, field: str) -> np.ndarray:
    """uint16 (n,): the bits of a float16 field of the blocks without their sign."""
    halves = iq1_m_scale(records) if "d" not in (records.dtype.names or ()) else np.ascontiguousarray(records[field])
    return halves.view(np.uint16) & np.uint16(0x7FFF)


def _scan(entry: TensorEntry) -> _Scan:
    form = entry.format
    if form.name in _FLOATS:
        return _Numbers(entry)
    if form.name in _ONE_NAN:
        return _SmallFloats(entry)
    return _Scan(entry) if form.is_plain else _Blocks(entry)
