"""Every number of a file is looked at: what is not finite, absurd, meaningless or all zeros is named with its place."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from llmctl.kernels.formats.codecs import dequantize_blocks
from llmctl.kernels.formats.layouts import LAYOUTS
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant import tensor_values
from llmctl.quant.findings import Finding
from llmctl.quant.tensor_values import check_values
from llmctl.quant.workers import Workers
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter

BLOCK_FORMATS = [name for name, form in FORMATS.items() if not form.is_plain]
ROWS, COLUMNS = 6, 512


def sound_blocks(name: str, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """uint8 (rows, row bytes): random codes under scales as a weight has them."""
    form, rng = FORMATS[name], np.random.default_rng(7)
    blocks = rng.integers(0, 256, (rows, form.row_bytes(columns)), np.uint8)
    records = blocks.reshape(-1).view(LAYOUTS[name])
    for field in ("d", "m", "dmin"):
        if field in records.dtype.names and records.dtype[field] == np.dtype("<f2"):
            records[field] = rng.uniform(0.001, 0.002, len(records)) * rng.choice([-1, 1], len(records))
    if name == "IQ1_M":
        records["scales"] &= 0x0FFF
        records["scales"][:, 2] |= 0x4000
        records["scales"][:, 3] |= 0x1000  # 0x1400: 0.001
    if name == "MXFP4":
        records["e"] = rng.integers(115, 122, len(records))
    if name == "NVFP4":
        records["d"] = rng.integers(1, 0x7E, records["d"].shape)
    if name == "TQ2_0":
        records["qs"] &= 0x55
    return blocks


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., list[Finding]]:
    """The findings of a tensor of blocks, written to a file: `check("Q4_K", blocks)`; or of an array."""

    def run(name: str, data: np.ndarray, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> list[Finding]:
        if FORMATS[name].is_plain:
            tensor, shape = data, data.shape
        else:
            tensor = QuantTensor(FORMATS[name], shape, data.reshape(*shape[:-1], -1))
        with GgufWriter(tmp_path / "m.gguf", {}) as writer:
            writer.declare("w.weight", FORMATS[name], shape)
            writer.write("w.weight", tensor)
        with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
            return check_values(checkpoint, checkpoint.entry("w.weight"), Workers())

    return run


def spoil(name: str, record: np.void) -> list[str]:
    """Ways to give a block a scale that is no number: the field, with the value in it."""
    if name == "IQ1_M":
        return ["iq1_m"]
    if name in ("MXFP4", "NVFP4"):
        return ["byte"]
    halves = [field for field in record.dtype.names if record.dtype[field] == np.dtype("<f2")]
    return [f"{field} {value}" for field in halves for value in ("nan", "inf", "-inf")]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_sound_blocks_have_no_findings(check: Callable[..., list[Finding]], name: str) -> None:
    assert check(name, sound_blocks(name)) == []


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_scale_that_is_no_number_is_counted(
    check: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In every field, whatever the slice it falls in; the first is named by row and columns."""
    monkeypatch.setattr(tensor_values, "_SLICE_BYTES", 3 * FORMATS[name].bytes_per_block)
    size = FORMATS[name].elements_per_block
    per_row = COLUMNS // size
    first, last = per_row + 1, ROWS * per_row - 1
    records = sound_blocks(name).reshape(-1).view(LAYOUTS[name])
    for way in spoil(name, records[0]):
        blocks = sound_blocks(name)
        records = blocks.reshape(-1).view(LAYOUTS[name])
        for at in (first, last):
            if way == "iq1_m":
                records["scales"][at, 3] |= 0xF000
                records["scales"][at, 2] |= 0xF000
            elif way == "byte":
                field = "e" if name == "MXFP4" else "d"
                records[field][at] = 255
            else:
                records[way.split()[0]][at] = float(way.split()[1])
        (found,) = check(name, blocks)
        assert (found.level, found.tensor) == ("error", "w.weight")
        assert found.message == (
            f"{name}: 2 of {ROWS * per_row} blocks have a scale that is NaN or infinite, "
            f"the first in row 1, columns {size} to {2 * size - 1}"
        )


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_what_passes_decodes_to_finite_numbers(check: Callable[..., list[Finding]], name: str) -> None:
    """Whatever the bytes: blocks are finite exactly where no error is found (NVFP4's NaN, read as zero, is one all the same)."""
    form, rng = FORMATS[name], np.random.default_rng(11)
    for _ in range(20):
        blocks = rng.integers(0, 256, (4, form.row_bytes(COLUMNS)), np.uint8)
        errors = [found for found in check(name, blocks, (4, COLUMNS)) if "scale that is" in found.message]
        if not errors:
            assert np.isfinite(dequantize_blocks(form, blocks)).all()


def test_a_scale_far_above_the_others(check: Callable[..., list[Finding]]) -> None:
    """What one flipped bit of an exponent leaves: finite, and ruinous."""
    blocks = sound_blocks("Q4_K")
    blocks.reshape(-1).view(LAYOUTS["Q4_K"])["d"][3] = 64.0
    (found,) = check("Q4_K", blocks)
    assert found.level == "warning"
    assert "1 of 12 blocks have a scale far above the others, up to 65536 times the usual one in row 1" in found.message


def test_absurd_numbers(check: Callable[..., list[Finding]]) -> None:
    weight = np.ones((4, 8), np.float32)
    weight[2, 5] = -1e30
    (found,) = check("F32", weight)
    assert (found.level, found.message) == ("warning", "F32: numbers up to 1e+30, the largest in row 2, column 5")
    blocks = sound_blocks("MXFP4")
    blocks.reshape(-1).view(LAYOUTS["MXFP4"])["e"][0] = 252
    assert "numbers up to 2.55e+38, the largest in row 0, columns 0 to 31" in check("MXFP4", blocks)[0].message


def test_codes_that_mean_nothing(check: Callable[..., list[Finding]]) -> None:
    blocks = sound_blocks("TQ2_0")
    blocks.reshape(-1).view(LAYOUTS["TQ2_0"])["qs"][5, 1, 3] = 0b00110000
    (found,) = check("TQ2_0", blocks)
    assert (found.level, found.message) == (
        "error", "TQ2_0: 1 of 12 blocks have codes that mean nothing, the first in row 2, columns 256 to 511"
    )  # fmt: skip


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "F32", "BF16"])
def test_a_tensor_of_zeros(check: Callable[..., list[Finding]], name: str) -> None:
    """A warning, by the values that come out; one number that is none is enough for silence."""
    if FORMATS[name].is_plain:
        data = np.zeros((4, 8), ml_dtypes.bfloat16 if name == "BF16" else np.float32)
        last: tuple[int, ...] = (3, 7)
        data[0, 0] = -0.0
    else:
        data, last = np.zeros((ROWS, FORMATS[name].row_bytes(COLUMNS)), np.uint8), (0, 0)
    (found,) = check(name, data)
    assert (found.level, found.message) == ("warning", f"{name}: all zeros")
    if FORMATS[name].is_plain:
        data[last] = 1
        assert check(name, data) == []


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
                                   "float8_e4m3fnuz", "float8_e5m2fnuz"])  # fmt: skip
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_plain_numbers_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, value: float
) -> None:
    monkeypatch.setattr(tensor_values, "_SLICE_BYTES", 64)
    weight = np.linspace(0.5, 2, 300, dtype=np.float32).reshape(10, 30).astype(np.dtype(dtype))
    weight[7, 2] = weight[9, 29] = value
    raw = weight.view(np.uint8 if weight.itemsize == 1 else np.uint16) if "float8" in dtype or dtype == "bfloat16" else weight
    if raw is weight:
        save_file({"w": weight}, tmp_path / "m.safetensors")
    else:
        _save_as(tmp_path / "m.safetensors", weight, dtype)
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        found = check_values(checkpoint, checkpoint.entry("w"), Workers())
    assert [finding.level for finding in found] == ["error"]
    assert "2 of 300 numbers are NaN or infinite, the first in row 7, column 2" in found[0].message


def _save_as(path: Path, weight: np.ndarray, dtype: str) -> None:
    """safetensors' own writer for numpy knows few small types."""
    names = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
             "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}  # fmt: skip
    entry = {"dtype": names[dtype], "shape": list(weight.shape), "data_offsets": [0, weight.nbytes]}
    header = json.dumps({"w": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + weight.tobytes())


def test_whole_numbers_and_empty_tensors_have_nothing_to_be_wrong(tmp_path: Path) -> None:
    tensors = {"i": np.zeros(4, np.int32), "b": np.zeros(3, bool), "e": np.zeros((0, 4), np.float32), "s": np.array(2.0)}
    save_file(tensors, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        assert [f for entry in checkpoint.entries() for f in check_values(checkpoint, entry, Workers())] == []
