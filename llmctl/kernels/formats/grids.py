"""Block formats taken apart: the scales and offsets of the groups, the level of every element, and back to bytes.

A decoded element is step · level + offset, with one step (and offset) for a group of 16 or 32 neighbours in a row. Search methods
that look at more than one block at a time choose steps, offsets and levels here; what they chose is what the bytes decode to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from llmctl.errors import UnsupportedError
from llmctl.kernels.formats.bits import to_f16_scale
from llmctl.kernels.formats.integer_blocks import store_codes
from llmctl.kernels.formats.iquants import iq4_values, store_iq4_nl
from llmctl.kernels.formats.kquants import q3_k_scales, unpack_scales
from llmctl.kernels.formats.kquants_encode import store_q2_k, store_q3_k, store_q4_k, store_q5_k, store_q6_k
from llmctl.kernels.formats.layouts import LAYOUTS
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format

F = np.float32


@dataclass(frozen=True)
class GridSpec:
    """What a format lets a search choose.

    group_size: elements with one step. lowest, highest: levels of an element, whole numbers, unless `table` lists them.
    scale_codes: least and greatest multiple of the block's d that a step is, and of its dmin that an offset is; None where
    they are float16 numbers of their own. has_offset: a group has an offset, subtracted (a multiple of dmin) or added (m).
    whole_offsets: it is minus a level, lowest to highest, times the step: a zero point.
    """

    group_size: int
    lowest: int
    highest: int
    has_offset: bool = False
    scale_codes: tuple[int, int] | None = None
    table: Callable[[], np.ndarray] | None = None
    whole_offsets: bool = False

    @property
    def is_nested(self) -> bool:
        """Whether steps are multiples of a scale of their block."""
        return self.scale_codes is not None


GRIDS: dict[str, GridSpec] = {
    "Q4_0": GridSpec(32, -8, 7),
    "Q5_0": GridSpec(32, -16, 15),
    "Q8_0": GridSpec(32, -127, 127),
    "Q4_1": GridSpec(32, 0, 15, has_offset=True),
    "Q5_1": GridSpec(32, 0, 31, has_offset=True),
    "IQ4_NL": GridSpec(32, 0, 15, table=iq4_values),
    "Q2_K": GridSpec(16, 0, 3, has_offset=True, scale_codes=(0, 15)),
    "Q3_K": GridSpec(16, -4, 3, scale_codes=(-32, 31)),
    "Q4_K": GridSpec(32, 0, 15, has_offset=True, scale_codes=(0, 63)),
    "Q5_K": GridSpec(32, 0, 31, has_offset=True, scale_codes=(0, 63)),
    "Q6_K": GridSpec(16, -32, 31, scale_codes=(-128, 127)),
}
_STORES = {"Q2_K": store_q2_k, "Q3_K": store_q3_k, "Q4_K": store_q4_k, "Q5_K": store_q5_k, "Q6_K": store_q6_k}


@dataclass(eq=False)
class BlockGrid:
    """The values that the elements of a matrix can take, group by group. Everything is column by row, as a search walks.

    shape: (N, K) of the matrix. steps, offsets: float32 (K / group_size, N); offsets is None where the format has none.
    block_scales, block_offsets: float32 (blocks of a row, N), what steps and offsets are multiples of, where they are.
    """

    form: Format
    shape: tuple[int, int]
    steps: np.ndarray
    offsets: np.ndarray | None
    block_scales: np.ndarray | None = None
    block_offsets: np.ndarray | None = None
    spec: GridSpec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = grid_spec(self.form)

    @classmethod
    def of(cls, tensor: QuantTensor) -> BlockGrid:
        """The grid of a tensor (N, K) in one of GRIDS; UnsupportedError for other formats."""
        spec, records = grid_spec(tensor.format), _records(tensor)
        rows = tensor.shape[0]
        d = records["d"].astype(F)
        if not spec.is_nested:
            offsets = _by_group(records["m"].astype(F), rows) if spec.has_offset else None
            return cls(tensor.format, tensor.shape, _by_group(d, rows), offsets)
        scales, offset_codes = _scale_codes(tensor.format.name, records)
        steps = _by_group(d[:, None] * scales.astype(F), rows)
        if offset_codes is None:
            return cls(tensor.format, tensor.shape, steps, None, _by_group(d, rows))
        dmin = records["dmin"].astype(F)
        offsets = -_by_group(dmin[:, None] * offset_codes.astype(F), rows)
        return cls(tensor.format, tensor.shape, steps, offsets, _by_group(d, rows), _by_group(dmin, rows))

    def values(self, levels: np.ndarray) -> np.ndarray:
        """The elements, float32 (K, N), of levels of that shape: exactly what their bytes decode to."""
        found = levels * np.repeat(self.steps, self.spec.group_size, axis=0)
        if self.offsets is not None:
            found += np.repeat(self.offsets, self.spec.group_size, axis=0)
        return found

    def nearest_step(self, group: int, wanted: np.ndarray) -> np.ndarray:
        """The steps that can be stored nearest to those wanted, float32 (N,), with the block's scale as it is; infinite where
        none can."""
        if not self.spec.is_nested:
            return _nearest_half(wanted)
        assert self.block_scales is not None
        return _nearest_multiple(wanted, self._of_block(self.block_scales, group), self.spec.scale_codes)

    def nearest_offset(self, group: int, wanted: np.ndarray) -> np.ndarray:
        """The same for offsets."""
        if not self.spec.is_nested:
            return _nearest_half(wanted)
        assert self.block_offsets is not None
        return -_nearest_multiple(-wanted, self._of_block(self.block_offsets, group), self.spec.scale_codes)

    def tensor(self, levels: np.ndarray) -> QuantTensor:
        """The bytes of the matrix with these levels, float32 (K, N): whole numbers from lowest to highest, or of the table."""
        rows, columns = self.shape
        blocks = np.empty(rows * columns // self.form.elements_per_block, LAYOUTS[self.form.name])
        codes = self._codes(levels).reshape(len(blocks), -1)
        if self.spec.is_nested:
            self._store_nested(blocks, codes)
        else:
            blocks["d"] = to_f16_scale(self.steps.T.reshape(-1))
            if self.offsets is not None:
                blocks["m"] = to_f16_scale(self.offsets.T.reshape(-1))
            (store_iq4_nl if self.spec.table else store_codes)(blocks, codes)
        return QuantTensor(self.form, self.shape, blocks.view(np.uint8).reshape(rows, -1))

    def _of_block(self, values: np.ndarray, group: int) -> np.ndarray:
        return values[group * self.spec.group_size // self.form.elements_per_block]

    def _codes(self, levels: np.ndarray) -> np.ndarray:
        """uint8 (N, K), from 0."""
        if self.spec.table is not None:
            return np.searchsorted(self.spec.table(), levels.T).astype(np.uint8)
        least = -128 if self.form.name == "Q8_0" else self.spec.lowest
        return (levels.T - F(least)).astype(np.uint8)

    def _store_nested(self, blocks: np.ndarray, codes: np.ndarray) -> None:
        assert self.block_scales is not None
        blocks["d"] = to_f16_scale(self.block_scales.T.reshape(-1))
        scales = self._multiples(self.steps, self.block_scales)
        if self.offsets is None or self.block_offsets is None:
            _STORES[self.form.name](blocks, scales, codes)
            return
        blocks["dmin"] = to_f16_scale(self.block_offsets.T.reshape(-1))
        _STORES[self.form.name](blocks, scales, self._multiples(-self.offsets, self.block_offsets), codes)

    def _multiples(self, values: np.ndarray, units: np.ndarray) -> np.ndarray:
        """(groups, N) in units (blocks, N): int32 (blocks of all rows, groups of a block)."""
        per_block = len(values) // len(units)
        inverse = np.repeat(_inverse(units), per_block, axis=0)
        return np.rint(values * inverse).T.reshape(-1, per_block).astype(np.int32)


def grid_spec(form: Format) -> GridSpec:
    """What a search can choose in this format; UnsupportedError where it is not a grid of scaled levels."""
    if found := GRIDS.get(form.name):
        return found
    raise UnsupportedError(f"{form.name} has no grid that errors can be fed back on; formats with one: {', '.join(GRIDS)}")


def _records(tensor: QuantTensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.blocks).reshape(-1).view(LAYOUTS[tensor.format.name])


def _by_group(values: np.ndarray, rows: int) -> np.ndarray:
    """Of all groups in file order → (groups of a row, rows)."""
    return np.ascontiguousarray(values.reshape(rows, -1).T)


def _scale_codes(name: str, records: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """(blocks, groups of a block)."""
    if name == "Q2_K":
        return records["scales"] & 15, records["scales"] >> 4
    if name == "Q3_K":
        return q3_k_scales(records["scales"]), None
    return (records["scales"], None) if name == "Q6_K" else unpack_scales(records["scales"])


def _nearest_half(wanted: np.ndarray) -> np.ndarray:
    """Infinite where float16 ends."""
    with np.errstate(over="ignore"):
        return wanted.astype(np.float16).astype(F)


def _nearest_multiple(wanted: np.ndarray, unit: np.ndarray, codes: tuple[int, int] | None) -> np.ndarray:
    assert codes is not None
    return unit * np.clip(np.rint(wanted * _inverse(unit)), F(codes[0]), F(codes[1]))


def _inverse(values: np.ndarray) -> np.ndarray:
    """1 / values, 0 for 0."""
    return np.divide(F(1), values, out=np.zeros_like(values), where=values != 0)
