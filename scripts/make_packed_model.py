#!/usr/bin/env python3
"""Write a folder of weights rounded to integers or small floats, in the layout of one of the tools that people use for it.

    python scripts/make_packed_model.py SRC OUT --layout gptq --bits 4 --group-size 128 --asymmetric --act-order
    python scripts/make_packed_model.py SRC OUT --layout awq --values PLAIN    # PLAIN: the same weights as plain float32
    python scripts/make_packed_model.py SRC OUT --layout fp8 --scales block

SRC is a Hugging Face folder of plain weights in one safetensors file. Layouts: gptq (v1), gptq_v2, awq, compressed-tensors,
compressed-tensors-old (codes never cross words), compressed-tensors-int8 (codes in bytes), fp8 and mxfp4. Weights are rounded to
nearest: this is for tests of readers, which it shares no code with. Bits are laid out one by one, with numpy's packbits.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

LAYOUTS = (
    *("gptq", "gptq_v2", "awq", "compressed-tensors", "compressed-tensors-old", "compressed-tensors-int8"),
    *("fp8", "mxfp4"),
)
FP8_SCALES = ("tensor", "channel", "block")
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_DTYPES = {
    "float16": "F16",
    "float32": "F32",
    "bfloat16": "BF16",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
}


@dataclass
class Choices:
    """How weights are rounded and laid out. signed_scales: scales of either sign, the larger side of a group using the whole
    range. skip: modules left as they are, by the end of their name. head: the head is quantized too."""

    layout: str = "gptq"
    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    act_order: bool = False
    signed_scales: bool = False
    scale_dtype: str = "float16"
    scales: str = "tensor"
    skip: tuple[str, ...] = ()
    head: bool = False
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Rounded:
    """codes (N, K) from 0, scales and zeros (N, G), g_idx (K,)."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    g_idx: np.ndarray

    def values(self) -> np.ndarray:
        """What the codes mean, float32."""
        whole = self.codes.astype(np.float32) - self.zeros.astype(np.float32)[:, self.g_idx]
        return whole * self.scales.astype(np.float32)[:, self.g_idx]


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """(rows, count) → int32 (rows, words): the codes as one stream of bits, the lowest first."""
    stream = (codes[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    stream = stream.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


def loose_words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """As `words_of`, but no code crosses a word."""
    count = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % count))).reshape(len(codes), -1, count)
    return sum(codes[..., i].astype(np.int64) << (bits * i) for i in range(count)).astype(np.uint32).view("<i4")


def awq_words_of(codes: np.ndarray) -> np.ndarray:
    """(rows, columns) → int32 (rows, columns / 8) in AWQ's order of nibbles."""
    eights = codes.reshape(len(codes), -1, 8).astype(np.int64)
    return sum(eights[..., column] << (4 * i) for i, column in enumerate(_AWQ_ORDER)).astype(np.uint32).view("<i4")


def round_weight(weight: np.ndarray, choices: Choices, rng: np.random.Generator) -> Rounded:
    """Round to nearest, group by group; with act_order the columns of a group are any."""
    rows, columns = weight.shape
    size = columns if choices.group_size == -1 else choices.group_size
    order = rng.permutation(columns) if choices.act_order else np.arange(columns)
    g_idx = np.empty(columns, np.int32)
    g_idx[order] = np.arange(columns) // size
    groups, middle, top = -(-columns // size), 1 << (choices.bits - 1), (1 << choices.bits) - 1
    scales, zeros = np.empty((rows, groups), np.float32), np.full((rows, groups), middle, np.uint8)
    for group in range(groups):
        part = weight[:, g_idx == group].astype(np.float32)
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if not choices.symmetric:
            scales[:, group] = np.maximum((high - low) / top, 1e-6)
            zeros[:, group] = np.clip(np.rint(-low / scales[:, group]), 0, top)
        elif choices.signed_scales:
            scales[:, group] = np.where(high > -low, high, low) / -middle
        else:
            scales[:, group] = np.maximum(high, -low) / (middle - 0.5)
    scales = scales.astype(choices.scale_dtype if choices.scale_dtype != "bfloat16" else ml_dtypes.bfloat16)
    scales[scales == 0] = 1e-6
    codes = np.rint(weight / scales.astype(np.float32)[:, g_idx]) + zeros[:, g_idx]
    return Rounded(np.clip(codes, 0, top).astype(np.uint8), scales, zeros, g_idx)


def packed_tensors(rounded: Rounded, choices: Choices) -> dict[str, np.ndarray]:
    """The tensors of one module, by what follows its name."""
    bits, codes, zeros = choices.bits, rounded.codes, rounded.zeros
    if choices.layout.startswith("gptq"):
        less = 1 if choices.layout == "gptq" else 0
        fields = ((zeros.astype(int) - less) & ((1 << bits) - 1)).astype(np.uint8)
        tensors = {"qweight": words_of(codes, bits).T, "qzeros": words_of(fields.T, bits)}
        return {**tensors, "scales": rounded.scales.T, "g_idx": rounded.g_idx}
    if choices.layout == "awq":
        return {"qweight": awq_words_of(codes.T), "qzeros": awq_words_of(zeros.T), "scales": rounded.scales.T}
    if choices.layout == "compressed-tensors-int8":
        tensors = {"weight": (codes.astype(np.int16) - 128).astype(np.int8), "weight_scale": rounded.scales}
        return tensors if choices.symmetric else {**tensors, "weight_zero_point": (zeros.astype(np.int16) - 128).astype(np.int8)}
    pack = loose_words_of if choices.layout.endswith("-old") else words_of
    tensors = {"weight_packed": pack(codes, bits), "weight_scale": rounded.scales}
    tensors["weight_shape"] = np.array(codes.shape, np.int64)
    if not choices.symmetric:
        tensors["weight_zero_point"] = pack(zeros.T, bits).T
    if choices.act_order:
        tensors["weight_g_idx"] = rounded.g_idx
    return tensors


def quantization_config(choices: Choices, skipped: list[str]) -> dict[str, Any]:
    """What the tool would write into config.json."""
    if choices.layout.startswith("gptq"):
        shape = {"bits": choices.bits, "group_size": choices.group_size, "sym": choices.symmetric}
        return {"quant_method": "gptq", "checkpoint_format": choices.layout, "desc_act": choices.act_order, **shape}
    if choices.layout == "awq":
        shape = {"bits": 4, "group_size": choices.group_size, "zero_point": True}
        return {"quant_method": "awq", "version": "gemm", "modules_to_not_convert": skipped or None, **shape}
    if choices.layout == "fp8":
        return {"quant_method": "fp8", "weight_block_size": [128, 128] if choices.scales == "block" else None}
    if choices.layout == "mxfp4":
        return {"quant_method": "mxfp4"}
    weights = {"num_bits": choices.bits, "type": "int", "symmetric": choices.symmetric}
    weights |= {"strategy": "channel"} if choices.group_size == -1 else {"strategy": "group", "group_size": choices.group_size}
    weights["actorder"] = "group" if choices.act_order else None
    form = "int-quantized" if choices.layout.endswith("int8") else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights}
    ignore = skipped if choices.head else ["lm_head", *skipped]
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ignore, "config_groups": {"group_0": group}}


def float8_tensors(weight: np.ndarray, choices: Choices) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of one module in float8, and what they mean."""
    rows, columns = weight.shape
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}[choices.scales]
    padded = np.pad(np.abs(weight), ((0, -rows % height), (0, -columns % width)))
    most = padded.reshape(-(-rows // height), height, -(-columns // width), width).max((1, 3))
    scales = np.maximum(most / 448, 1e-9).astype(np.float32)
    spread = np.repeat(np.repeat(scales, height, 0), width, 1)[:rows, :columns]
    stored = (weight / spread).astype(ml_dtypes.float8_e4m3fn)
    name = "weight_scale_inv" if choices.scales == "block" else "weight_scale"
    scales = scales.reshape(()) if choices.scales == "tensor" else scales
    return {"weight": stored, name: scales}, stored.astype(np.float32) * spread


def mxfp4_tensors(weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of one module as gpt-oss has them, and what they mean."""
    grouped = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.maximum(np.abs(grouped).max(-1), 1e-30))).astype(int) - 2
    scaled = grouped / np.exp2(exponents)[..., None]
    codes = np.abs(scaled[..., None] - _E2M1).argmin(-1).astype(np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    values = (_E2M1[codes] * np.exp2(exponents)[..., None].astype(np.float32)).reshape(weight.shape)
    return {"weight_blocks": blocks, "weight_scales": (exponents + 127).astype(np.uint8)}, values


def make_packed_model(source: Path, out: Path, choices: Choices | None = None, *, values: Path | None = None) -> Path:
    """Write the folder and return its path. values: a second folder, of the same weights as plain float32."""
    choices = choices or Choices()
    rng = np.random.default_rng(choices.seed)
    packed: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    skipped = []
    for name, weight in load_file(source / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        wanted = module.endswith(("_proj", "_proj_with_mqa")) or (choices.head and module == "lm_head")
        if kind != "weight" or not wanted or module.endswith(choices.skip or ("\0",)):
            packed[name], plain[name] = weight, weight
            skipped += [module] if wanted and kind == "weight" else []
            continue
        tensors, plain[name] = _module(weight.astype(np.float32), choices, rng)
        packed |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
    config = {**quantization_config(choices, skipped), **choices.config}
    _write_folder(source, out, packed, {"quantization_config": config})
    if values is not None:
        _write_folder(source, values, plain, {})
    return out


def _module(weight: np.ndarray, choices: Choices, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    if choices.layout == "fp8":
        return float8_tensors(weight, choices)
    if choices.layout == "mxfp4":
        return mxfp4_tensors(weight)
    rounded = round_weight(weight, choices, rng)
    return packed_tensors(rounded, choices), rounded.values()


def _write_folder(source: Path, out: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("model.safetensors", "config.json") and file.is_file():
            shutil.copyfile(file, out / file.name)
    stated = json.loads((source / "config.json").read_text("utf-8"))
    (out / "config.json").write_text(json.dumps({**stated, **config}, indent=2), "utf-8")
    save(tensors, out / "model.safetensors")


def save(tensors: dict[str, np.ndarray], path: Path) -> None:
    """A safetensors file of any dtype that is used here (the library's numpy functions lack small floats)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--values", type=Path, help="a second folder, of the same weights as plain float32")
    parser.add_argument("--layout", choices=LAYOUTS, default="gptq")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128, help="-1: whole rows")
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--act-order", action="store_true")
    parser.add_argument("--signed-scales", action="store_true")
    parser.add_argument("--scale-dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--scales", choices=FP8_SCALES, default="tensor", help="of fp8")
    a = parser.parse_args()
    choices = Choices(a.layout, a.bits, a.group_size, not a.asymmetric, a.act_order, a.signed_scales, a.scale_dtype, a.scales)
    print(make_packed_model(a.source, a.out, choices, values=a.values))


if __name__ == "__main__":
    main()
