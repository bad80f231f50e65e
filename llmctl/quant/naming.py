"""What a model is called: GGUF's general.* keys and the names of files, from whatever the source says about itself.

The parts follow the naming convention of the GGUF description: BaseName-SizeLabel-FineTune-Version-Encoding.gguf.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZE = re.compile(r"(?:(?P<experts>\d+)x)?(?P<number>\d+(?:[._]\d+)?)(?P<unit>[KMBT])", re.IGNORECASE)
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_VERSION = re.compile(r"v\d+(?:\.\d+)*", re.IGNORECASE)
_ENCODING = re.compile(r"(?:i?q\d+(?:_\w+)?|b?f(?:p|loat)?(?:16|32)|gguf|hf)", re.IGNORECASE)
_PURPOSE = re.compile(r"(?:chat|instruct|it|base|vision|code|coder)", re.IGNORECASE)
_PLAIN_SUFFIX = re.compile(r"[-.](?:i?q\d\w*|b?f(?:p|loat)?(?:16|32))$", re.IGNORECASE)
_SHARD_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")

@dataclass(frozen=True)
class ModelName:
    """The parts of a model's name; None where it has none."""

    title: str
    basename: str | None = None
    size_label: str | None = None
    finetune: str | None = None
    version: str | None = None
    organization: str | None = None


def parse_name(identifier: str, num_elements: int) -> ModelName:
    """The parts of "owner/Base-3.1-8B-Instruct-v2" and the like. A text with blanks is a title and nothing else.

    num_elements: weights of the model, 0 if not known; a part that looks like a size but is far from it (a context length,
    as in 8k) is none.
    """
    owner, _, name = identifier.strip().strip("/").rpartition("/")
    organization = owner.rpartition("/")[2] or None
    if " " in name:
        return ModelName(name, organization=organization)
    parts = [part for part in name.split("-") if part]
    while len(parts) > 1 and _ENCODING.fullmatch(parts[-1]):
        parts.pop()
    version = parts.pop() if len(parts) > 1 and _VERSION.fullmatch(parts[-1]) else None
    at = next((i for i, part in enumerate(parts) if i and _is_size(part, num_elements)), None)
    size = parts.pop(at).replace("_", ".") if at is not None else None
    if at is None:
        at = next((i for i, part in enumerate(parts) if i and _PURPOSE.fullmatch(part)), len(parts))
    basename, finetune = "-".join(parts[:at]), "-".join(parts[at:])
    label = size[:-1] + size[-1].upper() if size else None
    return ModelName(title(name), basename or None, label, finetune or None, version, organization)


def title(name: str) -> str:
    """The name for people: blanks for dashes, words in small letters capitalized but for versions and numbers."""
    words = name.replace("-", " ").split()
    plain = [not word.islower() or word[0].isdigit() or _VERSION.fullmatch(word) is not None for word in words]
    return " ".join(word if kept else word.title() for word, kept in zip(words, plain, strict=True))


def _is_size(part: str, num_elements: int) -> bool:
    found = _SIZE.fullmatch(part)
    if found is None:
        return False
    count = float(found["number"].replace("_", ".")) * _UNITS[found["unit"].upper()] * int(found["experts"] or 1)
    return not num_elements or num_elements / 4 < count < num_elements * 4


def size_label(num_elements: int) -> str:
    """A count of weights as models are labelled with it: two digits at least (1.2B, 135M, 20K)."""
    scaled, unit = next(
        ((num_elements / _UNITS[unit], unit) for unit in "TBM" if num_elements >= _UNITS[unit]), (num_elements / 1e3, "K")
    )
    return f"{scaled:.{1 if round(scaled) < 10 else 0}f}{unit}"


def file_name(metadata: Mapping[str, Any], source: Path, encoding: str, suffix: str = ".gguf") -> str:
    """The conventional name of a GGUF file; without a base name in the metadata, that of the source's own file.

    encoding: the type the weights are in, F16 or Q4_0. suffix: "" for the name of a folder.
    """
    basename = metadata.get("general.basename")
    if not isinstance(basename, str) or not basename.strip():
        stem = _SHARD_SUFFIX.sub("", source.stem if source.suffix == ".gguf" else source.name)
        return _safe(f"{_PLAIN_SUFFIX.sub('', stem)}-{encoding}{suffix}")
    parts = [basename, *(metadata.get(f"general.{key}") for key in ("size_label", "finetune", "version")), encoding]
    return _safe("-".join(part.strip() for part in parts if isinstance(part, str) and part.strip()) + suffix)


def _safe(name: str) -> str:
    """Metadata comes from a file: nothing in it may name another folder or hide the result."""
    return re.sub(r"[\s/\\:*?\"<>|\x00-\x1f]+", "-", name).lstrip(".-")
