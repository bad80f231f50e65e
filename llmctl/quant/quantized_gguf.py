"""A calibrated model as a GGUF file: the usual plan, with solved tensors in the place of those that would be rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.grids import grid_spec
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.quant.convert import Plan
from llmctl.quant.huggingface import gguf_reader
from llmctl.quant.imatrix import ImportanceMatrix
from llmctl.quant.results import Results
from llmctl.quant.rtn import Stack, Tensor
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.weights import ModelWeights


class SolvedWeights:
    """The model's tensors by Hugging Face name, the solved ones as they are to be written."""

    def __init__(self, weights: ModelWeights, results: Results, targets: Mapping[str, Format]) -> None:
        self.family, self.config = weights.family, weights.config
        self._weights, self._results, self._targets = weights, results, targets

    def read(self, name: str) -> Tensor:
        """As `ModelWeights.read`."""
        module = name.removesuffix(".weight")
        if module in self._targets and name.endswith(".weight"):
            stored: Any = self._results.stored(module)
            return stored
        changed = self._results.changed(name)
        return self._weights.read(name) if changed is None else changed

    def is_transposed(self, name: str) -> bool:
        """As `ModelWeights.is_transposed`; what was solved lies as the forward pass reads it."""
        return name.removesuffix(".weight") not in self._targets and self._weights.is_transposed(name)

    def release(self, name: str) -> None:
        """As `ModelWeights.release`."""
        self._weights.release(name)


def gguf_targets(plan: Plan, weights: ModelWeights, modules: Iterable[str], *, feedback: bool) -> dict[str, Format]:
    """What the plan makes of the model's projections: whole module name → type, of those that are rounded.

    feedback: errors will be fed back. UnsupportedError for a type that has no grid for that, and if nothing is rounded.
    """
    names = _by_gguf_name(weights, modules)
    found = {
        module: tensor.format
        for tensor in plan.tensors
        for module in names.get(tensor.source.name, ())
        if not tensor.format.is_plain
    }
    if feedback:
        for form in dict.fromkeys(found.values()):
            grid_spec(form)
    if not found:
        raise UnsupportedError(f"{plan.source.path}: {plan.type_name} rounds none of the model's projections")
    return found


def _by_gguf_name(weights: ModelWeights, modules: Iterable[str]) -> dict[str, list[str]]:
    """Modules by the name of the GGUF tensor that they are, or that they are stacked in, in order."""
    found: dict[str, list[str]] = {}
    for module in modules:
        if name := weights.family.gguf_names.to_gguf(f"{module}.weight"):
            found.setdefault(name, []).append(module)
    return found


def module_importances(matrix: ImportanceMatrix, weights: ModelWeights, modules: Iterable[str]) -> dict[str, np.ndarray]:
    """float32 [K] by whole module name, of the modules that the file names. FormatError if it is of another model."""
    found: dict[str, np.ndarray] = {}
    for name, members in _by_gguf_name(weights, modules).items():
        values = matrix.weights.get(name)
        if values is None:
            continue
        columns = weights.stored(f"{members[0]}.weight").shape[-1]
        if values.size != len(members) * columns:
            raise FormatError(
                f"{matrix.path}: has {values.size} values for {quoted(name)}, which needs {len(members) * columns}: it is of "
                "another model"
            )
        found |= zip(members, np.ascontiguousarray(values.reshape(len(members), columns), np.float32), strict=True)
    if not found:
        raise FormatError(f"{matrix.path}: names no matrix of this model")
    return found


def with_results(plan: Plan, weights: ModelWeights, results: Results, targets: Mapping[str, Format]) -> Plan:
    """The plan with the solved tensors in it."""
    solved, names = SolvedWeights(weights, results, targets), _by_gguf_name(weights, targets)
    tensors = []
    for tensor in plan.tensors:
        modules, source = names.get(tensor.source.name), tensor.source
        name = weights.family.gguf_names.to_hf(source.name)
        if modules:
            reader = _reader(solved, modules, source.shape)
            source = replace(source, read=reader, format=tensor.format, kept=source.format, packed=None)
        elif name is not None and results.changed(name) is not None:
            source = replace(source, read=gguf_reader(solved, name), format=FORMATS["F32"], kept=source.format, packed=None)
        tensors.append(replace(tensor, source=source))
    return replace(plan, tensors=tensors)


def _reader(solved: SolvedWeights, modules: list[str], shape: tuple[int, ...]) -> Callable[[], Tensor | Stack]:
    readers = [gguf_reader(solved, f"{module}.weight") for module in modules]
    if not solved.family.gguf_names.is_stack(f"{modules[0]}.weight"):
        return readers[0]
    return lambda: Stack(readers, shape)
