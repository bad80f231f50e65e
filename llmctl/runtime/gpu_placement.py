"""What of a model a GPU holds: all of it, or its last layers and the head; and the memory that is left for the cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from llmctl.errors import OutOfMemoryError, UsageError
from llmctl.runtime.cache.memory import LayerShape, bytes_per_token
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.weights import ModelWeights

AUTO = "auto"
UTILIZATION = 0.9
"""Share of the GPU's memory that is used where no other is asked for."""
PREPARED_SHARE = 1.05
"""Bytes of weights in kernel order for a byte of the formats the native kernels read, at most."""
_RESERVE = 512 << 20
"""For the numbers of a step, graphs and what CUDA keeps for itself."""
_USUAL_CONTEXT = 4096
"""Tokens that there is to be room for, where no other number is asked for."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class GpuChoice:
    """What was asked for. layers: how many of the last layers go to the GPU, "auto" for as many as fit, None for all.
    utilization: share of the GPU's memory to use."""

    layers: int | str | None = AUTO
    utilization: float = UTILIZATION

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise UsageError(f"--gpu-memory-utilization must be above 0 and at most 1, found {self.utilization}")


USUAL_GPU = GpuChoice()


def parse_gpu_layers(text: str | None) -> int | str | None:
    """--gpu-layers: "auto" or a number. Errors: UsageError."""
    if text is None or text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"--gpu-layers {text}: expected a number from 1 on, or auto; --device cpu puts no layer on the GPU")
    return int(text)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU."""

    free: int
    total: int

    def budget(self, utilization: float) -> int:
        """What may be used of it beside what is used already, after the reserve."""
        return int(self.total * utilization) - (self.total - self.free) - _RESERVE


@dataclass(frozen=True)
class Placement:
    """gpu_layers: None for all. cache_bytes: of the cache of all layers, so much that the GPU's part of it fits there."""

    gpu_layers: int | None
    cache_bytes: int


@dataclass(frozen=True)
class _Sizes:
    """Bytes of every layer's weights, of what lies before and after them, and of a token in each layer's cache."""

    layers: list[int]
    before: int
    after: int
    per_token: list[int]

    def of_last(self, count: int) -> int:
        """Weights on the GPU when it has the last `count` layers; the embedding where it has all."""
        before = self.before if count == len(self.layers) else 0
        return sum(self.layers[len(self.layers) - count :]) + self.after + before

    def cache_of_last(self, count: int, tokens: int) -> int:
        """Cache of those layers."""
        return tokens * sum(self.per_token[len(self.per_token) - count :])


def place(
    weights: ModelWeights,
    kv_type: str,
    shapes: tuple[LayerShape, ...],
    choice: GpuChoice,
    memory: DeviceMemory,
    context: int | None,
) -> Placement:
    """Where the layers go. shapes: of the layers' cache. context: tokens asked for, None for none.

    Errors: OutOfMemoryError where what was asked for does not fit, with what would; UsageError for more layers than there are.
    """
    sizes, count, path = _sizes(weights, kv_type, shapes), weights.config.num_layers, weights.checkpoint.path
    budget, tokens = memory.budget(choice.utilization), _tokens(weights.config, context)
    fitting = max((n for n in range(1, count + 1) if _fits(sizes, n, tokens, budget)), default=0)
    wanted = fitting if choice.layers == AUTO else count if choice.layers is None else choice.layers
    if wanted > count:
        raise UsageError(f"--gpu-layers {wanted}: this model has {count} layers")
    if not fitting or wanted > fitting:
        raise OutOfMemoryError(_what_fits(path, sizes, wanted or 1, fitting, tokens, budget, choice))
    left = budget - sizes.of_last(wanted)
    share = sizes.cache_of_last(wanted, 1) / max(1, sum(sizes.per_token))
    return Placement(None if wanted == count else wanted, int(left / share) if share else left)


def _fits(sizes: _Sizes, count: int, tokens: int, budget: int) -> bool:
    return sizes.of_last(count) + sizes.cache_of_last(count, tokens) <= budget


def _tokens(config: ModelConfig, context: int | None) -> int:
    return context or min(_USUAL_CONTEXT, config.max_position_embeddings)


def _what_fits(path: Path, sizes: _Sizes, wanted: int, fitting: int, tokens: int, budget: int, choice: GpuChoice) -> str:
    needed = sizes.of_last(wanted) + sizes.cache_of_last(wanted, tokens)
    way_out = f"--gpu-layers {fitting} fits, or auto" if fitting else "--device cpu computes it without a GPU"
    return (
        f"{path}: {wanted} layers on the GPU need {needed / 1e9:.1f} GB with the cache of {tokens} tokens, "
        f"{max(0, budget) / 1e9:.1f} GB may be used (--gpu-memory-utilization {choice.utilization:g}): {way_out}"
    )


def _sizes(weights: ModelWeights, kv_type: str, shapes: tuple[LayerShape, ...]) -> _Sizes:
    layers, before, after = [0] * weights.config.num_layers, 0, 0
    for name in weights.names():
        nbytes = int(weights.stored(name).bytes_on_native * PREPARED_SHARE)
        if (found := _LAYER.match(name)) and int(found[1]) < len(layers):
            layers[int(found[1])] += nbytes
        elif name.startswith("model.embed"):
            before += nbytes
            after += nbytes if weights.config.tie_word_embeddings and "tokens" in name else 0
        else:
            after += nbytes
    # A model that is whole on the GPU has a tied embedding once.
    before = 0 if weights.config.tie_word_embeddings else before
    return _Sizes(layers, before, after, [bytes_per_token([shape], kv_type) or 0 for shape in shapes])
