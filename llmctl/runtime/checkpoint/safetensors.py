"""safetensors checkpoints: a Hugging Face folder, a shard index, or one file."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from llmctl.errors import FormatError, LlmctlError
from llmctl.runtime.checkpoint.checkpoint import Checkpoint, TensorEntry, WeightSize
from llmctl.runtime.checkpoint.files import map_file
from llmctl.runtime.checkpoint.huggingface import WeightFiles, find_weights, read_optional_json
from llmctl.runtime.checkpoint.identify import identify
from llmctl.runtime.checkpoint.safetensors_header import read_header
from llmctl.runtime.checkpoint.text import quoted


class SafetensorsCheckpoint(Checkpoint):
    """Weights in safetensors, with the configuration beside them.

    folder: where the weights lie.
    config, generation_config: config.json and generation_config.json there; {} where there is none.
    metadata: `__metadata__` of the files, the first file's value where they differ.
    """

    kind: ClassVar[Literal["safetensors"]] = "safetensors"

    def __init__(self, path: Path) -> None:
        """Open `path`. Errors: ModelNotFoundError (also for a missing shard), FormatError, UnsupportedError."""
        path = Path(path)
        weights = find_weights(path)
        maps: dict[Path, np.ndarray] = {}
        entries: dict[str, TensorEntry] = {}
        self.metadata: dict[str, str] = {}
        for file in weights.files:
            maps[file] = _map(file)
            header = read_header(file, maps[file])
            self.metadata = {**header.metadata, **self.metadata}
            _add(entries, header.entries)
        _check_index(weights, entries)
        super().__init__(path, maps, entries.values())
        self.folder = weights.folder
        self.config: dict[str, Any] = read_optional_json(self.folder / "config.json")
        self.generation_config: dict[str, Any] = read_optional_json(self.folder / "generation_config.json")

    def weight_sizes(self) -> list[WeightSize]:
        """The weights; those quantized in a way that cannot be read are what they look like, tensors."""
        from llmctl.runtime.checkpoint.packed import find_packed

        try:
            found = find_packed(self)
        except LlmctlError:
            return super().weight_sizes()
        plain = [entry for entry in self.entries() if entry.name not in found.parts]
        sizes = [WeightSize(entry.format.name, entry.num_elements, entry.nbytes) for entry in plain]
        for module in found.modules.values():
            nbytes = sum(self.entry(part).nbytes for part in module.parts)
            sizes.append(WeightSize(module.form, prod(module.shape), nbytes))
        return sizes


def _map(file: Path) -> np.ndarray:
    if identify(file) != "safetensors":
        raise FormatError(f"{file}: not a safetensors file")
    return map_file(file)


def _add(entries: dict[str, TensorEntry], added: list[TensorEntry]) -> None:
    for entry in added:
        if entry.name in entries:
            raise FormatError(
                f"{entry.file}: tensor {quoted(entry.name)} is also in {entries[entry.name].file.name}, another shard"
            )
        entries[entry.name] = entry


def _check_index(weights: WeightFiles, entries: dict[str, TensorEntry]) -> None:
    """Every tensor the index lists must be in the file it names. Those it does not list count too: the files decide."""
    for name, file in (weights.weight_map or {}).items():
        if name not in entries or entries[name].file.name != file:
            raise FormatError(f"{weights.folder / file}: tensor {quoted(name)} is not in it, though the shard index says so")
