"""GGUF checkpoints, in one file or split over several."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from llmctl.errors import FormatError, ModelNotFoundError
from llmctl.runtime.checkpoint.checkpoint import Checkpoint, TensorEntry
from llmctl.runtime.checkpoint.files import map_file
from llmctl.runtime.checkpoint.gguf_header import GgufHeader, read_header
from llmctl.runtime.checkpoint.gguf_types import MetaValue, Typed, ValueType
from llmctl.runtime.checkpoint.identify import identify
from llmctl.runtime.checkpoint.text import quoted

_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class GgufCheckpoint(Checkpoint):
    """A GGUF model; of a split set, any shard opens the whole.

    metadata: key → value, from the first shard: scalars as Python's, arrays of numbers as numpy's, of strings as
    StringArray (a lazy sequence), nested arrays as lists.
    version, alignment: of the first shard's file.
    """

    kind: ClassVar[Literal["gguf"]] = "gguf"

    def __init__(self, path: Path) -> None:
        """Open `path`. Errors: ModelNotFoundError (also for a missing shard), FormatError, UnsupportedError."""
        path = Path(path)
        shards = _open_shards(path)
        first = shards[0].header
        entries = [entry for shard in shards for entry in shard.header.entries]
        super().__init__(path, {shard.path: shard.data for shard in shards}, entries)
        self.metadata: dict[str, MetaValue] = first.metadata
        self.version = first.version
        self.alignment = first.alignment
        self._types = first.types

    @cached_property
    def metadata_types(self) -> dict[str, ValueType]:
        """The stored value type of each key (ARRAY for arrays: numpy dtypes and StringArray tell their items')."""
        return dict(self._types)

    def typed_metadata(self) -> dict[str, object]:
        """The metadata as a writer must be given it to write the same types; without the keys of the split."""
        return {
            key: value if self._types[key] is ValueType.ARRAY else Typed(value, self._types[key])
            for key, value in self.metadata.items()
            if not key.startswith("split.")
        }


@dataclass(frozen=True)
class _Shard:
    path: Path
    data: np.ndarray
    header: GgufHeader


def _open_shard(path: Path) -> _Shard:
    if identify(path) != "gguf":
        raise FormatError(f"{path}: not a GGUF file")
    data = map_file(path)
    return _Shard(path, data, read_header(path, data))


def _open_shards(path: Path) -> list[_Shard]:
    """The file, or all files of the set it belongs to, in order."""
    opened = _open_shard(path)
    count = _split_key(opened, "split.count", default=1)
    if count <= 1:
        return [opened]
    number = _split_key(opened, "split.no")
    shards = []
    for index, shard_path in enumerate(_shard_paths(path, number, count)):
        shard = opened if index == number else _open_sibling(shard_path, path, index, count)
        if (_split_key(shard, "split.no"), _split_key(shard, "split.count")) != (index, count):
            raise FormatError(f"{shard_path}: its keys split.no and split.count do not say part {index + 1} of {count}")
        shards.append(shard)
    _check_set(shards)
    return shards


def _open_sibling(shard_path: Path, opened: Path, index: int, count: int) -> _Shard:
    try:
        return _open_shard(shard_path)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error} (part {index + 1} of {count} of the split model {opened})") from error


def _split_key(shard: _Shard, key: str, default: int | None = None) -> int:
    value = shard.header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FormatError(f"{shard.path}: {key} must be a number, found {quoted(repr(value))}")
    return value


def _shard_paths(path: Path, number: int, count: int) -> list[Path]:
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number + 1, count):
        raise FormatError(
            f"{path}: this is part {number + 1} of {count} of a split model, so its name must end in "
            f"-{number + 1:05d}-of-{count:05d}.gguf for the other parts to be found"
        )
    return [path.with_name(f"{match['prefix']}-{index + 1:05d}-of-{count:05d}.gguf") for index in range(count)]


def _check_set(shards: list[_Shard]) -> None:
    seen: dict[str, TensorEntry] = {}
    for shard in shards:
        for entry in shard.header.entries:
            if entry.name in seen:
                raise FormatError(
                    f"{entry.file}: tensor {quoted(entry.name)} is also in {seen[entry.name].file.name}, another part"
                )
            seen[entry.name] = entry
    expected = _split_key(shards[0], "split.tensors.count", default=len(seen))
    if expected != len(seen):
        raise FormatError(f"{shards[0].path}: split.tensors.count is {expected}, the parts hold {len(seen)} tensors")
