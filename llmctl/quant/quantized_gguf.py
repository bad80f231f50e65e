"""A calibrated model as a GGUF file: the usual plan, with solved tensors in the place of those that would be rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmctl.errors import UnsupportedError
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.quant.convert import Plan
from llmctl.quant.huggingface import gguf_reader
from llmctl.quant.results import Results
from llmctl.quant.rtn import Tensor
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


def gguf_targets(plan: Plan, weights: ModelWeights, modules: set[str]) -> dict[str, Format]:
    """What the plan makes of the model's projections: whole module name → type, of those that are rounded."""
    names = {weights.family.gguf_names.to_gguf(f"{module}.weight"): module for module in modules}
    found = {
        names[tensor.source.name]: tensor.format
        for tensor in plan.tensors
        if tensor.source.name in names and not tensor.format.is_plain
    }
    if not found:
        raise UnsupportedError(f"{plan.source.path}: {plan.type_name} rounds none of the model's projections")
    return found


def with_results(plan: Plan, weights: ModelWeights, results: Results, targets: Mapping[str, Format]) -> Plan:
    """The plan with the solved tensors in it."""
    solved = SolvedWeights(weights, results, targets)
    tensors = []
    for tensor in plan.tensors:
        name = weights.family.gguf_names.to_hf(tensor.source.name)
        module = name.removesuffix(".weight") if name else None
        if module in targets:
            source = replace(tensor.source, read=gguf_reader(solved, name), format=targets[module], kept=tensor.source.format)
        elif name is not None and results.changed(name) is not None:
            source = replace(tensor.source, read=gguf_reader(solved, name), format=FORMATS["F32"], kept=tensor.source.format)
        else:
            source = tensor.source
        tensors.append(replace(tensor, source=source))
    return replace(plan, tensors=tensors)
