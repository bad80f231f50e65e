"""LoRA adapters as PEFT saves them, added to the weights they were trained for: W + s·B·A.

Hu et al. 2021, https://arxiv.org/abs/2106.09685; s is alpha / r, or alpha / √r with rank-stabilized scaling (Kalajdzievski
2023, https://arxiv.org/abs/2312.03732). The product is made in float32, a few rows at a time, as its tensor is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError, LlmctlError, ModelNotFoundError, UnsupportedError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.quant.rtn import Tensor
from llmctl.runtime.checkpoint.files import exists, read_json_object
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.weights import ModelWeights

_CONFIG, _WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_LINEAR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(?:\.\w+)?")
_CHUNK_ROWS = 4096
# Kinds of adapter that do more than add a product, and starts that take something out of the weights first.
_REFUSED_FLAGS = {
    "use_dora": "DoRA scales the rows of the merged weight",
    "lora_bias": "its products have biases",
    "target_parameters": "it targets parameters that are no modules",
    "trainable_token_indices": "it replaces single tokens of the embedding",
    "alora_invocation_tokens": "it acts on a part of the text only",
    "megatron_config": "it is laid out for Megatron",
    "layer_replication": "it is for a model with layers repeated",
    **dict.fromkeys(
        ("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config"),
        "it adds more than a product of two matrices",
    ),
}
_REFUSED_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")

_Pair = tuple[np.ndarray, np.ndarray, bool]  # A, B, whether it is an embedding's


@dataclass(frozen=True)
class Adapter:
    """One adapter as asked for. scale: factor on all it adds."""

    folder: Path
    scale: float = 1.0


@dataclass(frozen=True)
class _Product:
    """s·B·A for one weight; for an embedding, whose rows are A's columns, its transpose. a: (r, in), b: (out, r)."""

    a: np.ndarray
    b: np.ndarray
    scale: float
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        shape = (self.b.shape[0], self.a.shape[1])
        return (shape[1], shape[0]) if self.transposed else shape

    def add_to(self, weight: np.ndarray) -> None:
        """Add it to a float32 weight, in place."""
        left, right = (self.a.T, self.b.T) if self.transposed else (self.b, self.a)
        right = dequantize(np.ascontiguousarray(right)) * np.float32(self.scale)
        for start in range(0, len(weight), _CHUNK_ROWS):
            weight[start : start + _CHUNK_ROWS] += dequantize(np.ascontiguousarray(left[start : start + _CHUNK_ROWS])) @ right


class MergedWeights:
    """Weights with adapters added to them; all others are read as they are.

    changed: Hugging Face names of the weights that are read as float32, because something is added.
    """

    def __init__(self, weights: ModelWeights, adapters: Iterable[Adapter], needed: Sequence[str]) -> None:
        """needed: the tensors of the model. FormatError and UnsupportedError name the adapter and the tensor."""
        self.family, self.config, self.checkpoint = weights.family, weights.config, weights.checkpoint
        self._weights = weights
        self._products: dict[str, list[_Product]] = {}
        for adapter in adapters:
            for name, product in _read_adapter(adapter, weights, set(needed)).items():
                self._products.setdefault(name, []).append(product)
        self.changed = set(self._products)

    def read(self, name: str) -> Tensor:
        """As `ModelWeights.read`, with what the adapters add."""
        stored = self._weights.read(name)
        if name not in self._products:
            return stored
        weight = np.array(dequantize(stored))
        for product in self._products[name]:
            product.add_to(weight)
        return weight

    def is_transposed(self, name: str) -> bool:
        """As `ModelWeights.is_transposed`."""
        return self._weights.is_transposed(name)

    def release(self, name: str) -> None:
        """As `ModelWeights.release`."""
        self._weights.release(name)


def _read_adapter(adapter: Adapter, weights: ModelWeights, needed: set[str]) -> dict[str, _Product]:
    """Weight name → product."""
    folder = adapter.folder
    if not exists(folder / _CONFIG):
        raise ModelNotFoundError(f"{folder}: no LoRA adapter: there is no {_CONFIG} (--lora takes a folder that PEFT saved)")
    if not exists(folder / _WEIGHTS):
        hint = f", only {_PICKLE}, a pickle, which is never opened; save it as safetensors" if exists(folder / _PICKLE) else ""
        raise ModelNotFoundError(f"{folder}: there is no {_WEIGHTS}{hint}")
    config = read_json_object(folder / _CONFIG)
    _refuse_others(folder, config)
    try:
        checkpoint = SafetensorsCheckpoint(folder / _WEIGHTS)
        _check_saved_modules(config, checkpoint)
        pairs = _pairs(checkpoint, weights, needed)
        spelled = weights.family.hf_names.to_folder
        found = {spelled(name).removesuffix(".weight") for name in pairs}
        _check_targets(folder, config, found, set(map(spelled, needed)))
        return {name: _product(folder, config, name, pair, adapter.scale, weights) for name, pair in pairs.items()}
    except LlmctlError as error:
        raise type(error)(str(error) if str(folder) in str(error) else f"{folder}: {error}") from error


def _refuse_others(folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedError(f"{folder}: an adapter of type {quoted(kind)}; only LORA can be merged")
    for flag, why in _REFUSED_FLAGS.items():
        if config.get(flag):
            raise UnsupportedError(f"{folder}: an adapter with {flag} cannot be merged: {why}")
    if config.get("bias", "none") != "none":
        raise UnsupportedError(f"{folder}: the adapter changes biases (bias = {quoted(config['bias'])}), which is not merged")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_REFUSED_STARTS):
        raise UnsupportedError(
            f"{folder}: its training began with {start}, which changed the base weights; save it with PEFT as a plain LoRA "
            "(path_initial_model_for_weight_conversion)"
        )


def _pairs(checkpoint: SafetensorsCheckpoint, weights: ModelWeights, needed: set[str]) -> dict[str, _Pair]:
    """Weight name → the two halves."""
    sides: dict[str, dict[str, str]] = {}
    for stored in checkpoint.names():
        name = stored.removeprefix(_PREFIX)
        found = _LINEAR.fullmatch(name) or _EMBEDDING.fullmatch(name)
        if found is None and _is_copy(checkpoint, stored, weights):
            continue
        if found is None:
            raise UnsupportedError(
                f"tensor {quoted(stored)} is no part of a LoRA product (modules trained as a whole are not merged)"
            )
        weight = weights.canonical(f"{found['module']}.weight")
        if weight not in needed:
            raise FormatError(f"tensor {quoted(stored)} is for {quoted(found['module'])}, which the model does not have")
        if sides.setdefault(weight, {}).setdefault(found["side"], stored) != stored:
            raise FormatError(f"tensor {quoted(stored)} is there twice, as {quoted(sides[weight][found['side']])} too")
    for weight, names in sides.items():
        if len(names) < 2:
            have = next(iter(names.values()))
            raise FormatError(f"tensor {quoted(have)} has no counterpart: {weight} needs lora_A and lora_B")
    return {
        weight: (checkpoint.read(names["A"]), checkpoint.read(names["B"]), "lora_embedding" in names["A"])
        for weight, names in sides.items()
    }


def _check_saved_modules(config: dict[str, Any], checkpoint: SafetensorsCheckpoint) -> None:
    """A module said to be saved whole must be there; what then becomes of it `_pairs` decides."""
    modules = config.get("modules_to_save") or []
    for module in modules if isinstance(modules, list) else [modules]:
        if not any(f".{module}." in f".{name}" for name in checkpoint.names()):
            raise FormatError(f"{quoted(module)} is among its modules_to_save, but has no tensors")


def _is_copy(checkpoint: SafetensorsCheckpoint, stored: str, weights: ModelWeights) -> bool:
    """Whether it is the embedding or head as the model has it: PEFT saves them along when they are targets."""
    name = weights.canonical(stored.removeprefix(_PREFIX).replace(".base_layer.", "."))
    if name not in weights:
        return False
    there, here = checkpoint.read(stored), weights.read(name)
    return there.shape == here.shape and np.array_equal(dequantize(there), dequantize(here))


def _check_targets(folder: Path, config: dict[str, Any], found: set[str], needed: set[str]) -> None:
    """Every module that the adapter says it targets must have its tensors, and no other."""
    targets = config.get("target_modules")
    if targets is None:
        return
    modules = {name.removesuffix(".weight") for name in needed if name.endswith(".weight") and "norm" not in name}
    if targets == "all-linear":
        expected = {module for module in modules if module.rpartition(".")[2] not in ("lm_head", "embed_tokens")}
    else:
        expected = {module for module in modules if _matches(folder, targets, module)}
    if excluded := config.get("exclude_modules"):
        expected = {module for module in expected if not _matches(folder, excluded, module)}
    layers = config.get("layers_to_transform")
    if layers is not None:
        chosen = {str(layer) for layer in (layers if isinstance(layers, list) else [layers])}
        expected = {module for module in expected if chosen & set(module.split("."))}
    if missing := sorted(expected - found):
        raise FormatError(f"{missing[0]} is among its target_modules, but has no tensors ({len(missing)} such modules)")
    if surplus := sorted(found - expected):
        raise FormatError(f"it has tensors for {surplus[0]}, which is not among its target_modules ({len(surplus)} such modules)")


def _matches(folder: Path, patterns: Any, module: str) -> bool:
    """As PEFT decides: a text is a pattern of the whole name, a list holds names or their ends."""
    try:
        if isinstance(patterns, str):
            return re.fullmatch(patterns, module) is not None
        return any(module == one or module.endswith(f".{one}") for one in patterns)
    except (re.error, TypeError) as error:
        raise FormatError(f"{folder / _CONFIG}: target_modules {quoted(patterns)} are no names ({error})") from error


def _product(folder: Path, config: dict[str, Any], name: str, pair: _Pair, scale: float, weights: ModelWeights) -> _Product:
    a, b, transposed = pair
    module = name.removesuffix(".weight")
    rank = _by_pattern(folder, config, module, "rank_pattern", "r")
    alpha = _by_pattern(folder, config, module, "alpha_pattern", "lora_alpha")
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise FormatError(f"{name}: lora_A is {a.shape} and lora_B {b.shape}, expected rank {rank:g} between them")
    for side, half in (("lora_A", a), ("lora_B", b)):
        if not np.isfinite(dequantize(np.ascontiguousarray(half))).all():
            raise FormatError(f"{name}: {side} holds NaN or infinity, so the adapter is damaged")
    product = _Product(a, b, scale * alpha / (sqrt(rank) if config.get("use_rslora") else rank), transposed)
    shape = weights.stored(name).shape
    if product.shape != tuple(shape):
        raise FormatError(f"{name}: lora_B·lora_A is {product.shape}, but the weight is {tuple(shape)}: another model's adapter?")
    return product


def _by_pattern(folder: Path, config: dict[str, Any], module: str, patterns: str, default: str) -> float:
    """A number of this module: of the first pattern that the end of its name matches, else the adapter's."""
    found = config.get(patterns) or {}
    try:
        key = next((key for key in found if re.match(rf"(.*\.)?({key})$", module)), None)
    except re.error as error:
        raise FormatError(f"{folder / _CONFIG}: {patterns} holds no pattern: {error}") from error
    value = config.get(default) if key is None else found[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise FormatError(f"{folder / _CONFIG}: {default} of {module} must be a number above zero, found {quoted(value)}")
    return value
