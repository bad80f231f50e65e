"""What the small files of a Hugging Face folder say about its tokenizer: special tokens, end tokens, templates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint.files import exists, read_json_object, regular_size
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.tokenizer.facts import AddedToken, Facts, end_token_ids

TEMPLATE_FOLDER = "additional_chat_templates"
SETTING_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")


@dataclass
class FolderSettings:
    """Settings from all the files.

    named: bos_token, eos_token, unk_token, pad_token → text. extra: further texts that are special.
    decoder: added tokens with their flags. additional: text → id of older files.
    add_bos, add_eos, add_prefix_space, legacy: None where nothing is said.
    end_ids: end tokens by number; bos_id, pad_id: from config.json.
    """

    named: dict[str, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    decoder: list[AddedToken] = field(default_factory=list)
    additional: dict[str, int] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None
    end_ids: list[int] = field(default_factory=list)
    bos_id: int | None = None
    pad_id: int | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)

    def complete(
        self, added: dict[int, AddedToken], find: Callable[[str], int | None], vocab_size: int
    ) -> tuple[AddedToken, ...]:
        """The added tokens of the vocabulary file, with what these settings add and override.

        added: by id. find: text → id in the vocabulary proper.
        FormatError for an id far beyond the vocabulary.
        """
        limit = 2 * vocab_size + 65536
        by_text = {token.text: token.id for token in added.values()}
        for token in self._additions():
            token_id = by_text.get(token.text, find(token.text))
            token_id = token.id if token_id is None else token_id
            if not 0 <= token_id < limit:
                raise FormatError(f"the added token {token.text[:40]!r} has the id {token_id}, among {vocab_size} tokens")
            added[token_id] = token._replace(id=token_id)
            by_text[token.text] = token_id
        for text in (*self.named.values(), *self.extra):
            token_id = by_text.get(text, find(text))
            if token_id is not None:
                token = added.get(token_id, AddedToken(token_id, text))
                added[token_id] = token._replace(special=True)
        return tuple(added[token_id] for token_id in sorted(added))

    def _additions(self) -> Iterator[AddedToken]:
        yield from self.decoder
        if not self.decoder:
            for text, token_id in self.additional.items():
                yield AddedToken(token_id, text, normalized=True)

    def fill(self, facts: Facts, find: Callable[[str], int | None]) -> None:
        """Complete `facts`, whose `added` are known, by special ids, end tokens and templates. find: text → id."""
        ids = {name: find(text) for name, text in self.named.items()}
        control = {token.text: token.id for token in facts.added if token.special}
        facts.bos_token_id = ids.get("bos_token", facts.bos_token_id if self.bos_id is None else self.bos_id)
        facts.unk_token_id = ids.get("unk_token", facts.unk_token_id)
        facts.pad_token_id = ids.get("pad_token", self.pad_id)
        facts.eos_token_ids = end_token_ids([ids.get("eos_token"), *facts.eos_token_ids, *self.end_ids], control)
        facts.chat_templates = self.chat_templates
        bos, eos = facts.bos_token_id, ids.get("eos_token")
        facts.prefix_ids = _chosen(self.add_bos, bos, facts.prefix_ids)
        facts.suffix_ids = _chosen(self.add_eos, eos, facts.suffix_ids)


def _chosen(wanted: bool | None, token_id: int | None, given: tuple[int, ...]) -> tuple[int, ...]:
    """What surrounds a text on one side. wanted: what a flag says, if there is one; given: by the vocabulary file."""
    if wanted is False:
        return ()
    return (token_id,) if wanted and token_id is not None and token_id not in given else given


def read_folder_settings(folder: Path) -> FolderSettings:
    """Read whatever of the files is there. FormatError for broken JSON or values of a wrong type."""
    config = _read(folder / "tokenizer_config.json")
    older = _read(folder / "special_tokens_map.json")
    generation, model = _read(folder / "generation_config.json"), _read(folder / "config.json")
    nested = model.get("text_config") if isinstance(model.get("text_config"), dict) else {}
    settings = FolderSettings(
        decoder=_decoder(folder / "tokenizer_config.json", config.get("added_tokens_decoder")),
        additional=_additional(folder / "added_tokens.json"),
        end_ids=[*_ids(generation.get("eos_token_id")), *_ids(model.get("eos_token_id")), *_ids(nested.get("eos_token_id"))],
        chat_templates=_templates(folder, config),
    )
    for name in ("bos", "eos"):
        value = config.get(f"add_{name}_token")
        setattr(settings, f"add_{name}", value if isinstance(value, bool) else None)
    for name in ("add_prefix_space", "legacy"):
        setattr(settings, name, config[name] if isinstance(config.get(name), bool) else None)
    for source in (config, older):
        _collect_special(source, settings)
    if not config:
        settings.bos_id, settings.pad_id = _first_id(model, "bos_token_id"), _first_id(model, "pad_token_id")
    return settings


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if exists(path) else {}


def _collect_special(source: Mapping[str, Any], settings: FolderSettings) -> None:
    for name, value in source.items():
        text = _text(value)
        if name in _NAMED and text is not None:
            settings.named.setdefault(name, text)
        elif name in _EXTRA:
            values = list(value.values()) if isinstance(value, dict) else value
            settings.extra += [text for one in values if (text := _text(one))] if isinstance(values, list) else []
        elif name.endswith("_token") and text is not None:
            settings.extra.append(text)


def _text(value: Any) -> str | None:
    """A token written as its text or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _decoder(path: Path, entries: Any) -> list[AddedToken]:
    if entries is None:
        return []
    if not isinstance(entries, dict):
        raise FormatError(f"{path}: added_tokens_decoder must be an object of id → token, found {type(entries).__name__}")
    try:
        return [added_token(int(token_id), entry) for token_id, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: added_tokens_decoder holds an entry that is no token ({quoted(error)})") from None


def added_token(token_id: int, entry: Mapping[str, Any]) -> AddedToken:
    """A token as tokenizer.json and tokenizer_config.json write it. KeyError or TypeError if it is none."""
    if not isinstance(entry["content"], str):
        raise TypeError("its content is no text")
    special = bool(entry.get("special", False))
    return AddedToken(
        token_id,
        entry["content"],
        special,
        lstrip=bool(entry.get("lstrip", False)),
        rstrip=bool(entry.get("rstrip", False)),
        single_word=bool(entry.get("single_word", False)),
        normalized=bool(entry.get("normalized", not special)),
    )


def _additional(path: Path) -> dict[str, int]:
    entries = _read(path)
    for text, token_id in entries.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise FormatError(f"{path}: {text[:40]!r} has {quoted(token_id)} for an id")
    return entries


def _ids(value: Any) -> list[int]:
    """Ids written as one number or a list of them."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0]


def _first_id(config: Mapping[str, Any], name: str) -> int | None:
    return next(iter(_ids(config.get(name))), None)


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files of their own come before those inside tokenizer_config.json."""
    inside = config.get("chat_template")
    if isinstance(inside, list):
        named = [one for one in inside if isinstance(one, dict)]
        templates = {str(one.get("name")): one["template"] for one in named if isinstance(one.get("template"), str)}
    else:
        templates = {"default": inside} if isinstance(inside, str) else {}
    in_json = _read(folder / "chat_template.json").get("chat_template")
    if isinstance(in_json, str):
        templates["default"] = in_json
    files = {path.stem: path for path in template_files(folder)}
    if exists(folder / "chat_template.jinja"):
        files["default"] = folder / "chat_template.jinja"
    return templates | {name: _template_text(path) for name, path in files.items()}


def template_files(folder: Path) -> list[Path]:
    """Further templates, one a file."""
    return sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))


def _template_text(path: Path) -> str:
    regular_size(path)  # a pipe would be waited for
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: the chat template cannot be read ({error})") from error
