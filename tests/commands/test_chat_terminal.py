"""The chat on terminals of every kind: what is drawn, which keys do what, what a full context does."""

from __future__ import annotations

import re
import stat

import pytest
from chat_terminal import CTRL_C, CTRL_D, PROMPT

ANSWER = "Paris is the answer."


def leave(chat) -> None:
    chat.expect(PROMPT)
    chat.type(CTRL_D)
    assert chat.wait() == 0


def test_alt_enter_begins_a_line_and_enter_sends_both(terminal, tmp_path):
    chat = terminal()
    chat.expect(PROMPT)
    chat.type("one\x1b\rtwo\r")
    chat.expect(ANSWER)
    leave(chat)
    assert "+one\n+two\n" in (tmp_path / "home" / "history").read_text(encoding="utf-8")


def test_ctrl_g_opens_the_editor_with_what_was_typed(terminal, tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\ncp "$1" ' + str(tmp_path / "seen") + '\nprintf "edited text" > "$1"\n', encoding="utf-8")
    editor.chmod(editor.stat().st_mode | stat.S_IXUSR)
    chat = terminal(env={"EDITOR": str(editor), "VISUAL": str(editor)})
    chat.expect(PROMPT)
    chat.type("a draft\x07")
    chat.expect("edited text")
    chat.type("\r")
    chat.expect(ANSWER)
    leave(chat)
    assert (tmp_path / "seen").read_text(encoding="utf-8").strip() == "a draft"
    assert "+edited text\n" in (tmp_path / "home" / "history").read_text(encoding="utf-8")


def test_tab_completes_what_set_takes(terminal):
    chat = terminal()
    chat.expect(PROMPT)
    chat.type("/set overf\t")
    chat.expect("low")
    chat.type("sl\t")
    chat.expect("ide")
    chat.type("\r")
    chat.expect("overflow           slide")
    leave(chat)


def test_markdown_is_rendered_and_can_be_switched_off(terminal):
    options = ("--logit-bias", "45=100", "-n", "3")  # "***": a rule
    chat = terminal(*options)
    chat.say("x")
    chat.expect("\n" + "-" * 60)
    chat.say("/set markdown off")
    chat.say("x")
    chat.expect("\n***\n")
    leave(chat)
    plain = terminal(*options, "--no-markdown")
    plain.say("x")
    plain.expect("\n***\n")
    leave(plain)


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["no color", "dumb"])
def test_a_terminal_without_colors_gets_the_text_as_it_is(terminal, env):
    chat = terminal("--logit-bias", "45=100", "-n", "3", env=env)
    chat.expect(">>>")
    chat.type("x\r")
    chat.expect("***\n")
    chat.expect("cut at --max-tokens 3")
    chat.type("/exit\r")
    assert chat.wait() == 0
    assert not re.search(rb"\x1b\[[0-9;]*[1-9][0-9]?m", chat.raw.split(b"***")[1])


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1"])
def test_a_locale_that_is_not_utf_8_neither_crashes_nor_garbles(terminal, tmp_path, locale):
    chat = terminal(env={"LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    chat.expect(PROMPT)
    chat.type("é?\r")
    chat.expect(ANSWER)
    chat.say("/show")
    chat.expect("messages: 2")
    leave(chat)
    assert "Traceback" not in chat.shown


def test_a_terminal_that_changes_its_size_while_it_answers(terminal):
    chat = terminal("--logit-bias", "2=-inf", "--temp", "0", "-n", "4000")
    chat.say("x")
    chat.expect(" more more more")
    for lines, columns in ((20, 30), (5, 100), (50, 7), (2, 2), (30, 120)):
        chat.resize(lines, columns)
        seen = len(chat.raw)
        chat.expect("more", timeout=20)
        while len(chat.raw) < seen + 200:
            chat.expect("mo")
    chat.type(CTRL_C)
    chat.say("/stats")
    chat.expect("generated: ")
    leave(chat)
    assert "Traceback" not in chat.shown


def test_a_terminal_that_states_no_size(terminal):
    chat = terminal("--temp", "0")
    chat.resize(0, 0)
    chat.say("x")
    chat.expect(ANSWER)
    leave(chat)


def test_overflow_slides_when_it_is_told_to_and_says_so(terminal):
    chat = terminal("-c", "105", "--overflow", "slide", "-n", "12")
    for _ in range(2):
        chat.say("A short one?")
        chat.expect(ANSWER)
    chat.say("A third one?")
    chat.expect("llmctl: warning: the context is full: the oldest 4 messages are no longer sent to the model")
    chat.expect(ANSWER)
    chat.say("x" * 130)
    chat.expect("llmctl: error: the message alone has")
    chat.say("A fourth one?")
    chat.expect(ANSWER)
    chat.say("/show")
    chat.expect("messages: 8")
    leave(chat)


def test_kv_says_what_the_cache_holds(terminal):
    chat = terminal("--kv-type", "f32")
    chat.say("x" * 40)
    chat.expect(ANSWER)
    chat.say("/kv")
    chat.expect("f32 cache, pages of 16 tokens")
    chat.expect("1 layers that see all tokens: 1250 pages, ")
    chat.say("y")
    chat.expect(ANSWER)
    chat.say("/stats")
    chat.expect("64 of them cached")
    leave(chat)


def test_a_chat_that_cannot_be_saved_goes_on(terminal, tmp_path):
    chat = terminal()
    chat.say("Capital?")
    chat.expect("Paris is the answer.")
    chat.say(f"/save {tmp_path / 'missing' / 'chat'}")
    chat.expect(f"the folder {tmp_path / 'missing'} does not exist")
    chat.say(f"/save {tmp_path / 'chat'}")
    chat.expect("2 messages and the cache of ")
    leave(chat)


def test_what_verbose_tells_of_a_draft_does_not_tear_the_answer(terminal):
    chat = terminal("--verbose", "--temp", "0", "--draft", "ngram")
    chat.say("Capital?")
    chat.expect("draft: ")
    assert "Paris is the answer.\nseed: " in chat.shown
    leave(chat)
