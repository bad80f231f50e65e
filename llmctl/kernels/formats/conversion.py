"""Blocks of one format rewritten as blocks of another that holds the same values, or all but.

For backends without a kernel for a format. Every conversion works on the codes themselves: the elements of a group are whole
multiples of one step, so a wider code with that step holds them exactly, and what is lost is the rounding of a scale to float16
(up to 2^-11 of it) where the target stores steps that way. Exceptions: IQ2_XS and IQ2_S, whose groups of 16 must share a step
of 32, and NVFP4 with scales further apart than sub-block scales reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from llmctl.kernels.formats import iquants, smallfloat
from llmctl.kernels.formats.bits import pack_planes, safe_inverse, to_f16_scale
from llmctl.kernels.formats.codecs import DECODERS
from llmctl.kernels.formats.kquants import pack_scales
from llmctl.kernels.formats.layouts import LAYOUTS
from llmctl.kernels.formats.spec import FORMATS, Format

_CHUNK_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Conversion:
    """source blocks → target blocks. rewrite: (records of n source blocks, records of the target to fill)."""

    source: Format
    target: Format
    rewrite: Callable[[np.ndarray, np.ndarray], None]

    def convert(self, blocks: np.ndarray) -> np.ndarray:
        """uint8 (rows, source row bytes) → uint8 (rows, target row bytes)."""
        columns = blocks.shape[-1] // self.source.bytes_per_block * self.source.elements_per_block
        out = np.empty((len(blocks), self.target.row_bytes(columns)), np.uint8)
        records = np.ascontiguousarray(blocks).reshape(-1).view(LAYOUTS[self.source.name])
        targets = out.reshape(-1).view(LAYOUTS[self.target.name])
        unit = max(self.source.elements_per_block, self.target.elements_per_block)
        step = _CHUNK_ELEMENTS // unit * (unit // self.source.elements_per_block)
        per_record = len(targets) / max(1, len(records))
        for start in range(0, len(records), step):
            end = min(start + step, len(records))
            self.rewrite(records[start:end], targets[round(start * per_record) : round(end * per_record)])
        return out


def conversion_for(format: Format, columns: int) -> Conversion | None:
    """How rows of this format and length are rewritten for kernels that lack it; None if no rewriting is known."""
    if format.name == "NVFP4" and columns % 256:
        return Conversion(format, FORMATS["Q8_0"], _nvfp4_to_q8_0)
    found = _CONVERSIONS.get(format.name)
    return Conversion(format, FORMATS[found[0]], found[1]) if found else None


def converted_bytes(format: Format, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor once its format is rewritten for kernels that lack it (plain numbers they lack become float32)."""
    if format.is_plain:
        return prod(shape) * (format.bytes_per_block if format.name in ("F16", "BF16") else 4)
    conversion = conversion_for(format, shape[-1])
    return prod(shape[:-1]) * (conversion.target if conversion else format).row_bytes(shape[-1])


def _without_d(name: str, records: np.ndarray) -> np.ndarray:
    """float32 (n, 256): the elements of blocks whose d is taken for 1."""
    unit = records.copy()
    if name == "IQ1_M":  # the bits of 1.0 in float16, four a word
        unit["scales"] = (unit["scales"] & 0x0FFF) | np.array([0, 0, 0xC000, 0x3000], np.uint16)
    else:
        unit["d"] = 1
    out = np.empty((len(records), 256), np.float32)
    DECODERS[name](unit, out)
    return out


def _codes(values: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """values float32 (n, E) in whole steps (n, groups) → int8 (n, E)."""
    groups = values.reshape(*steps.shape, -1) / steps[..., None].astype(np.float32)
    return np.rint(groups, out=groups).astype(np.int8).reshape(len(values), -1)


def _ternary(name: str) -> Callable[[np.ndarray, np.ndarray], None]:
    def rewrite(records: np.ndarray, target: np.ndarray) -> None:
        """x = d (t − 1) is what Q2_K means by a scale of 1, an offset of 1 and dmin = d."""
        digits = (_without_d(name, records) + 1).astype(np.uint8)
        target["qs"] = pack_planes(digits.reshape(-1, 2, 4, 32))
        target["scales"] = 0x11
        target["d"] = target["dmin"] = records["d"]

    return rewrite


def _iq1_s_to_q6_k(records: np.ndarray, target: np.ndarray) -> None:
    factors = iquants.factors_iq1_s(records)
    _iq1_to_q6_k(_without_d("IQ1_S", records), np.repeat(factors, 2, axis=1), records["d"], target)


def _iq1_m_to_q6_k(records: np.ndarray, target: np.ndarray) -> None:
    factors = iquants.factors_iq1_m(records)
    _iq1_to_q6_k(_without_d("IQ1_M", records), factors, iquants.iq1_m_scale(records), target)


def _iq1_to_q6_k(values: np.ndarray, factors: np.ndarray, d: np.ndarray, target: np.ndarray) -> None:
    """x = d factor (grid ± 1/8): eighths of d factor, −9 to 9 of them."""
    _fill_q6_k(target, _codes(values * 8, factors), factors.astype(np.int8), d.astype(np.float32) / 8)


def _nvfp4_to_q6_k(records: np.ndarray, target: np.ndarray) -> None:
    """Four blocks make one: the scales as multiples of a power of two, exact while the largest is below 16 times the least."""
    scales = smallfloat.half_e4m3()[records["d"]].reshape(-1, 16)
    exponents = np.frexp(scales.max(axis=1, keepdims=True) / 127)[1]  # the least with max ≤ 127 · 2^exponent
    unit = np.ldexp(np.float32(1), np.maximum(exponents, -10))  # every E4M3 scale is a multiple of 2^-10, halved as it is here
    _fill_q6_k(target, _nvfp4_codes(records), np.rint(scales / unit).astype(np.int8), unit[:, 0])


def _nvfp4_codes(records: np.ndarray) -> np.ndarray:
    """int8 (n / 4, 256): the 4-bit floats times two."""
    unit = records.copy()
    unit["d"] = 0x40  # E4M3 for 2
    values = np.empty((len(records), 64), np.float32)
    DECODERS["NVFP4"](unit, values)
    return values.astype(np.int8).reshape(-1, 256)


def _fill_q6_k(target: np.ndarray, codes: np.ndarray, scales: np.ndarray, d: np.ndarray) -> None:
    """codes int8 (n, 256) from −32 to 31, scales int8 (n, 16), d float32 (n,)."""
    codes = (codes + np.int8(32)).view(np.uint8)
    target["ql"] = pack_planes((codes & 15).reshape(-1, 2, 2, 64))
    target["qh"] = pack_planes((codes >> 4).reshape(-1, 2, 4, 32))
    target["scales"] = scales
    target["d"] = to_f16_scale(d)


def _iq3_s_to_q4_k(records: np.ndarray, target: np.ndarray) -> None:
    """x = d factor o with o odd, −15 to 15: 2 d factor q − 15 d factor with q = (o + 15) / 2."""
    factors = iquants.factors_iq3_s(records)
    odd = _codes(_without_d("IQ3_S", records), factors)
    target["qs"] = pack_planes(((odd + np.int8(15)) >> 1).view(np.uint8).reshape(-1, 4, 2, 32))
    scales = factors.astype(np.uint8)
    target["scales"] = pack_scales(scales, scales)
    d = records["d"].astype(np.float32)
    target["d"], target["dmin"] = to_f16_scale(2 * d), to_f16_scale(15 * d)


def _per_32(name: str, factors_of: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, np.ndarray], None]:
    def rewrite(records: np.ndarray, target: np.ndarray) -> None:
        """The grid's whole numbers are the codes of Q8_0."""
        factors = factors_of(records)
        target["qs"] = _codes(_without_d(name, records), factors).reshape(-1, 32)
        target["d"] = to_f16_scale((records["d"].astype(np.float32)[:, None] * factors).reshape(-1))

    return rewrite


def _per_16(name: str) -> Callable[[np.ndarray, np.ndarray], None]:
    def rewrite(records: np.ndarray, target: np.ndarray) -> None:
        """Two scales share a step, the one that both are nearest to whole multiples of."""
        pairs = (iquants.factors_iq2(records) * 8).astype(np.intp).reshape(-1, 2) // 2  # factor = (2 s + 1) / 8
        steps = _shared_steps()[pairs[:, 0], pairs[:, 1]]
        target["qs"] = _codes(_without_d(name, records).reshape(-1, 32), steps[:, None])
        target["d"] = to_f16_scale(np.repeat(records["d"].astype(np.float32), 8) * steps)

    return rewrite


@cache
def _shared_steps() -> np.ndarray:
    """float32 (16, 16): for scales s and t of neighbours in IQ2_XS and IQ2_S, the step in which codes up to 127 come nearest to
    the magnitudes 8, 25 and 43 of both, in units of d."""
    factors = (2 * np.arange(16) + 1) / 8
    both = np.stack(np.broadcast_arrays(factors[:, None], factors[None, :]), axis=-1)
    values = (both[..., None] * np.array([8.0, 25.0, 43.0])).reshape(16, 16, 6)
    largest = np.arange(40, 127.25, 0.25)  # the code of the largest value
    steps = values.max(axis=-1, keepdims=True) / largest
    errors = (values[..., None, :] / steps[..., None] + 0.5) % 1 - 0.5
    best = (errors**2).sum(axis=-1) * steps**2
    return np.take_along_axis(steps, best.argmin(axis=-1)[..., None], axis=-1)[..., 0].astype(np.float32)


def _nvfp4_to_q8_0(records: np.ndarray, target: np.ndarray) -> None:
    values = np.empty((len(records), 64), np.float32)
    DECODERS["NVFP4"](records, values)
    values = values.reshape(-1, 32)
    d = to_f16_scale(np.abs(values).max(axis=1) / np.float32(127))
    target["d"] = d
    target["qs"] = np.rint(values * safe_inverse(d.astype(np.float32))[:, None]).clip(-127, 127).astype(np.int8)


_CONVERSIONS = {
    "TQ1_0": ("Q2_K", _ternary("TQ1_0")),
    "TQ2_0": ("Q2_K", _ternary("TQ2_0")),
    "IQ1_S": ("Q6_K", _iq1_s_to_q6_k),
    "IQ1_M": ("Q6_K", _iq1_m_to_q6_k),
    "IQ2_XXS": ("Q8_0", _per_32("IQ2_XXS", iquants.factors_iq2_xxs)),
    "IQ2_XS": ("Q8_0", _per_16("IQ2_XS")),
    "IQ2_S": ("Q8_0", _per_16("IQ2_S")),
    "IQ3_XXS": ("Q8_0", _per_32("IQ3_XXS", iquants.factors_iq3_xxs)),
    "IQ3_S": ("Q4_K", _iq3_s_to_q4_k),
    "NVFP4": ("Q6_K", _nvfp4_to_q6_k),
}
