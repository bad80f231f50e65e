"""The chat of `llmctl run`: a conversation on the terminal, with editing and history from prompt_toolkit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.commands.answer import (
    Answer,
    describe_limit,
    describe_model,
    describe_sampling,
    describe_stats,
    load_weights,
    show_text,
    stream_answer,
)
from llmctl.errors import ChatTemplateError, LlmctlError

if TYPE_CHECKING:
    from llmctl.commands.session import Session
    from llmctl.runtime.loading import LoadedModel

QUOTES = '"""'
FAREWELL = "Ctrl-D or /exit leaves; so does Ctrl-C a second time."


def chat(session: Session) -> None:
    """Talk until /exit, Ctrl-D, Ctrl-C twice or the end of the terminal.

    Errors: ChatTemplateError, before the weights are loaded, for a model without a template.
    """
    if session.template is None:
        raise ChatTemplateError(
            f"{session.opened.checkpoint.path}: the model has no chat template, so there can be no chat: "
            "complete raw text with --no-chat and a prompt, or supply a template with --chat-template FILE"
        )
    model, _ = load_weights(session.opened, session.request.threads)
    conversation = Conversation(session, model)
    for line in conversation.describe():
        console.detail(line)
    console.info(f"{session.request.name}, context of {model.context_length} tokens. /help lists what can be done.")
    ChatLoop(conversation).run()


class Conversation:
    """Messages so far, how the next one is answered, and the engine that does it."""

    def __init__(self, session: Session, model: LoadedModel) -> None:
        self.session, self.model, self.params = session, model, session.params
        self.engine = session.engine(model)
        self.system = session.request.system
        self.messages: list[dict[str, str]] = []
        self.last: Answer | None = None

    def describe(self) -> list[str]:
        """The model and the sampling in force."""
        lines = describe_model(self.session.request.name, self.model)
        return [*lines, *describe_sampling(self.params, self.session.from_file)]

    def token_ids(self, messages: list[dict[str, str]], *, reply: bool = True) -> list[int]:
        """The conversation through the template, up to where the model's reply begins. Errors: ChatTemplateError."""
        from llmctl.runtime.tokenizer.chat_template import encode_chat

        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        if not system and not messages:
            return []
        template, tokenizer = self.session.template, self.model.tokenizer
        return encode_chat(tokenizer, [*system, *messages], template=template, add_generation_prompt=reply)

    def reply_to(self, text: str) -> Answer:
        """Say something and stream the reply. Both join the conversation, unless nothing came.

        Errors: ContextLengthError, ChatTemplateError; the conversation is then as before.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids, tokenizer, stop = self.token_ids(asked), self.model.tokenizer, self.session.request.stop
        answer = stream_answer(self.engine, tokenizer, ids, self.params, stop, lambda event: show_text(event.text))
        console.result()
        self.last = answer
        if answer.text:
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer

    def clear(self) -> None:
        """Forget every message but the system's."""
        self.messages, self.last = [], None


class ChatLoop:
    """Reads lines until the user leaves."""

    def __init__(self, conversation: Conversation) -> None:
        from llmctl.commands.chat_commands import ChatCommands

        self._conversation = conversation
        self._commands = ChatCommands(conversation, self._ask)
        self._prompt = _make_prompt(self._commands.names)
        self._is_leaving = False

    def run(self) -> None:
        """One line after another; an error ends the turn, not the chat."""
        while (line := self._read()) is not None:
            try:
                if line.startswith("/"):
                    if self._commands.run(line):
                        return
                elif _unquoted(line).strip():
                    self._ask(_unquoted(line))
            except LlmctlError as error:
                console.error(str(error))
            except KeyboardInterrupt:
                console.result()

    def _read(self) -> str | None:
        """The next line, or "" where Ctrl-C dropped it; None to leave."""
        try:
            line: str = self._prompt.prompt(">>> ")
            self._is_leaving = False
            return line
        except EOFError:
            return None
        except KeyboardInterrupt:
            return self._interrupted()

    def _interrupted(self) -> str | None:
        """Ctrl-C drops what was typed; at an empty prompt it says how to leave, and then leaves."""
        typed = self._prompt.default_buffer.text
        if not typed and self._is_leaving:
            return None
        self._is_leaving = not typed
        if not typed:
            console.result(FAREWELL)
        return ""

    def _ask(self, text: str) -> None:
        conversation = self._conversation
        answer = conversation.reply_to(text)
        if answer.finish_reason == "length":
            console.warn(describe_limit(answer, conversation.params, conversation.model.context_length))
        for line in describe_stats(answer.stats):
            console.detail(line)


def _unquoted(text: str) -> str:
    """The text without the quotes that made it several lines."""
    stripped = text.strip()
    if not stripped.startswith(QUOTES):
        return text
    return stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def is_open(text: str) -> bool:
    """Whether the text began with three quotes that have not been closed yet: Enter then begins another line."""
    stripped = text.strip()
    return stripped.startswith(QUOTES) and not (stripped.endswith(QUOTES) and len(stripped) >= 2 * len(QUOTES))


def _make_prompt(names: list[str]) -> Any:
    """A prompt_toolkit session: history on disk, Tab completes commands, three quotes begin a text of several lines."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition

    return PromptSession(
        history=_history(),
        multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
        prompt_continuation="... ",
        completer=WordCompleter(names, sentence=True),
        complete_while_typing=False,
        enable_suspend=True,
    )


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
