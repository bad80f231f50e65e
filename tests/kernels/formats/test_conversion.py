"""Formats rewritten as others: the values stay, to the stated error, and every format that kernels may lack has a way."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from llmctl.kernels.formats.codecs import dequantize_blocks
from llmctl.kernels.formats.conversion import conversion_for, converted_bytes
from llmctl.kernels.formats.layouts import LAYOUTS
from llmctl.kernels.formats.spec import FORMATS

# Target, and the error allowed: root of the summed squares, relative. A float16 scale costs up to 2^-11, 2e-4 on average.
EXPECTED = {
    "TQ1_0": ("Q2_K", 0),
    "TQ2_0": ("Q2_K", 0),
    "IQ1_S": ("Q6_K", 0),
    "IQ1_M": ("Q6_K", 0),
    "NVFP4": ("Q6_K", 0),
    "IQ2_XXS": ("Q8_0", 3e-4),
    "IQ3_XXS": ("Q8_0", 3e-4),
    "IQ3_S": ("Q4_K", 6e-4),
    "IQ2_XS": ("Q8_0", 3e-3),
    "IQ2_S": ("Q8_0", 3e-3),
}


def plausible_blocks(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random codes and sub-block scales under scales such as weights have."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, FORMATS[name].row_bytes(columns)), dtype=np.uint8)
    records = blocks.reshape(-1).view(LAYOUTS[name])
    d = rng.uniform(0.002, 0.05, len(records)).astype(np.float16)
    if name == "IQ1_M":
        nibbles = (d.view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16)) & 15
        records["scales"] = (records["scales"] & 0x0FFF) | (nibbles << 12)
    elif name == "NVFP4":
        scales = rng.uniform(1.0, 15.0, records["d"].shape).astype(ml_dtypes.float8_e4m3fn)
        records["d"] = scales.view(np.uint8)
    else:
        records["d"] = d
    return blocks


def relative_error(expected: np.ndarray, got: np.ndarray) -> float:
    return float(np.linalg.norm(expected - got) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", EXPECTED)
def test_values_stay(name: str) -> None:
    target, allowed = EXPECTED[name]
    blocks = plausible_blocks(name, rows=48, columns=1792)
    conversion = conversion_for(FORMATS[name], 1792)
    assert conversion.target.name == target
    expected = dequantize_blocks(FORMATS[name], blocks)
    got = dequantize_blocks(conversion.target, conversion.convert(blocks))
    assert relative_error(expected, got) <= allowed


@pytest.mark.parametrize("name", EXPECTED)
def test_chunks_do_not_show(name: str) -> None:
    blocks = plausible_blocks(name, rows=70, columns=1024)
    convert = conversion_for(FORMATS[name], 1024).convert
    assert np.array_equal(convert(blocks), np.concatenate([convert(blocks[i : i + 1]) for i in range(70)]))


@pytest.mark.parametrize("name", EXPECTED)
def test_zeros_stay_zeros(name: str) -> None:
    blocks = np.zeros((2, FORMATS[name].row_bytes(512)), np.uint8)
    conversion = conversion_for(FORMATS[name], 512)
    assert not dequantize_blocks(conversion.target, conversion.convert(blocks)).any()


def test_nvfp4_of_any_scales_and_of_rows_no_super_block_divides() -> None:
    rng = np.random.default_rng(3)
    for columns, target, allowed in ((512, "Q6_K", 8e-3), (320, "Q8_0", 1e-2)):
        blocks = rng.integers(0, 256, (40, FORMATS["NVFP4"].row_bytes(columns)), dtype=np.uint8)
        conversion = conversion_for(FORMATS["NVFP4"], columns)
        assert conversion.target.name == target
        got = dequantize_blocks(conversion.target, conversion.convert(blocks))
        assert relative_error(dequantize_blocks(FORMATS["NVFP4"], blocks), got) < allowed


def test_formats_that_kernels_read_themselves_have_no_conversion() -> None:
    assert conversion_for(FORMATS["Q4_K"], 256) is None


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("Q4_K", (3, 10, 512), 30 * 288),
        ("IQ2_XS", (10, 512), 10 * 544),
        ("TQ2_0", (10, 512), 10 * 168),
        ("NVFP4", (10, 64), 10 * 68),
        ("F64", (10, 7), 280),
        ("F32", (), 4),
        ("BF16", (5,), 10),
    ],
)
def test_bytes_after_conversion(name: str, shape: tuple[int, ...], expected: int) -> None:
    assert converted_bytes(FORMATS[name], shape) == expected
