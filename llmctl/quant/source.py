"""A model as GGUF lays it out, whatever it is stored as: tensors under GGUF's names and in its row order, and metadata.

Nothing is read here but headers and small vectors: a tensor is opened (mapped, permuted) when it is its turn to be written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.errors import UnsupportedError, UsageError
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.quant.packed_source import PackedFacts
from llmctl.quant.rtn import Stack, Tensor
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.checkpoint.text import quoted

if TYPE_CHECKING:
    from llmctl.quant.lora import Adapter

_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of the model.

    name: GGUF's. origin: the name in the source, for messages. format, shape: as stored, torch order.
    read: the tensor in GGUF's layout. kept: the type it keeps if none is asked for, where that is not the one it is read in
    (weights with an adapter added are read as float32). packed: of weights stored as several tensors, which types keep their
    codes.
    """

    name: str
    origin: str
    format: Format
    shape: tuple[int, ...]
    read: Callable[[], Tensor | Stack]
    kept: Format | None = None
    packed: PackedFacts | None = None

    @property
    def stored(self) -> Format:
        """The type it is stored in, whatever was added to it on the way."""
        return self.format if self.kept is None or self.packed is not None else self.kept


@dataclass
class ModelSource:
    """What is to be written.

    path: as the user named it. files: every file it is read from. kind: of the source, gguf or safetensors.
    metadata: as GgufWriter takes it, but for general.file_type, which depends on the types chosen.
    left_out: stored tensors that are no part of the model. warnings: what the user must know about the result.
    """

    path: Path
    kind: str
    files: list[Path]
    metadata: dict[str, Any]
    tensors: list[SourceTensor]
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """GGUF names of all tensors."""
        return {tensor.name for tensor in self.tensors}


def open_source(
    path: Path,
    *,
    pre: str | None = None,
    drop_surplus: bool = False,
    adapters: Sequence[Adapter] = (),
    family: str | None = None,
) -> ModelSource:
    """Read what the checkpoint says about itself and check that GGUF can say it too.

    path: a GGUF file or a Hugging Face folder (or its weights). pre: name of the pre-tokenizer rule to write, for a
    tokenizer whose own is not recognised. drop_surplus: leave out tokens of a folder that have no row in the embedding.
    adapters: LoRA adapters to add to the weights. family: it is taken for one of, None for what it says it is.
    Raises FormatError, UnsupportedError, ModelNotFoundError; UsageError for what has no effect on a GGUF file.
    """
    checkpoint = open_checkpoint(path)
    if isinstance(checkpoint, GgufCheckpoint):
        if drop_surplus:
            raise UsageError(f"--drop-surplus is about the tokens of a folder; {path} is a GGUF file")
        if family is not None and not adapters:
            raise UsageError(f"--as: {path} is a GGUF file, whose types change alike whatever the family; leave it out")
        source = _gguf_source(checkpoint, pre)
        return _with_adapters(source, checkpoint, adapters, family) if adapters else source
    from llmctl.quant.huggingface import read_folder

    return read_folder(checkpoint, pre=pre, drop_surplus=drop_surplus, adapters=adapters, family=family)


def open_vocabulary(
    path: Path, *, pre: str | None = None, drop_surplus: bool = False, family: str | None = None
) -> ModelSource:
    """As `open_source`, without the tensors. A folder needs no weights for it."""
    if path.is_dir():
        from llmctl.quant.huggingface import read_vocabulary

        return read_vocabulary(path, pre=pre, drop_surplus=drop_surplus, family=family)
    source = open_source(path, pre=pre, drop_surplus=drop_surplus, family=family)
    return replace(source, tensors=[], left_out=[])


def _gguf_source(checkpoint: GgufCheckpoint, pre: str | None) -> ModelSource:
    """Any architecture: nothing is renamed or reordered, so it need not be one we can run."""
    metadata = checkpoint.typed_metadata()
    if pre is not None:
        metadata = _with_rule(checkpoint, metadata, pre)
    tensors = [
        SourceTensor(entry.name, entry.name, entry.format, entry.shape, _reader(checkpoint, entry.name))
        for entry in checkpoint.entries()
    ]
    return ModelSource(checkpoint.path, "gguf", checkpoint.files, metadata, tensors)


def _with_adapters(
    source: ModelSource, checkpoint: GgufCheckpoint, adapters: Sequence[Adapter], family: str | None
) -> ModelSource:
    """Adapters name the weights as Hugging Face does, so here the family must be known."""
    from llmctl.quant.huggingface import gguf_reader, needed_names
    from llmctl.quant.lora import MergedWeights
    from llmctl.runtime.models.registry import chosen_family
    from llmctl.runtime.models.weights import ModelWeights

    weights = ModelWeights(checkpoint, chosen_family(family))
    merged = MergedWeights(weights, adapters, needed_names(weights))
    changed = {merged.family.gguf_names.to_gguf(name): name for name in merged.changed}
    tensors = [
        replace(tensor, format=FORMATS["F32"], read=gguf_reader(merged, changed[tensor.name]), kept=tensor.format)
        if tensor.name in changed
        else tensor
        for tensor in source.tensors
    ]
    return replace(source, tensors=tensors)


def _reader(checkpoint: GgufCheckpoint, name: str) -> Callable[[], Tensor]:
    return lambda: checkpoint.read(name)


def _with_rule(checkpoint: GgufCheckpoint, metadata: dict[str, Any], pre: str) -> dict[str, Any]:
    """The metadata with another splitting rule: what helps with files whose converter guessed it wrong."""
    from llmctl.runtime.tokenizer.pre_tokenizers import rule

    rule(pre)
    model = checkpoint.metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedError(
            f"{checkpoint.path}: --pre is for byte-level BPE (gpt2), the tokenizer's model is {quoted(str(model))}"
        )
    return {**metadata, "tokenizer.ggml.pre": pre}


def gguf_order(name: str, modules: list[str]) -> tuple[int, int, bool, str]:
    """Where a GGUF tensor comes in the file: what precedes the layers, the layers in order, what follows them.

    modules: those of a layer, in the order of the forward pass.
    """
    module, _, kind = name.rpartition(".")
    if found := _LAYER.match(name):
        inner = module[found.end() :]
        return int(found[1]), modules.index(inner) if inner in modules else len(modules), kind != "weight", name
    after = module in ("output_norm", "output")
    return (1 << 30 if after else -1), int(module == "output"), kind != "weight", name
