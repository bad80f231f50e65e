"""Attention over pages, and the pages, in Triton: against the reference, at sizes that fill no tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels.attention import BatchDescription, PageMap
from llmctl.kernels.attention import _triton as attention_triton
from llmctl.kernels.attention._triton_batch import SHORT, to_device
from llmctl.kernels.attention._triton_tiles import Numbers, Tile, splits_of, tile_of
from llmctl.kernels.attention_votes._triton import attention_votes
from llmctl.kernels.store_kv._triton import store_kv
from llmctl.kernels.store_kv._triton_pages import TritonPages
from llmctl.kernels.triton_lib.tiles import named_table

Guard = Callable[[torch.Tensor], torch.Tensor]
BLOCK_SIZE = 16
TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


@dataclass
class World:
    """Sequences over scattered pages of both backends, filled with the same keys and values.

    counts, lengths: of each sequence the tokens of the step, and all of them. sizes: of all kv heads; latent as in kv_pages.
    """

    counts: list[int]
    lengths: list[int]
    heads: int
    kv_heads: int
    width: int
    kv_type: str
    dtype: str = "float32"
    latent: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(11))

    def __post_init__(self) -> None:
        self.ops = ReferenceOps(dtype=self.dtype)
        self.num_pages = sum(-(-length // BLOCK_SIZE) for length in self.lengths) + 2
        order = iter(self.rng.permutation(self.num_pages))
        self.tables = [np.array([next(order) for _ in range(-(-n // BLOCK_SIZE))], np.int64) for n in self.lengths]
        places = [np.arange(length) for length in self.lengths]
        slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for t, p in zip(self.tables, places, strict=True)]
        self.slots = np.concatenate(slots)
        shape = (self.num_pages, BLOCK_SIZE, self.kv_heads, self.width, self.kv_type)
        self.reference = self.ops.kv_pages(*shape, self.latent)
        self.pages = TritonPages.make(*shape, "cpu", self.latent)
        for part in self.pages.parts:
            part.fill_(0xFF)  # NaN in every type: what no one wrote must not matter
        rows = (len(self.slots), self.kv_heads, self.width)
        self.store(self.normal(*rows), self.normal(*rows))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32)).to(getattr(torch, self.dtype))

    def store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        slots = torch.from_numpy(self.slots)
        self.ops.store_kv(keys, None if self.latent else values, self.reference, self.batch(torch.from_numpy))
        store_kv(keys, None if self.latent else values, self.pages, slots)

    def batch(self, upload: Callable[[np.ndarray], Any]) -> BatchDescription:
        cu_seqlens_q = np.concatenate([[0], np.cumsum(self.counts)]).tolist()
        nothing = np.zeros(cu_seqlens_q[-1], np.int64)
        page_map = PageMap(self.slots, self.lengths, self.tables)
        batch = BatchDescription(nothing, nothing, [], cu_seqlens_q, [page_map], BLOCK_SIZE)
        return batch.convert(upload) if upload is torch.from_numpy else to_device(batch, torch.from_numpy)

    def check(self, guarded: Guard, *choices: Any) -> None:
        """One attention of both backends. choices: those after the scale."""
        queries, scale = self.normal(sum(self.counts), self.heads, self.width), self.width**-0.5
        expected = self.ops.attention(queries, self.reference, self.batch(torch.from_numpy), scale, *choices)
        found = attention_triton.attention(guarded(queries), self.pages, self.batch(guarded), scale, *choices)
        assert found.dtype == queries.dtype
        tolerance = TOLERANCES[self.dtype]
        torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0])
LAYERS = {
    "plain": (6, 2, 24, ()),
    "window": (4, 4, 16, (19,)),
    "window of a tile": (2, 1, 64, (32, 3.0)),
    "softcap and sinks": (6, 3, 40, (None, 5.0, SINKS)),
    "anchors": (6, 1, 16, (21, None, SINKS, 4)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_attention_is_the_reference(layer: str, guarded: Guard) -> None:
    heads, kv_heads, width, choices = LAYERS[layer]
    World([1, SHORT + 3, 3, 34], [70, 53, 33, 34], heads, kv_heads, width, "f32").check(guarded, *choices)


@pytest.mark.parametrize(
    ("kv_type", "dtype"),
    [
        *(("f16", "float16"), ("f16", "bfloat16"), ("bf16", "bfloat16"), ("fp8", "bfloat16")),
        *(("q8_0", "float16"), ("q8_0", "float32"), ("k=fp8,v=f16", "float32")),
    ],
)
def test_every_type_of_pages(kv_type: str, dtype: str, guarded: Guard) -> None:
    World([2, 9], [50, 33], 2, 1, 96, kv_type, dtype).check(guarded)


@pytest.mark.parametrize(("heads", "kv_type"), [(3, "f16"), (16, "q8_0"), (5, "fp8")])
def test_latent_pages(heads: int, kv_type: str, guarded: Guard) -> None:
    World([1, 9], [50, 33], heads, 1, 96 + 32, kv_type, latent=96).check(guarded)


def test_pages_out_of_every_window_are_not_read(guarded: Guard) -> None:
    world = World([1, 9], [100, 77], 2, 1, 16, "f16")
    for table, first in zip(world.tables, (100 - 1 - 18, 77 - 9 - 18), strict=True):
        table[: first // BLOCK_SIZE] = -1
    world.check(guarded, 19)


def test_a_sequence_without_keys_is_zeros(guarded: Guard) -> None:
    """So are those that fill up a graph's batch."""
    world = World([1, 1], [20, 3], 2, 1, 16, "f16")
    queries = world.normal(2, 2, 16)
    world.lengths[1] = 0
    y = attention_triton.attention(guarded(queries), world.pages, world.batch(guarded), 0.25)
    assert torch.equal(y[1], torch.zeros(2, 16))
    assert y[0].isfinite().all()


def test_a_token_decodes_to_the_bits_it_is_verified_with(guarded: Guard) -> None:
    world = World([5, 1], [68, 33], 4, 2, 32, "f16")
    queries = world.normal(6, 4, 32)
    together = attention_triton.attention(guarded(queries), world.pages, world.batch(guarded), 0.2)
    for token in range(5):
        one = World([1], [64 + token], 4, 2, 32, "f16")
        one.pages, one.tables = world.pages, world.tables[:1]
        alone = attention_triton.attention(guarded(queries[token : token + 1]), one.pages, one.batch(guarded), 0.2)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize(
    ("kv_type", "latent", "choices"), [("f16", 0, (4.0,)), ("q8_0", 0, (None, SINKS)), ("f32", 32, ())], ids=str
)
def test_votes_are_the_reference(kv_type: str, latent: int, choices: tuple[Any, ...], guarded: Guard) -> None:
    kv_heads = 1 if latent else 2
    world = World([50], [50], 6, kv_heads, 64, kv_type, latent=latent)
    queries, table = world.normal(7, 6, 64), torch.from_numpy(world.tables[0])
    expected = world.ops.attention_votes(queries.numpy(), world.reference, world.tables[0], 50, 0.2, *choices)
    votes = attention_votes(guarded(queries), world.pages, guarded(table), 50, 0.2, *choices)
    np.testing.assert_allclose(votes.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_tiles_and_splits_come_from_the_table() -> None:
    table = named_table("h200")
    own = table["attention"]
    assert {splits_of(table, 8, sequences) for sequences in range(1, 9)} == {32}, "a token's sums are the same in small batches"
    assert (splits_of(table, 1, 1), splits_of(table, 8, 64), splits_of(table, 512, 1)) == (64, 4, 1)
    assert tile_of(table, "decode", Numbers(96, is_float32=False, are_codes=False)) == Tile(*own["decode"]["128"])
    assert tile_of(table, "decode", Numbers(600, is_float32=False, are_codes=True)) == Tile(*own["decode_codes"]["576"])
    assert tile_of(table, "prefill", Numbers(64, is_float32=True, are_codes=True)) == Tile(*own["float32"])
