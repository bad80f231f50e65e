"""A model's weights in other formats, made while they are read: a draft of the model itself needs no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmctl.kernels.encode import Encoder
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format
from llmctl.runtime.models.weights import ModelWeights, Weight


class RequantizedWeights:
    """`ModelWeights` whose matrices come in other formats. formats: by Hugging Face name; tensors not in it stay as they are."""

    def __init__(self, weights: ModelWeights, formats: Mapping[str, Format], threads: int) -> None:
        self._weights, self._formats, self._encoder = weights, formats, Encoder(threads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def read(self, name: str) -> Weight:
        """As `ModelWeights.read`, rounded to the format."""
        weight, form = self._weights.read(name), self._formats.get(name)
        if form is None or (isinstance(weight, QuantTensor) and weight.format == form):
            return weight
        plain = weight if isinstance(weight, np.ndarray) else dequantize(weight)
        return self._encoder.encode(np.ascontiguousarray(plain), form)
