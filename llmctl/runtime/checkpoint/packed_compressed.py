"""compressed-tensors: pack-quantized (codes of 2 to 8 bits in words) and int-quantized (codes in bytes).

Codes are signed, stored with 2^(bits − 1) added. Each module is described by the config group whose targets name it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.packed_bits import pack_codes, unpack_codes, unpack_words, words_for
from llmctl.runtime.checkpoint.packed_float import mxfp4_module
from llmctl.runtime.checkpoint.packed_integers import StoredIntegers, check_g_idx, check_scales
from llmctl.runtime.checkpoint.packed_parts import CODES, FLOATS, PackedModule, Parts, integer_bytes
from llmctl.runtime.checkpoint.packed_settings import Settings, checked_bits, checked_group_size, checked_pattern
from llmctl.runtime.checkpoint.text import quoted

_READ = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "dense",
)
_PATTERN = "re:"
_CLASSES = ("Linear",)


@dataclass(frozen=True)
class Scheme:
    """One config group. bits, type: of the codes; group_size: −1 for a scale a row, None for one scale in all."""

    where: str
    targets: tuple[str, ...]
    bits: int
    type: str
    symmetric: bool
    group_size: int | None
    block: tuple[int, int] | None


class CompressedTensorsReader:
    """Finds and reads the modules of a checkpoint with compressed-tensors' layouts."""

    marker = "weight_packed"

    def __init__(self, settings: Settings) -> None:
        """Raises FormatError and UnsupportedError for settings that cannot be followed."""
        self.where = settings.where
        self.format = settings.values.get("format", "pack-quantized")
        if self.format not in _READ:
            raise UnsupportedError(
                f"{self.where}: the format {quoted(self.format)} is not read; write the model again as pack-quantized"
            )
        sparsity = settings.values.get("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise UnsupportedError(f"{self.where}: sparse weights are not read; write the model again with the format dense")
        self.ignored = _strings(self.where, "ignore", settings.values.get("ignore"))
        groups = settings.values.get("config_groups") or {}
        if not isinstance(groups, dict):
            raise FormatError(f"{self.where}: config_groups must be an object, found {quoted(groups)}")
        self.schemes = [_scheme(f"{self.where}: {quoted(name)}", group) for name, group in groups.items()]

    def scheme(self, parts: Parts) -> Scheme:
        """The config group of a module: one that names it before one whose pattern matches, the class Linear last."""
        if any(_matches(self.where, target, parts.module) for target in self.ignored):
            raise FormatError(f"{parts.where('weight')} is quantized, but the list 'ignore' in {self.where} names its module")
        for kind in (_is_name, _is_pattern, _is_class):
            for scheme in self.schemes:
                targets = [target for target in scheme.targets if kind(target)]
                if any(_matches(scheme.where, target, parts.module) for target in targets):
                    return scheme
        raise FormatError(f"{parts.where('weight')} is quantized, but no group in {self.where} has its module for a target")

    def block(self, parts: Parts) -> tuple[int, int] | None:
        """Rows and columns that share a scale of a float8 module; None where it has a scale a row, or one."""
        return self.scheme(parts).block if self.schemes else None

    def module(self, parts: Parts) -> PackedModule:
        """The module of these parts, its shapes checked. Nothing is read but headers and weight_shape."""
        if parts.dtype("weight_packed") == "U8" and self.format == "mxfp4-pack-quantized":
            return mxfp4_module(parts, parts.name("weight"), "weight_packed", "weight_scale")
        scheme = self.scheme(parts)
        if scheme.type != "int":
            raise UnsupportedError(f"{parts.where('weight_packed')} holds codes of the type {quoted(scheme.type)}, expected int")
        parts.check("weight_shape", ("I64", "I32"), (2,), "the two sizes of a weight")
        rows, columns = map(int, parts.read("weight_shape"))
        packed_rows, width = parts.shape("weight_packed", 2)
        dense, loose = words_for(columns, scheme.bits), -(-columns // (32 // scheme.bits))
        if rows != packed_rows or columns < 1 or width not in (dense, loose):
            raise FormatError(
                f"{parts.where('weight_packed')} has shape {(packed_rows, width)}, expected {(rows, dense)} for "
                f"{scheme.bits}-bit codes of {rows} x {columns} weights"
            )
        parts.check("weight_packed", CODES, (packed_rows, width), "packed codes")
        return self._module(parts, scheme, (rows, columns), "weight_packed")

    def bytes_module(self, parts: Parts) -> PackedModule:
        """A module whose codes are bytes (int-quantized)."""
        scheme = self.scheme(parts)
        if scheme.type != "int":
            raise UnsupportedError(f"{parts.where('weight')} holds whole numbers, but {scheme.where} says {quoted(scheme.type)}")
        return self._module(parts, scheme, parts.shape("weight", 2), "weight")

    def _module(self, parts: Parts, scheme: Scheme, shape: tuple[int, int], codes: str) -> PackedModule:
        groups = self._check_scales(parts, scheme, shape)
        names = parts.names(codes, "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
        bits = 8 if codes == "weight" else scheme.bits
        return PackedModule(
            name=parts.name("weight"),
            parts=names,
            shape=shape,
            form=f"INT{bits}",
            native_bytes=integer_bytes(shape, bits, _size(scheme)),
            read=lambda: self._read(parts, scheme, shape, groups),
        )

    def _check_scales(self, parts: Parts, scheme: Scheme, shape: tuple[int, int]) -> int:
        """Number of groups; FormatError for scales, zero points and g_idx of other shapes."""
        rows, columns = shape
        size = columns if _size(scheme) == -1 else _size(scheme)
        groups = -(-columns // size)
        why = f"{rows} x {columns} weights in groups of {size}"
        single = scheme.group_size is None
        stored = parts.checkpoint.entry(parts.name("weight_scale")).shape if parts.has("weight_scale") else ()
        expected = stored if single and stored in ((), (1,), (1, 1)) else (rows, groups)
        parts.check("weight_scale", FLOATS, expected, why)
        if not scheme.symmetric and not single:
            parts.shape("weight_zero_point", 2)
        if parts.has("weight_g_idx"):
            parts.check("weight_g_idx", CODES, (columns,), why)
        return groups

    def _read(self, parts: Parts, scheme: Scheme, shape: tuple[int, int], groups: int) -> StoredIntegers:
        bits = scheme.bits if parts.has("weight_packed") else 8
        scales = check_scales(parts.where("weight_scale"), np.atleast_2d(parts.read("weight_scale")))
        scales = np.ascontiguousarray(np.broadcast_to(scales, (shape[0], groups)))
        zeros = None if scheme.symmetric else _zero_points(parts, bits, (shape[0], groups))
        return StoredIntegers(
            bits=bits,
            group_size=_size(scheme),
            shape=shape,
            load_words=lambda: _words(parts, bits, shape[1]),
            scales=scales,
            zero_points=zeros,
            g_idx=_g_idx(parts, groups) if parts.has("weight_g_idx") else None,
        ).simplified()


def _size(scheme: Scheme) -> int:
    return -1 if scheme.group_size is None else scheme.group_size


def _words(parts: Parts, bits: int, columns: int) -> np.ndarray:
    """The codes as dense streams of rows, however they are packed."""
    if not parts.has("weight_packed"):
        return pack_codes(parts.read("weight").view(np.uint8) ^ np.uint8(128), 8)
    words = parts.words("weight_packed")
    if words.shape[1] == words_for(columns, bits):
        return words
    return pack_codes(unpack_words(words, bits, columns), bits)


def _zero_points(parts: Parts, bits: int, shape: tuple[int, int]) -> np.ndarray:
    """uint8 (rows, groups), 2^(bits − 1) added: packed along the rows, or one a byte."""
    rows, groups = shape
    if parts.dtype("weight_zero_point") == "I8":
        parts.check("weight_zero_point", ("I8",), shape, "one zero point a group")
        zeros = parts.read("weight_zero_point").astype(np.int16) + (1 << (bits - 1))
        if ((zeros < 0) | (zeros >> bits)).any():
            raise FormatError(f"{parts.where('weight_zero_point')} holds zero points that {bits} bits do not")
        return zeros.astype(np.uint8)
    height = parts.shape("weight_zero_point", 2)[0]
    dense, loose = words_for(rows, bits), -(-rows // (32 // bits))
    parts.check("weight_zero_point", CODES, (loose if height == loose else dense, groups), f"{rows} x {groups} zero points")
    unpack = unpack_codes if height == dense else unpack_words
    return np.ascontiguousarray(unpack(np.ascontiguousarray(parts.words("weight_zero_point").T), bits, rows).T)


def _g_idx(parts: Parts, groups: int) -> np.ndarray | None:
    """The group of every column; None where all are −1, which is how its absence is written."""
    g_idx = parts.read("weight_g_idx")
    return None if (g_idx == -1).all() else check_g_idx(parts.where("weight_g_idx"), g_idx, groups)


def _scheme(where: str, group: Any) -> Scheme:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise FormatError(f"{where} must be an object with an object 'weights', found {quoted(group)}")
    weights = group["weights"]
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") is not None else "tensor")
    if strategy not in ("group", "channel", "tensor", "block"):
        raise UnsupportedError(f"{where}: the strategy {quoted(strategy)} is not read; expected group, channel, tensor or block")
    block = weights.get("block_structure")
    if strategy == "block" and not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise FormatError(f"{where}: block_structure must be two sizes, found {quoted(block)}")
    group_size = checked_group_size(f"{where}: 'group_size'", weights.get("group_size")) if strategy == "group" else -1
    kind = weights.get("type", "int")
    return Scheme(
        where=where,
        targets=tuple(_strings(where, "targets", group.get("targets"))),
        bits=checked_bits(f"{where}: 'num_bits'", weights.get("num_bits", 8)),
        type=kind if isinstance(kind, str) else repr(kind),
        symmetric=weights.get("symmetric", True) is not False,
        group_size=None if strategy == "tensor" else group_size,
        block=tuple(block) if strategy == "block" else (1, group_size) if strategy == "group" else None,
    )


def _strings(where: str, key: str, value: Any) -> list[str]:
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise FormatError(f"{where}: {key!r} must be a list of names, found {quoted(value)}")
    return value


def _is_pattern(target: str) -> bool:
    return target.startswith(_PATTERN)


def _is_class(target: str) -> bool:
    return target in _CLASSES


def _is_name(target: str) -> bool:
    return not _is_pattern(target) and not _is_class(target)


def _matches(where: str, target: str, module: str) -> bool:
    if _is_pattern(target):
        return _pattern(where, target).match(module) is not None
    return target == module or _is_class(target)


def _pattern(where: str, target: str) -> re.Pattern[str]:
    return checked_pattern(where, target.removeprefix(_PATTERN))
