"""A checkpoint seen through its family: Hugging Face names and layouts, whatever the file.

GGUF keeps llama's q and k rows interleaved and gemma's norms plus one; both are undone here, so nothing above ever knows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from llmctl.errors import FormatError, LlmctlError, UnsupportedError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.conversion import converted_bytes
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.plain import shifted
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.runtime.checkpoint.checkpoint import TensorEntry
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.checkpoint.names import EXPERT, deinterleave_rows
from llmctl.runtime.checkpoint.packed import find_packed, read_module
from llmctl.runtime.checkpoint.packed_parts import PackedModule, rows_module
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.expert_parts import ExpertPart, folder_parts, gguf_parts
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.gguf_config import FACTOR_TENSORS, config_from_gguf, has_experts
from llmctl.runtime.models.latent_parts import LatentPart, parts_of
from llmctl.runtime.models.registry import config_taken_for, family_by_gguf_arch, family_by_name

# Multimodal folders nest the language model; the rest of such a checkpoint is not part of a text model.
_NESTED = re.compile(r"^(?:language_model\.model|model\.language_model)\.")
_NOT_TEXT = re.compile(
    r"(?:^|\.)(?:vision_tower|vision_model|vision_encoder|visual|multi_modal_projector|mm_projector|vision_language_adapter"
    r"|patch_merger|embed_vision|embed_audio|audio_tower|audio_model|audio_projector)\."
)
# Buffers that old folders saved beside the weights; they are computed here.
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|attn\.masked_bias$|(?:^|\.)h\.\d+\.attn\.bias$")
_WEIGHT_FORMATS = ("F64", "F32", "F16", "BF16")
_LAYERS_WEIGHT = re.compile(r"model\.layers\.(\d{1,9})\..*\.weight$")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


Weight = np.ndarray | QuantTensor | PackedIntTensor


@dataclass(frozen=True)
class StoredWeight:
    """What a weight is before it is read.

    form: how it is stored, for people (F16, Q4_0, INT4). bytes_on_native: of memory once the native kernels have it, about.
    """

    form: str
    shape: tuple[int, ...]
    nbytes: int
    bytes_on_native: int

    @property
    def num_elements(self) -> int:
        """Logical elements."""
        return prod(self.shape)


class ModelWeights:
    """Named tensors of one model in canonical form, read lazily.

    family, config: what the checkpoint is. hf_config: the Hugging Face config dict (made up for a GGUF).
    left_out: stored tensors that are not part of the text model. names_read: Hugging Face names of those read so far.
    unpacked: (how it is stored, dtype it was read as) → bytes, of packed weights that no kernel reads as they are.
    """

    def __init__(self, checkpoint: GgufCheckpoint | SafetensorsCheckpoint, family: Family | None = None) -> None:
        """family: to be taken for one of, whatever the file says; None for the one it says. Raises FormatError and
        UnsupportedError, naming the file."""
        self.checkpoint = checkpoint
        try:
            source = (_GgufSource if isinstance(checkpoint, GgufCheckpoint) else _HfSource)(checkpoint, family)
        except LlmctlError as error:
            raise type(error)(_located(error, checkpoint)) from error
        self._source = source
        self.family: Family = source.family
        self.hf_config: dict[str, Any] = source.hf_config
        self.config: ModelConfig = source.config
        self._parts: dict[str, LatentPart] = {}
        for name in source.stored:
            self._parts |= parts_of(name, source.config)
        self._wholes = {part.whole for part in self._parts.values()}
        self.left_out: list[str] = source.left_out
        self.names_read: set[str] = set()
        self.unpacked: Counter[tuple[str, str]] = Counter()

    def __contains__(self, name: str) -> bool:
        return name in self._parts or (name in self._source.stored and name not in self._wholes)

    def names(self) -> Iterator[str]:
        """Hugging Face names, in file order; of what is stored as one and read as several, those of the parts."""
        for name in self._source.stored:
            yield from parts_of(name, self.config) or (name,)

    def is_mapped(self, name: str) -> bool:
        """Whether `read` gives what stands in the file, and costs nothing, or as little as a few rows of plain numbers."""
        module = self.packed(name)
        return (module is None or module.form in _WEIGHT_FORMATS) and name not in self._parts

    def packed(self, name: str) -> PackedModule | None:
        """The tensors that the weight is made of, where it is stored as several."""
        return self._source.packed.get(name)

    def stored(self, name: str) -> StoredWeight:
        """What the checkpoint's headers say of the tensor. FormatError if there is none of this name."""
        if part := self._parts.get(name):
            return self._stored_part(part)
        if module := self.packed(name):
            nbytes = module.nbytes or sum(self.checkpoint.entry(part).nbytes for part in module.parts)
            return StoredWeight(module.form, module.shape, nbytes, module.native_bytes)
        entry = self.stored_entry(name)
        shape = entry.shape[::-1] if self.is_transposed(name) else entry.shape
        shape = (1, *shape) if len(shape) == 1 and name in self._source.flat else shape
        return StoredWeight(entry.format.name, shape, entry.nbytes, converted_bytes(entry.format, shape))

    def read(self, name: str) -> Weight:
        """The tensor in Hugging Face's layout.

        FormatError naming it if the checkpoint lacks it, UnsupportedError if it holds no floating-point weights: codes
        and float8 without their scales mean nothing.
        """
        if part := self._parts.get(name):
            whole = self.read(part.whole)
            self.names_read.add(name)
            try:
                return part.take(whole)
            except FormatError as error:
                raise FormatError(f"{self.checkpoint.path}: {error}") from error
        if module := self.packed(name):
            self.names_read.add(name)
            return self._read_packed(module)
        entry = self.stored_entry(name)
        if entry.format.is_plain and entry.format.name not in _WEIGHT_FORMATS:
            raise UnsupportedError(
                f"{self.checkpoint.path}: tensor {quoted(entry.name)} holds {entry.format.name} numbers, "
                f"expected one of {', '.join(_WEIGHT_FORMATS)}"
            )
        self.names_read.add(name)
        return self._source.read(name)

    def stored_entry(self, name: str) -> TensorEntry:
        """Where and as what the tensor of this Hugging Face name is stored. FormatError if the checkpoint lacks it, or stores it
        as several tensors."""
        if name not in self._source.stored:
            raise FormatError(f"{self.checkpoint.path}: tensor {name!r} is missing")
        entry, part = self.checkpoint.entry(self._source.stored[name]), self._source.parts.get(name)
        return part.entry(entry) if part else entry

    def is_transposed(self, name: str) -> bool:
        """Whether the tensor is stored with its axes swapped: `read` then gives a view whose rows are not contiguous."""
        return name in self._source.transposed

    def canonical(self, name: str) -> str:
        """What a tensor that a folder calls `name` is called here."""
        return self.family.hf_names.to_canonical(canonical_name(name))

    def release(self, name: str) -> None:
        """Let the stored tensor's pages leave memory once it has been prepared; it can still be read again."""
        if part := self._parts.get(name):
            return self.release(part.whole)
        if module := self.packed(name):
            for part in module.parts:
                self.checkpoint.release(part)
        else:
            self.checkpoint.release_entry(self.stored_entry(name))

    def _stored_part(self, part: LatentPart) -> StoredWeight:
        whole, elements = self.stored(part.whole), prod(part.shape)
        nbytes, native = (size * elements // max(1, whole.num_elements) for size in (whole.nbytes, whole.bytes_on_native))
        kept = not part.turned or whole.form in _WEIGHT_FORMATS
        return StoredWeight(whole.form, part.shape, nbytes, native if kept else 4 * elements)

    def _read_packed(self, module: PackedModule) -> Weight:
        weight = read_module(module)
        if isinstance(weight, np.ndarray) and module.form not in _WEIGHT_FORMATS:
            self.unpacked[module.form, weight.dtype.name] += weight.nbytes
        return weight

    def unneeded(self, needed: Iterable[str]) -> list[str]:
        """The tensors that are not among the needed ones: nothing of this model, and to be named to the user.

        FormatError for those that would change the result: a head that differs from the embedding it is said to share, a
        bias or scale of a module that should have none, a norm or matrix of a layer that should have none. Layers beyond the
        model's are no part of it: they guess further tokens.
        """
        needed = set(needed)
        modules = {name.rpartition(".")[0] for name in needed}
        path, others = self.checkpoint.path, [name for name in self.names() if name not in needed]
        for name in others:
            if name == _HEAD:
                if not _same_bytes(self.read(name), self.read(_EMBEDDING)):
                    raise FormatError(
                        f"{path}: config.json says tie_word_embeddings, but {_HEAD} differs from {_EMBEDDING}; "
                        "correct the one or the other"
                    )
            elif name.rpartition(".")[0] in modules or self._is_layers_weight(name):
                stored = self._source.stored[name]
                raise FormatError(f"{path}: tensor {quoted(stored)} has no place in the model its config describes")
        return [name for name in others if name != _HEAD]

    def _is_layers_weight(self, name: str) -> bool:
        found = _LAYERS_WEIGHT.match(name)
        return found is not None and int(found[1]) < self.config.num_layers


def _located(error: LlmctlError, checkpoint: GgufCheckpoint | SafetensorsCheckpoint) -> str:
    """The message, led by the file it is about; a GGUF file has no config.json."""
    message = str(error)
    if isinstance(checkpoint, GgufCheckpoint):
        message = message.removeprefix("config.json: ")
    return message if str(checkpoint.path) in message else f"{checkpoint.path}: {message}"


def _same_bytes(left: np.ndarray | QuantTensor, right: np.ndarray | QuantTensor) -> bool:
    same_kind = isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and left.dtype == right.dtype
    return same_kind and left.shape == right.shape and np.array_equal(left.view(np.uint8), right.view(np.uint8))


def _read_part(source: _GgufSource | _HfSource, name: str) -> np.ndarray | QuantTensor:
    tensor, part = source.checkpoint.read(source.stored[name]), source.parts.get(name)
    return part.of(tensor) if part else tensor


class _GgufSource:
    def __init__(self, checkpoint: GgufCheckpoint, family: Family | None) -> None:
        self.checkpoint = checkpoint
        names, metadata = checkpoint.names(), checkpoint.metadata
        stated = metadata.get("general.architecture")
        # a file has no model_type: what its keys say decides among those of a family
        self.family = family_by_name(family.name) if family else family_by_gguf_arch(stated, sparse=has_experts(metadata, stated))
        if family is not None:
            metadata = {str(key).replace(f"{stated}.", f"{family.gguf_arch}.", 1): metadata[key] for key in metadata}
        factors = {name: dequantize(checkpoint.read(name)) for name in FACTOR_TENSORS if name in names}
        shapes = {name: checkpoint.entry(name).shape for name in names}
        self.hf_config = config_from_gguf(metadata, self.family, shapes, factors)
        self.config = self.family.read_config(self.hf_config)
        translated = {name: self.family.gguf_names.to_hf(name) for name in names if name not in FACTOR_TENSORS}
        self.parts: dict[str, ExpertPart] = {}
        unknown = [name for name, hf in translated.items() if hf is None]
        if unknown:
            raise FormatError(
                f"{checkpoint.path}: tensor {quoted(unknown[0])} has no place in a {self.family.name} model"
                + (f" (and {len(unknown) - 1} more)" if unknown[1:] else "")
            )
        self.stored: dict[str, str] = {}
        for name, hf in translated.items():
            self._add(name, hf)
        self.packed: dict[str, PackedModule] = {}
        self.transposed: set[str] = set()
        self.flat = {name for name in self.stored if self.family.gguf_names.is_flat(name)}
        self.left_out: list[str] = []

    def _add(self, name: str, hf: str) -> None:
        """A stored tensor under its Hugging Face name, or under those of all the experts it holds."""
        if EXPERT not in hf:
            self.stored[hf] = name
            return
        count = self.config.experts.num_experts if self.config.experts else 0
        for each, part in gguf_parts(hf, self.checkpoint.entry(name), count):
            self.stored[each], self.parts[each] = name, part

    def read(self, name: str) -> np.ndarray | QuantTensor:
        tensor = _read_part(self, name)
        spelling = self.family.gguf_names
        if heads_key := spelling.heads_key(name):
            heads = self.hf_config.get(heads_key) or self.config.num_heads
            # Rows of another number are left as they are: who asked for the tensor says what is wrong with its shape.
            fits = len(tensor.shape) > 0 and tensor.shape[0] == heads * self.config.head_dim
            return deinterleave_rows(tensor, heads) if fits else tensor
        if spelling.has_offset_norm(name):
            return shifted(dequantize(tensor), -1)
        return tensor.reshape(1, -1) if isinstance(tensor, np.ndarray) and name in self.flat else tensor


class _HfSource:
    def __init__(self, checkpoint: SafetensorsCheckpoint, family: Family | None) -> None:
        self.checkpoint, self.hf_config = checkpoint, checkpoint.config
        if not self.hf_config:
            raise FormatError(f"{checkpoint.path}: no config.json beside the weights, so the architecture is unknown")
        found = find_packed(checkpoint)
        self.family, self.hf_config = config_taken_for(self.hf_config, family)
        self.config = self.family.read_config(self.hf_config)
        elsewhere = found.parts | set(found.of_activations)
        names = [name for name in checkpoint.names() if not _BUFFERS.search(name) and name not in elsewhere]
        names += found.modules
        self.left_out = [*(name for name in names if _NOT_TEXT.search(name)), *found.of_activations]
        text = [name for name in names if not _NOT_TEXT.search(name)]
        spelling = self.family.hf_names
        whole, text = self._split_rows(text)
        canonical = {name: spelling.to_canonical(canonical_name(name)) for name in text}
        self.stored = {ours: name for name, ours in canonical.items()}
        self.packed = {canonical[name]: module for name, module in found.modules.items() if name in canonical}
        self.stored |= {name: module.parts[0] for name, module in whole.items()}
        self.packed |= whole
        self.parts: dict[str, ExpertPart] = {}
        self.flat: set[str] = set()
        # What was packed is packed as (out_features, in_features), however its family stores plain weights.
        self.transposed = {name for name in self.stored if spelling.is_transposed(name)} - set(self.packed)
        if len(self.stored) != len(text) + len(whole):
            twice = next(name for name in text if self.stored[canonical[name]] != name)
            raise FormatError(f"{checkpoint.path}: tensor {quoted(twice)} is there twice, under two names of the same module")
        if self.config.experts is not None:
            self._split_experts(self.config.experts.num_experts)

    def _split_rows(self, names: list[str]) -> tuple[dict[str, PackedModule], list[str]]:
        """Matrices whose rows are tensors of their own, by canonical name, and the names of all other tensors."""
        rows: dict[str, dict[int, str]] = {}
        others = []
        for name in names:
            if place := self.family.hf_names.row_of(canonical_name(name)):
                rows.setdefault(place[0], {})[place[1]] = name
            else:
                others.append(name)
        return {name: rows_module(self.checkpoint, name, found) for name, found in rows.items()}, others

    def _split_experts(self, count: int) -> None:
        """Tensors that hold all experts of a layer give way to the experts' names."""
        in_turn = self.family.hf_names.joined_experts
        for name, stored in list(self.stored.items()):
            stack = self.packed.get(name)
            shape = stack.shape if stack else self.checkpoint.entry(stored).shape
            parts = folder_parts(name, shape, count, in_turn=in_turn, packed=stack is not None)
            if not parts or (stack and stack.matrix is None):
                continue
            del self.stored[name]
            for each, part in parts:
                if each in self.stored:
                    raise FormatError(f"tensor {quoted(stored)} holds experts that are there twice")
                self.stored[each] = stored
                if stack is not None:
                    self.packed[each] = part.module(stack)
                    continue
                self.parts[each] = part
                if in_turn and len(shape) > 2:
                    self.transposed.add(each)
            self.packed.pop(name, None)

    def read(self, name: str) -> np.ndarray | QuantTensor:
        tensor = _read_part(self, name)
        return tensor.T if name in self.transposed else tensor


def canonical_name(name: str) -> str:
    """The name without what multimodal checkpoints put before the language model's."""
    return _NESTED.sub("model.", name).replace("language_model.lm_head", "lm_head")
