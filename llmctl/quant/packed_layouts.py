"""Grouped integer codes as GPTQ, AWQ and compressed-tensors store them: one class a layout, nothing rounded, ever.

Each says what it cannot hold, which tensors a module becomes, and the config that describes them. The bits are those of
runtime/checkpoint/packed_*.py, the other way round.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from llmctl.runtime.checkpoint.packed_bits import awq_from_rows, awq_words, pack_codes
from llmctl.runtime.checkpoint.packed_integers import StoredIntegers

Modules = Mapping[str, StoredIntegers]
HEAD = "lm_head"
_GPTQ_BITS = (2, 3, 4, 8)
_AWQ_ROWS = 32
_EIGHT = 8


class Layout(Protocol):
    """name: as --to asks for it and configs state it. label: for the names of folders."""

    name: str
    label: str

    def why_not(self, module: str, stored: StoredIntegers) -> str | None:
        """Why the module cannot be stored so without a change to its values; None if it can. Reads no codes."""

    def tensors(self, stored: StoredIntegers, modules: Modules) -> dict[str, np.ndarray]:
        """The module's tensors by the ends of their names. modules: all of the model, as one config describes them."""

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

    def tensors(self, stored: StoredIntegers, modules: Modules) -> dict[str, np.ndarray]:
        zeros = stored.all_zero_points()
        fields = zeros - np.uint8(1) if _all_symmetric(modules) else zeros
        return {
            "qweight": _signed(stored.words.T),
            "qzeros": _signed(pack_codes(np.ascontiguousarray(fields.T), stored.bits)),
            "scales": stored.scales.astype(np.float16).T,
            "g_idx": stored.groups(),
        }

    def config(self, modules: Modules, unquantized: Sequence[str]) -> dict[str, Any]:
        symmetric = _all_symmetric(modules)
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
            "desc_act": any(stored.g_idx is not None for stored in modules.values()),
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

    def tensors(self, stored: StoredIntegers, modules: Modules) -> dict[str, np.ndarray]:
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

    def tensors(self, stored: StoredIntegers, modules: Modules) -> dict[str, np.ndarray]:
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
        for module, stored in modules.items():
            kind = (stored.bits, stored.group_size, stored.zero_points is None, stored.g_idx is not None)
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
    sizes = sorted({stored.group_size for stored in modules.values()})
    if isinstance(layout, AwqLayout) and len(sizes) > 1:
        return f"AWQ has one group size for the whole model, there are {', '.join(map(str, sizes))}"
    return None


def _signed(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view("<i4")


def _all_symmetric(modules: Modules) -> bool:
    return all(stored.zero_points is None for stored in modules.values())


def _schemes(modules: Modules) -> tuple[tuple[int, int], dict[str, tuple[int, int]]]:
    """Bits and group size that most modules have, and those of the modules that have others."""
    schemes = {module: (stored.bits, stored.group_size) for module, stored in modules.items()}
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
