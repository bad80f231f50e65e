"""A calibrated model as a folder of packed integers: GPTQ, AWQ or compressed-tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

import numpy as np

from llmctl.errors import UnsupportedError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.plain import cast
from llmctl.quant.integer_grid import IntegerGrid
from llmctl.quant.naming import file_name
from llmctl.quant.packed_folder import PackedPlan, PlainTensor, config_files, unquantized
from llmctl.quant.packed_layouts import Layout, Scheme, why_not_together
from llmctl.quant.results import Results
from llmctl.quant.to_folder import FolderPlan
from llmctl.runtime.checkpoint.text import quoted


def plan_quantized(
    folder: FolderPlan, layout: Layout, targets: Mapping[str, IntegerGrid], results: Results | None
) -> PackedPlan:
    """What the folder becomes with `targets` quantized. results: None while they are not there yet: the plan can be shown, not
    written. UnsupportedError names the module that the layout cannot hold."""
    shapes = {tensor.name.removesuffix(".weight"): tensor.shape for tensor in folder.tensors}
    modules = {name: _scheme(folder, layout, name, grid, shapes[name]) for name, grid in targets.items()}
    if reason := why_not_together(layout, modules):
        raise UnsupportedError(f"{folder.path}: cannot be stored as {layout.name}: {reason}")
    quantized = {f"{name}.weight" for name in targets}
    plain = [
        PlainTensor(tensor.name, folder.form, tensor.shape, partial(_plain, folder, tensor.name, results))
        for tensor in folder.tensors
        if tensor.name not in quantized
    ]
    config = layout.config(modules, unquantized(plain))
    stated = json.loads(folder.files["config.json"])
    return PackedPlan(
        inputs=folder.sources,
        layout=layout,
        source=folder.form.name,
        readers={} if results is None else {name: partial(results.stored, name) for name in targets},
        modules=modules,
        plain=plain,
        release=folder.weights.checkpoint.release_all,
        files=config_files(folder.files, stated, layout, config),
        name=file_name({}, folder.path, f"{layout.label}-{_bits(modules)}bit", suffix=""),
        warnings=list(folder.warnings),
    )


def _bits(modules: Mapping[str, Scheme]) -> int:
    return max(scheme.bits for scheme in modules.values())


def _scheme(folder: FolderPlan, layout: Layout, name: str, grid: IntegerGrid, shape: tuple[int, int]) -> Scheme:
    groups = shape[1] // grid.columns_per_group(shape[1])
    scheme = Scheme(grid.bits, grid.group_size, shape, groups, grid.symmetric, ordered=False, scale_dtype=np.dtype(np.float16))
    if reason := layout.why_not(name, scheme.blank()):
        raise UnsupportedError(f"{folder.path}: module {quoted(name)} cannot be stored as {layout.name}: {reason}")
    return scheme


def _plain(folder: FolderPlan, name: str, results: Results | None) -> np.ndarray:
    changed = None if results is None else results.changed(name)
    return cast(dequantize(folder.weights.read(name)) if changed is None else changed, folder.form)
