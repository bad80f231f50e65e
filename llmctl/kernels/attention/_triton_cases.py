"""What is compiled of attention without a GPU: the tables' own tiles, for the GPUs they are for."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from llmctl.kernels.attention._triton_kernels import attend, merge
from llmctl.kernels.attention._triton_tiles import Numbers, splits_of, tile_of
from llmctl.kernels.triton_lib.compilation import Case
from llmctl.kernels.triton_lib.tiles import named_table

_GPUS = {"h200": 90, "a100": 80, "rtx4090": 89}
_POINTERS = {"f16": "*fp16", "bf16": "*bf16", "f32": "*fp32", "q8_0": "*i8", "fp8": "*fp8e4nv"}
_CODES = ("q8_0", "fp8")
_DOTS = {"bf16": tl.bfloat16, "f32": tl.float32}
_BYTES_OF_FP8 = 80
"""This GPU takes e4m3 as bytes."""
_HEADS = {64: (32, 8), 128: (32, 8), 256: (16, 8), 576: (128, 1)}
"""Query heads and kv heads by the width of a key."""
_LATENT = {576: 512}
"""Widths of keys that are latents, and how much of them are the values."""
_EVERYTHING = ("HAS_SINKS", "HAS_SOFTCAP", "HAS_WINDOW", "HAS_ANCHORS")
_USUAL = {("decode", 128, "q8_0"), ("prefill", 128, "f16")}
_OTHERS = [
    *(("prefill", width, "f16") for width in (64, 256, 576)),
    *(("decode", width, "f16") for width in (64, 128, 256, 576)),
    *(("decode", width, "q8_0") for width in (256, 576)),
    ("decode", 128, "fp8"),
    ("prefill", 128, "bf16"),
    *(("prefill", width, "q8_0") for width in (128, 256, 576)),
    ("prefill", 128, "f32"),
]


def kernel_cases() -> list[Case]:
    """Every commit: one kind of prefill and one of decode, and the merge."""
    asked = [(gpu, *one) for gpu in _GPUS for one in dict.fromkeys((*sorted(_USUAL), *_OTHERS))]
    everything = [_attend(gpu, kind, 128, "f16", _EVERYTHING) for gpu in _GPUS for kind in ("prefill", "decode")]
    return [*(_attend(*one) for one in asked), *everything, _merge()]


def _attend(gpu: str, kind: str, width: int, kv_type: str, choices: tuple[str, ...] = ()) -> Case:
    """choices: what a layer has beside."""
    table, arch = named_table(gpu), _GPUS[gpu]
    heads, kv_heads = _HEADS[width]
    tile = tile_of(table, kind, Numbers(width, kv_type == "f32", kv_type in _CODES))
    splits = splits_of(table, kv_heads, 1) if kind == "decode" else 1
    latent = _LATENT.get(width, 0)
    types = _types("*u8" if kv_type == "fp8" and arch == _BYTES_OF_FP8 else _POINTERS[kv_type], kv_type, splits > 1)
    dot = _DOTS.get(kv_type, tl.float16)
    constants: dict[str, Any] = {
        **{"HEADS": heads, "KV_HEADS": kv_heads, "WIDTH": latent or width, "ROPE": width - latent if latent else 0},
        **{"BLOCK_D": latent or width, "BLOCK_R": width - latent if latent else 32, "BLOCK_SIZE": 16, "IS_LATENT": bool(latent)},
        **{"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "SPLITS": splits, "DOT_K": dot, "DOT_V": dot},
        **{choice: choice in choices for choice in _EVERYTHING},
    }
    optional = {"key_scales": kv_type == "q8_0", "value_scales": kv_type == "q8_0", "logs": splits > 1, "sinks": bool(choices)}
    constants |= {name: None for name, is_there in optional.items() if not is_there}
    types = {name: kind for name, kind in types.items() if name not in constants}
    aligned = tuple(name for name, kind in types.items() if kind.startswith("*") and name not in ("lens", "starts"))
    name = ".".join(("attention", kind, f"d{width}", kv_type, *(("all",) if choices else ()), gpu))
    is_usual = (kind, width, kv_type) in _USUAL and not choices
    return Case(name, attend, types, constants, aligned, tile.num_warps, tile.num_stages, (arch,), every_commit=is_usual)


def _types(pages: str, kv_type: str, is_split: bool) -> dict[str, str]:
    numbers = _POINTERS[kv_type] if kv_type in _DOTS else "*fp16"
    types = {"queries": numbers, "out": "*fp32" if is_split else numbers, "logs": "*fp32", "sinks": "*fp32"}
    types |= {"key_codes": pages, "value_codes": pages, "key_scales": "*fp16", "value_scales": "*fp16"}
    types |= dict.fromkeys(("tables", "lens", "starts"), "*i32") | dict.fromkeys(("scale", "softcap"), "fp32")
    return types | dict.fromkeys(("window", "anchors", "table_width", "least", "most"), "i32")


def _merge() -> Case:
    types = {"parts": "*fp32", "logs": "*fp32", "out": "*fp16", "starts": "*i32", "most": "i32"}
    constants = {"HEADS": 32, "SPLITS": 32, "WIDTH": 128, "BLOCK": 128}
    return Case("attention.merge.d128", merge, types, constants, ("parts", "logs", "out"))
