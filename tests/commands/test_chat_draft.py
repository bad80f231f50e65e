"""A chat of ten turns with a draft, saved in the middle and gone on with: every answer that of a chat without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chat_terminal import CTRL_D, PROMPT
from make_tiny_model import make_tiny_model

from llmctl.commands.chat import ChatOptions, Conversation
from llmctl.commands.draft import DraftRequest
from llmctl.commands.saved_chat import load_chat, save_chat
from llmctl.commands.session import Request, open_session

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
QUESTIONS = [f"What is number {number}, and what came before it?" for number in range(10)]
SAMPLING = {"drawn": {"temperature": 0.9, "seed": 7}, "greedy": {"temperature": 0.0}}
Start = Callable[..., Conversation]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, in which every token before counts."""
    return make_tiny_model(tmp_path_factory.mktemp("chat") / "model", "llama", tokenizer="bpe", max_position_embeddings=4096)


@pytest.fixture
def start(folder: Path) -> Start:
    def begin(sampling: str, draft: str | None = None) -> Conversation:
        spec = str(folder) if draft == "model" else draft
        session = open_session(
            Request(
                str(folder),
                system=None,
                template=TEMPLATE,
                raw=False,
                stop=[],
                sampling={"max_tokens": 24, **SAMPLING[sampling]},
                loading={"backend": "native", "ctx_size": None},
                threads=1,
                json=False,
                draft=None if spec is None else DraftRequest(spec, 3),
            )
        )
        return Conversation(session, session.opened.load(threads=1), ChatOptions(markdown=False))

    return begin


def turns(chat: Conversation, questions: list[str]) -> list[tuple[list[int], int]]:
    """Of every answer its tokens, and how many of its prompt were in the cache."""
    answers = [chat.reply_to(question) for question in questions]
    return [([token.token_id for token in answer.tokens], answer.stats.cached_tokens) for answer in answers]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("draft", ["ngram", "self:Q8_0", "model"])
def test_ten_turns_are_those_without_a_draft(start: Start, tmp_path: Path, capsys, draft: str, sampling: str) -> None:
    plain = turns(start(sampling), QUESTIONS)
    chat = start(sampling, draft)
    assert turns(chat, QUESTIONS[:5]) == plain[:5]
    kept = save_chat(chat, tmp_path / "chat")
    assert turns(chat, QUESTIONS[5:]) == plain[5:]
    assert chat.engine.speculation.stats.drafted > 0
    assert chat.engine.speculation.stats.accepted > 0 or draft == "ngram"
    resumed = start(sampling, draft)
    load_chat(resumed, tmp_path / "chat")
    again = turns(resumed, QUESTIONS[5:])
    assert [ids for ids, _ in again] == [ids for ids, _ in plain[5:]]
    assert again[0][1] == kept > 100
    assert again[1:] == plain[6:]


def test_ten_turns_on_a_terminal_with_a_draft_and_on_again(terminal, tmp_path: Path) -> None:
    options = ("--temp", "0", "--draft", "ngram", "--num-draft-tokens", "3")
    chat = terminal(*options)
    for number in range(10):
        chat.say(f"Question {number}")
        chat.expect("Paris is the answer.")
    chat.say("/stats")
    chat.expect("drafted tokens accepted")
    chat.say(f"/save {tmp_path / 'chat'}")
    chat.expect("20 messages and the cache of ")
    chat.expect(PROMPT)
    chat.type(CTRL_D)
    assert chat.wait() == 0
    again = terminal(*options, "--continue")
    again.expect("20 messages from ")
    again.say("And now?")
    again.expect("Paris is the answer.")
    again.say("/stats")
    again.expect("of them cached")
    again.expect(PROMPT)
    again.type(CTRL_D)
    assert again.wait() == 0
