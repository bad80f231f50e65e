"""A Hugging Face folder as GGUF lays it out: names, row order, norms, rope factors, metadata and tokenizer.

What is written is what the forward pass reads: the decoder is built once over the headers alone, so a tensor that is
missing, misshapen or unexpected is found before anything is written. The metadata is read back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import LlmctlError, UnsupportedError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.plain import shifted
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant.expressible import check_expressible
from llmctl.quant.left_out import left_out_of
from llmctl.quant.lora import Adapter, MergedWeights
from llmctl.quant.model_card import describe_folder
from llmctl.quant.packed_source import describe, together
from llmctl.quant.rtn import Stack, Tensor, stored_format
from llmctl.quant.source import ModelSource, SourceTensor, gguf_order
from llmctl.quant.tokenizer import tokenizer_keys
from llmctl.runtime.checkpoint.files import read_json_object
from llmctl.runtime.checkpoint.huggingface import read_optional_json
from llmctl.runtime.checkpoint.names import interleave_rows
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.loading import sampling_defaults
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.decoder import Decoder
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.gguf_config import factor_tensors, metadata_from_config
from llmctl.runtime.models.registry import chosen_family, config_taken_for
from llmctl.runtime.models.weights import ModelWeights, StoredWeight

_QUANTIZATION_VERSION = 2  # of llama.cpp's block formats
# Names of runtime.loading.sampling_defaults → GGUF keys below general.sampling.
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def read_folder(
    checkpoint: SafetensorsCheckpoint,
    *,
    pre: str | None = None,
    drop_surplus: bool = False,
    adapters: Sequence[Adapter] = (),
    family: str | None = None,
) -> ModelSource:
    """The model in a folder. Arguments and errors as `open_source`."""
    weights = ModelWeights(checkpoint, chosen_family(family))
    names = needed_names(weights)
    left_out = left_out_of(weights, names)
    tensors = _tensors(weights, MergedWeights(weights, adapters, names), names)
    metadata = _metadata(weights.family, weights.config, checkpoint, sum(prod(tensor.shape) for tensor in tensors))
    tokenizer = tokenizer_keys(checkpoint, weights.config.vocab_size, metadata, pre=pre, drop_surplus=drop_surplus)
    metadata |= tokenizer.keys
    try:
        check_expressible(weights.config, weights.family, metadata, tensors)
    except LlmctlError as error:
        raise type(error)(f"{checkpoint.path}: {error}") from error
    config = weights.config
    warnings = [*tokenizer.warnings, *_rope_warnings(config), *_window_warnings(weights), *_group_warnings(config)]
    return ModelSource(checkpoint.path, "safetensors", _files(checkpoint), metadata, tensors, left_out, warnings)


@dataclass(frozen=True)
class FolderWithoutWeights:
    """What a folder says about a model, for those who want no more of it."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @property
    def path(self) -> Path:
        """As the user named it."""
        return self.folder


Described = SafetensorsCheckpoint | FolderWithoutWeights


def read_vocabulary(
    folder: Path, *, pre: str | None = None, drop_surplus: bool = False, family: str | None = None
) -> ModelSource:
    """The metadata and the tokenizer of a folder, which need not hold weights. Arguments and errors as `open_source`."""
    values = read_json_object(folder / "config.json")
    found = FolderWithoutWeights(folder, values, read_optional_json(folder / "generation_config.json"))
    try:
        kind, values = config_taken_for(values, chosen_family(family))
        config = kind.read_config(values)
    except LlmctlError as error:
        raise type(error)(f"{folder}: {error}") from error
    metadata = _metadata(kind, config, found, 0)
    tokenizer = tokenizer_keys(found, config.vocab_size, metadata, pre=pre, drop_surplus=drop_surplus)
    files = [path for path in folder.iterdir() if path.suffix != ".gguf"]
    return ModelSource(folder, "safetensors", files, metadata | tokenizer.keys, [], [], tokenizer.warnings)


def _files(checkpoint: SafetensorsCheckpoint) -> list[Path]:
    """The weights and everything beside them: configs, tokenizer, template. GGUF files there are not read."""
    beside = [file for file in checkpoint.folder.iterdir() if file.suffix != ".gguf" and file not in checkpoint.files]
    return [*checkpoint.files, *beside]


class _Recorder:
    """Weights that note what is read of them."""

    def __init__(self, weights: ModelWeights) -> None:
        self.config, self.checkpoint = weights.config, weights.checkpoint
        self.read_names: list[str] = []
        self._weights = weights

    def read(self, name: str) -> Tensor | StoredWeight:
        """The tensor; of one that is made of others, which is done when it is its turn, what their headers say."""
        self.read_names.append(name)
        return self._weights.read(name) if self._weights.is_mapped(name) else self._weights.stored(name)

    def release(self, name: str) -> None:
        """Nothing was touched."""


class _NoOps:
    """A backend that prepares nothing: what is left of loading are the checks."""

    def prepare_weight(self, weight: Any) -> None: ...

    def prepare_vector(self, vector: Any, dtype: str | None = None) -> None: ...


def needed_names(weights: ModelWeights) -> list[str]:
    """The tensors the forward pass reads; FormatError for one that is missing or of another shape than config.json says."""
    recorder = _Recorder(weights)
    Decoder(_NoOps(), recorder)
    return recorder.read_names


def _tensors(weights: ModelWeights, merged: MergedWeights, names: list[str]) -> list[SourceTensor]:
    """In the order of the forward pass."""
    spelling = weights.family.gguf_names
    stacks: dict[str, list[SourceTensor]] = {}
    for name in names:
        tensor = _tensor(weights, merged, name)
        stacks.setdefault(tensor.name, []).append(tensor)
    found = [_stacked(name, parts, weights) for name, parts in stacks.items()]
    for name, factors in factor_tensors(weights.config).items():
        found.append(SourceTensor(name, "config.json", FORMATS["F32"], factors.shape, lambda factors=factors: factors))
    return sorted(found, key=lambda tensor: gguf_order(tensor.name, list(spelling.layer.values())))


def _stacked(name: str, parts: list[SourceTensor], weights: ModelWeights) -> SourceTensor:
    """One tensor of those that have one name in GGUF: experts, in order. FormatError where they are stored in different types."""
    first = parts[0]
    if not weights.family.gguf_names.is_stack(first.origin):
        return first
    other = next((part for part in parts if part.stored != first.stored), None)
    if other is not None:
        raise UnsupportedError(
            f"{weights.checkpoint.path}: tensor {quoted(other.origin)} is {other.stored.name} and {quoted(first.origin)} is "
            f"{first.stored.name}: experts that become one tensor must be of one type"
        )
    shape = (len(parts), *first.shape)
    facts = [part.packed for part in parts if part.packed is not None]
    packed = together(facts) if len(facts) == len(parts) else None
    merged = FORMATS["F32"] if any(part.format != first.format for part in parts) else first.format
    stack = Stack([part.read for part in parts], shape)
    kept = packed.natural(first.shape[-1]) if packed else first.kept or (None if merged == first.format else first.stored)
    return SourceTensor(name, first.origin, merged, shape, lambda: stack, kept, packed)


def _tensor(weights: ModelWeights, merged: MergedWeights, name: str) -> SourceTensor:
    gguf_name = weights.family.gguf_names.to_gguf(name)
    if gguf_name is None:
        raise UnsupportedError(f"{weights.checkpoint.path}: GGUF has no name for tensor {quoted(name)}")
    read = gguf_reader(merged, name)
    if module := weights.packed(name):
        facts = describe(module, weights.stored(name).nbytes)
        kept = facts.natural(module.shape[-1])
        found = SourceTensor(gguf_name, name, facts.format, module.shape, read, kept, None if name in merged.changed else facts)
    else:
        tensor = weights.read(name)
        shape = tensor.shape[1:] if weights.family.gguf_names.is_flat(name) else tensor.shape
        found = SourceTensor(gguf_name, name, stored_format(tensor), shape, read)
    return replace(found, format=FORMATS["F32"], kept=found.kept or found.format) if name in merged.changed else found


def gguf_reader(weights: MergedWeights, name: str) -> Callable[[], Tensor]:
    """Reads the tensor in GGUF's layout: the reverse of what ModelWeights does for a GGUF file."""
    spelling, config = weights.family.gguf_names, weights.config
    if heads_key := spelling.heads_key(name):
        heads = config.num_kv_heads if heads_key == "num_key_value_heads" else config.num_heads
        return lambda: _interleaved(weights, name, heads)
    if spelling.has_offset_norm(name):
        return lambda: shifted(dequantize(weights.read(name)), 1)
    if spelling.is_flat(name):
        return lambda: dequantize(weights.read(name)).reshape(-1)
    if weights.is_transposed(name):
        return lambda: _contiguous(weights, name)
    return lambda: weights.read(name)


def _interleaved(weights: MergedWeights, name: str, heads: int) -> Tensor:
    rows = interleave_rows(weights.read(name), heads)  # a copy
    weights.release(name)
    return rows


def _contiguous(weights: MergedWeights, name: str) -> Tensor:
    rows = np.array(weights.read(name), order="C")
    weights.release(name)
    return rows


def _metadata(family: Family, config: ModelConfig, checkpoint: Described, num_elements: int) -> dict[str, Any]:
    """The keys that are not the tokenizer's. num_elements: weights of the model, 0 where they are not known."""
    try:
        names = describe_folder(checkpoint.folder, checkpoint.config, num_elements)
        sampling = sampling_defaults(checkpoint)
    except LlmctlError as error:
        raise type(error)(f"{checkpoint.path}: {error}") from error
    return {
        "general.architecture": family.gguf_arch,
        "general.type": "model",
        **names,
        **{f"general.sampling.{key}": sampling[name] for name, key in _SAMPLING.items() if name in sampling},
        **metadata_from_config(config, family),
        "general.file_type": 0,  # set once the types are chosen
        "general.quantization_version": _QUANTIZATION_VERSION,
    }


def _rope_warnings(config: ModelConfig) -> list[str]:
    limits = {layer.rope.max_position for layer in config.layers if layer.rope is not None and layer.rope.kind == "dynamic"}
    return [f"GGUF has no key for dynamic rope scaling: beyond {limit} tokens readers will not scale" for limit in limits]


def _group_warnings(config: ModelConfig) -> list[str]:
    experts = config.experts
    if experts is None or experts.num_groups == 1 or experts.group_by_top2:
        return []
    return ["llama.cpp values a group of experts by its two best, this model by its best alone: it will choose others there"]


def _window_warnings(weights: ModelWeights) -> list[str]:
    """llama.cpp reads no window for its llama architecture, which Mistral's is, and none for phi3 and starcoder2."""
    windows = {layer.sliding_window for layer in weights.config.layers if layer.sliding_window is not None}
    if weights.family.gguf_arch not in ("llama", "phi3", "starcoder2") or not windows:
        return []
    return [f"llama.cpp knows no window for this architecture: beyond {max(windows)} tokens it will see more than the model did"]
