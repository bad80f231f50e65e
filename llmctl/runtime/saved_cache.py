"""The cache of a text on disk, so that a later process need not compute it again: one safetensors file.

Saved are whole pages; the few tokens after the last one are computed again. A file counts only for the model, the element type
and the kernels it was made with, so an answer that begins with it is that of a run without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.cache.memory import BLOCK_SIZE
from llmctl.runtime.checkpoint.checkpoint import Checkpoint
from llmctl.runtime.checkpoint.output_file import OutputFile
from llmctl.runtime.engine import Engine
from llmctl.runtime.loading import LoadedModel

_KIND, _VERSION = "llmctl kv cache", "1"
_HASH_PIECE = 1 << 22


@dataclass
class SavedCache:
    """A file that was read. token_ids: the text. firsts: of every group of layers, the first page that is there. pages: layer →
    bytes [pages, bytes of a page]. extra: what the saver put beside."""

    token_ids: list[int]
    model: str
    layout: str
    firsts: list[int]
    pages: dict[str, np.ndarray]
    extra: dict[str, Any] = field(default_factory=dict)


def model_hash(checkpoint: Checkpoint) -> str:
    """sha256 over the names, sizes and bytes of the model's weight files, and its config.json where there is one."""
    digest = hashlib.sha256()
    config = checkpoint.path / "config.json" if checkpoint.path.is_dir() else None
    for file in [*checkpoint.files, *([config] if config is not None and config.is_file() else [])]:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode("utf-8", "surrogateescape"))
        with file.open("rb") as data:
            while piece := data.read(_HASH_PIECE):
                digest.update(piece)
    return digest.hexdigest()


def save_cache(path: Path, engine: Engine, token_ids: list[int], model: str, extra: Mapping[str, Any] | None = None) -> int:
    """Write what the engine's cache has of a text; returns how many tokens that is. model: its `model_hash`.

    Errors: OutputError; UnsupportedError for a backend whose pages stay where they are.
    """
    from safetensors.numpy import save

    layout = page_layout(engine.model)
    count, firsts, pages = engine.take_out(token_ids)
    arrays = {f"layer.{i}": _rows(each) for i, each in enumerate(pages)}
    arrays["token_ids"] = np.array(token_ids[:count], np.int32)
    metadata = {"kind": _KIND, "version": _VERSION, "model": model, "layout": layout, "firsts": json.dumps(firsts)}
    file = OutputFile(path)
    try:
        file.write(save(arrays, {**metadata, "extra": json.dumps(dict(extra or {}))}))
        file.commit()
    finally:
        file.abort()
    return count


def _rows(pages: list[bytes]) -> np.ndarray:
    """Pages of one layer, which may be none, as uint8 [pages, bytes of a page]."""
    return np.frombuffer(b"".join(pages), np.uint8).reshape(len(pages), len(pages[0]) if pages else 0)


def read_cache(path: Path) -> SavedCache:
    """Read such a file. Errors: OSError; FormatError where it is none."""
    from safetensors import SafetensorError, safe_open

    path.open("rb").close()  # what cannot be read is named here; safetensors' own errors name no file
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != _KIND or metadata.get("version") != _VERSION:
                raise FormatError(f"{path}: not a cache that this version of llmctl has written")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            token_ids = arrays.pop("token_ids").tolist()
            firsts, extra = json.loads(metadata["firsts"]), json.loads(metadata["extra"])
            return SavedCache(token_ids, metadata["model"], metadata["layout"], firsts, arrays, extra)
    except (SafetensorError, KeyError, ValueError) as error:
        raise FormatError(f"{path}: not a sound cache: {error}") from None


def is_cache(path: Path) -> bool:
    """Whether a file is such a one, of whatever version. Errors: OSError."""
    from safetensors import SafetensorError, safe_open

    path.open("rb").close()
    try:
        with safe_open(path, "np") as file:
            return (file.metadata() or {}).get("kind") == _KIND
    except SafetensorError:
        return False


def put_back(path: Path, saved: SavedCache, engine: Engine, model: str) -> int:
    """Let the engine find the text in its cache; returns how many tokens that is.

    Errors: FormatError where the file is of another model, or made with other kernels or another element type.
    """
    if saved.model != model:
        raise FormatError(f"{path}: the cache of another model")
    layout = page_layout(engine.model)
    if saved.layout != layout:
        raise FormatError(f"{path}: made with {saved.layout!r}, here it is {layout!r} (kernels, --kv-type, --activations)")
    layers = [saved.pages.get(f"layer.{i}") for i in range(len(saved.pages))]
    groups = engine.cache_plan.groups
    count, rest = divmod(len(saved.token_ids), BLOCK_SIZE)
    is_sound = not rest and len(saved.firsts) == len(groups) and len(layers) == sum(len(group.layers) for group in groups)
    for group, first in zip(groups, saved.firsts, strict=False):
        is_sound = is_sound and isinstance(first, int) and 0 <= first <= count
        is_sound = is_sound and all(_holds(layers[i], group.held_pages(count, first)) for i in group.layers)
    if not is_sound or not all(0 <= token_id < engine.model.num_tokens for token_id in saved.token_ids):
        raise FormatError(f"{path}: its tokens and pages are not those of this model")
    try:
        return engine.put_in(saved.token_ids, saved.firsts, [[row.tobytes() for row in layer] for layer in layers])
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from None


def _holds(layer: np.ndarray | None, count: int) -> bool:
    return layer is not None and layer.dtype == np.uint8 and layer.ndim == 2 and len(layer) == count


def page_layout(model: LoadedModel) -> str:
    """The name of the pages' layout. Errors: UnsupportedError where they cannot be taken out."""
    layout = model.ops.page_layout(model.kv_type)
    if layout is None:
        raise UnsupportedError(f"the {model.ops.name} backend cannot save its cache: use --backend native")
    if model.kv_policy.kind in ("full", "snapkv"):  # prompts are computed in full
        return layout
    seen = dict.fromkeys((shape.anchors, shape.sliding_window) for shape in model.kv_layers())
    return f"{layout} {' '.join(f'{anchors}+{window}' for anchors, window in seen)}"
