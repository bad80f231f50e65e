"""What a line that begins with a slash does in the chat."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmctl.commands import console
from llmctl.commands.answer import describe_answer
from llmctl.errors import UsageError

if TYPE_CHECKING:
    from llmctl.commands.chat import Conversation


class Setting(NamedTuple):
    """One value of SamplingParams that /set changes: its name there, its type, and whether it can be none."""

    field: str
    type: type
    optional: bool = False


VIEW = {"markdown": ("on", "off"), "thinking": ("show", "dim", "hide"), "overflow": ("refuse", "slide")}
"""What /set changes of the chat itself, and the values there are."""
SETTINGS = {
    "temp": Setting("temperature", float),
    "top-k": Setting("top_k", int),
    "top-p": Setting("top_p", float),
    "min-p": Setting("min_p", float),
    "typical": Setting("typical_p", float),
    "xtc-probability": Setting("xtc_probability", float),
    "xtc-threshold": Setting("xtc_threshold", float),
    "dry-multiplier": Setting("dry_multiplier", float),
    "repeat-penalty": Setting("repetition_penalty", float),
    "presence-penalty": Setting("presence_penalty", float),
    "frequency-penalty": Setting("frequency_penalty", float),
    "seed": Setting("seed", int, True),
    "max-tokens": Setting("max_tokens", int, True),
}
_NAMES = [*SETTINGS, *VIEW]


class ChatCommands:
    """The commands of one conversation. `ask` says something to the model and shows the reply."""

    def __init__(self, conversation: Conversation, ask: Callable[[str], None]) -> None:
        self._conversation, self._ask = conversation, ask
        self._table: dict[str, tuple[Callable[[str], Any], str]] = {
            "/help": (self._help, "This list."),
            "/exit": (lambda rest: True, "Leave (also Ctrl-D, or Ctrl-C twice)."),
            "/clear": (self._clear, "Forget the conversation; the system message stays."),
            "/regen": (self._regenerate, "Answer the last question again."),
            "/system": (self._system, "/system TEXT sets the system message, /system none removes it, alone shows it."),
            "/set": (self._set, "/set NAME VALUE changes the sampling or the view, alone lists both: " + ", ".join(_NAMES)),
            "/show": (self._show, "What answers, and how."),
            "/stats": (self._stats, "Counts and rates of the last answer."),
            "/save": (self._save, "/save FILE keeps the conversation and its cache."),
            "/load": (self._load, "/load FILE goes on with a saved one."),
            "/tokens": (self._tokens, "How much of the context the conversation takes."),
            "/kv": (self._kv, "What the cache of keys and values holds."),
        }

    @property
    def names(self) -> list[str]:
        """The commands."""
        return list(self._table)

    def complete(self, line: str) -> list[str]:
        """What a line that has been begun can become: commands, then the names and values that /set takes."""
        words = [
            self.names,
            [f"/set {name} " for name in _NAMES],
            [f"/set {name} {value}" for name in VIEW for value in VIEW[name]],
        ]
        known = words[min(line.count(" "), 2)] if line.startswith("/") else []
        return [each for each in known if each.startswith(line) and each != line]

    def run(self, line: str) -> bool:
        """Carry out a line; True to leave the chat. Errors: UsageError."""
        name, _, rest = line.strip().partition(" ")
        if name not in self._table:
            near = difflib.get_close_matches(name, self._table, n=1)
            hint = f"did you mean {near[0]}?" if near else "/help lists them"
            raise UsageError(f"there is no command {name}: {hint} (to say this to the model, begin with a space)")
        return bool(self._table[name][0](rest.strip()))

    def _help(self, rest: str) -> None:
        for name, (_, meaning) in self._table.items():
            console.result(f"{name:<8}  {meaning}")
        console.result(
            '""" begins and ends a text of several lines; Alt-Enter: another line; Ctrl-G: $EDITOR. Ctrl-C stops an answer.'
        )

    def _clear(self, rest: str) -> None:
        self._conversation.clear()
        console.result("The conversation is forgotten.")

    def _regenerate(self, rest: str) -> None:
        """A fixed seed would give the same answer again, so it moves on by one."""
        conversation, before = self._conversation, self._conversation.messages
        if not before:
            raise UsageError("there is no answer yet to make again")
        if conversation.params.seed is not None:
            conversation.params = dataclasses.replace(conversation.params, seed=(conversation.params.seed + 1) % 2**64)
        conversation.messages = before[:-2]
        try:
            self._ask(before[-2]["content"])
        finally:
            if len(conversation.messages) < len(before):  # there was no new answer
                conversation.messages = before

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = None if rest == "none" else rest
        system = self._conversation.system
        console.result("There is no system message." if system is None else f"System message: {system}")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name in VIEW:
            self._set_view(name, value.strip())
        elif rest:
            self._conversation.params = _changed(self._conversation.params, name, value.strip())
        for name, setting in SETTINGS.items():
            console.result(f"{name:<17}  {_shown(getattr(self._conversation.params, setting.field))}")
        for name in VIEW:
            console.result(f"{name:<17}  {_shown(getattr(self._conversation.options, name))}")

    def _set_view(self, name: str, value: str) -> None:
        if value not in VIEW[name]:
            raise UsageError(f"/set {name} needs one of {', '.join(VIEW[name])}, found {value!r}")
        setattr(self._conversation.options, name, value == "on" if name == "markdown" else value)

    def _show(self, rest: str) -> None:
        for line in self._conversation.describe():
            console.result(line)
        console.result(f"messages: {len(self._conversation.messages)}")
        self._system("")

    def _stats(self, rest: str) -> None:
        if self._conversation.last is None:
            raise UsageError("there is no answer yet to count")
        for line in describe_answer(self._conversation.last):
            console.result(line)

    def _save(self, rest: str) -> None:
        from llmctl.commands.saved_chat import save_chat
        from llmctl.runtime.saved_cache import is_cache

        path = _path(rest, "/save")
        if path.is_file() and not is_cache(path):
            raise UsageError(f"{path}: exists already and is no saved chat; /save another name")
        count = save_chat(self._conversation, path)
        console.result(f"{len(self._conversation.messages)} messages and the cache of {count} tokens are in {path}.")

    def _load(self, rest: str) -> None:
        from llmctl.commands.saved_chat import load_chat

        try:
            console.result(load_chat(self._conversation, _path(rest, "/load")))
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from None

    def _kv(self, rest: str) -> None:
        for line in describe_cache(self._conversation):
            console.result(line)

    def _tokens(self, rest: str) -> None:
        conversation = self._conversation
        used = len(conversation.token_ids(conversation.messages[conversation.first :], reply=False))
        console.result(f"{used} of {self._conversation.model.context_length} tokens")


def _path(rest: str, name: str) -> Path:
    if not rest:
        raise UsageError(f"{name} needs the name of a file")
    return Path(rest).expanduser()


def describe_cache(conversation: Conversation) -> list[str]:
    """Type and pages of the cache, group by group where layers have windows of their own."""
    from llmctl.runtime.cache.memory import BLOCK_SIZE

    model, engine = conversation.model, conversation.engine
    lines = [f"{model.kv_type} cache, pages of {BLOCK_SIZE} tokens"]
    for group, stats in zip(engine.cache_plan.groups, engine.group_stats, strict=True):
        first = f"the first {group.anchors} tokens and " if group.anchors else ""
        which = "all tokens" if group.window is None else f"{first}a window of {group.window} tokens"
        kept = f"{stats.pages_remembered} keep a text for the next turn, {stats.pages_held} in use"
        lines.append(
            f"{len(group.layers)} layers that see {which}: {stats.pages} pages, {kept}, {stats.evictions} texts given up"
        )
    reuse = engine.reuse_stats
    return [*lines, f"{reuse.found_tokens} of {reuse.tokens} prompt tokens were in the cache already"]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _changed(params: Any, name: str, text: str) -> Any:
    """The parameters with one value replaced. Errors: UsageError."""
    setting = SETTINGS.get(name.replace("_", "-"))
    if setting is None:
        raise UsageError(f"there is no setting {name!r}; there are: {', '.join(_NAMES)}")
    if setting.optional and text == "none":
        return dataclasses.replace(params, **{setting.field: None})
    try:
        value = setting.type(text)
    except ValueError:
        kind = "a whole number" if setting.type is int else "a number"
        raise UsageError(f"/set {name} needs {kind}{' or none' if setting.optional else ''}, found {text!r}") from None
    return dataclasses.replace(params, **{setting.field: value})
