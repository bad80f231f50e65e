"""Quantized weights of a Hugging Face folder: which modules are stored as several tensors, and what they stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.runtime.checkpoint.packed_awq import AwqReader
from llmctl.runtime.checkpoint.packed_compressed import CompressedTensorsReader
from llmctl.runtime.checkpoint.packed_float import FLOAT8, SCALES, float8_module, mxfp4_module
from llmctl.runtime.checkpoint.packed_gptq import GptqReader
from llmctl.runtime.checkpoint.packed_integers import StoredIntegers, canonical
from llmctl.runtime.checkpoint.packed_parts import PackedModule, Parts
from llmctl.runtime.checkpoint.packed_settings import Settings, read_settings
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint
from llmctl.runtime.checkpoint.text import quoted

_BITSANDBYTES = re.compile(r"\.(?:absmax|nested_absmax|quant_map|SCB|quant_state\.bitsandbytes__\w+)$")
# How activations were to be rounded, which they are not here: they are kept in a better type.
_OF_ACTIVATIONS = re.compile(
    r"\.(?:input_scale|input_zero_point|input_scale_ub|input_global_scale|output_scale|output_zero_point|"
    r"[kv]_scale|[kv]_zero_point|[qkv]_proj\.output_scale|activation_scale)$"
)


class _Reader(Protocol):
    marker: str

    def module(self, parts: Parts) -> PackedModule: ...


@dataclass(frozen=True)
class PackedTensors:
    """modules: by the name that the weight would have if it were stored plainly. parts: every stored tensor they are made of.
    of_activations: stored scales of activations, no part of any weight. settings: None where no config says anything."""

    settings: Settings | None = None
    modules: dict[str, PackedModule] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()
    of_activations: tuple[str, ...] = ()


def find_packed(checkpoint: SafetensorsCheckpoint) -> PackedTensors:
    """The quantized modules of a checkpoint, told by their tensors; what these do not say comes from the settings beside them.

    Nothing is read but headers and settings. Errors: FormatError for shapes, dtypes and settings that contradict each other,
    UnsupportedError for a method that is not read, each naming the tensor or the file.
    """
    if found := next((name for name in checkpoint.names() if _BITSANDBYTES.search(name)), None):
        raise UnsupportedError(
            f"{checkpoint.path}: tensor {quoted(found)} belongs to weights quantized with bitsandbytes, which cannot be read: "
            "load them with transformers, call model.dequantize(), save the model and convert that folder"
        )
    settings = read_settings(checkpoint.folder, checkpoint.config)
    finder = _Finder(checkpoint, settings)
    modules = [module for name in checkpoint.names() if (module := finder.module(name)) is not None]
    parts = frozenset(part for module in modules for part in module.parts)
    if twice := next((module.name for module in modules if module.name in checkpoint and module.name not in parts), None):
        raise FormatError(f"{checkpoint.path}: tensor {quoted(twice)} is there twice, once of them quantized")
    of_activations = tuple(name for name in checkpoint.names() if _OF_ACTIVATIONS.search(name)) if settings else ()
    return PackedTensors(settings, {module.name: module for module in modules}, parts, of_activations)


class _Finder:
    """Recognises modules by the one tensor of theirs that no other kind has."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, settings: Settings | None) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        makers: dict[str, Any] = {"gptq": GptqReader, "awq": AwqReader, "compressed-tensors": CompressedTensorsReader}
        maker = makers.get(settings.method) if settings else None
        self.reader = maker(settings) if maker else None

    def module(self, name: str) -> PackedModule | None:
        """The module whose codes this tensor holds; None if it holds none."""
        module, _, suffix = name.rpartition(".")
        parts = Parts(self.checkpoint, module)
        if suffix in ("qweight", "weight_packed"):
            return self._reader_for(name, suffix).module(parts)
        if suffix == "weight":
            return self._weight(parts)
        if suffix.endswith("_blocks") and parts.has(suffix.removesuffix("_blocks") + "_scales"):
            base = suffix.removesuffix("_blocks")
            return mxfp4_module(parts, parts.name(base), suffix, f"{base}_scales")
        return None

    def _reader_for(self, name: str, suffix: str) -> _Reader:
        if self.reader is None or self.reader.marker != suffix:
            stated = f"{self.settings.where} says {self.settings.method}" if self.settings else "no config beside it says how"
            raise FormatError(f"{self.checkpoint.path}: tensor {quoted(name)} holds packed codes, but {stated}")
        return self.reader

    def _weight(self, parts: Parts) -> PackedModule | None:
        """A weight stored in float8 or in bytes, with its scale beside it."""
        if not any(parts.has(scale) for scale in SCALES):
            return None
        if parts.dtype("weight") in FLOAT8:
            return float8_module(parts, self._block(parts))
        if parts.dtype("weight") == "I8" and isinstance(self.reader, CompressedTensorsReader):
            return self.reader.bytes_module(parts)
        return None

    def _block(self, parts: Parts) -> tuple[int, int] | None:
        if isinstance(self.reader, CompressedTensorsReader):
            return self.reader.block(parts)
        stated = self.settings.value("weight_block_size") if self.settings else None
        if stated is None:
            return None
        if not isinstance(stated, list) or len(stated) != 2 or not all(type(size) is int and size > 0 for size in stated):
            raise FormatError(f"{self.settings.where}: weight_block_size must be two sizes, found {quoted(stated)}")
        return tuple(stated)


def read_module(module: PackedModule) -> PackedIntTensor | QuantTensor | np.ndarray:
    """The weight as the kernels read it. Errors as `PackedModule.read`."""
    stored = module.read()
    return canonical(stored) if isinstance(stored, StoredIntegers) else stored
