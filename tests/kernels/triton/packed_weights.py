"""Weights of every form that the Triton kernels know, small and of awkward sizes, with what they mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from llmctl.kernels.formats.codecs import dequantize, quantize
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.triton_lib.forms import FORMS
from llmctl.kernels.triton_lib.layouts import Planes
from llmctl.kernels.triton_lib.weights import TritonWeight

Stored = np.ndarray | QuantTensor | PackedIntTensor
INTEGERS = {"I4 groups of 96": (4, 96, True), "I4 rows": (4, -1, False), "I8 groups of 32": (8, 32, True)}
NAMES = (*FORMS, *INTEGERS)


@functools.cache
def stored(name: str, *shape: int) -> Stored:
    """Numbers about as weights are. Of packed integers the first kind has its columns in another order."""
    rng = np.random.default_rng(len(name) + shape[-1])
    if name not in INTEGERS:
        return quantize(rng.standard_normal(shape, np.float32) * np.float32(0.05), FORMATS[name])
    bits, group, has_zeros = INTEGERS[name]
    groups = (*shape[:-1], 1 if group == -1 else shape[-1] // group)
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] * bits // 8), np.uint8)
    scales = rng.standard_normal(groups, np.float32) * np.float32(0.02)
    zeros = rng.integers(0, 1 << bits, groups, np.uint8) if has_zeros else None
    order = rng.permutation(shape[-1]).astype(np.int32) if name.endswith("96") else None
    return PackedIntTensor(bits, group, shape, codes, scales, zeros, order)


def values(weight: Stored) -> torch.Tensor:
    """Its numbers, float32."""
    return torch.from_numpy(dequantize(weight).copy())


def columns_of(name: str) -> int:
    """A length of rows that its blocks divide, and not much else: two turns of the kernels and a rest."""
    return 512 if name.endswith("_K") else 288


def behind_guards(weight: TritonWeight, guarded: Callable[[torch.Tensor], torch.Tensor]) -> TritonWeight:
    """The same between guard bands."""
    planes = weight.planes
    parts = {id(part): guarded(part) for part in (planes.low, planes.high, planes.scales, planes.extra) if part is not None}
    kept = (planes.low, planes.high, planes.scales, planes.extra)
    return replace(weight, planes=Planes(*(None if part is None else parts[id(part)] for part in kept)))


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of all numbers together; infinite for a NaN."""
    error = float((got.double() - wanted.double()).norm() / wanted.double().norm())
    return error if error == error else float("inf")
