"""Linear kernels: every layout on every instruction set this machine has, against float64 of the dequantized weight."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from packing import pack, pack_groups

from llmctl.kernels.formats.codecs import dequantize_blocks
from llmctl.kernels.formats.layouts import LAYOUTS
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.native import _native as native

PLAIN = ["F32", "F16", "BF16"]
SMALL = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"]
SUPER = ["Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_XS"]
GROUPED = ["I4", "I8"]
QUANTIZED = [*SMALL, *SUPER, *GROUPED]

each_isa = pytest.mark.parametrize("isa", native.available_isas())
each_quantized = pytest.mark.parametrize("layout", QUANTIZED)
each_layout = pytest.mark.parametrize("layout", [*PLAIN, *QUANTIZED])


@dataclass(frozen=True)
class Matrix:
    """A packed matrix and its exact values float32 (rows, columns)."""

    layout: str
    packed: np.ndarray
    values: np.ndarray
    group_size: int = 0

    def arguments(self) -> tuple[str, np.ndarray, int, int, int]:
        return (self.layout, self.packed, *self.values.shape, self.group_size)


def make_matrix(layout: str, rows: int, columns: int, *, seed: int = 0, wild: bool = False) -> Matrix:
    """Random codes; the scales about 1/32, or if `wild` any finite ones."""
    rng = np.random.default_rng(seed)
    if layout in GROUPED:
        return _grouped_matrix(layout, rows, columns, rng)
    fmt = FORMATS[layout]
    blocks = rng.integers(0, 256, (rows, fmt.row_bytes(columns)), dtype=np.uint8)
    if fmt.is_plain:
        blocks = _plain_blocks(layout, rng.standard_normal((rows, columns)).astype(np.float32))
    else:
        records = blocks.reshape(-1, fmt.bytes_per_block).view(LAYOUTS[layout])[:, 0]
        _set_scales(records, rng, wild)
    return Matrix(layout, pack(layout, blocks), dequantize_blocks(fmt, blocks))


def _plain_blocks(layout: str, values: np.ndarray) -> np.ndarray:
    if layout == "F16":
        return np.ascontiguousarray(values.astype(np.float16)).view(np.uint8)
    pairs = values.view(np.uint16).reshape(len(values), -1, 2)
    return np.ascontiguousarray(pairs if layout == "F32" else pairs[..., 1]).view(np.uint8).reshape(len(values), -1)


def _set_scales(records: np.ndarray, rng: np.random.Generator, wild: bool) -> None:
    for field in {"d", "m", "dmin"} & set(records.dtype.names):
        scales = (rng.standard_normal(len(records)) / 32).astype(np.float16)
        if wild:
            bits = rng.integers(0, 1 << 16, len(records)).astype(np.uint16)
            scales = np.where(bits & 0x7C00 == 0x7C00, bits & 0x83FF, bits).astype(np.uint16).view(np.float16)
        records[field] = scales
    if "e" in records.dtype.names:
        records["e"] = rng.integers(0, 251, len(records)) if wild else rng.integers(119, 124, len(records))


def _grouped_matrix(layout: str, rows: int, columns: int, rng: np.random.Generator) -> Matrix:
    bits, group_size = int(layout[1:]), 32 if columns % 64 else 64
    codes = rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8)
    scales = (rng.standard_normal((rows, columns // group_size)) / 32).astype(np.float32)
    zeros = rng.integers(0, 1 << bits, scales.shape, dtype=np.uint8)
    difference = codes.reshape(*scales.shape, -1).astype(np.int32) - zeros[..., None]
    values = scales[..., None] * difference.astype(np.float32)
    return Matrix(layout, pack_groups(bits, codes, scales, zeros), values.reshape(rows, columns), group_size)


def shapes(layout: str) -> list[tuple[int, int]]:
    """(rows, columns): rows that fill no tile, one and several units, more columns than are unpacked at a time."""
    if layout in PLAIN:
        return [(1, 1), (16, 33), (35, 300), (48, 7)]
    unit = 256 if layout in SUPER else 32
    return [(1, unit), (16, 3 * unit), (35, 1280), (49, 2 * unit)]


def make_tokens(tokens: int, columns: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, columns)).astype(np.float32)


def rounded_to_int8(isa: str, x: np.ndarray) -> np.ndarray:
    """What the kernel sees of its activations, float64."""
    return np.array([_rounded_row(isa, row) for row in x])


def _rounded_row(isa: str, row: np.ndarray) -> np.ndarray:
    codes, scales, _ = native.quantize_activations(isa, row)
    return (codes.reshape(-1, 32) * scales[:, None].astype(np.float64)).reshape(-1)[: len(row)]


def bits_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint32)


@each_isa
@each_layout
def test_a_row_is_dequantized_bit_for_bit(isa: str, layout: str) -> None:
    for rows, columns in shapes(layout):
        matrix = make_matrix(layout, rows, columns, wild=True)
        for row in {0, rows // 2, rows - 1}:
            assert np.array_equal(bits_of(native.dequantize_row(isa, *matrix.arguments(), row)), bits_of(matrix.values[row]))


@each_isa
@each_layout
def test_float_activations(isa: str, layout: str) -> None:
    for rows, columns in shapes(layout):
        matrix = make_matrix(layout, rows, columns)
        for tokens in (1, 2, 3, 11, 130):
            x = make_tokens(tokens, columns)
            expected = x.astype(np.float64) @ matrix.values.T.astype(np.float64)
            magnitude = np.abs(x) @ np.abs(matrix.values.T)
            error = np.abs(native.linear(isa, *matrix.arguments(), x, False) - expected)
            assert (error <= 2e-6 * magnitude + 1e-12).all(), (rows, columns, tokens)


@each_isa
@each_quantized
def test_int8_activations(isa: str, layout: str) -> None:
    for rows, columns in shapes(layout):
        matrix = make_matrix(layout, rows, columns)
        for tokens in (1, 2, 3, 4, 5, 8, 17, 130):
            x = rounded_to_int8(isa, raw := make_tokens(tokens, columns))
            expected = x @ matrix.values.T.astype(np.float64)
            magnitude = np.abs(x) @ np.abs(matrix.values.T)
            error = np.abs(native.linear(isa, *matrix.arguments(), raw, True) - expected)
            assert (error <= 4e-6 * magnitude + 1e-12).all(), (rows, columns, tokens)


@each_isa
@each_quantized
def test_int8_activations_cost_about_one_percent_of_gaussian_inputs(isa: str, layout: str) -> None:
    matrix, x = make_matrix(layout, 64, 1024), make_tokens(8, 1024)
    expected = native.linear(isa, *matrix.arguments(), x, False)
    error = native.linear(isa, *matrix.arguments(), x, True) - expected
    relative = np.linalg.norm(error) / np.linalg.norm(expected)
    assert 1e-3 < relative < 1.2e-2


@each_isa
@each_layout
def test_a_token_has_the_same_bits_in_any_company_and_any_split(isa: str, layout: str) -> None:
    matrix, x = make_matrix(layout, 35, 1280), make_tokens(40, 1280)
    for int8 in (False,) if layout in PLAIN else (False, True):
        alone = np.concatenate([native.linear(isa, *matrix.arguments(), x[t : t + 1], int8) for t in range(40)])
        for tokens in range(2, 41):
            together = native.linear(isa, *matrix.arguments(), x[:tokens], int8)
            assert np.array_equal(bits_of(together), bits_of(alone[:tokens])), (tokens, int8)
        for tiles in (1, 2):
            split = native.linear(isa, *matrix.arguments(), x[:9], int8, tiles_per_call=tiles)
            assert np.array_equal(bits_of(split), bits_of(alone[:9])), (tiles, int8)


@each_isa
@each_quantized
def test_a_token_without_finite_activations_does_not_touch_the_others(isa: str, layout: str) -> None:
    matrix, x = make_matrix(layout, 20, 512), make_tokens(6, 512)
    expected = native.linear(isa, *matrix.arguments(), x, True)
    x[1, 300], x[2, 40], x[3, 511] = np.nan, np.inf, -np.inf
    x[4] = 0
    got = native.linear(isa, *matrix.arguments(), x, True)
    assert np.array_equal(bits_of(got[[0, 5]]), bits_of(expected[[0, 5]]))
    assert np.isnan(got[1:4]).all()
    assert (got[4] == 0).all()


@each_isa
@pytest.mark.parametrize("columns", [1, 31, 32, 50, 64, 97, 256, 320, 1000])
def test_quantized_activations(isa: str, columns: int) -> None:
    x = make_tokens(1, columns)[0] * np.float32(3)
    codes, scales, sums = native.quantize_activations(isa, x)
    padded = np.zeros(len(codes), np.float32)
    padded[:columns] = x
    largest = np.abs(padded.reshape(-1, 32)).max(axis=1)
    assert np.array_equal(scales, largest / np.float32(127))
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, 0).astype(np.float32)
    assert np.array_equal(codes, np.rint(padded.reshape(-1, 32) * inverse[:, None]).reshape(-1))
    assert np.array_equal(sums, codes.reshape(-1, 16).sum(axis=1, dtype=np.int32))


@each_isa
def test_quantized_activations_at_the_ends_of_the_range(isa: str) -> None:
    for x, scale in [(0.0, 0.0), (1e-40, 0.0), (1e-37, 0.0), (3e38, 3e38 / 127), (np.inf, np.nan), (np.nan, np.nan)]:
        codes, scales, sums = native.quantize_activations(isa, np.array([x, -x, x / 2, 0], np.float32))
        assert scales[0] == np.float32(scale) or (np.isnan(scale) and np.isnan(scales[0]))
        assert np.array_equal(codes[:4], [127, -127, 64, 0] if scale > 0 else [0] * 4)
        assert sums[0] == (64 if scale > 0 else 0)


@each_isa
def test_only_the_blocks_that_are_not_finite_lose_their_codes(isa: str) -> None:
    x = make_tokens(1, 600)[0]
    expected = native.quantize_activations(isa, x)
    x[70], x[300], x[599] = np.nan, -np.inf, np.inf  # within 256 columns, and in the rest
    codes, scales, sums = native.quantize_activations(isa, x)
    damaged = np.isin(np.arange(len(scales)), [70 // 32, 300 // 32, 599 // 32])
    assert np.array_equal(np.isnan(scales), damaged)
    assert np.array_equal(scales[~damaged], expected[1][~damaged])
    assert np.array_equal(codes.reshape(-1, 32), np.where(damaged[:, None], 0, expected[0].reshape(-1, 32)))
    assert np.array_equal(sums.reshape(-1, 2), np.where(damaged[:, None], 0, expected[2].reshape(-1, 2)))


@pytest.mark.skipif("amx" not in native.available_isas(), reason="this machine has no tile unit")
@each_quantized
def test_the_tile_unit_gives_the_bits_of_dot_products(layout: str) -> None:
    matrix = make_matrix(layout, 35, 1280)
    for tokens in (12, 16, 24, 25, 300):
        x = make_tokens(tokens, 1280)
        with_tiles, without = (native.linear(isa, *matrix.arguments(), x, True) for isa in ("amx", "avx512"))
        assert np.array_equal(bits_of(with_tiles), bits_of(without)), tokens


def test_wrong_arguments_are_refused() -> None:
    matrix, x = make_matrix("Q4_0", 16, 64), make_tokens(1, 64)
    layout, packed, rows, columns, _ = matrix.arguments()
    with pytest.raises(ValueError, match=r"there is no instruction set called 'mmx'; available: .*generic"):
        native.linear("mmx", *matrix.arguments(), x, True)
    with pytest.raises(ValueError, match="no native layout called Q9_0"):
        native.linear("generic", "Q9_0", packed, rows, columns, 0, x, True)
    with pytest.raises(ValueError, match="not those of rows x columns"):
        native.linear("generic", layout, packed[:-1], rows, columns, 0, x, True)
    with pytest.raises(ValueError, match="plain weights take float activations"):
        native.linear("generic", *make_matrix("F16", 16, 64).arguments(), x, True)
    with pytest.raises(ValueError, match="no such row"):
        native.dequantize_row("generic", *matrix.arguments(), 16)


def active_isa(forced: str) -> subprocess.CompletedProcess[str]:
    code = "from llmctl.kernels.native import _native; print(_native.active_isa())"
    environment = {**os.environ, "LLMCTL_ISA": forced}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.unchecked  # its child processes run on the processor as it is
def test_the_instruction_set_can_be_forced() -> None:
    assert active_isa("").stdout.strip() == native.available_isas()[0]
    for isa in native.available_isas():
        assert active_isa(isa).stdout.strip() == isa
    absent = "avx2" if "neon" in native.available_isas() else "neon"
    assert f"this machine has no {absent} kernels; available: " in active_isa(absent).stderr
    assert "there is no instruction set called 'sse9'" in active_isa("sse9").stderr
