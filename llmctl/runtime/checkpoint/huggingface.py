"""Which files of a Hugging Face folder hold the weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmctl.errors import FormatError, ModelNotFoundError
from llmctl.runtime.checkpoint.files import exists, not_readable, read_json_object
from llmctl.runtime.checkpoint.identify import identify
from llmctl.runtime.checkpoint.text import quoted

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_MAX_NAME = 255
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class WeightFiles:
    """files: in order of name; weight_map: tensor → name of its file, if an index lists them."""

    folder: Path
    files: list[Path]
    weight_map: dict[str, str] | None = None


def find_weights(path: Path) -> WeightFiles:
    """The weight files that `path` stands for: a folder, a shard index, or a safetensors file.

    In a folder the index comes first, then model.safetensors, then the only *.safetensors there is: repositories often
    keep the same weights twice (consolidated.safetensors). A file that the index beside it lists stands for the whole
    set. Errors: ModelNotFoundError if there are no weights or a shard is missing, FormatError.
    """
    kind = identify(path)
    if kind == "folder":
        return _in_folder(path)
    if kind == "index":
        return _from_index(path)
    if kind == "safetensors":
        return _set_of(path)
    raise FormatError(f"{path}: not a safetensors file")


def read_optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file; {} if there is no such file. FormatError if it is there and broken."""
    return read_json_object(path) if exists(path) else {}


def _in_folder(folder: Path) -> WeightFiles:
    if exists(folder / INDEX_NAME):
        return _from_index(folder / INDEX_NAME)
    found = _listing(folder, ("*.safetensors",))
    if folder / _SINGLE_NAME in found:
        return WeightFiles(folder, [folder / _SINGLE_NAME])
    if len(found) == 1:
        return WeightFiles(folder, found)
    if found:
        raise FormatError(
            f"{folder}: several safetensors files, and neither {INDEX_NAME} nor {_SINGLE_NAME} to say which are "
            f"the model: {_names(found)}"
        )
    raise ModelNotFoundError(f"{folder}: no safetensors weights in this folder{_instead(folder)}")


def _instead(folder: Path) -> str:
    """What a folder without weights holds in their place."""
    if models := _listing(folder, ("*.gguf",)):
        return f"; it holds GGUF files, name one of them: {_names(models)}"
    if pickles := _listing(folder, _PICKLES):
        return f", only PyTorch pickles ({_names(pickles)}), which can run code and are never opened; convert them to safetensors"
    everything = _listing(folder, ("*",))
    return f"; it holds {_names(everything)}" if everything else "; it is empty"


def _listing(folder: Path, patterns: Iterable[str]) -> list[Path]:
    try:
        return sorted(path for pattern in patterns for path in folder.glob(pattern))
    except OSError as error:
        raise not_readable(folder, error) from error


def _names(paths: list[Path], limit: int = 5) -> str:
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(path.name for path in paths[:limit]) + more


def _set_of(path: Path) -> WeightFiles:
    index = path.with_name(INDEX_NAME)
    if exists(index):
        from_index = _from_index(index)
        if path in from_index.files:
            return from_index
    return WeightFiles(path.parent, [path])


def _from_index(path: Path) -> WeightFiles:
    weight_map = read_json_object(path).get("weight_map")
    if weight_map is None:
        raise FormatError(f"{path}: a JSON file without a weight_map is no shard index; give the model's folder or weights")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{path}: weight_map must be an object of tensor name → file name with at least one entry")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise FormatError(
                f"{path}: weight_map places tensor {quoted(tensor)} in {quoted(str(name))}, "
                "expected the name of a file in the same folder"
            )
    files = [path.with_name(name) for name in sorted(set(weight_map.values()))]
    for file in files:
        if not exists(file):
            raise ModelNotFoundError(f"{file}: no such file, but {path.name} lists it ({len(files)} shards in all)")
    return WeightFiles(path.parent, files, weight_map)


def _is_plain_name(name: str) -> bool:
    """Whether the name stays in its folder on any system: no separators, drive or parent; and is one a file can have."""
    return 0 < len(name) <= _MAX_NAME and name not in (".", "..") and not set(name) & set("/\\:\0")
