"""SparseMlp: a router, the experts it chooses among, and the expert that all tokens share where there is one."""

from __future__ import annotations

import numpy as np

from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.moe import Experts, Routing
from llmctl.kernels.ops import Array, Ops
from llmctl.runtime.models.config import ExpertsConfig, ModelConfig
from llmctl.runtime.models.layers import GatedMlp, Linear, checked
from llmctl.runtime.models.weights import ModelWeights


class SparseMlp:
    """The weighted sum of the chosen experts' MLPs, plus the shared one's."""

    def __init__(self, ops: Ops, config: ModelConfig, weights: ModelWeights, prefix: str) -> None:
        """prefix: of the layer's modules. Weights of the experts are read one after the other."""
        choices, hidden = config.experts, config.hidden_size
        assert choices is not None, "a sparse layer without experts"
        names = choices.names
        self.ops, self.activation = ops, config.activation
        self.router = Linear.read(ops, weights, prefix + names.router, (choices.num_experts, hidden), choices.bias)
        self.routing = _routing(choices, weights, prefix)
        self.experts = _read_experts(ops, config, choices, weights, prefix)
        self.shared = self.shared_gate = None
        if choices.shared_size is not None:
            self.shared = GatedMlp(ops, config, weights, f"{prefix}{names.shared}.", choices.shared_size)
        if choices.shared_gate:
            self.shared_gate = Linear.read(ops, weights, prefix + names.shared_gate, (1, hidden))

    def forward(self, x: Array) -> Array:
        """x [T, hidden_size] → the same."""
        y = self.ops.moe(x, self.router.forward(x), self.experts, self.routing, self.activation)
        if self.shared is None:
            return y
        shared = self.shared.forward(x)
        if self.shared_gate is not None:
            shared = self.ops.gated(shared, self.shared_gate.forward(x))
        return self.ops.add(y, shared)


def _routing(choices: ExpertsConfig, weights: ModelWeights, prefix: str) -> Routing:
    bias = None
    if choices.correction_bias is not None:
        bias = np.array(dequantize(checked(weights, prefix + choices.correction_bias, (choices.num_experts,))), np.float32)
    return choices.routing(bias)


def _read_experts(ops: Ops, config: ModelConfig, choices: ExpertsConfig, weights: ModelWeights, prefix: str) -> Experts:
    hidden, size, names = config.hidden_size, choices.intermediate_size, choices.names
    shapes = {names.gate: (size, hidden), names.up: (size, hidden), names.down: (hidden, size)}
    matrices, biases = [], []
    for name, shape in shapes.items():
        modules = [prefix + name.format(expert) for expert in range(choices.num_experts)]
        matrices.append([Linear.read(ops, weights, module, shape).weight for module in modules])
        biases.append(_read_biases(ops, weights, modules, shape[0]) if choices.bias else None)
    return Experts(*matrices, np.zeros(choices.num_experts, np.int64), *biases)


def _read_biases(ops: Ops, weights: ModelWeights, modules: list[str], size: int) -> Array:
    vectors = [dequantize(checked(weights, f"{module}.bias", (size,))) for module in modules]
    return ops.prepare_vector(np.stack(vectors))
