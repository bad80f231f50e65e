"""Arrays over memory-mapped files: letting go of pages that have been read."""

from __future__ import annotations

import mmap

import numpy as np


def release_mapped(array: np.ndarray) -> None:
    """Let the pages that lie wholly in the array leave this process's memory, if it is a contiguous view of a file that is
    mapped read-only; of other arrays nothing is touched. The array stays valid: pages are read again when they are needed.
    Does nothing where the system offers no such call."""
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    source = whole.base.obj if isinstance(whole.base, memoryview) else whole.base
    if not isinstance(source, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    with memoryview(source) as view:
        if not view.readonly or not array.flags.c_contiguous:
            return
    offset = array.ctypes.data - whole.ctypes.data
    first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (offset + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        source.madvise(mmap.MADV_DONTNEED, first, length)
