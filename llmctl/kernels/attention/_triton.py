"""Paged attention in Triton: which kernels a step takes, in which tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.attention._triton_batch import SHORT, DevicePageMap
from llmctl.kernels.attention._triton_kernels import attend, merge
from llmctl.kernels.attention._triton_tiles import Tile, decode_tile, prefill_tile
from llmctl.kernels.store_kv._triton_pages import TritonPages
from llmctl.kernels.triton_lib.launch import cdiv, empty, interpreting, power_of_two

_ANY = 1 << 30
_MERGED_COLUMNS = 128


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
        tile = prefill_tile(pages.values.width, pages.is_latent, queries.device)
        least = SHORT + 1 if page_map.most_short else 0
        _attend(queries, out, None, pages, page_map, layer, tile, 1, (least, _ANY), page_map.most_long)
    if page_map.most_short:
        _attend_split(queries, out, pages, page_map, layer)
    return out


def _attend_split(
    queries: torch.Tensor, out: torch.Tensor, pages: TritonPages, page_map: DevicePageMap, layer: Choices
) -> None:
    """The sequences with few tokens: splits of their keys, then all splits of a token together."""
    (tokens, heads, width), sequences = out.shape, len(page_map.lens)
    tile, splits = decode_tile(width, pages.is_latent, pages.num_kv_heads, sequences, queries.device)
    if splits == 1:
        _attend(queries, out, None, pages, page_map, layer, tile, 1, (0, SHORT), page_map.most_short)
        return
    parts = empty((tokens, heads, splits, width), torch.float32, queries.device)
    logs = empty((tokens, heads, splits), torch.float32, queries.device)
    _attend(queries, parts, logs, pages, page_map, layer, tile, splits, (0, SHORT), page_map.most_short)
    block = min(power_of_two(width), _MERGED_COLUMNS)
    grid = (page_map.most_short * heads, sequences, cdiv(width, block))
    merge[grid](parts, logs, out, page_map.starts, SHORT, HEADS=heads, SPLITS=splits, WIDTH=width, BLOCK=block)


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
    heads, kv_heads, latent = queries.shape[1], pages.num_kv_heads, pages.is_latent
    width, rope = pages.values.width, queries.shape[2] - pages.values.width
    grid = (cdiv(most_queries * (heads // kv_heads), tile.block_m), kv_heads * len(page_map.lens), splits)
    keys, values = pages.keys, pages.values
    attend[grid](
        *(queries, out, logs, keys.codes, keys.scales, values.codes, values.scales),
        *(page_map.tables, page_map.lens, page_map.starts, layer.sinks, layer.scale, layer.softcap or 0.0),
        *(layer.sliding_window or 0, layer.anchors, page_map.tables.shape[1], *served),
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        ROPE=rope,
        BLOCK_D=power_of_two(width, 32),
        BLOCK_R=power_of_two(rope, 32),
        BLOCK_SIZE=pages.block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SPLITS=splits,
        IS_LATENT=latent,
        HAS_SINKS=layer.sinks is not None,
        HAS_SOFTCAP=layer.softcap is not None,
        HAS_WINDOW=layer.sliding_window is not None,
        HAS_ANCHORS=layer.sliding_window is not None and layer.anchors > 0,
        DOT=dot_type(queries.dtype, keys.numbers.dtype, values.numbers.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def dot_type(*types: torch.dtype) -> tl.dtype:
    """What queries, keys and weights are multiplied in: float32 where one of them is, then bfloat16, then float16. The
    interpreter's products of bfloat16 are wrong: there float32."""
    if torch.float32 in types or (torch.bfloat16 in types and interpreting()):
        return tl.float32
    return tl.bfloat16 if torch.bfloat16 in types else tl.float16
