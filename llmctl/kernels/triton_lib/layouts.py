"""Stored blocks in the order kernels read them, and back.

Of a matrix (N, K): planes int32 [K / 32 · bits, N], scales [K / 32 …, N] and, of some kinds, extra numbers [K / 256 …, N]; N is
padded to a multiple of 16 with zeros. So neighbouring threads own neighbouring rows, a thread reads up to four of them with one
instruction, and a word holds the same columns of each. Everything is rearranged, nothing is rounded: `unpack_blocks` gives the
stored bytes again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmctl.kernels.triton_lib.forms import AFFINE, FORMS, GROUPS, HALF, PAIRS, SIGNED16, Form

ROW_MULTIPLE = 16


@dataclass(frozen=True)
class Plane:
    """Where the bits of the codes are in a stored block: `parts` runs of `width` bytes from `offset`; the first `bits` of the
    bytes of a run are its first `width` columns."""

    offset: int
    parts: int
    width: int
    bits: int

    @property
    def nbytes(self) -> int:
        """Bytes in a block."""
        return self.parts * self.width


@dataclass(frozen=True)
class BlockMap:
    """A stored block taken apart: planes from the lowest bits on; where scales and the numbers of the whole block are."""

    planes: tuple[Plane, ...]
    scales: tuple[int, int]
    extra: tuple[int, int] | None = None


BLOCKS = {
    "Q4_0": BlockMap((Plane(2, 1, 16, 4),), (0, 2)),
    "Q4_1": BlockMap((Plane(4, 1, 16, 4),), (0, 4)),
    "Q5_0": BlockMap((Plane(6, 1, 16, 4), Plane(2, 4, 1, 1)), (0, 2)),
    "Q5_1": BlockMap((Plane(8, 1, 16, 4), Plane(4, 4, 1, 1)), (0, 4)),
    "Q8_0": BlockMap((Plane(2, 1, 32, 8),), (0, 2)),
    "Q2_K": BlockMap((Plane(16, 2, 32, 2),), (0, 16), (80, 84)),
    "Q3_K": BlockMap((Plane(32, 2, 32, 2), Plane(0, 1, 32, 1)), (96, 108), (108, 110)),
    "Q4_K": BlockMap((Plane(16, 4, 32, 4),), (4, 16), (0, 4)),
    "Q5_K": BlockMap((Plane(48, 4, 32, 4), Plane(16, 1, 32, 1)), (4, 16), (0, 4)),
    "Q6_K": BlockMap((Plane(0, 2, 64, 4), Plane(128, 2, 32, 2)), (192, 208), (208, 210)),
}
_SCALE_TYPES = {HALF: torch.float16, AFFINE: torch.int32, GROUPS: torch.float32}


@dataclass(frozen=True)
class Planes:
    """One matrix in kernel order, every tensor [rows, N padded]. high, extra: None where the form has none."""

    low: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    extra: torch.Tensor | None


def padded(rows: int) -> int:
    """Rows with their padding."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def pack_blocks(name: str, blocks: torch.Tensor) -> Planes:
    """Stored bytes uint8 (N, row bytes) of a format in FORMS."""
    form, where = FORMS[name], BLOCKS[name]
    block_bytes = sum(plane.nbytes for plane in where.planes) + _length(where.scales) + _length(where.extra)
    records = blocks.reshape(blocks.shape[0], -1, block_bytes)
    codes = _read_codes(records, where, form).flatten(1)
    scales = _spread_scales(name, records[..., slice(*where.scales)]).flatten(1)
    extra = None if where.extra is None else records[..., slice(*where.extra)].flatten(1)
    extra_type = torch.float16 if form.kind == SIGNED16 else torch.int32
    return Planes(
        *pack_codes(codes, form),
        _transposed(scales, _SCALE_TYPES.get(form.kind, torch.int32)),
        None if extra is None else _transposed(extra, extra_type),
    )


def unpack_blocks(name: str, planes: Planes, rows: int) -> torch.Tensor:
    """Inverse of `pack_blocks`."""
    form, where = FORMS[name], BLOCKS[name]
    codes = unpack_codes(planes.low, planes.high, form, rows)
    blocks = codes.shape[1] // (8 * where.planes[0].nbytes // where.planes[0].bits)
    scales = _gather_scales(name, restored(planes.scales, rows).view(rows, blocks, -1))
    pieces = {where.scales[0]: scales}
    if where.extra is not None:
        pieces[where.extra[0]] = restored(planes.extra, rows).view(rows, blocks, -1)
    codes = codes.view(rows, blocks, -1) ^ _flip(form)
    below = 0
    for plane in where.planes:
        pieces[plane.offset] = _pack_plane((codes >> below) & ((1 << plane.bits) - 1), plane)
        below += plane.bits
    return torch.cat([pieces[offset] for offset in sorted(pieces)], dim=-1).flatten(1)


def pack_codes(codes: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor | None]:
    """codes uint8 (N, K), one a byte → the low and the high plane."""
    low = _pack_words(codes & ((1 << form.low) - 1), form.low)
    return low, _pack_words(codes >> form.low, form.high) if form.high else None


def unpack_codes(low: torch.Tensor, high: torch.Tensor | None, form: Form, rows: int) -> torch.Tensor:
    """Inverse of `pack_codes`: uint8 (rows, K)."""
    codes = _unpack_words(low, form.low, rows)
    return codes if high is None else codes | (_unpack_words(high, form.high, rows) << form.low)


def _pack_words(field: torch.Tensor, bits: int) -> torch.Tensor:
    """Columns 4 w + b of a sub-block: byte b of word w % bits, from bit bits · (w // bits) on."""
    words = field.view(field.shape[0], -1, 8 // bits, bits, 4)
    packed = words[:, :, 0].clone()
    for above in range(1, 8 // bits):
        packed |= words[:, :, above] << (bits * above)
    return _transposed(packed.flatten(1), torch.int32)


def _unpack_words(plane: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
    packed = restored(plane, rows).view(rows, -1, 1, bits, 4)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device).view(1, 1, -1, 1, 1)
    return ((packed >> shifts) & ((1 << bits) - 1)).flatten(1)


def _transposed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes uint8 (N, …) as numbers [numbers of a row, N padded]."""
    numbers = data.reshape(-1).view(dtype).view(data.shape[0], -1)
    out = torch.zeros((numbers.shape[1], padded(numbers.shape[0])), dtype=dtype, device=data.device)
    out[:, : numbers.shape[0]] = numbers.T
    return out


def transposed_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """(N, n) → [n, N padded]."""
    return _transposed(numbers.reshape(-1).view(torch.uint8).view(numbers.shape[0], -1), numbers.dtype)


def restored(plane: torch.Tensor, rows: int) -> torch.Tensor:
    """The bytes of [numbers of a row, N padded], uint8 (rows, …)."""
    return plane[:, :rows].T.reshape(-1).view(torch.uint8).view(rows, -1)


def _length(span: tuple[int, int] | None) -> int:
    return 0 if span is None else span[1] - span[0]


def _flip(form: Form) -> int:
    """Stored codes count from 0, signed ones here are two's complement: their highest bit differs. Q8_0 has it already."""
    return 1 << (form.bits - 1) if form.is_signed and form.bits < 8 else 0


def _read_codes(records: torch.Tensor, where: BlockMap, form: Form) -> torch.Tensor:
    """uint8 (N, blocks, columns of a block)."""
    codes, below = torch.zeros((), dtype=torch.uint8, device=records.device), 0
    for plane in where.planes:
        codes = codes | (_unpack_plane(records, plane) << below)
        below += plane.bits
    return codes ^ _flip(form)


def _unpack_plane(records: torch.Tensor, plane: Plane) -> torch.Tensor:
    packed = records[..., plane.offset : plane.offset + plane.nbytes].unflatten(-1, (plane.parts, 1, plane.width))
    shifts = torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=records.device).view(-1, 1)
    return ((packed >> shifts) & ((1 << plane.bits) - 1)).flatten(-3)


def _pack_plane(field: torch.Tensor, plane: Plane) -> torch.Tensor:
    parts = field.unflatten(-1, (plane.parts, 8 // plane.bits, plane.width))
    packed = parts[..., 0, :].clone()
    for above in range(1, 8 // plane.bits):
        packed |= parts[..., above, :] << (plane.bits * above)
    return packed.flatten(-2)


def _spread_scales(name: str, stored: torch.Tensor) -> torch.Tensor:
    """The 12 bytes of six-bit numbers one a byte, in the order of `forms`; the scales of other formats as they are."""
    if FORMS[name].kind == PAIRS:
        first, second, nibbles = stored[..., 0:4], stored[..., 4:8], stored[..., 8:12]
        scales = torch.cat([first & 63, (nibbles & 15) | ((first >> 6) << 4)], dim=-1)
        offsets = torch.cat([second & 63, (nibbles >> 4) | ((second >> 6) << 4)], dim=-1)
        return torch.stack([scales.unflatten(-1, (4, 2)), offsets.unflatten(-1, (4, 2))], dim=-2).flatten(-3)
    if name == "Q3_K":
        codes = _unpack_plane(stored, Plane(0, 1, 8, 4)) | (_unpack_plane(stored, Plane(8, 1, 4, 2)) << 4)
        return codes - 32  # wraps: two's complement
    return stored


def _gather_scales(name: str, spread: torch.Tensor) -> torch.Tensor:
    """Inverse of `_spread_scales`."""
    if FORMS[name].kind == PAIRS:
        scales, offsets = (part.flatten(-2) for part in spread.unflatten(-1, (4, 2, 2)).unbind(-2))
        first = scales[..., :4] | ((scales[..., 4:] >> 4) << 6)
        second = offsets[..., :4] | ((offsets[..., 4:] >> 4) << 6)
        return torch.cat([first, second, (scales[..., 4:] & 15) | ((offsets[..., 4:] & 15) << 4)], dim=-1)
    if name == "Q3_K":
        codes = spread + 32
        return torch.cat([_pack_plane(codes & 15, Plane(0, 1, 8, 4)), _pack_plane(codes >> 4, Plane(8, 1, 4, 2))], dim=-1)
    return spread
