"""Quantized weights of a folder on their way to GGUF: which types keep their codes, and what is lost where none does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmctl.kernels.formats.integer_blocks import formats_that_keep
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.quant.rtn import packed_format
from llmctl.runtime.checkpoint.dtypes import SAFETENSORS_FORMATS
from llmctl.runtime.checkpoint.packed_integers import GROUP_MULTIPLE, StoredIntegers
from llmctl.runtime.checkpoint.packed_parts import PackedModule

if TYPE_CHECKING:
    from llmctl.quant.convert import PlannedTensor

_BLOCK = 32
_FLOAT8_TARGET = "BF16"


@dataclass(frozen=True)
class PackedFacts:
    """What is known of a packed weight before its codes are read.

    format: it stands for in plans. nbytes: stored. keeps: names of the types that hold its codes unchanged, the smallest first.
    why_not: the reason where there are none. scale_error: by how much a scale changes at most as a float16, relative to it.
    offset_error: the same of a type's offset, in steps of the codes.
    """

    format: Format
    nbytes: int
    keeps: tuple[str, ...] = ()
    why_not: str | None = None
    scale_error: float = 0.0
    offset_error: float = 0.0

    def error_in(self, name: str) -> float:
        """How much scale (relative) or offset (steps) change at most in a type that keeps the codes; 0 is exact."""
        return max(self.scale_error, self.offset_error if name.endswith("_1") else 0.0)

    def natural(self, columns: int) -> Format:
        """The type for those who ask for none: one that keeps the codes, else 8 bits, which lose next to nothing."""
        if self.format.name == "MXFP4":
            return self.format
        if self.format.is_plain:
            return FORMATS[_FLOAT8_TARGET]
        return FORMATS[self.keeps[0] if self.keeps else "F16" if columns % _BLOCK else "Q8_0"]


def together(facts: Sequence[PackedFacts]) -> PackedFacts:
    """The facts of several weights that become one: it keeps its codes in a type that keeps those of all."""
    first = facts[0]
    return PackedFacts(
        first.format,
        sum(one.nbytes for one in facts),
        tuple(name for name in first.keeps if all(name in one.keeps for one in facts)),
        next((one.why_not for one in facts if one.why_not), None),
        max(one.scale_error for one in facts),
        max(one.offset_error for one in facts),
    )


def describe(module: PackedModule, nbytes: int) -> PackedFacts:
    """The facts of one weight. nbytes: of all its tensors. Reads scales, zero points and group indices, no codes."""
    if not module.form.startswith("INT"):
        known = FORMATS if module.form in FORMATS else SAFETENSORS_FORMATS
        return PackedFacts(known[module.form], nbytes, (module.form,) if module.form in FORMATS else ())
    stored = module.read()
    assert isinstance(stored, StoredIntegers), module.form
    form, symmetric = packed_format(stored.bits), stored.zero_points is None
    if reason := _why_not(stored):
        return PackedFacts(form, nbytes, why_not=reason)
    keeps = formats_that_keep(stored.bits, symmetric)
    reason = None if keeps else f"no type has offsets for codes of {stored.bits} bits"
    return PackedFacts(form, nbytes, keeps, reason, _scale_error(stored), _offset_error(stored))


def _why_not(stored: StoredIntegers) -> str | None:
    """Why GGUF's blocks of 32 columns cannot have the groups of this weight."""
    size = np.gcd(stored.columns_per_group, stored.shape[1])
    if stored.g_idx is not None and (np.diff(stored.g_idx) < 0).any():
        return "activation order: the columns of a group do not lie side by side"
    return f"groups of {stored.columns_per_group} columns are no blocks of {_BLOCK}" if size % GROUP_MULTIPLE else None


def _scale_error(stored: StoredIntegers) -> float:
    scales = stored.scales.astype(np.float32)
    return float(np.max(np.abs(_as_f16(scales) - scales) / np.maximum(np.abs(scales), np.float32(1e-30)), initial=0))


def _offset_error(stored: StoredIntegers) -> float:
    scales = stored.scales.astype(np.float32)
    offsets = scales * stored.all_zero_points().astype(np.float32)
    return float(np.max(np.abs(_as_f16(offsets) - offsets) / np.maximum(np.abs(scales), np.float32(1e-30)), initial=0))


def _as_f16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def packed_warnings(tensors: Sequence[PlannedTensor]) -> Iterator[str]:
    """What the user must know about packed weights in the types planned."""
    packed = [tensor for tensor in tensors if tensor.source.packed is not None]
    for name in sorted({tensor.format.name for tensor in packed if tensor.keeps_codes}):
        found = [tensor for tensor in packed if tensor.keeps_codes and tensor.format.name == name]
        worst = max(tensor.source.packed.error_in(name) for tensor in found)
        if worst:
            yield f"{_count(found)} in {name} with unchanged codes, {_rounded(name, worst)}{_exactly(found)}"
    for reason in sorted({tensor.source.packed.why_not for tensor in packed if tensor.source.packed.why_not}):
        found = [tensor for tensor in packed if tensor.source.packed.why_not == reason]
        yield f"{_count(found)} rounded again, since GGUF cannot keep the codes ({reason})"
    float8 = [tensor for tensor in packed if tensor.source.format.is_plain and tensor.format.name != "F32"]
    if float8:
        yield f"{_count(float8)} float8 times a scale, rounded to {float8[0].format.name}; --type F32 keeps every value"


def _rounded(name: str, worst: float) -> str:
    what = "offsets rounded to float16 by at most {:.2g} of a step" if name.endswith("_1") else "scales rounded by at most {:.2g}"
    return what.format(worst)


def _exactly(found: Sequence[PlannedTensor]) -> str:
    """A type that would be exact for all of them, if there is one."""
    exact = [{name for name in tensor.source.packed.keeps if not tensor.source.packed.error_in(name)} for tensor in found]
    both = set.intersection(*exact)
    best = next((name for name in found[0].source.packed.keeps if name in both), None)
    return f"; --type {best} holds them exactly" if best else ""


def _count(found: Sequence[PlannedTensor]) -> str:
    return "1 weight is" if len(found) == 1 else f"{len(found)} weights are"
