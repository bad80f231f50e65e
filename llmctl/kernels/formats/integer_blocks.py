"""Grouped integers as blocks of a GGUF type that holds the same codes: nothing is rounded but scales and offsets to float16.

What fits where, for groups of whole blocks of 32 and columns in their own order (s = scale, z = zero point):

    Q4_0, Q5_0, Q8_0   code − z within −8 … 7, −16 … 15, −128 … 127     d = s
    Q4_1, Q5_1         codes below 16, 32                               d = s, m = −s z
"""

from __future__ import annotations

import numpy as np

from llmctl.kernels.formats.bits import pack_planes, to_f16_scale
from llmctl.kernels.formats.layouts import LAYOUTS
from llmctl.kernels.formats.packed_int import PackedIntTensor, unpack_packed_int
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format

_BLOCK = 32
_LEAST = {"Q4_0": -8, "Q5_0": -16, "Q8_0": -128}  # the value of the lowest code
_CODES = {"Q4_1": 16, "Q5_1": 32}


def formats_that_keep(bits: int, symmetric: bool) -> tuple[str, ...]:
    """Names of the types that hold any codes of so many bits, the smallest first. symmetric: the zero point is 2^(bits − 1)."""
    lowest = -(1 << (bits - 1)) if symmetric else 1 - (1 << bits)
    highest = -1 - lowest if symmetric else -lowest
    signed = [name for name, least in _LEAST.items() if least <= lowest and highest <= -1 - least]
    offset = [name for name, count in _CODES.items() if 1 << bits <= count]
    return tuple(sorted({*signed, *offset}, key=lambda name: (name[1], name[3] == "1", name)))


def as_blocks(tensor: PackedIntTensor, form: Format) -> QuantTensor | None:
    """The tensor in blocks of `form` with its own codes; None if these do not fit it, or columns are out of order.

    FormatError for a scale or offset that no float16 holds.
    """
    if tensor.column_order is not None or form.name not in {*_LEAST, *_CODES}:
        return None
    rows, columns = tensor.codes.reshape(-1, tensor.codes.shape[-1]), tensor.shape[-1]
    codes = unpack_packed_int(rows, tensor.bits).reshape(len(rows), tensor.num_groups, -1).astype(np.int16)
    zeros = np.int16(1 << (tensor.bits - 1)) if tensor.zero_points is None else _grouped(tensor.zero_points, tensor)
    scales = _grouped(tensor.scales, tensor)
    blocks = np.empty(len(rows) * columns // _BLOCK, LAYOUTS[form.name])
    per_group = tensor.columns_per_group // _BLOCK
    if form.name in _LEAST:
        codes = codes - zeros - np.int16(_LEAST[form.name])
        fits = codes.min(initial=0) >= 0 and codes.max(initial=0) < -2 * _LEAST[form.name]
    else:
        if tensor.zero_points is None:  # the wide codes of few bits lie around the middle
            codes, zeros = codes - zeros + np.int16(_CODES[form.name] // 2), np.int16(_CODES[form.name] // 2)
        fits = codes.min(initial=0) >= 0 and codes.max(initial=0) < _CODES[form.name]
        blocks["m"] = _per_block(to_f16_scale(-scales * np.float32(zeros)), per_group) if fits else 0
    if not fits:
        return None
    blocks["d"] = _per_block(to_f16_scale(scales), per_group)
    store_codes(blocks, codes.reshape(-1, _BLOCK))
    return QuantTensor(form, tensor.shape, blocks.view(np.uint8).reshape(*tensor.shape[:-1], -1))


def _grouped(values: np.ndarray, tensor: PackedIntTensor) -> np.ndarray:
    """(…, groups) → (rows, groups, 1), of the codes' type or float32."""
    kind = np.float32 if values.dtype == np.float32 else np.int16
    return values.reshape(-1, tensor.num_groups, 1).astype(kind)


def _per_block(values: np.ndarray, per_group: int) -> np.ndarray:
    """(rows, groups, 1) → one for every block, in order."""
    return np.repeat(values.reshape(-1), per_group)


def store_codes(blocks: np.ndarray, codes: np.ndarray) -> None:
    """The elements of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0: codes (n, 32) from 0, integers; fills all of `blocks` but its scales."""
    if "qs" in blocks.dtype.names and blocks.dtype["qs"].base == np.int8:
        blocks["qs"] = codes.astype(np.int16) - 128
        return
    unsigned = codes.astype(np.uint8)
    blocks["qs"] = pack_planes((unsigned & 15).reshape(-1, 2, _BLOCK // 2))
    if "qh" in blocks.dtype.names:
        blocks["qh"] = np.packbits(unsigned >> 4, axis=1, bitorder="little")
