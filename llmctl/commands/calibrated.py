"""What `quantize` does for methods that look at activations and for folders of packed integers: plan, run, write, tell."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console

if TYPE_CHECKING:
    from llmctl.quant.calibrated import CalibratedPlan
    from llmctl.quant.recipe import Recipe
    from llmctl.quant.results import Results

_TELL_EVERY_S = 10.0
_FEW_TOKENS = 512


@dataclass(frozen=True)
class Calibrated:
    """One request as the command line has it."""

    path: Path
    method: str
    form: str
    facts: dict[str, Any]
    recipe: Recipe | None
    pure: bool
    target_size: int | None
    target_bpw: float | None
    bits: int
    group_size: int | None
    symmetric: bool
    per_tensor: bool
    damping: float | None
    activation_order: bool
    calibration: Path | None
    num_samples: int
    seq_len: int
    seed: int
    imatrix: Path | None
    save_imatrix: Path | None
    report: Path | None
    max_ram: int | None
    resume: bool
    check: bool
    threads: int | None
    device: str
    family: str | None
    output: Path | None
    dry_run: bool
    force: bool
    json: bool


def carry_out_calibrated(request: Calibrated) -> None:
    """The result goes to stdout, all else to stderr."""
    from llmctl.quant.calibrated import check_disk, check_weights, make_calibrated_plan, save_importances, solve, write_result
    from llmctl.quant.work_folder import WorkFolder

    started = time.perf_counter()
    _check_targets(request)
    plan = make_calibrated_plan(_request(request), _Fitting())
    output = _output(request, plan)
    _tell(request, plan)
    if request.dry_run:
        _show_plan(request, plan, output)
        return
    check_disk(plan, output)
    check_weights(plan)
    work = WorkFolder(output, plan.fingerprint, resume=request.resume)
    if work.left_over:
        console.info(f"What an unfinished run left beside {output} is begun anew; --resume would have gone on with it")
    try:
        results = solve(plan, work, _Layers())
        with console.progress(f"Writing {output}", plan.nbytes) as bar:
            written = write_result(plan, results, output, force=request.force, progress=bar.update_to)
        if request.save_imatrix is not None:
            save_importances(plan, results, request.save_imatrix)
        _show_result(request, plan, results, output, written, started)
    except BaseException:
        work.close()
        raise
    work.remove()


def _request(request: Calibrated) -> Any:
    from llmctl.kernels.backend import torch_device
    from llmctl.quant import gptq, grid_gptq
    from llmctl.quant.calibrated import Request, TextRequest
    from llmctl.quant.module_solver import Method
    from llmctl.runtime.machine import default_threads

    usual = grid_gptq.DAMPING if request.form == "gguf" else gptq.DAMPING
    damping = usual if request.damping is None else request.damping
    search = "range" if request.method == "rtn" else "error"
    return Request(
        path=request.path,
        method=Method(request.method, search, damping, request.activation_order, request.per_tensor),
        form=request.form,
        bits=request.bits,
        group_size=request.group_size,
        symmetric=request.symmetric,
        recipe=request.recipe,
        pure=request.pure,
        budget=_budget(request),
        text=TextRequest(request.calibration, request.num_samples, request.seq_len, request.seed),
        threads=request.threads or default_threads(),
        device=torch_device(request.device),
        max_ram=request.max_ram,
        family=request.family,
        imatrix=request.imatrix,
    )


def _budget(request: Calibrated) -> Any:
    from llmctl.quant.fitting import Budget

    if request.target_size is None and request.target_bpw is None:
        return None
    return Budget(request.target_size, request.target_bpw)


def _check_targets(request: Calibrated) -> None:
    """What can be known to fail without a look at the model."""
    from llmctl.errors import UsageError
    from llmctl.quant.convert import check_target

    for target in (request.report, request.save_imatrix):
        if target is not None and not request.dry_run:
            check_target(target, force=request.force)
    if request.report is not None and request.report.suffix.lower() not in (".json", ".html", ".htm"):
        raise UsageError(f"--report {request.report}: expected a name that ends in .json or .html")


def _output(request: Calibrated, plan: CalibratedPlan) -> Path:
    from llmctl.quant.convert import output_path
    from llmctl.quant.packed_folder import PackedPlan, packed_path

    force = request.force or request.dry_run
    if isinstance(plan.output_plan, PackedPlan):
        return packed_path(plan.output_plan, request.output, force=force)
    return output_path(plan.output_plan, request.output, force=force)


def _tell(request: Calibrated, plan: CalibratedPlan) -> None:
    from llmctl.quant.convert import Plan, plan_warnings
    from llmctl.quant.module_solver import target_name

    output_plan = plan.output_plan
    for warning in [*plan.warnings, *(plan_warnings(output_plan) if isinstance(output_plan, Plan) else output_plan.warnings)]:
        console.warn(warning)
    kinds = ", ".join(dict.fromkeys(target_name(target) for target in plan.targets.values()))
    console.info(f"{request.method} of {len(plan.targets)} matrices: {kinds}")
    if plan.calibration is not None:
        found = plan.calibration
        console.info(f"Calibration: {len(found.rows)} rows, {found.num_tokens} tokens of {found.name}")
        if found.num_tokens < _FEW_TOKENS:
            console.warn(f"{found.num_tokens} tokens are few to calibrate with: matrices are fitted to them alone")
    if plan.fitted is not None:
        fitted, kept = plan.fitted, plan.output_plan.type_name
        compared = f"; {fitted.recipe} as it is: {fitted.recipe_measured:.4f}" if fitted.recipe_measured is not None else ""
        console.info(f"Types by measurement: {kept}. Divergence with all rounded to nearest: {fitted.measured:.4f}{compared}")
    if plan.memory is not None:
        spilled = ", activations on disk" if plan.memory.spill else ""
        console.info(f"Memory: up to {console.format_bytes(plan.memory.nbytes)}{spilled}")


class _Fitting:
    """Progress of what types are worth: a line now and then."""

    def __init__(self) -> None:
        self._told = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if time.perf_counter() - self._told >= _TELL_EVERY_S:
            self._told = time.perf_counter()
            console.info(f"{what}: {done} of {total}")


class _Layers:
    """Progress over layers, with the time left: a line now and then."""

    def __init__(self) -> None:
        self._started = self._told = time.perf_counter()
        self._first: int | None = None

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if now - self._told < _TELL_EVERY_S and done not in (1, total):
            return
        self._told = now
        left = (now - self._started) / done * (total - done)
        console.info(f"Layer {done} of {total} done, {_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _show_plan(request: Calibrated, plan: CalibratedPlan, output: Path) -> None:
    from llmctl.quant.calibrated_report import plan_document

    document = plan_document(plan, output, request.facts)
    if request.report is not None and request.report.suffix.lower() == ".json":
        _save_report(request, document)
    if request.json:
        console.print_json(document)
        return
    rows = [(line["kind"], line["type"], line["count"], f"{line['bits_per_weight']:.2f}") for line in document["kinds"]]
    for line in console.format_table(("MODULES OF KIND", "TYPE", "COUNT", "BITS"), rows, right=(2, 3)):
        console.result(line)
    totals = document["totals"]
    console.result(
        f"would write {output}: {console.format_bytes(totals['bytes'])} of weights, {totals['bits_per_weight']:.2f} bits per "
        f"weight over all; about {_duration(totals['seconds'])}, {console.format_bytes(totals['memory_bytes'])} of memory; "
        f"loads in {', '.join(document['loads_in'])}"
    )


def _show_result(
    request: Calibrated, plan: CalibratedPlan, results: Results, output: Path, written: Any, started: float
) -> None:
    from llmctl.quant.calibrated_report import document, summary_rows

    found = document(plan, results, output, written, dict(request.facts))
    found["check"] = _checked(request, plan, output)
    found["seconds"] = round(time.perf_counter() - started, 2)
    headers, rows = summary_rows(found)
    for line in console.format_table(headers, rows, right=range(2, len(headers))):
        console.info(line)
    for module in found["modules"]:
        if module.get("fallback"):
            console.warn(f"{module['name']}: {module['fallback']}")
    bits = found["totals"]["bits_per_weight"]
    console.info(f"{console.format_bytes(written[0])}, {bits:.2f} bits per weight, {found['seconds']:.1f} s")
    _save_report(request, found)
    if request.json:
        console.print_json(found)
    else:
        console.result(str(output))


def _checked(request: Calibrated, plan: CalibratedPlan, output: Path) -> dict[str, Any] | None:
    """How close the result is to the source, on the calibration text and on text left out of it."""
    if not request.check or plan.calibration is None:
        return None
    from llmctl.quant.overfit_check import check

    found = check(request.path, output, plan.calibration, plan.request.threads, request.family, request.max_ram)
    if "skipped" in found:
        console.warn(f"The result was not measured: {found['skipped']}")
        return found
    for name in ("calibration", "held_out"):
        if part := found[name]:
            same = f"same top token {part['same_top']:.1%}"
            console.info(f"KL divergence, {name.replace('_', '-')} text: {part['kl']:.5f} ± {part['kl_error']:.5f}, {same}")
    if found.get("overfit"):
        console.warn("The result is much closer on the calibration text than on other text: take more of it (--num-samples)")
    return found


def _save_report(request: Calibrated, found: dict[str, Any]) -> None:
    from llmctl.commands.conversion import save_file, save_json

    if request.report is None:
        return
    if request.report.suffix.lower() == ".json":
        save_json(request.report, found)
        return
    from llmctl.quant.html_report import html_page

    save_file(request.report, html_page(found).encode("utf-8", "replace"))
