"""The memory reader: what a benchmark compares with."""

from __future__ import annotations

import pytest

from llmctl.kernels.native import _native as native


@pytest.mark.parametrize("threads", [1, 3])
def test_everything_is_read_in_a_time_that_grows_with_it(threads: int):
    pool = native.ThreadPool(threads)
    small, large = native.MemoryReader(1 << 16), native.MemoryReader(1 << 25)
    assert (small.bytes, large.bytes) == (1 << 16, 1 << 25)
    best = [min(reader.seconds(pool) for _ in range(20)) for reader in (small, large)]
    # 512 times the bytes; a reader that the compiler emptied would need as long for both. No memory reads 10 TB/s.
    assert best[1] > 4 * best[0] > 0
    assert best[1] > large.bytes / 10e12


def test_lines_that_threads_and_streams_do_not_divide():
    reader = native.MemoryReader(64 * 37 + 5)
    assert reader.bytes == 64 * 37
    assert reader.seconds(native.ThreadPool(2)) > 0


def test_less_than_a_line_cannot_be_read():
    with pytest.raises(ValueError, match="at least 64"):
        native.MemoryReader(63)


@pytest.mark.unchecked
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("int8", [True, False])
def test_no_core_computes_more_than_its_registers_allow(isa: str, int8: bool):
    """Two products of 64 bytes or 16 floats in a cycle of at most 6 GHz: more would mean that the compiler left some out."""
    bits = {"generic": 512, "neon": 4 * 128, "avx2": 3 * 256, "avxvnni": 2 * 256}.get(isa, 2 * 512)
    numbers = bits // (8 if int8 else 32)
    assert 1e8 < native.peak_operations(isa, int8) < 2 * numbers * 6e9


def test_an_instruction_set_that_is_not_there():
    with pytest.raises(ValueError, match="mmx"):
        native.peak_operations("mmx", True)
