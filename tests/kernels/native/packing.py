"""The prepared layouts of layouts.hpp written a second time, in numpy: slow, and independent of pack.cpp."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmctl.kernels.formats.bits import unpack_bits, unpack_planes
from llmctl.kernels.formats.layouts import LAYOUTS

TILE_ROWS = 16


def pack(layout: str, blocks: np.ndarray) -> np.ndarray:
    """Stored rows uint8 (rows, row bytes) -> the bytes of all tiles."""
    return _tiles(blocks, lambda tile: _plain(layout, tile) if layout in _PLAIN_BYTES else _quantized(layout, tile))


def pack_groups(bits: int, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """I4, I8: codes uint8 (rows, columns), scales float32 and zeros uint8 (rows, groups) -> the bytes of all tiles."""
    groups = scales.shape[1]
    records = np.concatenate([codes.reshape(len(codes), groups, -1), scales[..., None].view(np.uint8), zeros[..., None]], axis=2)

    def pack_tile(tile: np.ndarray) -> list[np.ndarray]:
        parts = []
        for group in tile.reshape(TILE_ROWS, groups, -1).swapaxes(0, 1):
            blocks = group[:, :-5].reshape(TILE_ROWS, -1, 32).swapaxes(0, 1)
            parts += [group[:, -5:-1], group[:, -1], *(_codes4(b) if bits == 4 else _codes8(b) for b in blocks)]
        return parts

    return _tiles(records.reshape(len(codes), -1), pack_tile)


def _tiles(rows: np.ndarray, pack_tile: Callable[[np.ndarray], list[np.ndarray]]) -> np.ndarray:
    """Rows padded with zero bytes to whole tiles, each packed into a list of parts."""
    padded = np.zeros((-(-len(rows) // TILE_ROWS) * TILE_ROWS, rows.shape[1]), np.uint8)
    padded[: len(rows)] = rows
    parts = [part for tile in padded.reshape(-1, TILE_ROWS, rows.shape[1]) for part in pack_tile(tile)]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).ravel() for part in parts])


_PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def _plain(layout: str, tile: np.ndarray) -> list[np.ndarray]:
    return [tile.reshape(TILE_ROWS, -1, _PLAIN_BYTES[layout]).swapaxes(0, 1)]


def _quantized(layout: str, tile: np.ndarray) -> list[np.ndarray]:
    records = np.ascontiguousarray(tile).view(LAYOUTS[layout])  # (16, units)
    return [part for unit in records.T for part in _UNITS[layout](unit)]


# Codes of one block uint8 (16 rows, 32 columns).
def _groups(codes: np.ndarray) -> np.ndarray:
    """-> (8 groups, 64 bytes): byte 4 * row + column of a group."""
    return codes.reshape(TILE_ROWS, 8, 4).swapaxes(0, 1).reshape(8, 64)


def _codes4(codes: np.ndarray) -> np.ndarray:
    groups = _groups(codes)
    return groups[:4] | (groups[4:] << 4)


def _codes8(codes: np.ndarray) -> np.ndarray:
    return _groups(codes)


def _plane1(bits: np.ndarray) -> np.ndarray:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(_groups(bits) << shifts, axis=0)


def _plane2(pairs: np.ndarray) -> np.ndarray:
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return np.bitwise_or.reduce(_groups(pairs).reshape(2, 4, 64) << shifts, axis=1)


def _nibbles(qs: np.ndarray) -> np.ndarray:
    """(16, 16) -> (16, 32): low nibbles, then high ones."""
    return unpack_planes(qs[:, None], 4).reshape(TILE_ROWS, 32)


def _blocks(codes: np.ndarray) -> np.ndarray:
    """(16, 256) in any shape -> (8 blocks, 16, 32)."""
    return codes.reshape(TILE_ROWS, 8, 32).swapaxes(0, 1)


def _packed_scales(packed: np.ndarray) -> np.ndarray:
    """(16, 12) -> three vectors of 16 words."""
    return packed.reshape(TILE_ROWS, 3, 4).swapaxes(0, 1)


def _small(unit: np.ndarray) -> list[np.ndarray]:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL."""
    parts = [unit["d"]] + ([unit["m"]] if "m" in unit.dtype.names else [])
    high = [_plane1(unpack_bits(unit["qh"]))] if "qh" in unit.dtype.names else []
    return [*parts, *high, _codes4(_nibbles(unit["qs"]))]


def _q8_0(unit: np.ndarray) -> list[np.ndarray]:
    return [unit["d"], _codes8(unit["qs"].view(np.uint8) ^ 0x80)]


def _mxfp4(unit: np.ndarray) -> list[np.ndarray]:
    return [unit["e"], _codes4(_nibbles(unit["qs"]))]


def _q4_k(unit: np.ndarray) -> list[np.ndarray]:
    codes = _blocks(unpack_planes(unit["qs"], 4))
    return [unit["d"], unit["dmin"], _packed_scales(unit["scales"]), *map(_codes4, codes)]


def _q5_k(unit: np.ndarray) -> list[np.ndarray]:
    codes, high = _blocks(unpack_planes(unit["qs"], 4)), _blocks(unpack_planes(unit["qh"][:, None], 1))
    parts = [part for c, h in zip(codes, high, strict=True) for part in (_plane1(h), _codes4(c))]
    return [unit["d"], unit["dmin"], _packed_scales(unit["scales"]), *parts]


def _q6_k(unit: np.ndarray) -> list[np.ndarray]:
    low, high = _blocks(unpack_planes(unit["ql"], 4)), _blocks(unpack_planes(unit["qh"], 2))
    parts = [part for c, h in zip(low, high, strict=True) for part in (_plane2(h), _codes4(c))]
    return [unit["d"], unit["scales"].T, *parts]


def _q3_k(unit: np.ndarray) -> list[np.ndarray]:
    low, high = _blocks(unpack_planes(unit["qs"], 2)), _blocks(unpack_planes(unit["qh"][:, None], 1))
    scales = unpack_planes(unit["scales"][:, None, :8], 4).reshape(TILE_ROWS, 16)
    scales = (scales | unpack_planes(unit["scales"][:, None, 8:], 2).reshape(TILE_ROWS, 16) << 4).view(np.int8) - np.int8(32)
    return [unit["d"], scales.T, *(part for c, h in zip(low, high, strict=True) for part in (_plane2(c), _plane1(h)))]


def _q2_k(unit: np.ndarray) -> list[np.ndarray]:
    codes = _blocks(unpack_planes(unit["qs"], 2))
    return [unit["d"], unit["dmin"], unit["scales"].T, *map(_plane2, codes)]


def _iq4_xs(unit: np.ndarray) -> list[np.ndarray]:
    low = np.stack([unit["scales_l"] & 15, unit["scales_l"] >> 4], axis=2).reshape(TILE_ROWS, 8)
    high = (unit["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    codes = _blocks(unpack_planes(unit["qs"][:, :, None], 4))
    return [unit["d"], scales.T, *map(_codes4, codes)]


_UNITS: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    **dict.fromkeys(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"], _small),
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q3_K": _q3_k,
    "Q2_K": _q2_k,
    "IQ4_XS": _iq4_xs,
}
