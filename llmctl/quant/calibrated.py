"""One calibrated quantization from request to files: everything that can be refused is refused before any text is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmctl.errors import FormatError, LlmctlError, UnsupportedError, UsageError
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.quant.calibration import Calibration, read_calibration
from llmctl.quant.convert import Plan, Written, make_plan, write
from llmctl.quant.demand import demand_of, fitting_memory
from llmctl.quant.fitting import Budget, Fitted, aimed_numbers, fit
from llmctl.quant.head import head_module
from llmctl.quant.imatrix import ImportanceMatrix, read_imatrix
from llmctl.quant.integer_grid import IntegerGrid
from llmctl.quant.memory_plan import MemoryPlan
from llmctl.quant.module_solver import Method, Target
from llmctl.quant.packed_folder import PackedPlan, write_packed
from llmctl.quant.packed_layouts import LAYOUTS
from llmctl.quant.pipeline import Job, run
from llmctl.quant.quantized_folder import plan_quantized
from llmctl.quant.quantized_gguf import gguf_targets, module_importances, with_results
from llmctl.quant.recipe import Recipe
from llmctl.quant.results import HEAD_LAYER, Results
from llmctl.quant.source import open_source
from llmctl.quant.statistics import Importances, write_imatrix
from llmctl.quant.to_folder import FolderPlan, plan_folder
from llmctl.quant.walk import Walk, one_thread_each
from llmctl.quant.work_folder import WorkFolder
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.output_file import free_bytes
from llmctl.runtime.machine import cpu
from llmctl.runtime.models.registry import chosen_family
from llmctl.runtime.models.topology import layer_modules
from llmctl.runtime.models.weights import ModelWeights
from llmctl.runtime.tokenizer import load_tokenizer

FitProgress = Callable[[str, int, int], None]
GROUP_SIZES = (128, 64, 32)
"""What is tried where none is asked for, the first that divides the rows of every quantized matrix."""
_VERSION = 3  # of the algorithm: unfinished runs of another one are not gone on with
_HELD_OUT = 8


@dataclass(frozen=True)
class TextRequest:
    """source: file or folder, None for the built-in set. See `read_calibration`."""

    source: Path | None = None
    num_samples: int = 128
    row_length: int = 512
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """form: gguf or a name of LAYOUTS. bits, group_size, symmetric: of a packed folder's grid, group_size None for the largest
    of GROUP_SIZES. recipe, pure: of a GGUF file; budget: its size, where that decides the types. family: it is taken for one
    of. imatrix: file of importances, which stand for those of the text where errors are weighed. device: where the text runs
    through the model; matrices are solved on the CPU."""

    path: Path
    method: Method
    form: str
    bits: int = 4
    group_size: int | None = None
    symmetric: bool = True
    recipe: Recipe | None = None
    pure: bool = False
    budget: Budget | None = None
    text: TextRequest = TextRequest()
    threads: int = 1
    max_ram: int | None = None
    family: str | None = None
    imatrix: Path | None = None
    device: str = "cpu"


@dataclass
class CalibratedPlan:
    """What will be done. output_plan: what is written, still without results. memory: None where no text is needed."""

    request: Request
    weights: ModelWeights
    targets: dict[str, Target]
    output_plan: PackedPlan | Plan
    folder: FolderPlan | None
    calibration: Calibration | None
    memory: MemoryPlan | None
    fast: bool
    warnings: list[str] = field(default_factory=list)
    fitted: Fitted | None = None
    importance: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        """For the pipeline."""
        norm_format = self.folder.form if self.folder is not None else FORMATS["F32"]
        return Job(self.weights, self.request.method, self.targets, norm_format, self.request.threads, self.fast, self.importance)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that will be written."""
        plan = self.output_plan
        return plan.nbytes if isinstance(plan, PackedPlan) else sum(tensor.nbytes for tensor in plan.tensors)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything the result depends on, for --resume."""
        request, files = self.request, self.weights.checkpoint.files
        return {
            "version": _VERSION,
            "source": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files],
            "method": vars(request.method),
            "targets": {name: repr(target) for name, target in self.targets.items()},
            "text": self.calibration.digest if self.calibration else None,
            "threads": request.threads,
            "batch_tokens": self.memory.batch_tokens if self.memory else None,
            "lanes": self.memory.lanes if self.memory else None,
            "fast": self.fast,
            "device": request.device,
            "imatrix": [request.imatrix.stat().st_size, request.imatrix.stat().st_mtime_ns] if request.imatrix else None,
            "torch": torch.__version__,
        }


def make_calibrated_plan(request: Request, progress: FitProgress | None = None) -> CalibratedPlan:
    """Open, check and size everything; with a budget, also measure what types are worth. Errors name the file, module or option
    at fault. progress: of the measuring, called with (what is done, done, all)."""
    weights = ModelWeights(open_checkpoint(request.path), chosen_family(request.family))
    modules = _projections(weights)
    if request.form == "gguf":
        source = open_source(request.path, family=request.family if weights.checkpoint.kind != "gguf" else None)
        output_plan: PackedPlan | Plan = make_plan(source, request.recipe, pure=request.pure)
        solved = {*modules, head_module(weights.config)} if request.method.needs_text else set(modules)
        feedback = request.method.name == "gptq"
        targets: dict[str, Target] = dict(gguf_targets(output_plan, weights, solved, feedback=feedback))
        folder = None
    else:
        grid = _grid(request, modules)
        targets = dict.fromkeys(modules, grid)
        folder = plan_folder(request.path, family=request.family)
        output_plan = plan_quantized(folder, LAYOUTS[request.form], dict.fromkeys(modules, grid), None)
    plan = CalibratedPlan(request, weights, targets, output_plan, folder, None, None, _multiplies_bfloat16())
    if request.method.needs_text:
        plan.calibration = _calibration(request, weights)
        if request.imatrix is not None:
            _take_importance(plan, read_imatrix(request.imatrix))
        aimed = aimed_numbers(weights.config) if request.budget is not None else 0
        head = head_module(weights.config) in targets or bool(aimed)
        demand = demand_of(weights, request.method, plan.calibration, head=head, aimed=aimed)
        plan.memory = fitting_memory(demand, request.threads, request.max_ram)
    if request.budget is not None:
        _fit(plan, request.budget, progress)
    plan.warnings += _coarse(weights, targets)
    return plan


def _take_importance(plan: CalibratedPlan, matrix: ImportanceMatrix) -> None:
    plan.importance = module_importances(matrix, plan.weights, plan.targets)
    missing = [name for name in plan.targets if name not in plan.importance]
    if missing:
        plan.warnings.append(f"{matrix.path}: says nothing of {missing[0]} and {len(missing) - 1} more: the text does")


def _fit(plan: CalibratedPlan, budget: Budget, progress: FitProgress | None) -> None:
    """Types by measurement instead of those of the recipe."""
    assert isinstance(plan.output_plan, Plan)
    assert plan.calibration is not None
    assert plan.memory is not None
    with one_thread_each(plan.fast):
        plan.fitted = fit(
            plan.output_plan,
            plan.weights,
            plan.calibration.rows,
            budget,
            batch_tokens=plan.memory.batch_tokens,
            lanes=plan.memory.lanes,
            damping=plan.request.method.damping,
            progress=progress,
        )
    plan.output_plan = plan.fitted.plan
    feedback = plan.request.method.name == "gptq"
    plan.targets = dict(gguf_targets(plan.output_plan, plan.weights, set(plan.targets), feedback=feedback))


def _projections(weights: ModelWeights) -> dict[str, tuple[int, ...]]:
    """Whole names of all projections and their shapes."""
    names = [f"model.layers.{i}.{m}" for i in range(weights.config.num_layers) for m in layer_modules(weights.config, i)]
    return {name: weights.stored(f"{name}.weight").shape for name in names}


def _grid(request: Request, modules: dict[str, tuple[int, ...]]) -> IntegerGrid:
    """The grid of all modules; UsageError for groups that do not divide the rows."""
    lengths = sorted({shape[-1] for shape in modules.values()})
    size = request.group_size
    if size is None:
        size = next((size for size in GROUP_SIZES if not any(length % size for length in lengths)), -1)
    wrong = [name for name, shape in modules.items() if size != -1 and shape[-1] % size]
    if wrong:
        fitting = [str(size) for size in GROUP_SIZES if not any(length % size for length in lengths)]
        raise UsageError(
            f"--group-size {size} does not divide the {modules[wrong[0]][-1]} columns of {wrong[0]} and {len(wrong) - 1} more; "
            f"what does: {', '.join([*fitting, '-1'])}"
        )
    return IntegerGrid(request.bits, size, request.symmetric)


def _coarse(weights: ModelWeights, targets: dict[str, Target]) -> Iterator[str]:
    """What is rounded a second time."""
    forms = {weights.stored(f"{name}.weight").form for name in targets} - {"F32", "F16", "BF16", "F64"}
    if forms:
        yield f"the source is quantized already ({', '.join(sorted(forms))}): its errors stay"


def _calibration(request: Request, weights: ModelWeights) -> Calibration:
    text = request.text
    if text.row_length > weights.config.max_position_embeddings:
        trained = weights.config.max_position_embeddings
        raise UsageError(f"--seq-len {text.row_length} is more than the {trained} tokens the model was trained with")
    tokenizer = load_tokenizer(weights.checkpoint)
    found = read_calibration(
        text.source,
        tokenizer,
        num_samples=text.num_samples,
        row_length=text.row_length,
        seed=text.seed,
        num_held_out=_HELD_OUT,
    )
    highest = max(map(max, found.rows))
    if highest >= weights.config.vocab_size:
        raise FormatError(
            f"{request.path}: the calibration text has token {highest}, the embedding {weights.config.vocab_size} rows"
        )
    return found


def _multiplies_bfloat16() -> bool:
    return any(flag in cpu().isa for flag in ("amx_bf16", "avx512_bf16"))


def check_weights(plan: CalibratedPlan) -> None:
    """FormatError naming the first tensor of the model that holds NaN or infinity: before hours of work, not after."""
    from llmctl.quant.rtn import first_nonfinite

    for name in plan.weights.names():
        found = first_nonfinite(plan.weights.read(name))
        plan.weights.release(name)
        if found is not None:
            raise FormatError(
                f"{plan.request.path}: tensor {name!r} holds NaN or infinity in row {found[0]}, column {found[1]}: "
                "weights must be finite, so the source is damaged"
            )


def check_disk(plan: CalibratedPlan, output: Path) -> None:
    """OutOfMemory of the disk: the result, what is kept meanwhile, and spilled activations must fit."""
    needed = 2 * plan.nbytes
    if plan.memory is not None and plan.memory.spill and plan.calibration is not None:
        needed += 4 * plan.calibration.num_tokens * plan.weights.config.hidden_size
    free = free_bytes(output.absolute().parent)
    if needed > free:
        from llmctl.errors import OutputError

        raise OutputError(f"{output}: needs {needed} bytes while it is made, {free} are free on this disk")


def solve(plan: CalibratedPlan, work: WorkFolder, progress: Callable[[int, int], None] | None = None) -> Results:
    """Run the pipeline to its end."""
    walk = None
    if plan.calibration is not None and plan.memory is not None:
        walk = Walk(
            plan.weights,
            plan.calibration.rows,
            batch_tokens=plan.memory.batch_tokens,
            lanes=plan.memory.lanes if plan.request.device == "cpu" else 1,  # a GPU runs one batch at a time
            device=plan.request.device,
            spill=work.path if plan.memory.spill else None,
        )
    job = plan.job
    try:
        run(job, walk, work, progress)
    finally:
        if walk is not None:
            walk.activations.close()
    results = job.results(work)
    _check_coverage(plan, results)
    return results


def _check_coverage(plan: CalibratedPlan, results: Results) -> None:
    """Every target was solved."""
    parts = [*range(plan.weights.config.num_layers), *([HEAD_LAYER] if plan.job.head_format is not None else [])]
    missing = set(plan.targets) - {name for part in parts for name in results.facts(part)["modules"]}
    if missing:
        raise LlmctlError(f"{len(missing)} modules were not quantized, the first is {min(missing)}")


def write_result(
    plan: CalibratedPlan, results: Results, output: Path, *, force: bool, progress: Callable[[int, int], None] | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """Write file or folder: bytes of all that was written, and what was rounded to nearest on the way, as an embedding."""
    if plan.folder is not None:
        targets: Any = plan.targets
        packed = plan_quantized(plan.folder, LAYOUTS[plan.request.form], targets, results)
        return write_packed(packed, output, force=force, progress=progress), []
    assert isinstance(plan.output_plan, Plan)
    formats: dict[str, Format] = dict(plan.targets)  # type: ignore[arg-type]
    solved = with_results(plan.output_plan, plan.weights, results, formats)
    written = write(solved, output, measure=True, progress=progress)
    return written.file_bytes, list(_rounded_on_the_way(plan, written))


def _rounded_on_the_way(plan: CalibratedPlan, written: Written) -> Iterator[dict[str, Any]]:
    """For the report: tensors that are no targets, but of a type that rounds. None was fitted to text, so no tokens are told."""
    to_hf, to_gguf = plan.weights.family.gguf_names.to_hf, plan.weights.family.gguf_names.to_gguf
    solved = {to_gguf(f"{module}.weight") for module in plan.targets}
    for tensor, rounded in written.rounded:
        if tensor.format.is_plain or tensor.source.name in solved:
            continue
        yield {
            "name": (to_hf(tensor.source.name) or tensor.source.name).removesuffix(".weight"),
            "shape": list(tensor.source.shape),
            "type": tensor.format.name,
            "bits_per_weight": tensor.format.bits_per_weight,
            "relative_rms_error": rounded.relative_error,
            "method": "rtn",
        }


def importances(plan: CalibratedPlan, results: Results) -> Importances:
    """What the matrices' inputs were, under GGUF's names. UnsupportedError where GGUF has none."""
    sums, counts = {}, {}
    names = plan.weights.family.gguf_names
    for layer in range(plan.weights.config.num_layers):
        for module, squares, count in results.squares(layer):
            name = names.to_gguf(f"{module}.weight")
            if name is None:
                raise UnsupportedError(f"GGUF has no name for {module}, so its importance cannot be saved")
            sums[name], counts[name] = squares[None], np.array([count])
    return Importances(sums, counts)


def save_importances(plan: CalibratedPlan, results: Results, path: Path) -> ImportanceMatrix:
    """Write the importance matrix, and read it back."""
    calibration = plan.calibration
    assert calibration is not None
    write_imatrix(path, importances(plan, results), [calibration.name], len(calibration.rows), calibration.row_length)
    return read_imatrix(path)
