"""What a folder calls its model, and its README.md: as GGUF's general.* keys, and such keys as a README.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmctl.errors import FormatError
from llmctl.quant.naming import ModelName, parse_name, size_label, title
from llmctl.runtime.checkpoint.string_array import StringArray

# GGUF key below general. → key of a model card's front matter.
_CARD_KEYS = (
    ("author", "author"),
    ("license", "license"),
    ("license.name", "license_name"),
    ("license.link", "license_link"),
    ("languages", "language"),
    ("tags", "tags"),
)
_LISTS = ("languages", "tags")
# GGUF numbers what a model comes from: general.base_model.0.name …; the card lists it.
_ORIGINS = (("base_model", "base_model"), ("dataset", "datasets"))
_HUB = "https://huggingface.co/"
_MAX_ORIGINS = 1000


def describe_folder(folder: Path, config: Mapping[str, Any], num_elements: int) -> dict[str, Any]:
    """The general.* keys that name a Hugging Face folder, in the order they are written.

    Sources, the first that says something: the model card (README.md), `_name_or_path` of config.json unless it is a path,
    the folder's own name. Raises FormatError for a model card that is no valid YAML.
    """
    card = read_card(folder)
    stated = config.get("_name_or_path")
    stated = stated if isinstance(stated, str) and stated.strip() and stated.count("/") <= 1 and stated[0] not in "./~" else None
    names = [parse_name(text, num_elements) for text in (card.get("model_name"), stated, folder.resolve().name) if text]
    found = {key: next((value for name in names if (value := getattr(name, key))), None) for key in ModelName.__annotations__}
    found["size_label"] = found["size_label"] or (size_label(num_elements) if num_elements else None)
    found["organization"] = title(found["organization"]) if found["organization"] else None
    keys = {"name": found.pop("title"), **found}
    keys |= card_keys(card)
    return {f"general.{key}": value for key, value in keys.items() if value is not None}


def read_card(folder: Path) -> dict[str, Any]:
    """The front matter of README.md; {} where there is none. FormatError if it is no valid YAML."""
    path = folder / "README.md"
    if not path.is_file() or not path.read_bytes()[:200].lstrip(b"\xef\xbb\xbf \r\n").startswith(b"---"):
        return {}
    from huggingface_hub import metadata_load

    try:
        return metadata_load(path) or {}
    except Exception as error:  # YAML's own classes, not a dependency of ours
        raise FormatError(f"{path}: its front matter cannot be read: {error}") from error


def card_keys(card: Mapping[str, Any]) -> dict[str, Any]:
    """What a card says beside names, as keys below general."""
    keys: dict[str, Any] = {}
    for prefix, source in _ORIGINS:
        keys |= _origins(prefix, _texts(card.get(source)))
    for key, source in _CARD_KEYS:
        values = _texts(card.get(source))
        if key == "tags":  # what it is for is a tag like others
            values += [text for text in _texts(card.get("pipeline_tag")) if text not in values]
        if values:
            keys[key] = values if key in _LISTS else ",".join(values)
    return keys


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(item) for item in values if item is not None and str(item).strip()]


def _origins(prefix: str, identifiers: list[str]) -> dict[str, Any]:
    keys: dict[str, Any] = {f"{prefix}.count": len(identifiers)} if identifiers else {}
    for index, identifier in enumerate(identifiers):
        name = parse_name(identifier, 0)
        found = {
            "name": name.title,
            "version": name.version,
            "organization": title(name.organization) if name.organization else None,
            "repo_url": _HUB + identifier if identifier.count("/") == 1 else None,
        }
        keys |= {f"{prefix}.{index}.{key}": value for key, value in found.items() if value is not None}
    return keys


def model_card(metadata: Mapping[str, Any], source: Path) -> bytes:
    """A README.md whose front matter says what GGUF's general.* keys do, so that the way back finds it."""
    pairs = [("model_name", "name"), *((card, key) for key, card in _CARD_KEYS)]
    found = {card: _stated(metadata.get(f"general.{key}")) for card, key in pairs}
    found |= {card: list(_urls(metadata, prefix)) for prefix, card in _ORIGINS}
    lines = [f"{card}: {json.dumps(value, ensure_ascii=False)}" for card, value in found.items() if value]
    body = f"Converted from {source.name} by llmctl.\n"
    return ("---\n" + "\n".join(lines) + "\n---\n\n" + body if lines else body).encode("utf-8", "replace")


def _stated(value: Any) -> str | list[str] | None:
    if isinstance(value, (StringArray, list)):
        return [_printable(str(item)) for item in value]
    return _printable(value) if isinstance(value, str) else None


def _printable(text: str) -> str:
    """YAML has no place for control characters."""
    return "".join(letter for letter in text if letter.isprintable()).strip()


def _urls(metadata: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """owner/name of what the numbered keys point to."""
    for index in range(_MAX_ORIGINS):
        url = metadata.get(f"general.{prefix}.{index}.repo_url")
        if not isinstance(url, str):
            return
        if url.startswith(_HUB):
            yield _printable(url.removeprefix(_HUB))
