"""How tensors are dealt out to several files: in order, each file filled until the next tensor would be too much."""

from __future__ import annotations

from collections.abc import Sequence


def deal_out(sizes: Sequence[int], limit: int | None) -> list[list[int]]:
    """Indexes of tensors per file. sizes: bytes of each tensor. limit: bytes of tensors in a file; None for one file.

    A tensor above the limit has a file of its own: tensors are never cut. There is one file at least, even of nothing.
    """
    files: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        if limit is not None and files[-1] and filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(index)
        filled += size
    return files


def shard_name(stem: str, index: int, count: int, suffix: str) -> str:
    """The name of file `index` (from 0) of `count`: NAME-00001-of-00003.gguf. A single file has no number."""
    return f"{stem}{suffix}" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}{suffix}"
