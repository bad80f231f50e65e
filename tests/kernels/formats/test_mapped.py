"""Only pages of read-only mapped files are let go; everything else keeps its bytes."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels.formats.mapped import release_mapped

PAGE = mmap.PAGESIZE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * (PAGE // 16))  # 16 pages
    return path


def mapped(path: Path, access: int) -> np.ndarray:
    with path.open("r+b") as handle:
        return np.frombuffer(mmap.mmap(handle.fileno(), 0, access=access), np.uint8)


def test_a_released_view_of_a_file_reads_the_same(file: Path) -> None:
    whole = mapped(file, mmap.ACCESS_READ)
    expected = whole.copy()
    for view in (whole, whole[100 : 5 * PAGE], whole[3:20], whole.reshape(16, -1)[2:9], whole[8:].view(np.uint16)):
        release_mapped(view)
        assert np.array_equal(whole, expected)


def test_changes_that_live_in_memory_only_are_kept(file: Path) -> None:
    private = mapped(file, mmap.ACCESS_COPY)
    private[:] = 7
    release_mapped(private)
    assert (private == 7).all()
    private.setflags(write=False)
    release_mapped(private)
    assert (private == 7).all()


def test_arrays_that_are_no_files_are_kept(file: Path) -> None:
    anonymous = np.frombuffer(mmap.mmap(-1, 4 * PAGE), np.uint8)
    strided = mapped(file, mmap.ACCESS_READ)[::2]
    for array in (np.full(4 * PAGE, 5, np.uint8), anonymous, strided, np.frombuffer(b"abc", np.uint8)):
        before = array.copy()
        release_mapped(array)
        assert np.array_equal(array, before)
