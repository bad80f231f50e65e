"""A checkpoint seen through its family: Hugging Face names and layouts, whatever the file.

GGUF keeps llama's q and k rows interleaved and gemma's norms plus one; both are undone here, so nothing above ever knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.checkpoint.names import deinterleave_rows
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.gguf_config import FACTOR_TENSORS, config_from_gguf
from llmctl.runtime.models.registry import family_by_gguf_arch, family_by_model_type

# Multimodal folders nest the language model; the rest of such a checkpoint is not part of a text model.
_NESTED = re.compile(r"^(?:language_model\.model|model\.language_model)\.")
_NOT_TEXT = re.compile(r"(?:^|\.)(?:vision_tower|vision_model|multi_modal_projector|embed_vision|audio_tower)\.")
# Buffers that old folders saved beside the weights; they are computed here.
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|attn\.masked_bias$")


class ModelWeights:
    """Named tensors of one model in canonical form, read lazily.

    family, config: what the checkpoint is. hf_config: the Hugging Face config dict (made up for a GGUF).
    left_out: stored tensors that are not part of the text model.
    """

    def __init__(self, checkpoint: GgufCheckpoint | SafetensorsCheckpoint) -> None:
        self.checkpoint = checkpoint
        source = _GgufSource(checkpoint) if isinstance(checkpoint, GgufCheckpoint) else _HfSource(checkpoint)
        self._source = source
        self.family: Family = source.family
        self.hf_config: dict[str, Any] = source.hf_config
        self.config: ModelConfig = source.config
        self.left_out: list[str] = source.left_out

    def __contains__(self, name: str) -> bool:
        return name in self._source.stored

    def names(self) -> Iterator[str]:
        """Hugging Face names, in file order."""
        yield from self._source.stored

    def read(self, name: str) -> np.ndarray | QuantTensor:
        """The tensor in Hugging Face's layout; FormatError naming it if the checkpoint lacks it."""
        if name not in self:
            raise FormatError(f"{self.checkpoint.path}: tensor {name!r} is missing")
        return self._source.read(name)


class _GgufSource:
    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self.checkpoint = checkpoint
        names = checkpoint.names()
        self.family = family_by_gguf_arch(checkpoint.metadata.get("general.architecture"))
        factors = {name: dequantize(checkpoint.read(name)) for name in FACTOR_TENSORS if name in names}
        shapes = {name: checkpoint.entry(name).shape for name in names}
        self.hf_config = config_from_gguf(checkpoint.metadata, self.family, shapes, factors)
        self.config = self.family.read_config(self.hf_config)
        translated = {name: self.family.gguf_names.to_hf(name) for name in names if name not in FACTOR_TENSORS}
        unknown = [name for name, hf in translated.items() if hf is None]
        if unknown:
            raise UnsupportedError(
                f"{checkpoint.path}: tensor {unknown[0]!r} has no place in a {self.family.name} model"
                + (f" (and {len(unknown) - 1} more)" if unknown[1:] else "")
            )
        self.stored = {hf: name for name, hf in translated.items()}
        self.left_out: list[str] = []

    def read(self, name: str) -> np.ndarray | QuantTensor:
        tensor = self.checkpoint.read(self.stored[name])
        spelling = self.family.gguf_names
        if heads_key := spelling.heads_key(name):
            return deinterleave_rows(tensor, self.hf_config.get(heads_key) or self.config.num_heads)
        if spelling.has_offset_norm(name):
            return dequantize(tensor) - np.float32(1)
        return tensor


class _HfSource:
    def __init__(self, checkpoint: SafetensorsCheckpoint) -> None:
        self.checkpoint, self.hf_config = checkpoint, checkpoint.config
        if not self.hf_config:
            raise FormatError(f"{checkpoint.path}: no config.json beside the weights, so the architecture is unknown")
        if quantization := self.hf_config.get("quantization_config"):
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
            raise UnsupportedError(f"{checkpoint.path}: weights quantized with {method!r} cannot be read yet")
        self.family = family_by_model_type(self.hf_config.get("model_type"))
        self.config = self.family.read_config(self.hf_config)
        names = [name for name in checkpoint.names() if not _BUFFERS.search(name)]
        self.left_out = [name for name in names if _NOT_TEXT.search(name)]
        text = [name for name in names if not _NOT_TEXT.search(name)]
        self.stored = {_canonical(name): name for name in text}

    def read(self, name: str) -> np.ndarray | QuantTensor:
        return self.checkpoint.read(self.stored[name])


def _canonical(name: str) -> str:
    return _NESTED.sub("model.", name).replace("language_model.lm_head", "lm_head")
