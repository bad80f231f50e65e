"""Where the user types: prompt_toolkit with history on disk, several lines, an editor of one's own, Tab completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from llmctl.commands import console

QUOTES = '"""'


def make_prompt(complete: Callable[[str], Iterable[str]]) -> Any:
    """A prompt_toolkit session. complete: what a line that has been begun can become.

    Three quotes, or Alt-Enter, begin a text of several lines; Ctrl-G edits it with $VISUAL or $EDITOR.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import Condition

    return PromptSession(
        history=_history(),
        multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
        prompt_continuation="... ",
        completer=_completer(complete),
        complete_while_typing=False,
        enable_suspend=True,
        enable_open_in_editor=True,
        tempfile_suffix=".md",
        key_bindings=_keys(),
    )


def unquoted(text: str) -> str:
    """The text without the quotes that made it several lines."""
    stripped = text.strip()
    if not stripped.startswith(QUOTES):
        return text
    return stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def is_open(text: str) -> bool:
    """Whether the text began with three quotes that have not been closed yet: Enter then begins another line."""
    stripped = text.strip()
    return stripped.startswith(QUOTES) and not (stripped.endswith(QUOTES) and len(stripped) >= 2 * len(QUOTES))


def _keys() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("c-g")
    def edit(event: Any) -> None:
        event.current_buffer.open_in_editor()

    @keys.add("escape", "enter")
    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _completer(complete: Callable[[str], Iterable[str]]) -> Any:
    from prompt_toolkit.completion import Completer, Completion

    class Commands(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterable[Completion]:
            before = document.text_before_cursor
            return (Completion(line, start_position=-len(before)) for line in complete(before))

    return Commands()


def _history() -> Any:
    """What was typed in earlier chats; in memory only, and said so, where the file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from llmctl.runtime import paths

    file: Path = paths.home() / "history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        with file.open("ab"):
            return FileHistory(file)
    except OSError as error:
        console.warn(f"{file}: {error.strerror}; what is typed here is not kept")
        return InMemoryHistory()
