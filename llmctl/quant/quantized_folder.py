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
from llmctl.quant.to_folder import FolderPlan, FolderTensor
from llmctl.runtime.checkpoint.text import quoted


def plan_quantized(
    folder: FolderPlan, layout: Layout, targets: Mapping[str, IntegerGrid], results: Results | None
) -> PackedPlan:
    """What the folder becomes with `targets` quantized. results: None while they are not there yet: the plan can be shown, not
    written. UnsupportedError names the module that the layout cannot hold."""
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in folder.tensors if tensor.name.endswith(".weight")}
    written = {name: tensors[name].written.removesuffix(".weight") for name in targets}
    modules = {written[name]: _scheme(folder, layout, tensors[name], grid) for name, grid in targets.items()}
    if reason := why_not_together(layout, modules):
        raise UnsupportedError(f"{folder.path}: cannot be stored as {layout.name}: {reason}")
    quantized = {tensors[name].name for name in targets}
    plain = [
        PlainTensor(tensor.written, folder.form, tensor.shape, partial(_plain, folder, tensor, results))
        for tensor in folder.tensors
        if tensor.name not in quantized
    ]
    config = layout.config(modules, unquantized(plain))
    stated = json.loads(folder.files["config.json"])
    return PackedPlan(
        inputs=folder.sources,
        layout=layout,
        source=folder.form.name,
        readers={} if results is None else {written[name]: partial(results.stored, name) for name in targets},
        modules=modules,
        plain=plain,
        release=folder.weights.checkpoint.release_all,
        files=config_files(folder.files, stated, layout, config),
        name=file_name({}, folder.path, f"{layout.label}-{_bits(modules)}bit", suffix=""),
        warnings=list(folder.warnings),
    )


def _bits(modules: Mapping[str, Scheme]) -> int:
    return max(scheme.bits for scheme in modules.values())


def _scheme(folder: FolderPlan, layout: Layout, tensor: FolderTensor, grid: IntegerGrid) -> Scheme:
    if tensor.transposed and layout.name != "gptq":
        raise UnsupportedError(
            f"{folder.path}: this family stores {quoted(tensor.written)} the other way round, which {layout.name} readers do not "
            "expect; --format gptq or gguf can be written"
        )
    rows, columns = tensor.shape[::-1] if tensor.transposed else tensor.shape
    groups = columns // grid.columns_per_group(columns)
    scheme = Scheme(grid.bits, grid.group_size, (rows, columns), groups, grid.symmetric, False, np.dtype(np.float16))
    if reason := layout.why_not(tensor.written.removesuffix(".weight"), scheme.blank()):
        raise UnsupportedError(f"{folder.path}: {quoted(tensor.written)} cannot be stored as {layout.name}: {reason}")
    return scheme


def _plain(folder: FolderPlan, tensor: FolderTensor, results: Results | None) -> np.ndarray:
    changed = None if results is None else results.changed(tensor.name)
    stored = folder.weights.read(tensor.name) if changed is None else changed
    values = stored if isinstance(stored, np.ndarray) else dequantize(stored)
    return cast(np.ascontiguousarray(values.T) if tensor.transposed else values, folder.form)
