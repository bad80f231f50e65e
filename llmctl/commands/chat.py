"""The chat of `llmctl run`: a conversation on the terminal, with editing and history from prompt_toolkit."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llmctl.commands import console
from llmctl.commands.answer import (
    describe_answer,
    describe_limit,
    describe_model,
    describe_sampling,
    load_weights,
    stream_answer,
)
from llmctl.commands.answer_view import AnswerView, render_markdown
from llmctl.commands.chat_prompt import make_prompt, unquoted
from llmctl.commands.thinking import OPEN
from llmctl.errors import ChatTemplateError, ContextLengthError, LlmctlError, StandardOutputError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from llmctl.commands.session import Session
    from llmctl.runtime.generation import Completion
    from llmctl.runtime.loading import LoadedModel

FAREWELL = "Ctrl-D or /exit leaves; so does Ctrl-C a second time."


@dataclass
class ChatOptions:
    """How a chat goes. markdown: render answers. thinking: what is shown of <think> … </think>. overflow: what happens when
    the conversation no longer fits the context: "refuse" the message, or "slide", leaving out the oldest turns. goes_on: begin
    with the last chat."""

    markdown: bool = True
    thinking: Literal["show", "dim", "hide"] = "dim"
    overflow: Literal["refuse", "slide"] = "refuse"
    goes_on: bool = False


def chat(session: Session, options: ChatOptions) -> None:
    """Talk until /exit, Ctrl-D, Ctrl-C twice or the end of the terminal.

    Errors: ChatTemplateError, before the weights are loaded, for a model without a template.
    """
    if session.template is None:
        raise ChatTemplateError(
            f"{session.opened.checkpoint.path}: the model has no chat template, so there can be no chat: "
            "complete raw text with --no-chat and a prompt, or supply a template with --chat-template FILE"
        )
    if options.markdown and console.use_color(sys.stdout):  # its import takes longer than a token
        threading.Thread(target=render_markdown, args=("", 80)).start()
    model, _ = load_weights(session.opened, session.request.threads)
    conversation = Conversation(session, model, options)
    for line in conversation.describe():
        console.detail(line)
    console.info(f"{session.request.name}, context of {model.context_length} tokens. /help lists what can be done.")
    if options.goes_on:
        _go_on(conversation)
    try:
        ChatLoop(conversation).run()
    finally:
        _keep(conversation)


def _go_on(conversation: Conversation) -> None:
    """Begin with the last chat. Errors: UsageError if there is none, FormatError if it was with another model."""
    from llmctl.commands.saved_chat import last_chat, load_chat

    try:
        console.info(load_chat(conversation, last_chat()))
    except FileNotFoundError:
        raise UsageError(f"--continue: there is no earlier chat ({last_chat()})") from None


def _keep(conversation: Conversation) -> None:
    """Keep the chat for --continue. That it cannot be kept is no failure of the chat."""
    from llmctl.commands.saved_chat import keep_last_chat

    if conversation.messages and conversation.has_changed:
        try:
            keep_last_chat(conversation)
        except UnsupportedError as error:
            console.detail(f"the chat is not kept for --continue: {error}")
        except (LlmctlError, OSError) as error:
            console.warn(f"the chat is not kept for --continue: {error}")


class Conversation:
    """Messages so far, how the next one is answered, and the engine that does it.

    first: the messages before this one are no longer sent, since they did not fit. has_changed: something was said since it
    began.
    """

    def __init__(self, session: Session, model: LoadedModel, options: ChatOptions | None = None) -> None:
        self.session, self.model, self.params = session, model, session.params
        self.options, self.first = options or ChatOptions(), 0
        self.engine = session.engine(model)
        self.system = session.request.system
        self.messages: list[dict[str, str]] = []
        self.last: Completion | None = None
        self.has_changed = False

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

    def reply_to(self, text: str) -> Completion:
        """Say something and stream the reply. Both join the conversation, unless nothing came.

        Errors: ContextLengthError, ChatTemplateError; the conversation is then as before.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids, stop = self._fitting(asked), self.session.request.stop
        view = self._view(ids)
        try:
            answer = stream_answer(self.engine, self.model.tokenizer, ids, self.params, stop, lambda event: view.push(event.text))
        except (LlmctlError, KeyboardInterrupt):
            view.give_up()
            raise
        view.finish()
        self.last = answer
        if answer.text:
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
            self.has_changed = True
        return answer

    def _view(self, ids: list[int]) -> AnswerView:
        """Templates of models that always think end inside a thought."""
        tail = self.model.tokenizer.decode(ids[-16:], skip_special=False).rstrip()
        options = self.options
        return AnswerView(markdown=options.markdown, thinking=options.thinking, begins_thinking=tail.endswith(OPEN))

    def _fitting(self, asked: list[dict[str, str]]) -> list[int]:
        """The conversation's ids; with "slide" without its oldest turns where they do not fit, which is said.

        Errors: ContextLengthError where not even the last message fits; the engine's where nothing may be left out.
        """
        ids = self.token_ids(asked[self.first :])
        if self.options.overflow == "refuse" or len(ids) + self._room() <= self.model.context_length:
            return ids
        before = self.first
        # Half of the context is made free at once: what is left stays as it is, and in the cache, for some turns.
        while len(ids) > self.model.context_length // 2 and self.first + 2 < len(asked):
            self.first += 2
            ids = self.token_ids(asked[self.first :])
        if len(ids) >= self.model.context_length:
            self.first = before
            raise ContextLengthError(f"the message alone has {len(ids)} tokens, the context holds {self.model.context_length}")
        if self.first > before:
            console.warn(f"the context is full: the oldest {self.first} messages are no longer sent to the model")
        return ids

    def _room(self) -> int:
        """Tokens kept free for an answer."""
        most = self.model.context_length // 4
        return most if self.params.max_tokens is None else min(self.params.max_tokens, most)

    def clear(self) -> None:
        """Forget every message but the system's."""
        self.messages, self.last, self.first = [], None, 0


class ChatLoop:
    """Reads lines until the user leaves."""

    def __init__(self, conversation: Conversation) -> None:
        from llmctl.commands.chat_commands import ChatCommands

        self._conversation = conversation
        self._commands = ChatCommands(conversation, self._ask)
        self._prompt = make_prompt(self._commands.complete)
        self._is_leaving = False

    def run(self) -> None:
        """One line after another; an error ends the turn, not the chat."""
        while (line := self._read()) is not None:
            try:
                if line.startswith("/"):
                    if self._commands.run(line):
                        return
                elif unquoted(line).strip():
                    self._ask(unquoted(line))
            except StandardOutputError:  # nobody sees the chat any more
                raise
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
        for line in describe_answer(answer):
            console.detail(line)
