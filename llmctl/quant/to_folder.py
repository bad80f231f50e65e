"""A model as a Hugging Face folder: what transformers loads, from a GGUF file or another folder.

Everything small is made first (config, tokenizer, templates), so that what cannot be said is found before a weight is read;
then the tensors are streamed, a few rows at a time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError, LlmctlError, UsageError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.plain import PLAIN_DTYPES, cast
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.quant.config_json import TORCH_DTYPES, config_json, generation_json
from llmctl.quant.huggingface import needed_names
from llmctl.quant.left_out import left_out_of
from llmctl.quant.lora import Adapter, MergedWeights
from llmctl.quant.model_card import model_card
from llmctl.quant.naming import file_name
from llmctl.quant.rtn import Tensor
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.checkpoint.output_folder import OutputFolder, check_folder, refuse_inside
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint
from llmctl.runtime.checkpoint.safetensors_writer import SafetensorsWriter
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.loading import sampling_defaults
from llmctl.runtime.models.expert_parts import join_in_turn, joined_name
from llmctl.runtime.models.latent_parts import join_parts, whole_name
from llmctl.runtime.models.registry import chosen_family
from llmctl.runtime.models.weights import ModelWeights
from llmctl.runtime.tokenizer.folder_files import tokenizer_files
from llmctl.runtime.tokenizer.gguf_source import describe_gguf
from llmctl.runtime.tokenizer.load import build_tokenizer
from llmctl.runtime.tokenizer.same_ids import find_library_difference

AUTO = "auto"
_CHUNK_ELEMENTS = 1 << 22  # 16 MiB as float32: what is unfolded at once, whatever the size of the tensor
# Files of a folder that say something about the model and are taken over as they are.
TAKEN_OVER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "README.md",
    "LICENSE*",
    "NOTICE*",
)

Progress = Callable[[int, int], None]
Files = tuple[dict[str, bytes], list[str]]  # name → content, and warnings


@dataclass(frozen=True)
class FolderTensor:
    """One tensor to be written. name: ours. parts: our names of what it is read as. source: how it is stored where it is read.
    written: the name in the folder. shape: torch order, as written. transposed: with its axes swapped. joined: of all experts of
    a layer. row: of the one that is read, None for all."""

    name: str
    parts: tuple[str, ...]
    source: str
    written: str
    shape: tuple[int, ...]
    transposed: bool
    joined: bool = False
    row: int | None = None

    @property
    def num_elements(self) -> int:
        """Logical elements."""
        return prod(self.shape)


@dataclass
class FolderPlan:
    """Everything that will be written.

    path: as the user named the source. sources: every file it is read from. form: the type all tensors get.
    files: name → content of the small files. name: of the folder, if none is asked for.
    """

    path: Path
    sources: list[Path]
    weights: MergedWeights
    tensors: list[FolderTensor]
    form: Format
    files: dict[str, bytes]
    name: str
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they will be."""
        size = PLAIN_DTYPES[self.form.name].itemsize
        return sum(tensor.num_elements for tensor in self.tensors) * size


@dataclass
class FolderWritten:
    """What became of a plan. changed: plain tensors whose values the new type does not hold exactly."""

    output: Path
    nbytes: int = 0
    changed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def plan_folder(
    path: Path, type_name: str = AUTO, adapters: Sequence[Adapter] = (), family: str | None = None
) -> FolderPlan:
    """What `path` becomes as a folder. adapters: LoRA adapters to add to the weights. family: as in `open_source`.

    type_name: F16, BF16 or F32; "auto" is the type most of the weights have if that is one of these, else F16.
    Raises FormatError, UnsupportedError, ModelNotFoundError, each naming the file, and UsageError for another type.
    """
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, (GgufCheckpoint, SafetensorsCheckpoint))
    weights = ModelWeights(checkpoint, chosen_family(family))
    needed = needed_names(weights)
    left_out = left_out_of(weights, needed)
    tensors = _tensors(weights, needed)
    form = _chosen_type(tensors, type_name)
    try:
        if isinstance(checkpoint, GgufCheckpoint):
            files, warnings = _files_of_gguf(checkpoint, weights, form)
            metadata: dict[str, Any] = dict(checkpoint.metadata)
        else:
            files, warnings = _files_of_folder(checkpoint, weights, form)
            metadata = {}
    except LlmctlError as error:
        raise type(error)(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    name = file_name(metadata, path, form.name, suffix="")
    merged = MergedWeights(weights, adapters, needed)
    sources = [*_sources(checkpoint), *(adapter.folder for adapter in adapters)]
    return FolderPlan(path, sources, merged, tensors, form, files, name, left_out, warnings)


def _sources(checkpoint: GgufCheckpoint | SafetensorsCheckpoint) -> list[Path]:
    return [*checkpoint.files, *([checkpoint.folder] if isinstance(checkpoint, SafetensorsCheckpoint) else [])]


def _tensors(weights: ModelWeights, needed: Sequence[str]) -> list[FolderTensor]:
    """In the order of the forward pass."""
    parts: dict[str, list[str]] = {}
    whole = joined_name if weights.family.hf_names.joined_experts else whole_name
    for name in needed:
        parts.setdefault(whole(name), []).append(name)
    found = [_tensor(weights, name, tuple(names)) for name, names in parts.items()]
    return [one for tensor in found for one in _rows_of(weights, tensor) or [tensor]]


def _rows_of(weights: ModelWeights, tensor: FolderTensor) -> list[FolderTensor]:
    """The rows of one whose folders have a tensor for each; none of any other."""
    names = weights.family.hf_names.row_names(tensor.name, tensor.shape[0])
    return [replace(tensor, written=name, shape=tensor.shape[1:], row=row) for row, name in enumerate(names)]


def _tensor(weights: ModelWeights, name: str, parts: tuple[str, ...]) -> FolderTensor:
    stored, spelling = [weights.stored(part) for part in parts], weights.family.hf_names
    transposed, joined = spelling.is_transposed(name), spelling.joined_experts and name not in parts
    shape = stored[0].shape[::-1] if transposed else stored[0].shape
    if joined:
        experts = weights.config.experts.num_experts if weights.config.experts else 0
        shape = (experts, *stored[0].shape[:0:-1], stored[0].shape[0] * len(parts) // experts)
    elif len(parts) > 1:
        (heads, rank, keys), (_, values, _) = (part.shape for part in stored)
        shape = heads * (keys + values), rank
    return FolderTensor(name, parts, stored[0].form, spelling.to_folder(name), shape, transposed, joined)


def _chosen_type(tensors: list[FolderTensor], type_name: str) -> Format:
    if type_name.lower() != AUTO:
        if type_name.upper() not in TORCH_DTYPES:
            raise UsageError(f"--type {type_name}: a safetensors folder has {AUTO}, {', '.join(TORCH_DTYPES)}")
        return FORMATS[type_name.upper()]
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.source] += tensor.num_elements
    most = counts.most_common(1)[0][0]
    return FORMATS["F32" if most == "F64" else most if most in TORCH_DTYPES else "F16"]


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _files_of_gguf(checkpoint: GgufCheckpoint, weights: ModelWeights, form: Format) -> Files:
    files, warnings, facts = {}, [], None
    if checkpoint.metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        warnings.append("the file carries no tokenizer, so the folder has none")
    else:
        description = describe_gguf(checkpoint.metadata)
        facts = description.facts
        expected = build_tokenizer(description)
        made = tokenizer_files(description, weights.config.max_position_embeddings)
        added = [token.text for token in facts.added]
        if difference := find_library_difference(expected, made.files["tokenizer.json"], added):
            warnings.append(f"with the tokenizer written, {difference}")
        files, warnings = made.files, [*warnings, *made.warnings]
    files["config.json"] = _json(config_json(weights.config, weights.family, form, facts))
    files["generation_config.json"] = _json(generation_json(facts, weights.config, sampling_defaults(checkpoint)))
    files["README.md"] = model_card(checkpoint.metadata, checkpoint.path)
    return files, warnings


def _files_of_folder(checkpoint: SafetensorsCheckpoint, weights: ModelWeights, form: Format) -> Files:
    """Its own files; of a multimodal model the config of the text part, which is all that is written."""
    found = {path for pattern in TAKEN_OVER for path in checkpoint.folder.glob(pattern) if path.is_file()}
    files = {str(path.relative_to(checkpoint.folder)): path.read_bytes() for path in sorted(found)}
    config = dict(weights.hf_config)
    nested = config.get("text_config")
    if isinstance(nested, dict):
        ids = {key: value for key, value in config.items() if key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        family, spelled = weights.family, weights.family.hf_keys(weights.config)
        kind = spelled.get("model_type", family.model_types[0])
        config = {**nested, **ids, "architectures": spelled.get("architectures", [family.hf_class]), "model_type": kind}
    for key in ("dtype", "quantization_config"):
        config.pop(key, None)
    config["torch_dtype"] = TORCH_DTYPES[form.name]
    files["config.json"] = _json(config)
    return files, []


def folder_path(plan: FolderPlan, asked: Path | None, *, force: bool) -> Path:
    """Where the folder goes: as asked, or its conventional name in the current folder. OutputError if it cannot."""
    output = asked if asked is not None else Path(plan.name)
    refuse_inside(plan.sources, output)
    check_folder(output, replace=force)
    return output


def write_folder(
    plan: FolderPlan,
    output: Path,
    *,
    max_shard_bytes: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> FolderWritten:
    """Write the folder: whole at its name, or not at all.

    max_shard_bytes: most bytes of tensors in a file; None for one file. progress: called with (bytes done, bytes in all).
    Raises FormatError naming the tensor whose values do not fit the type, OutputError for the disk.
    """
    written, done = FolderWritten(output), 0
    with OutputFolder(output, replace=force) as folder:
        folder.require(plan.nbytes + sum(map(len, plan.files.values())))
        with SafetensorsWriter(folder.work, max_shard_bytes=max_shard_bytes) as writer:
            for tensor in plan.tensors:
                writer.declare(tensor.written, plan.form, tensor.shape)
            for tensor in plan.tensors:
                writer.write(tensor.written, _parts(plan, tensor, written))
                for part in tensor.parts:
                    plan.weights.release(part)
                done += tensor.num_elements * PLAIN_DTYPES[plan.form.name].itemsize
                if progress is not None:
                    progress(done, plan.nbytes)
        for name, data in plan.files.items():
            folder.write_file(name, data)
    written.nbytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return written


def _parts(plan: FolderPlan, tensor: FolderTensor, written: FolderWritten) -> Iterator[np.ndarray]:
    """The tensor in its new type, a few rows at a time."""
    what = f"{plan.path}: tensor {quoted(tensor.name)}"
    changed = odd = False
    try:
        pieces = _joined(plan, tensor) if tensor.joined else [_whole(plan, tensor)]
        for rows, was_plain in ((rows, plain) for piece, plain in pieces for rows in _chunks(piece)):
            part = cast(rows if isinstance(rows, np.ndarray) else dequantize(rows), plan.form)
            yield part
            if not was_plain or not isinstance(rows, np.ndarray):
                continue  # it was rounded when it was quantized
            if rows.dtype != part.dtype:
                changed = changed or not np.array_equal(part.astype(rows.dtype), rows)
            else:
                odd = odd or not np.isfinite(part).all()
    except FormatError as error:
        hint = "; --type BF16 has room for it" if plan.form.name == "F16" and "does not fit F16" in str(error) else ""
        raise FormatError(f"{what}: {error}{hint}") from error
    if changed:
        written.changed.append(tensor.name)
    if odd:
        written.warnings.append(f"tensor {quoted(tensor.name)} holds NaN or infinity, copied as it is")


def _whole(plan: FolderPlan, tensor: FolderTensor) -> tuple[Tensor, bool]:
    """The tensor as it is written but for its type, and whether it is stored in plain numbers."""
    stored = plan.weights.read(tensor.parts[0])
    was_plain = isinstance(stored, np.ndarray)
    if len(tensor.parts) > 1:
        stored = join_parts(dequantize(stored), dequantize(plan.weights.read(tensor.parts[1])))
    if tensor.transposed:  # only whole rows of the one are columns of the other
        stored = np.ascontiguousarray((stored if was_plain else dequantize(stored)).T)
    if tensor.row is not None:
        stored = dequantize(stored)[tensor.row]
    return stored, was_plain


def _joined(plan: FolderPlan, tensor: FolderTensor) -> Iterator[tuple[Tensor, bool]]:
    """The same, one expert after the other."""
    experts = tensor.shape[0]
    for expert in range(experts):
        sides = [plan.weights.read(part) for part in tensor.parts[expert::experts]]
        yield join_in_turn([dequantize(side) for side in sides]), all(isinstance(side, np.ndarray) for side in sides)


def _chunks(tensor: Tensor | PackedIntTensor) -> Iterator[Tensor]:
    """Some rows of the tensor after another; leading axes are rows."""
    if not tensor.shape:
        yield tensor
        return
    if isinstance(tensor, PackedIntTensor):
        tensor = dequantize(tensor)
    columns = tensor.shape[-1]
    step, count = max(1, _CHUNK_ELEMENTS // max(1, columns)), prod(tensor.shape[:-1])
    if isinstance(tensor, QuantTensor):
        blocks = tensor.blocks.reshape(count, -1)
        for start in range(0, count, step):
            part = blocks[start : start + step]
            yield QuantTensor(tensor.format, (len(part), columns), part)
    else:
        rows = tensor.reshape(count, columns)
        yield from (rows[start : start + step] for start in range(0, count, step))

