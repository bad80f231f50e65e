"""Grouped integer codes as GPTQ, AWQ and compressed-tensors store them: one class a layout, nothing rounded, ever.

Each says what it cannot hold, which tensors a module becomes, and the config that describes them. The bits are those of
runtime/checkpoint/packed_*.py, the other way round.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from llmctl.runtime.checkpoint.packed_bits import awq_from_rows, awq_words, pack_codes, words_for
from llmctl.runtime.checkpoint.packed_integers import StoredIntegers

HEAD = "lm_head"
_GPTQ_BITS = (2, 3, 4, 8)
_AWQ_ROWS = 32
_EIGHT = 8


@dataclass(frozen=True)
class Scheme:
    """What a config says of one module, and what its tensors' shapes follow from. ordered: the columns of a group are any."""

    bits: int
    group_size: int
    shape: tuple[int, int]
    num_groups: int
    symmetric: bool
    ordered: bool
    scale_dtype: np.dtype

    @classmethod
    def of(cls, stored: StoredIntegers) -> Scheme:
        """That of a module as it was read."""
        return cls(
            bits=stored.bits,
            group_size=stored.group_size,
            shape=stored.shape,
            num_groups=stored.scales.shape[1],
            symmetric=stored.zero_points is None,
            ordered=stored.g_idx is not None,
            scale_dtype=stored.scales.dtype,
        )

    def blank(self) -> StoredIntegers:
        """A module like this one whose numbers are all 0: for the shapes and types of its tensors."""
        groups, columns = (self.shape[0], self.num_groups), self.shape[1]
        words = np.broadcast_to(np.uint32(0), (self.shape[0], words_for(columns, self.bits)))
        return StoredIntegers(
            bits=self.bits,
            group_size=self.group_size,
            shape=self.shape,
            load_words=lambda: np.ascontiguousarray(words),
            scales=np.broadcast_to(np.zeros((), self.scale_dtype), groups),
            zero_points=None if self.symmetric else np.broadcast_to(np.uint8(0), groups),
            g_idx=np.broadcast_to(np.int32(0), (columns,)) if self.ordered else None,
        )


Modules = Mapping[str, Scheme]


class Layout(Protocol):
    """name: as --to asks for it and configs state it. label: for the names of folders."""

    name: str
    label: str

    def why_not(self, module: str, stored: StoredIntegers) -> str | None:
        """Why the module cannot be stored so without a change to its values; None if it can. Reads no codes."""

    def tensors(self, stored: StoredIntegers, all_symmetric: bool) -> dict[str, np.ndarray]:
        """The module's tensors by the ends of their names. all_symmetric: so are all modules of the model, which one config
        describes."""

    def config(self, modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
        """quantization_config. unquantized: modules that a reader would expect to be quantized too."""


class GptqLayout:
    """Version 1 where all zero points are those of symmetric codes, which every reader knows; version 2 otherwise, since
    version 1 cannot store a zero point of 0 in a way that all readers agree on."""

    name, label = "gptq", "GPTQ"

    def why_not(self, module: str, stored: StoredIntegers) -> str | None:
        if stored.bits not in _GPTQ_BITS:
            return f"GPTQ has codes of 2, 3, 4 or 8 bits, these have {stored.bits}"
        return _scales_not_f16(stored)

    def tensors(self, stored: StoredIntegers, all_symmetric: bool) -> dict[str, np.ndarray]:
        zeros = stored.all_zero_points()
        fields = zeros - np.uint8(1) if all_symmetric else zeros
        return {
            "qweight": _signed(stored.words.T),
            "qzeros": _signed(pack_codes(np.ascontiguousarray(fields.T), stored.bits)),
            "scales": stored.scales.astype(np.float16).T,
            "g_idx": stored.groups(),
        }

    def config(self, modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
        symmetric = all(scheme.symmetric for scheme in modules.values())
        (bits, group_size), others = _schemes(modules)
        version = "gptq" if symmetric else "gptq_v2"
        rules: dict[str, Any] = {f"-:^{re.escape(module)}$": {} for module in unquantized if module != HEAD}
        for module, (other_bits, other_size) in others.items():
            rules[f"+:^{re.escape(module)}$"] = {"bits": other_bits, "group_size": other_size}
        return {
            "quant_method": "gptq",
            "method": "gptq",
            "bits": bits,
            "group_size": group_size,
            "desc_act": any(scheme.ordered for scheme in modules.values()),
            "sym": symmetric,
            "lm_head": HEAD in modules,
            "checkpoint_format": version,
            "format": version,
            **({"dynamic": rules} if rules else {}),
        }


class AwqLayout:
    """AutoAWQ's GEMM version."""

    name, label = "awq", "AWQ"

    def why_not(self, module: str, stored: StoredIntegers) -> str | None:
        rows, columns = stored.shape
        if stored.bits != 4:
            return f"AWQ has 4-bit codes, these have {stored.bits}"
        if stored.g_idx is not None:
            return "AWQ has no activation order: the columns of a group must lie side by side"
        if module == HEAD:
            return "AWQ has no quantized head"
        if rows % _AWQ_ROWS:
            return f"AWQ needs a multiple of {_AWQ_ROWS} outputs, there are {rows}"
        if columns % stored.columns_per_group or columns % _EIGHT:
            return f"groups must be whole there, {columns} columns are not a multiple of {stored.columns_per_group}"
        return _scales_not_f16(stored)

    def tensors(self, stored: StoredIntegers, all_symmetric: bool) -> dict[str, np.ndarray]:
        zeros = np.ascontiguousarray(stored.all_zero_points().T)
        return {
            "qweight": _signed(awq_from_rows(stored.words)),
            "qzeros": _signed(awq_words(zeros)),
            "scales": stored.scales.astype(np.float16).T,
        }

    def config(self, modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
        (bits, group_size), _ = _schemes(modules)
        return {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(unquantized) or None,
        }


class CompressedTensorsLayout:
    """pack-quantized, in its present packing (codes may cross words)."""

    name, label = "compressed-tensors", "compressed-tensors"

    def why_not(self, module: str, stored: StoredIntegers) -> str | None:
        columns, size = stored.shape[1], stored.columns_per_group
        return f"groups must be whole there, {columns} columns are not a multiple of {size}" if columns % size else None

    def tensors(self, stored: StoredIntegers, all_symmetric: bool) -> dict[str, np.ndarray]:
        tensors = {
            "weight_packed": _signed(stored.words),
            "weight_scale": stored.scales,
            "weight_shape": np.array(stored.shape, np.int64),
        }
        if stored.zero_points is not None:
            tensors["weight_zero_point"] = _signed(pack_codes(np.ascontiguousarray(stored.zero_points.T), stored.bits).T)
        if stored.g_idx is not None:
            tensors["weight_g_idx"] = stored.g_idx
        return tensors

    def config(self, modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
        found: dict[tuple[Any, ...], list[str]] = {}
        for module, scheme in modules.items():
            kind = (scheme.bits, scheme.group_size, scheme.symmetric, scheme.ordered)
            found.setdefault(kind, []).append(module)
        groups = {f"group_{i}": _config_group(kind, ["Linear"] if len(found) == 1 else targets)
                  for i, (kind, targets) in enumerate(found.items())}  # fmt: skip
        return {
            "quant_method": self.name,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(dict.fromkeys([*unquantized, *([HEAD] if HEAD not in modules else [])])),
            "kv_cache_scheme": None,
        }


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (GptqLayout(), AwqLayout(), CompressedTensorsLayout())}


def why_not_together(layout: Layout, modules: Modules) -> str | None:
    """Why modules that could each be stored so cannot be in one model: AWQ has one group size for all."""
    sizes = sorted({scheme.group_size for scheme in modules.values()})
    if isinstance(layout, AwqLayout) and len(sizes) > 1:
        return f"AWQ has one group size for the whole model, there are {', '.join(map(str, sizes))}"
    return None


def _signed(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view("<i4")


def _schemes(modules: Modules) -> tuple[tuple[int, int], dict[str, tuple[int, int]]]:
    """Bits and group size that most modules have, and those of the modules that have others."""
    schemes = {module: (scheme.bits, scheme.group_size) for module, scheme in modules.items()}
    most = Counter(schemes.values()).most_common(1)[0][0]
    return most, {module: scheme for module, scheme in schemes.items() if scheme != most}


def _scales_not_f16(stored: StoredIntegers) -> str | None:
    """float16 is the only type that readers of these layouts take for scales."""
    with np.errstate(over="ignore"):
        changed = np.count_nonzero(stored.scales.astype(np.float16).astype(stored.scales.dtype) != stored.scales)
    if not changed:
        return None
    return f"scales are float16 there, and {changed} of {stored.scales.size} {stored.scales.dtype} scales would be rounded"


def _config_group(kind: tuple[Any, ...], targets: list[str]) -> dict[str, Any]:
    bits, group_size, symmetric, ordered = kind
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "actorder": "group" if ordered else None,
        "dynamic": False,
    }
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
