"""Packing into the native layouts and back: every stored bit returns, whatever the shape, the order of rows, the threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packing import pack, pack_groups

from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.native import _native as native

BLOCK_LAYOUTS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_XS"]
PLAIN_LAYOUTS = ["F32", "F16", "BF16"]
ROWS = (1, 15, 16, 17, 50)


def random_rows(layout: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Stored rows of any bits: uint8 (rows, row_bytes)."""
    shape = (rows, FORMATS[layout].row_bytes(columns))
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def packed(layout: str, stored: np.ndarray, columns: int, **options: object) -> object:
    weight = native.PackedWeight(layout, len(stored), columns)
    weight.store(stored, **options)
    return weight


@pytest.mark.parametrize("layout", BLOCK_LAYOUTS)
@pytest.mark.parametrize("rows", ROWS)
def test_blocks_return_bit_for_bit(layout: str, rows: int) -> None:
    for columns in (256, 768):
        stored = random_rows(layout, rows, columns)
        assert np.array_equal(packed(layout, stored, columns).to_blocks(), stored)


@pytest.mark.parametrize("layout", BLOCK_LAYOUTS + PLAIN_LAYOUTS)
def test_tiles_are_those_of_the_layout_written_down_twice(layout: str) -> None:
    for rows in (5, 16, 37):
        stored = random_rows(layout, rows, 512)
        assert np.array_equal(packed(layout, stored, 512).tiles, pack(layout, stored))


@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
@pytest.mark.parametrize("columns", [1, 7, 16, 33, 100])
def test_plain_numbers_return_bit_for_bit(layout: str, columns: int) -> None:
    for rows in ROWS:
        stored = random_rows(layout, rows, columns)
        assert np.array_equal(packed(layout, stored, columns).to_blocks(), stored)


@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
def test_plain_numbers_lie_column_after_column(layout: str) -> None:
    size = FORMATS[layout].bytes_per_block
    stored = random_rows(layout, 21, 45)
    tiles = packed(layout, stored, 45).tiles.reshape(2, 45, 16, size)
    expected = np.zeros((32, 45, size), np.uint8)
    expected[:21] = stored.reshape(21, 45, size)
    assert np.array_equal(tiles, expected.reshape(2, 16, 45, size).swapaxes(1, 2))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "group_size"), [(96, 32), (256, 128), (160, 160)])
def test_packed_integers_return_with_their_scales_and_zero_points(bits: int, columns: int, group_size: int) -> None:
    rng = np.random.default_rng(1)
    for rows in ROWS:
        codes = rng.integers(0, 256, (rows, columns * bits // 8), dtype=np.uint8)
        scales = rng.standard_normal((rows, columns // group_size)).astype(np.float32)
        zeros = rng.integers(0, 1 << bits, scales.shape, dtype=np.uint8)
        weight = native.PackedWeight(f"I{bits}", rows, columns, group_size)
        weight.store_groups(codes, scales, zeros)
        columns_of = codes if bits == 8 else np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, columns)
        assert np.array_equal(weight.tiles, pack_groups(bits, columns_of, scales, zeros))
        for restored, stored in zip(weight.to_groups(), (codes, scales, zeros), strict=True):
            assert np.array_equal(restored, stored)


def test_packed_integers_without_zero_points_get_the_middle() -> None:
    for bits in (4, 8):
        weight = native.PackedWeight(f"I{bits}", 3, 64, 32)
        weight.store_groups(np.zeros((3, 8 * bits), np.uint8), np.ones((3, 2), np.float32))
        assert (weight.to_groups()[2] == 1 << (bits - 1)).all()


@pytest.mark.parametrize("layout", ["Q4_1", "Q6_K", "F16"])
def test_rows_are_taken_in_the_order_asked_for(layout: str) -> None:
    stored = random_rows(layout, 40, 512)
    order = np.random.default_rng(2).permutation(40)
    assert np.array_equal(packed(layout, stored, 512, order=order).to_blocks(), stored[order])


def test_rows_of_a_file_may_lie_at_any_address_and_distance() -> None:
    whole = random_rows("Q8_0", 20, 64).reshape(-1)
    padded = np.zeros((20, 75), np.uint8)
    rows = padded[:, 3:71]
    rows[:] = whole.reshape(20, 68)
    rows.flags.writeable = False
    assert np.array_equal(packed("Q8_0", rows, 64).to_blocks(), rows)


def test_parts_make_the_whole() -> None:
    stored = random_rows("Q5_K", 50, 256)
    weight = native.PackedWeight("Q5_K", 50, 256)
    for first in (32, 0, 16):
        weight.store(stored[first : first + (16 if first < 32 else 18)], first_row=first)
    assert np.array_equal(weight.to_blocks(), stored)
    assert np.array_equal(weight.tiles, packed("Q5_K", stored, 256).tiles)


def test_several_matrices_share_one_weight() -> None:
    stored = random_rows("Q4_K", 3 * 20, 256)
    weight = native.PackedWeight("Q4_K", 20, 256, matrices=3)
    for i in range(3):
        weight.store(stored[20 * i : 20 * i + 20], matrix=i)
    assert np.array_equal(weight.to_blocks(), stored)
    assert weight.nbytes == 3 * packed("Q4_K", stored[:20], 256).nbytes


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_a_byte(threads: int) -> None:
    stored = random_rows("Q4_0", 16 * 67 + 3, 1024)
    pool = native.ThreadPool(threads)
    weight = packed("Q4_0", stored, 1024, pool=pool)
    assert np.array_equal(weight.tiles, packed("Q4_0", stored, 1024).tiles)
    assert np.array_equal(weight.to_blocks(pool=pool), stored)


@pytest.mark.parametrize("rows", [16, 2048])
def test_tiles_begin_on_a_cache_line(rows: int) -> None:
    weights = [packed("Q4_1", random_rows("Q4_1", rows, 2048), 2048) for _ in range(3)]
    assert all(weight.tiles.ctypes.data % 64 == 0 for weight in weights)
    assert all(np.array_equal(w.tiles, weights[0].tiles) for w in weights)


def test_tiles_outlive_their_weight() -> None:
    stored = random_rows("Q8_0", 16, 32)
    tiles = packed("Q8_0", stored, 32).tiles
    again = packed("Q8_0", ~stored, 32)
    assert np.array_equal(tiles, packed("Q8_0", stored, 32).tiles)
    assert not np.array_equal(tiles, again.tiles)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Q9_9", 16, 256), "no native layout is called Q9_9"),
        (("Q4_K", 16, 128), "Q4_K needs rows of a multiple of 256 columns, got 128"),
        (("Q4_0", 0, 32), "at least one row"),
        (("I4", 16, 64), "group size"),
        (("I4", 16, 64, 48), "multiple of 32"),
        (("I4", 16, 96, 64), "multiple of 64"),
        (("Q4_0", 16, 64, 32), "group size"),
    ],
)
def test_shapes_a_layout_cannot_hold_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.PackedWeight(*arguments)


def test_rows_that_do_not_fit_are_refused() -> None:
    weight = native.PackedWeight("Q4_0", 40, 64)
    stored = random_rows("Q4_0", 40, 64)
    for bad in (
        {"stored": stored[:, :-1]},
        {"stored": stored, "first_row": 16},
        {"stored": stored[:16], "first_row": 8},
        {"stored": stored[:20]},
        {"stored": stored, "matrix": 1},
        {"stored": stored[:, ::-1]},
        {"stored": stored, "order": np.arange(1, 41)},
        {"stored": stored, "order": np.arange(-1, 39)},
    ):
        with pytest.raises(ValueError, match=r"row|matrix|stored"):
            weight.store(**bad)


_HUNGRY = """
import resource
from llmctl.kernels.native._native import PackedWeight
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    PackedWeight("F32", 1 << 16, 1 << 14)
except MemoryError:
    print("refused")
"""


@pytest.mark.unchecked
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS")
def test_no_memory_is_a_memory_error() -> None:
    done = subprocess.run([sys.executable, "-c", _HUNGRY], capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr


_ADVICE = """
from pathlib import Path
from llmctl.kernels.native._native import PackedWeight
weights = [PackedWeight("F32", 1024, 1024), PackedWeight("F32", 16, 16)]
addresses = [weight.tiles.ctypes.data for weight in weights]
for line in Path("/proc/self/smaps").read_text().splitlines():
    if "-" in line.split(" ", 1)[0]:
        first, last = (int(end, 16) for end in line.split(" ", 1)[0].split("-"))
    elif line.startswith("VmFlags:"):
        print(*["hg" in line.split() for address in addresses if first <= address < last], end=" ")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("value", "advised"), [("1", True), ("", True), ("0", False)])
def test_huge_pages_are_asked_for_unless_told_not_to(value: str, advised: bool) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this system has no transparent huge pages")
    environment = {**os.environ, "LLMCTL_HUGE_PAGES": value}
    done = subprocess.run([sys.executable, "-c", _ADVICE], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [str(advised)] * 2
