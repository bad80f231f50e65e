"""Writing a model as GGUF: the types of all tensors first, then one tensor after the other.

The plan costs nothing and says everything: what --dry-run shows is what a run writes. Memory needed beyond the mapped
source is one tensor in its new type.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from llmctl.errors import FormatError, OutputError, UsageError
from llmctl.kernels.encode import Encoder
from llmctl.kernels.formats.mapped import release_mapped
from llmctl.kernels.formats.plain import CAST_LIMITS
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.quant.imatrix import ImportanceMatrix
from llmctl.quant.naming import file_name
from llmctl.quant.packed_source import packed_warnings
from llmctl.quant.recipe import RECIPES, Choice, Recipe, choose_types, is_embedding, is_matrix, model_facts
from llmctl.quant.rtn import Rounded, Stack, first_nonfinite, round_stack, round_to_nearest
from llmctl.quant.source import ModelSource, SourceTensor
from llmctl.runtime.checkpoint.file_types import FILE_TYPES
from llmctl.runtime.checkpoint.gguf_split import SplitGgufWriter, shard_paths
from llmctl.runtime.checkpoint.gguf_writer import Typed, ValueType, file_bytes, refuse_same_file
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.machine import default_threads

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to be written. replaced: the type the recipe has for it, if its rows do not fit that."""

    source: SourceTensor
    format: Format
    nbytes: int
    replaced: Format | None = None

    @property
    def num_elements(self) -> int:
        """Logical elements."""
        return prod(self.source.shape)

    @property
    def bytes_before(self) -> int:
        """Bytes in the source."""
        return self.source.packed.nbytes if self.source.packed else _nbytes(self.source.stored, self.source.shape)

    @property
    def keeps_codes(self) -> bool:
        """Whether it was packed integers, and the same integers are written."""
        return self.source.packed is not None and self.format.name in self.source.packed.keeps

    @property
    def requantized(self) -> bool:
        """Whether it was rounded before and is rounded again."""
        stored = self.source.stored
        return not (stored.is_plain or self.format.is_plain or self.keeps_codes or self.source.format == self.format)


@dataclass(frozen=True)
class Plan:
    """Everything that will be written. type_name: for file names; file_type: GGUF's number for it. importance: to round with."""

    source: ModelSource
    tensors: list[PlannedTensor]
    type_name: str
    file_type: int
    importance: ImportanceMatrix | None = None

    @property
    def unweighted(self) -> list[PlannedTensor]:
        """With an importance matrix, the tensors it has nothing for, though they are rounded."""
        if self.importance is None:
            return []
        return [t for t in self.tensors if not t.format.is_plain and t.source.name not in self.importance.weights]

    @property
    def substitutions(self) -> list[PlannedTensor]:
        """The tensors that could not have the recipe's type."""
        return [tensor for tensor in self.tensors if tensor.replaced is not None]

    @property
    def requantized(self) -> list[PlannedTensor]:
        """The tensors rounded a second time."""
        return [tensor for tensor in self.tensors if tensor.requantized]


@dataclass
class Written:
    """What became of a plan: the file (of a set the first, and the bytes of all), and per tensor its rounding error or None."""

    output: Path
    file_bytes: int
    rounded: list[tuple[PlannedTensor, Rounded]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def make_plan(
    source: ModelSource, recipe: Recipe | None, *, pure: bool = False, importance: ImportanceMatrix | None = None
) -> Plan:
    """Choose the type of every tensor. recipe: None keeps what the source has. pure: see `choose_types`.

    importance: to round with. FormatError if it is of another model, UsageError if it is needed and not there, or not needed.
    """
    _check_importance(source, recipe, importance)
    if recipe is not None and not source.tensors:
        raise FormatError(f"{source.path}: there are no tensors to make {recipe.name} of")
    chosen = _kept_types(source) if recipe is None else _chosen_types(source, recipe, pure, importance is not None)
    tensors = [
        PlannedTensor(tensor, choice.format, _nbytes(choice.format, tensor.shape), choice.replaced)
        for tensor, choice in zip(source.tensors, chosen, strict=True)
    ]
    if recipe is not None:
        plan = Plan(source, tensors, recipe.name, recipe.file_type, importance)
        _check_unweighted(plan, recipe)
        return plan
    return Plan(source, tensors, *_kept_type(source, tensors))


def vocabulary_plan(source: ModelSource) -> Plan:
    """A file of the metadata and the tokenizer alone. source: of `open_vocabulary`."""
    return Plan(source, [], "vocab", 0)


def _check_importance(source: ModelSource, recipe: Recipe | None, importance: ImportanceMatrix | None) -> None:
    if importance is None:
        if recipe is not None and recipe.needs_importance:
            raise UsageError(f"{recipe.name} has too few bits to do without an importance matrix: give one with --imatrix")
        return
    if recipe is None or recipe.matrices.is_plain:
        raise UsageError("--imatrix is for types with few bits: with this --type nothing is rounded by it")
    importance.check((tensor.name, tensor.shape) for tensor in source.tensors)
    source.files.append(importance.path)  # which the output must not replace either


def _check_unweighted(plan: Plan, recipe: Recipe) -> None:
    if not recipe.needs_importance or plan.importance is None:
        return
    bare = [t for t in plan.unweighted if t.format == recipe.matrices and not is_embedding(t.source.name)]
    if bare:
        raise FormatError(
            f"{plan.importance.path}: has nothing for {tensor_names(bare)}: {recipe.name} has too few bits to do without"
        )


def _chosen_types(source: ModelSource, recipe: Recipe, pure: bool, importance: bool) -> list[Choice]:
    facts = model_facts(_plain(source), source.names, importance=importance)
    shapes = [(tensor.name, tensor.shape) for tensor in source.tensors]
    choices = choose_types(shapes, recipe, facts, pure=pure)
    # Tables of numbers that are no weights stay what they are.
    return [Choice(t.format) if _is_table(t.format) else choices[t.name] for t in source.tensors]


def _is_table(form: Format) -> bool:
    return form.is_plain and form.name.startswith("I")


def _kept_types(source: ModelSource) -> list[Choice]:
    return [_kept(source, tensor) for tensor in source.tensors]


def _kept(source: ModelSource, tensor: SourceTensor) -> Choice:
    """The source's own type; from a folder, norms and biases in float32, which readers of GGUF need."""
    kept = tensor.kept or tensor.format
    if source.kind == "gguf":
        return Choice(kept)
    if not is_matrix(tensor.name, tensor.shape):
        return Choice(FORMATS["F32"])
    if kept.name in CAST_LIMITS or not kept.is_plain:
        return Choice(kept)
    return Choice(FORMATS["F32"], replaced=kept)


def _kept_type(source: ModelSource, tensors: list[PlannedTensor]) -> tuple[str, int]:
    """Name and number of a file that keeps its types: what its source says, else what most weights are."""
    stated = source.metadata.get("general.file_type")
    stated = stated.value if isinstance(stated, Typed) else stated
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.format.name] += tensor.num_elements
    most = counts.most_common(1)[0][0] if counts else "F32"
    if source.kind == "gguf" and isinstance(stated, int):
        return FILE_TYPES.get(stated, most), stated
    return most, RECIPES[most].file_type if most in RECIPES else 0


def _nbytes(form: Format, shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) * form.row_bytes(shape[-1] if shape else 1)


def output_path(plan: Plan, asked: Path | None, *, force: bool = False, max_shard_bytes: int | None = None) -> Path:
    """Where the file goes: as asked, a conventional name in the folder asked for, or that name in the current folder.

    max_shard_bytes: see `write`; the files of a set are checked each.
    OutputError if it is one of the source's own files, or exists and `force` is not given.
    """
    output = asked if asked is not None else Path()
    if asked is None or output.is_dir():
        output = output / file_name(_plain(plan.source), plan.source.path, plan.type_name)
    for path in output_files(plan, output, max_shard_bytes):
        check_output(path, plan.source, force=force)
    return output


def output_files(plan: Plan, output: Path, max_shard_bytes: int | None) -> list[Path]:
    """The files that will be written: `output`, or a numbered set named after it."""
    return shard_paths(output, [tensor.nbytes for tensor in plan.tensors], max_shard_bytes)


def _plain(source: ModelSource) -> dict[str, object]:
    return {key: value.value if isinstance(value, Typed) else value for key, value in source.metadata.items()}


def check_output(output: Path, source: ModelSource, *, force: bool) -> None:
    """OutputError if the file is one of the source's own, or exists and may not be replaced."""
    refuse_same_file(source.files, output)
    check_target(output, force=force)


def check_target(output: Path, *, force: bool) -> None:
    """OutputError if the file exists and may not be replaced, or its folder does not. Costs nothing, so it comes first."""
    if not force and not output.is_dir() and (output.exists() or output.is_symlink()):
        raise OutputError(f"{output}: exists already; --force replaces it, -o names another file")
    if not output.parent.is_dir():
        raise OutputError(f"{output}: the folder {output.parent} does not exist")
    if not os.access(output.parent, os.W_OK):
        raise OutputError(f"{output}: the folder {output.parent} cannot be written to")


def write(
    plan: Plan,
    output: Path,
    *,
    measure: bool = False,
    strict: bool = False,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write the file: whole at its name, or not at all.

    max_shard_bytes: most bytes of tensors in a file, more of them make several files; None writes one.
    measure: work out the error of every tensor. strict: NaN and infinity are errors also in tensors that keep their type,
    which otherwise are copied bit for bit, with a warning. progress: called with (bytes done, bytes in all).
    Raises FormatError naming the tensor whose values do not fit its type, OutputError for the disk.
    """
    total, done = sum(tensor.nbytes for tensor in plan.tensors), 0
    written, encoder = Written(output, 0), Encoder(default_threads())
    with SplitGgufWriter(output, _metadata(plan), max_shard_bytes) as writer:
        for tensor in plan.tensors:
            writer.declare(tensor.source.name, tensor.format, tensor.source.shape)
        for tensor in plan.tensors:
            rounded = _round(plan, tensor, encoder, measure, strict, written.warnings)
            writer.write(tensor.source.name, rounded.tensor)
            release_mapped(rounded.tensor.blocks if isinstance(rounded.tensor, QuantTensor) else rounded.tensor)
            written.rounded.append((tensor, Rounded(None, rounded.squared_error, rounded.squared_weight)))
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)
    written.output, written.file_bytes = writer.paths[0], sum(path.stat().st_size for path in writer.paths)
    return written


def planned_file_bytes(plan: Plan) -> int:
    """Bytes of the file that `write` makes of the plan, unsplit."""
    tensors = [(tensor.source.name, tensor.format, tensor.source.shape) for tensor in plan.tensors]
    return file_bytes(plan.source.path, _metadata(plan), tensors)


def _metadata(plan: Plan) -> dict[str, object]:
    file_type = {"general.file_type": Typed(plan.file_type, ValueType.U32)}
    importance = plan.importance.metadata() if plan.importance is not None else {}
    return {**plan.source.metadata, **file_type, "general.quantization_version": Typed(2, ValueType.U32), **importance}


def _round(
    plan: Plan, tensor: PlannedTensor, encoder: Encoder, measure: bool, strict: bool, warnings: list[str]
) -> Rounded:
    source = tensor.source
    importance = plan.importance.columns(source.name, source.shape) if plan.importance is not None else None
    try:
        weight = source.read()
        if source.format == tensor.format or tensor.format.name == "F32":  # other types have no NaN: rounding refuses it
            _check_finite(weight, source, strict, warnings)
        rounding = round_stack if isinstance(weight, Stack) else round_to_nearest
        return rounding(weight, tensor.format, importance, measure=measure, encoder=encoder)
    except FormatError as error:
        raise FormatError(f"{plan.source.path}: tensor {_both_names(source)}: {error}") from error


def _check_finite(weight: object, source: SourceTensor, strict: bool, warnings: list[str]) -> None:
    found = first_nonfinite(weight)
    if found is None:
        return
    place = f"row {found[0]}, column {found[1]}"
    if strict:
        raise FormatError(f"NaN or infinity in {place}: weights must be finite, so the source is damaged")
    warnings.append(f"tensor {_both_names(source)} holds NaN or infinity ({place}), copied as it is")


def _both_names(source: SourceTensor) -> str:
    return quoted(source.origin) if source.origin == source.name else f"{quoted(source.origin)} ({source.name})"


def tensor_names(tensors: list[PlannedTensor], limit: int = 3) -> str:
    """The first few names, and how many more there are."""
    names = [tensor.source.name for tensor in tensors]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if names[limit:] else "")


def plan_warnings(plan: Plan) -> Iterator[str]:
    """What the user must know about the result before it is made."""
    yield from plan.source.warnings
    kinds = sorted({(tensor.replaced.name, tensor.format.name) for tensor in plan.substitutions if tensor.replaced})
    for wanted, used in kinds:
        found = [t for t in plan.substitutions if t.replaced and (t.replaced.name, t.format.name) == (wanted, used)]
        size = FORMATS[wanted].elements_per_block
        why = f"needs rows that are a multiple of {size}" if size > 1 else "readers do not take for weights"
        yield f"{_tensors(len(found))} in {used} instead of {wanted}, which {why}: {tensor_names(found)}"
    if plan.unweighted:
        names = tensor_names(plan.unweighted)
        yield f"{_tensors(len(plan.unweighted))} rounded without importance, which {plan.importance.path} has not for: {names}"
    yield from packed_warnings(plan.tensors)
    if plan.requantized:
        types = ", ".join(sorted({tensor.source.stored.name for tensor in plan.requantized}))
        yield (
            f"{_tensors(len(plan.requantized))} quantized already ({types}) and rounded a second time: the original weights "
            "give a better result"
        )


def _tensors(count: int) -> str:
    return "1 tensor is" if count == 1 else f"{count} tensors are"
