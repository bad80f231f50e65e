"""A folder of packed integers as another: GPTQ, AWQ and compressed-tensors into each other, without a change to any value.

Scales, zero points and group indices are read to plan it, which tells whether it can be done; then everything is read one
module at a time. Everything that is not quantized is copied as it is, so the architecture need not be one that can be run here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import UnsupportedError
from llmctl.kernels.formats.spec import Format
from llmctl.quant.naming import file_name
from llmctl.quant.packed_layouts import LAYOUTS, Layout, Scheme, why_not_together
from llmctl.quant.to_folder import TAKEN_OVER, Progress
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.dtypes import format_of
from llmctl.runtime.checkpoint.output_folder import OutputFolder, check_folder, refuse_inside
from llmctl.runtime.checkpoint.packed import find_packed
from llmctl.runtime.checkpoint.packed_integers import StoredIntegers
from llmctl.runtime.checkpoint.packed_parts import PackedModule
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint
from llmctl.runtime.checkpoint.safetensors_writer import SafetensorsWriter
from llmctl.runtime.checkpoint.text import quoted

_CONFIG_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class PlainTensor:
    """One that is not quantized. format, shape: as it will be written. read: it, in that type."""

    name: str
    format: Format
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclass
class PackedPlan:
    """Everything that will be written.

    inputs: files and folders that must not be written over. source: how the modules are stored now. readers, modules: the
    quantized ones by name, how they are read and what they are. plain: the others. release: called when something was written,
    to let go of its memory. files: name → content of the small files. name: of the folder, if none is asked for.
    """

    inputs: list[Path]
    layout: Layout
    source: str
    readers: Mapping[str, Callable[[], StoredIntegers]]
    modules: dict[str, Scheme]
    plain: list[PlainTensor]
    release: Callable[[], None]
    files: dict[str, bytes]
    name: str
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def declared(self) -> list[tuple[str, Format, tuple[int, ...]]]:
        """Name, type and shape of every tensor, in the order of the file."""
        found = [(tensor.name, tensor.format, tensor.shape) for tensor in self.plain]
        for module, scheme in self.modules.items():
            for suffix, tensor in self.layout.tensors(scheme.blank(), self.all_symmetric).items():
                found.append((f"{module}.{suffix}", format_of(tensor), tensor.shape))
        return found

    @property
    def all_symmetric(self) -> bool:
        """Whether no module has zero points of its own."""
        return all(scheme.symmetric for scheme in self.modules.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they will be."""
        return sum(int(np.prod(shape)) * form.bytes_per_block for _, form, shape in self.declared)


def plan_packed(path: Path, target: str) -> PackedPlan:
    """What the folder at `path` becomes. target: a name of LAYOUTS.

    Raises UnsupportedError, with the reason and the tensor, where it cannot be done without a change to the values; FormatError
    and ModelNotFoundError as any reader.
    """
    layout, checkpoint = LAYOUTS[target], open_checkpoint(path)
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        raise UnsupportedError(f"{path}: {layout.name} is made from folders of packed integers; this is a {checkpoint.kind} file")
    found = find_packed(checkpoint)
    if not found.modules:
        raise UnsupportedError(f"{path}: no weight here is quantized; llmctl quantize makes a smaller model of it")
    sources = {name.removesuffix(".weight"): module for name, module in found.modules.items()}
    modules = {name: _scheme(path, layout, name, module) for name, module in sources.items()}
    if reason := why_not_together(layout, modules):
        raise UnsupportedError(f"{path}: cannot be stored as {layout.name}: {reason}")
    entries = [checkpoint.entry(name) for name in checkpoint.names() if name not in found.parts]
    plain = [PlainTensor(e.name, e.format, e.shape, partial(checkpoint.read, e.name)) for e in entries]
    config = layout.config(modules, unquantized(plain))
    return PackedPlan(
        inputs=[*checkpoint.files, checkpoint.folder],
        layout=layout,
        source=found.settings.method if found.settings else "unknown",
        readers={name: partial(_read, name, module) for name, module in sources.items()},
        modules=modules,
        plain=plain,
        release=checkpoint.release_all,
        files=config_files(_taken_over(checkpoint), checkpoint.config, layout, config),
        name=file_name({}, path, layout.label, suffix=""),
        warnings=_warnings(layout, modules),
    )


def _read(name: str, module: PackedModule) -> StoredIntegers:
    stored = module.read()
    assert isinstance(stored, StoredIntegers), name
    return stored


def _scheme(path: Path, layout: Layout, name: str, module: PackedModule) -> Scheme:
    """What the module is; UnsupportedError if the layout cannot hold its values."""
    stored = module.read() if module.form.startswith("INT") else None
    if not isinstance(stored, StoredIntegers):
        raise UnsupportedError(f"{path}: tensor {quoted(module.parts[0])} holds {module.form}, {layout.name} is of whole numbers")
    if reason := layout.why_not(name, stored):
        raise UnsupportedError(f"{path}: module {quoted(name)} cannot be stored as {layout.name}: {reason}")
    return Scheme.of(stored)


def unquantized(plain: Iterable[PlainTensor]) -> list[str]:
    """Modules with a matrix that is not quantized, the embedding apart, which no tool expects to be."""
    matrices = [tensor.name for tensor in plain if tensor.name.endswith(".weight") and len(tensor.shape) == 2]
    return [name.removesuffix(".weight") for name in matrices if "embed" not in name.rpartition(".")[0].rpartition(".")[2]]


def _warnings(layout: Layout, modules: dict[str, Scheme]) -> list[str]:
    if layout.name == "compressed-tensors" and any(scheme.ordered for scheme in modules.values()):
        return ["activation order is written as weight_g_idx, which vLLM reads and compressed-tensors itself no longer does"]
    return []


def _taken_over(checkpoint: SafetensorsCheckpoint) -> dict[str, bytes]:
    taken = {path for pattern in TAKEN_OVER for path in checkpoint.folder.glob(pattern) if path.is_file()}
    return {str(path.relative_to(checkpoint.folder)): path.read_bytes() for path in sorted(taken)}


def config_files(
    files: dict[str, bytes], stated: Mapping[str, Any], layout: Layout, config: dict[str, Any]
) -> dict[str, bytes]:
    """The small files of a packed folder. stated: its config.json so far. config: how the weights are quantized."""
    kept = {key: value for key, value in stated.items() if key not in _CONFIG_KEYS}
    files = {**files, "config.json": _json({**kept, "quantization_config": config})}
    return {**files, "quantize_config.json": _json(config)} if layout.name == "gptq" else files


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def packed_path(plan: PackedPlan, asked: Path | None, *, force: bool) -> Path:
    """Where the folder goes: as asked, or its conventional name in the current folder. OutputError if it cannot."""
    output = asked if asked is not None else Path(plan.name)
    refuse_inside(plan.inputs, output)
    check_folder(output, replace=force)
    return output


def write_packed(
    plan: PackedPlan,
    output: Path,
    *,
    max_shard_bytes: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the folder, whole at its name or not at all; bytes of all its files.

    max_shard_bytes: most bytes of tensors in a file; None for one file. progress: called with (bytes done, bytes in all).
    """
    total, done = plan.nbytes, 0
    with OutputFolder(output, replace=force) as folder:
        folder.require(total + sum(map(len, plan.files.values())))
        with SafetensorsWriter(folder.work, max_shard_bytes=max_shard_bytes) as writer:
            for declared in plan.declared:
                writer.declare(*declared)
            for name, tensor in _tensors(plan):
                writer.write(name, [tensor])
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total)
        for name, data in plan.files.items():
            folder.write_file(name, data)
    return sum(path.stat().st_size for path in output.rglob("*") if path.is_file())


def _tensors(plan: PackedPlan) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) in the order of `declared`; what was written leaves memory."""
    for tensor in plan.plain:
        yield tensor.name, tensor.read()
        plan.release()
    for name, read in plan.readers.items():
        for suffix, tensor in plan.layout.tensors(read(), plan.all_symmetric).items():
            yield f"{name}.{suffix}", tensor
        plan.release()
