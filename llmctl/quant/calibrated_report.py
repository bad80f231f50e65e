"""What a calibrated quantization will do and what it did, in numbers: by module, by kind of module, in all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from llmctl.quant.calibrated import CalibratedPlan
from llmctl.quant.convert import Plan
from llmctl.quant.module_solver import target_bits, target_name
from llmctl.quant.packed_folder import PackedPlan
from llmctl.quant.results import HEAD_LAYER, Results
from llmctl.runtime.machine import peak_memory

_LAYER = re.compile(r"^model\.layers\.\d+\.")
_LOADS_IN = {
    "gguf": ("llmctl", "llama.cpp"),
    "gptq": ("llmctl", "transformers with GPTQModel", "vLLM"),
    "awq": ("llmctl", "transformers with AutoAWQ or GPTQModel", "vLLM"),
    "compressed-tensors": ("llmctl", "transformers with compressed-tensors", "vLLM"),
}
_VLLM_BITS = (4, 8)
# Operations a second of one thread, for the estimate of time.
_SPEED, _FAST_SPEED = 60e9, 150e9


def plan_document(plan: CalibratedPlan, output: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What a run would do, as a JSON object."""
    return {
        **facts,
        "dry_run": True,
        "output": str(output),
        "format": plan.request.form,
        "kinds": _kinds(plan),
        "totals": {
            "modules": len(plan.targets),
            "bytes": plan.nbytes,
            "bits_per_weight": _bits_per_weight(plan),
            "seconds": round(estimated_seconds(plan), 3),
            "memory_bytes": plan.memory.nbytes if plan.memory is not None else 0,
            "activations_on_disk": plan.memory is not None and plan.memory.spill,
        },
        "calibration": _calibration(plan),
        "substitutions": _substitutions(plan),
        "loads_in": loads_in(plan),
        "warnings": plan.warnings,
    }


def _kinds(plan: CalibratedPlan) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, target in plan.targets.items():
        shape = plan.weights.stored(f"{name}.weight").shape
        key = (_LAYER.sub("", name), target_name(target))
        line = found.setdefault(
            key,
            {"kind": key[0], "type": key[1], "count": 0, "shape": list(shape), "bits_per_weight": target_bits(target, shape[-1])},
        )
        line["count"] += 1
    return list(found.values())


def _substitutions(plan: CalibratedPlan) -> list[dict[str, Any]]:
    if not isinstance(plan.output_plan, Plan):
        return []
    return [
        {"name": t.source.name, "wanted": t.replaced.name, "used": t.format.name}
        for t in plan.output_plan.substitutions
        if t.replaced is not None
    ]


def _calibration(plan: CalibratedPlan) -> dict[str, Any] | None:
    found = plan.calibration
    if found is None:
        return None
    return {"text": found.name, "documents": found.documents, "rows": len(found.rows), "tokens": found.num_tokens}


def loads_in(plan: CalibratedPlan) -> list[str]:
    """Programs that can load the result."""
    known = _LOADS_IN[plan.request.form]
    if plan.request.form != "gguf" and plan.request.bits not in _VLLM_BITS:
        return [name for name in known if name != "vLLM"]
    return list(known)


def estimated_seconds(plan: CalibratedPlan) -> float:
    """A rough guess: operations of the passes over the text and of the solvers."""
    shapes = [plan.weights.stored(f"{name}.weight").shape for name in plan.targets]
    weights = sum(prod(shape) for shape in shapes)
    solving = sum(2 * prod(shape) * shape[-1] for shape in shapes) + 4000 * weights
    tokens = plan.calibration.num_tokens if plan.calibration is not None else 0
    passes = {"gptq": 3.0, "awq": 2.5}.get(plan.request.method.name, 2.0)
    running = 2 * tokens * weights * passes + 2 * tokens * sum(shape[-1] ** 2 for shape in shapes) / 1.7
    return (solving / _SPEED + running / (_FAST_SPEED if plan.fast else _SPEED)) / plan.request.threads


def _bits_per_weight(plan: CalibratedPlan) -> float:
    """Over all tensors of the file."""
    if isinstance(plan.output_plan, PackedPlan):
        plain = sum(prod(tensor.shape) for tensor in plan.output_plan.plain)
        elements = plain + sum(prod(scheme.shape) for scheme in plan.output_plan.modules.values())
    else:
        elements = sum(tensor.num_elements for tensor in plan.output_plan.tensors)
    return 8 * plan.nbytes / elements


def document(
    plan: CalibratedPlan, results: Results, output: Path, written: tuple[int, list[dict[str, Any]]], facts: dict[str, Any]
) -> dict[str, Any]:
    """What a run did, as a JSON object. written: of `write_result`."""
    layers = [results.facts(index) for index in range(plan.weights.config.num_layers)]
    parts = [*layers, *([results.facts(HEAD_LAYER)] if plan.job.head_format is not None else [])]
    modules = [{"name": name, **found} for part in parts for name, found in part["modules"].items()]
    nbytes, modules = written[0], modules + written[1]
    return {
        **facts,
        "dry_run": False,
        "output": str(output),
        "format": plan.request.form,
        "totals": {
            "modules": len(modules),
            "bytes": plan.nbytes,
            "file_bytes": nbytes,
            "memory_bytes": plan.memory.nbytes if plan.memory is not None else 0,
            "peak_memory_bytes": peak_memory(),
            "bits_per_weight": _bits_per_weight(plan),
        },
        "calibration": _calibration(plan),
        "substitutions": _substitutions(plan),
        "loads_in": loads_in(plan),
        "warnings": plan.warnings,
        "layers": [{key: value for key, value in layer.items() if key != "modules"} for layer in layers],
        "modules": modules,
    }


def summary_rows(found: dict[str, Any]) -> tuple[Sequence[str], list[list[object]]]:
    """Headers and one line for each kind of module: mean errors, methods, the fewest tokens."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for module in found["modules"]:
        groups.setdefault((_LAYER.sub("", module["name"]), module["type"]), []).append(module)
    rows: list[list[object]] = []
    for (kind, type_name), group in groups.items():
        outputs = [module["output_error"] for module in group if "output_error" in module]
        methods = dict.fromkeys(module["method"] for module in group)
        rows.append(
            [
                kind,
                type_name,
                len(group),
                f"{sum(m['bits_per_weight'] for m in group) / len(group):.2f}",
                f"{sum(m['relative_rms_error'] for m in group) / len(group):.2%}",
                f"{sum(outputs) / len(outputs):.2%}" if outputs else "",
                "/".join(f"{name} {sum(m['method'] == name for m in group)}" for name in methods),
                min(m.get("tokens", 0) for m in group) or "",
            ]
        )
    return ("MODULES OF KIND", "TYPE", "COUNT", "BITS", "WEIGHT ERROR", "OUTPUT ERROR", "METHOD", "TOKENS"), rows
