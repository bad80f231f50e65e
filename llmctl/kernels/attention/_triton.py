"""Paged attention in Triton: which kernels a step takes, in which tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from llmctl.errors import UnsupportedError
from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.attention._triton_batch import SHORT, DevicePageMap
from llmctl.kernels.attention._triton_kernels import attend, merge
from llmctl.kernels.attention._triton_tiles import Numbers, Tile, decode_tile, prefill_tile
from llmctl.kernels.store_kv._triton_pages import TritonPages
from llmctl.kernels.store_kv._triton_rows import PER_SCALE
from llmctl.kernels.triton_lib.launch import cdiv, empty, interpreting, power_of_two

ANY = 1 << 30
"""More tokens than a sequence has."""
MAX_WIDTH = 512
"""Of values: beyond, no tile fits a GPU."""
_MERGED_COLUMNS = 128
_SHORT_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Choices:
    """What a layer's attention is like: see the contract."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    anchors: int = 0


def attention(queries: torch.Tensor, pages: TritonPages, batch: BatchDescription, scale: float, *choices: Any) -> torch.Tensor:
    """Causal attention of every sequence over its own pages; see the contract. The batch's page maps are DevicePageMap."""
    page_map = batch.page_maps[batch.group]
    assert isinstance(page_map, DevicePageMap), "to_device makes them"
    out = empty((*queries.shape[:2], pages.values.width), queries.dtype, queries.device)
    layer, queries = Choices(scale, *choices), queries.contiguous()
    if page_map.most_long:
        tile = prefill_tile(numbers_of(queries, pages), queries.device)
        least = SHORT + 1 if page_map.most_short else 0
        _attend(queries, out, None, pages, page_map, layer, tile, 1, (least, ANY), page_map.most_long)
    if page_map.most_short:
        _attend_split(queries, out, pages, page_map, layer)
    return out


def _attend_split(
    queries: torch.Tensor, out: torch.Tensor, pages: TritonPages, page_map: DevicePageMap, layer: Choices
) -> None:
    """The sequences with few tokens: splits of their keys, then all splits of a token together."""
    (heads, width), sequences = out.shape[1:], len(page_map.lens)
    tile, splits = decode_tile(numbers_of(queries, pages), pages.num_kv_heads, sequences, queries.device)
    if splits == 1:
        _attend(queries, out, None, pages, page_map, layer, tile, 1, (0, SHORT), page_map.most_short)
        return
    parts, logs = attend_parts(queries, pages, page_map, layer, tile, splits, SHORT, page_map.most_short)
    block = min(power_of_two(width), _MERGED_COLUMNS)
    grid = (page_map.most_short * heads, sequences, cdiv(width, block))
    merge[grid](parts, logs, out, page_map.starts, SHORT, HEADS=heads, SPLITS=splits, WIDTH=width, BLOCK=block)


def attend_parts(
    queries: torch.Tensor,
    pages: TritonPages,
    page_map: DevicePageMap,
    layer: Choices,
    tile: Tile,
    splits: int,
    most: int,
    most_queries: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each split of the keys gives to queries [T, num_heads, width] of sequences with up to `most` tokens: float32 results
    [T, num_heads, splits, width], and the log2 of the sums of their weights [T, num_heads, splits]."""
    shape = (*queries.shape[:2], splits)
    parts = empty((*shape, pages.values.width), torch.float32, queries.device)
    logs = empty(shape, torch.float32, queries.device)
    _attend(queries, parts, logs, pages, page_map, layer, tile, splits, (0, most), most_queries)
    return parts, logs


def _attend(
    queries: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor | None,
    pages: TritonPages,
    page_map: DevicePageMap,
    layer: Choices,
    tile: Tile,
    splits: int,
    served: tuple[int, int],
    most_queries: int,
) -> None:
    """Launch `attend` over the sequences with served[0] … served[1] tokens, of which none has more than most_queries."""
    heads, kv_heads = queries.shape[1], pages.num_kv_heads
    grid = (cdiv(most_queries * (heads // kv_heads), tile.block_m), kv_heads * len(page_map.lens), splits)
    keys, values = pages.keys, pages.values
    attend[grid](
        *(queries, out, logs, keys.codes, keys.scales, values.codes, values.scales),
        *(page_map.tables, page_map.lens, page_map.starts, layer.sinks, layer.scale, layer.softcap or 0.0),
        *(layer.sliding_window or 0, layer.anchors, page_map.tables.shape[1], *served),
        **sizes_of(heads, pages),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SPLITS=splits,
        IS_LATENT=pages.is_latent,
        HAS_SINKS=layer.sinks is not None,
        HAS_SOFTCAP=layer.softcap is not None,
        HAS_WINDOW=layer.sliding_window is not None,
        HAS_ANCHORS=layer.sliding_window is not None and layer.anchors > 0,
        DOT_K=dot_type(queries.dtype, keys.numbers.dtype),
        DOT_V=dot_type(queries.dtype, values.numbers.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def sizes_of(heads: int, pages: TritonPages) -> dict[str, int]:
    """The sizes that kernels over pages are compiled for. Errors: UnsupportedError for values wider than any tile."""
    width, stride = pages.values.width, pages.keys.width
    if width > MAX_WIDTH:
        raise UnsupportedError(
            f"the triton backend attends values of up to {MAX_WIDTH} numbers, these have {width}: --backend reference has them"
        )
    sizes = {"HEADS": heads, "KV_HEADS": pages.num_kv_heads, "BLOCK_SIZE": pages.block_size}
    blocks = {"BLOCK_D": power_of_two(width, PER_SCALE), "BLOCK_R": power_of_two(stride - width, PER_SCALE)}
    return sizes | blocks | {"WIDTH": width, "ROPE": stride - width}


def numbers_of(queries: torch.Tensor, pages: TritonPages) -> Numbers:
    """What the tiles depend on."""
    sides = (pages.keys.numbers, pages.values.numbers)
    is_float32 = torch.float32 in (queries.dtype, *(side.dtype for side in sides))
    return Numbers(pages.keys.width, is_float32, any(side.element_size() == 1 for side in sides))


def dot_type(queries: torch.dtype, pages: torch.dtype) -> tl.dtype:
    """What numbers of pages are multiplied in: their own 16-bit type, so that they need not be converted, or the queries';
    float32 where one of the two is. The interpreter's products of bfloat16 are wrong: there float32."""
    kept = pages if pages in _SHORT_TYPES else queries
    if torch.float32 in (queries, pages) or (kept == torch.bfloat16 and interpreting()):
        return tl.float32
    return _SHORT_TYPES[kept]
