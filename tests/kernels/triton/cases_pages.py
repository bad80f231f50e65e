"""Pages of the Triton backend outside the forward pass: copied, taken out, put back, moved, read, refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from llmctl.errors import UnsupportedError
from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels.attention import BatchDescription, PageMap
from llmctl.kernels.attention._triton_batch import SHORT, most_queries, stack_tables, to_device
from llmctl.kernels.store_kv import _triton_pages as triton_pages
from llmctl.kernels.store_kv._triton import store_kv
from llmctl.kernels.store_kv._triton_pages import TritonPages

Guard = Callable[[torch.Tensor], torch.Tensor]
BLOCK_SIZE, HEADS = 16, 3
KINDS = [("f16", 0, 24), ("q8_0", 0, 32), ("k=fp8,v=q8_0", 0, 64), ("q8_0", 64, 96), ("f32", 40, 40)]


def filled(kv_type: str, latent: int, width: int) -> TritonPages:
    """Three pages of random rows."""
    pages = TritonPages.make(3, BLOCK_SIZE, HEADS, width, kv_type, "cpu", latent)
    rows = torch.randn(2, 3 * BLOCK_SIZE, HEADS, width)
    store_kv(rows[0], None if latent else rows[1], pages, torch.arange(3 * BLOCK_SIZE))
    return pages


def sides(pages: TritonPages, page: int) -> list[torch.Tensor]:
    """What the rows of a page read as."""
    slots = torch.arange(page * BLOCK_SIZE, (page + 1) * BLOCK_SIZE)
    return [side.read(slots) for side in (pages.keys, pages.values)]


@pytest.mark.parametrize(("kv_type", "latent", "width"), KINDS)
def test_pages_are_copied_taken_out_and_put_back(kv_type: str, latent: int, width: int) -> None:
    pages = filled(kv_type, latent, width)
    first, second, third = (sides(pages, page) for page in range(3))
    triton_pages.copy_page(pages, 0, 2)
    assert all(map(torch.equal, sides(pages, 2), first))
    data = triton_pages.read_page(pages, 1)
    triton_pages.write_page(pages, 0, data)
    assert all(map(torch.equal, sides(pages, 0), second))
    assert all(map(torch.equal, sides(pages, 1), second))
    other = filled(kv_type, latent, width)
    triton_pages.write_page(other, 2, data)
    assert all(map(torch.equal, sides(other, 2), second))
    assert not torch.equal(first[0], third[0])
    with pytest.raises(ValueError, match=f"{len(data)} bytes, found {len(data) - 1}"):
        triton_pages.write_page(pages, 0, data[1:])


@pytest.mark.parametrize(("kv_type", "latent", "width"), KINDS)
def test_rows_move_head_by_head(kv_type: str, latent: int, width: int) -> None:
    pages = filled(kv_type, latent, width)
    every = torch.arange(3 * BLOCK_SIZE)
    before = pages.keys.read(every), pages.values.read(every)
    sources, targets = torch.tensor([[0, 5, 40], [1, 2, 3], [7, 17, 47]]), torch.tensor([16, 17, 18])
    triton_pages.move_tokens(pages, sources, targets)
    for side, old in zip((pages.keys, pages.values), before, strict=True):
        for head in range(HEADS):
            expected = old[:, head].clone()
            expected[targets] = old[sources[head], head]
            assert torch.equal(side.read(every)[:, head], expected)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "fp8", "q8_0"])
def test_what_is_stored_reads_as_the_reference_has_it(kv_type: str, guarded: Guard) -> None:
    ops, width = ReferenceOps(), 32
    rows = torch.randn(2, 40, HEADS, width) * 10.0 ** torch.randint(-6, 3, (2, 40, 1, 1))
    rows[0, 3], rows[0, 5, 1, 7], rows[1, 9, 2, 0], rows[0, 7, 0] = 0.0, torch.inf, torch.nan, 1e4
    slots = torch.randperm(48)[:40]
    slots[[2, 30]] = -1
    pages, reference = (make(3, BLOCK_SIZE, HEADS, width, kv_type) for make in (make_pages, ops.kv_pages))
    page_map = PageMap(slots, [], [])
    ops.store_kv(rows[0], rows[1], reference, BatchDescription(None, None, [], [0], [page_map], BLOCK_SIZE))
    store_kv(guarded(rows[0]), guarded(rows[1]), pages, guarded(slots))
    kept = slots[slots >= 0]
    for ours, theirs in ((pages.keys, reference.keys), (pages.values, reference.values)):
        torch.testing.assert_close(ours.read(kept), theirs.read(kept), rtol=0, atol=0, equal_nan=True)
    others = torch.tensor([slot for slot in range(48) if slot not in kept.tolist()])
    assert pages.keys.read(others).isnan().all(), "what no slot names stays as it was"


def make_pages(*shape: object) -> TritonPages:
    """Pages full of NaN."""
    pages = TritonPages.make(*shape, "cpu")
    for part in pages.parts:
        part.fill_(0xFF)
    return pages


def test_what_no_kernel_reads_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"q4_0.*f16"):
        TritonPages.make(1, BLOCK_SIZE, 1, 64, "k=f16,v=q4_0", "cpu")
    with pytest.raises(UnsupportedError, match="heads of 40 numbers"):
        TritonPages.make(1, BLOCK_SIZE, 1, 40, "q8_0", "cpu")
    with pytest.raises(UnsupportedError, match="latents of 48 and 16 numbers"):
        TritonPages.make(1, BLOCK_SIZE, 1, 64, "q8_0", "cpu", 48)


def test_a_batch_on_the_device() -> None:
    tables = [np.array([4, 2, 9]), np.array([], np.int64), np.array([7])]
    starts = [0, 3, 3, 3 + SHORT + 1]
    page_map = PageMap(np.arange(starts[-1]), [40, 0, 9], tables)
    positions = np.arange(starts[-1])
    batch = to_device(BatchDescription(positions, positions, [np.ones(4)], starts, [page_map], BLOCK_SIZE), torch.from_numpy)
    (found,) = batch.page_maps
    assert found.tables.tolist() == [[4, 2, 9], [-1, -1, -1], [7, -1, -1]]
    assert (found.lens.tolist(), found.starts.tolist()) == ([40, 0, 9], starts)
    assert (found.most_short, found.most_long) == (3, SHORT + 1)
    assert {array.dtype for array in (found.tables, found.lens, found.starts)} == {torch.int32}
    assert most_queries([0, 1, 2]) == (1, 0)
    assert stack_tables(tables, 5).shape == (3, 5)
