"""What the layers of a work folder hold, as files store it: by module, read when it is wanted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format
from llmctl.quant.module_solver import Target
from llmctl.quant.work_folder import WorkFolder
from llmctl.runtime.checkpoint.packed_integers import StoredIntegers, dequantized

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FLOAT = "float/"
HEAD_LAYER = 1 << 16
"""Where a work folder keeps the head, which is in no layer."""


class Results:
    """targets: by whole module name, what they were solved for. shapes: theirs."""

    def __init__(self, work: WorkFolder, targets: Mapping[str, Target], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._work, self._targets, self._shapes = work, targets, shapes

    def modules(self, layer: int) -> list[str]:
        """Whole names of the solved modules of a layer."""
        return [name for name in self._targets if _layer(name) == layer]

    def stored(self, module: str) -> StoredIntegers | QuantTensor:
        """The module as it is to be written."""
        layer, target, shape = _layer(module), self._targets[module], self._shapes[module]
        if isinstance(target, Format):
            return QuantTensor(target, shape, self._work.read(layer, f"{module}/blocks"))
        return StoredIntegers(
            bits=target.bits,
            group_size=target.group_size,
            shape=(shape[0], shape[1]),
            load_words=lambda: self._work.read(layer, f"{module}/words"),
            scales=self._work.read(layer, f"{module}/scales"),
            zero_points=None if target.symmetric else self._work.read(layer, f"{module}/zeros"),
        )

    def values(self, module: str) -> np.ndarray:
        """float32 of the module's shape: what readers will compute with."""
        stored = self.stored(module)
        return dequantize(stored) if isinstance(stored, QuantTensor) else dequantized(stored)

    def floats(self, layer: int) -> dict[str, np.ndarray]:
        """Other tensors of the layer that changed, float32 by whole name."""
        names = [name for name in self._work.names(layer) if name.startswith(_FLOAT)]
        return {name.removeprefix(_FLOAT): self._work.read(layer, name) for name in names}

    def changed(self, name: str) -> np.ndarray | None:
        """A tensor that is no quantized weight as it is to be written, float32; None if it is as it was."""
        if _LAYER.match(name) is None or _FLOAT + name not in self._work.names(_layer(name)):
            return None
        return self._work.read(_layer(name), _FLOAT + name)

    def facts(self, layer: int) -> dict[str, Any]:
        """What was noted about a layer."""
        return self._work.facts(layer)

    def squares(self, layer: int) -> Iterator[tuple[str, np.ndarray, int]]:
        """(module, Σ x² of its inputs, tokens) of a layer's modules, where text was seen."""
        names = self._work.names(layer)
        for name in names:
            if name.endswith("/squares"):
                module = name.removesuffix("/squares")
                yield module, self._work.read(layer, name), int(self._work.read(layer, f"{module}/count")[0])


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found is not None else HEAD_LAYER
