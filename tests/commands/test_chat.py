"""The chat: its conversation and commands in this process, its keys and signals on a pseudo-terminal."""

from __future__ import annotations

import os
import signal
import termios
import time

import pytest
from chat_terminal import CTRL_C, CTRL_D, PROMPT

from llmctl.commands.chat import Conversation
from llmctl.commands.chat_commands import ChatCommands
from llmctl.commands.chat_prompt import is_open, unquoted
from llmctl.commands.session import Request, open_session
from llmctl.errors import ChatTemplateError, ContextLengthError, UsageError

ANSWER = "Paris is the answer."
MARKED = "<|im_start|>{}\n{}<|im_end|>\n"

# --- conversation -----------------------------------------------------------------------------------------------------


@pytest.fixture
def start(scripted):
    """Begins a conversation with the scripted model."""

    def begin(*, system: str | None = None, template: str | None = None, ctx_size: int | None = None, **sampling: object):
        loading = {"backend": "reference", "device": "cpu", "dtype": "float32", "kv_type": "f32", "ctx_size": ctx_size}
        request = Request(
            spec=str(scripted),
            system=system,
            template=template,
            raw=False,
            stop=[],
            sampling=sampling,
            loading=loading,
            threads=None,
            json=False,
        )
        session = open_session(request)
        return Conversation(session, session.opened.load())

    return begin


def rendered(conversation: Conversation, *, reply: bool = True) -> str:
    ids = conversation.token_ids(conversation.messages, reply=reply)
    return conversation.model.tokenizer.decode(ids, skip_special=False)


def test_every_turn_sees_the_whole_conversation(start, capsys):
    conversation = start(system="Be brief.")
    first = conversation.reply_to("First?")
    second = conversation.reply_to("Second?")
    assert capsys.readouterr().out == f"{ANSWER}\n{ANSWER}\n"
    assert conversation.messages == [
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "Second?"},
        {"role": "assistant", "content": ANSWER},
    ]
    turns = [("system", "Be brief."), ("user", "First?"), ("assistant", ANSWER), ("user", "Second?"), ("assistant", ANSWER)]
    text = "".join(MARKED.format(*turn) for turn in turns)
    assert rendered(conversation, reply=False) == text
    assert rendered(conversation) == text + "<|im_start|>assistant\n"
    assert second.stats.prompt_tokens > first.stats.prompt_tokens


def test_a_message_beyond_the_context_leaves_the_conversation_as_it_was(start, capsys):
    conversation = start(ctx_size=64)
    conversation.reply_to("Short?")
    before = list(conversation.messages)
    with pytest.raises(ContextLengthError, match=r"\d+ tokens, the context holds 64"):
        conversation.reply_to("x" * 100)
    assert conversation.messages == before
    assert not conversation.engine.has_work


def test_a_template_that_refuses_leaves_the_conversation_as_it_was(start):
    conversation = start(template="{{ raise_exception('not today') }}")
    with pytest.raises(ChatTemplateError, match="not today"):
        conversation.reply_to("x")
    assert conversation.messages == []


def test_an_answer_without_text_joins_nothing(start, capsys):
    conversation = start(max_tokens=0)
    conversation.reply_to("x")
    assert conversation.messages == []
    assert capsys.readouterr().out == "\n"


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(start, capsys):
    """Runs commands on a conversation: `commands("/set temp 0")` gives what is shown; `.conversation`, `.asked`."""

    class Commands:
        def __init__(self) -> None:
            self.conversation = start(temperature=0.5)
            self.asked: list[str] = []
            self._commands = ChatCommands(self.conversation, self._ask)
            self.leaves = False

        def _ask(self, text: str) -> None:
            self.asked.append(text)
            self.conversation.reply_to(text)

        def __call__(self, line: str) -> str:
            capsys.readouterr()
            self.leaves = self._commands.run(line)
            return capsys.readouterr().out

    return Commands()


def test_help_lists_every_command(commands):
    shown = commands("/help")
    names = ["/help", "/exit", "/clear", "/regen", "/system", "/set", "/show", "/stats", "/save", "/load", "/tokens", "/kv"]
    assert [line.split()[0] for line in shown.splitlines()[:-1]] == names
    assert commands._commands.names == names


def test_exit_leaves_and_the_others_do_not(commands):
    commands("/exit")
    assert commands.leaves
    commands("/help")
    assert not commands.leaves


def test_clear_forgets_all_but_the_system_message(commands):
    commands("/system Be kind.")
    commands.conversation.reply_to("x")
    commands("/clear")
    assert commands.conversation.messages == []
    assert commands.conversation.system == "Be kind."
    with pytest.raises(UsageError, match="no answer yet"):
        commands("/stats")


def test_system_sets_shows_and_removes(commands):
    assert commands("/system") == "There is no system message.\n"
    assert commands("/system  You are a pirate. ") == "System message: You are a pirate.\n"
    commands.conversation.reply_to("x")
    assert rendered(commands.conversation).startswith(MARKED.format("system", "You are a pirate."))
    assert commands("/system none") == "There is no system message.\n"
    assert rendered(commands.conversation).startswith("<|im_start|>user")


def test_set_changes_and_lists(commands):
    shown = dict(line.split() for line in commands("/set").splitlines())
    assert shown["temp"] == "0.5"
    assert shown["seed"] == "none"
    commands("/set temp 0")
    commands("/set top_k 3")
    commands("/set seed 8")
    commands("/set max-tokens 2")
    params = commands.conversation.params
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.0, 3, 8, 2)
    assert commands.conversation.reply_to("x").text == "Paris is"
    commands("/set max-tokens none")
    assert commands.conversation.reply_to("x").text == ANSWER


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set heat 1", "there is no setting 'heat'; there are: temp"),
        ("/set temp warm", "needs a number, found 'warm'"),
        ("/set temp none", "needs a number, found 'none'"),
        ("/set top-k 1.5", "needs a whole number, found '1.5'"),
        ("/set seed x", "needs a whole number or none"),
        ("/set temp -1", "temperature must be at least 0, found -1.0"),
        ("/set temp", "found ''"),
        ("/regen", "no answer yet"),
        ("/stats", "no answer yet"),
        ("/sytem x", "there is no command /sytem: did you mean /system?"),
        ("/save", "/save needs the name of a file"),
        ("/save x", "there is nothing to save yet"),
        ("/load", "/load needs the name of a file"),
        ("/load /no/such/file", "/no/such/file: No such file"),
        ("/load /", "/: Is a directory"),
        ("/", "there is no command /: /help lists them"),
    ],
)
def test_lines_that_cannot_be(commands, line, words):
    before = commands.conversation.params
    with pytest.raises(UsageError) as refused:
        commands(line)
    assert words in str(refused.value)
    assert commands.conversation.params == before


def test_a_file_that_is_no_saved_chat_is_not_replaced(commands, tmp_path):
    commands.conversation.reply_to("x")
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"model.gguf: exists already and is no saved chat"):
        commands(f"/save {model}")
    assert model.read_bytes() == b"GGUF"


def test_show_says_what_answers_and_how(commands):
    commands.conversation.reply_to("x")
    shown = commands("/show")
    assert "model: " in shown
    assert "context: 20000 tokens" in shown
    assert "temperature 0.5" in shown
    assert "messages: 2" in shown
    assert "There is no system message." in shown


def test_tokens_and_stats_count_what_is_there(commands):
    assert commands("/tokens") == "0 of 20000 tokens\n"
    answer = commands.conversation.reply_to("x")
    used = len(commands.conversation.token_ids(commands.conversation.messages, reply=False))
    assert commands("/tokens") == f"{used} of 20000 tokens\n"
    assert used > answer.stats.prompt_tokens
    shown = commands("/stats")
    assert f"prompt: {answer.stats.prompt_tokens} tokens, 0 of them cached" in shown
    assert "generated: 6 tokens" in shown


def test_regen_answers_the_last_question_again(commands):
    commands.conversation.reply_to("First?")
    commands.conversation.reply_to("Second?")
    assert commands("/regen") == ANSWER + "\n"
    assert commands.asked == ["Second?"]
    assert [m["content"] for m in commands.conversation.messages] == ["First?", ANSWER, "Second?", ANSWER]


def test_regen_moves_a_fixed_seed_on(commands):
    commands("/set seed 18446744073709551615")
    commands.conversation.reply_to("x")
    commands("/regen")
    assert commands.conversation.params.seed == 0


def test_regen_that_fails_keeps_the_old_answer(commands):
    commands.conversation.reply_to("x")
    before = list(commands.conversation.messages)
    commands("/set max-tokens 0")
    commands("/regen")
    assert commands.conversation.messages == before


@pytest.mark.parametrize(
    ("text", "still_open", "said"),
    [
        ("hello", False, "hello"),
        ('"""', True, ""),
        ('"""one', True, "one"),
        ('"""one"""', False, "one"),
        ('"""\none\ntwo\n"""', False, "one\ntwo"),
        ('  """one\n\ntwo"""  ', False, "one\n\ntwo"),
        ('say """x"""', False, 'say """x"""'),
        ('""""""', False, ""),
    ],
)
def test_three_quotes(text, still_open, said):
    assert is_open(text) is still_open
    if not still_open:
        assert unquoted(text) == said


# --- on a terminal ----------------------------------------------------------------------------------------------------

def test_a_whole_chat(terminal, tmp_path):
    chat = terminal("--system", "Be brief.")
    chat.expect("/help lists what can be done")
    chat.say("What is the answer?")
    chat.expect("\n" + ANSWER + "\n")
    chat.say("/nonsense")
    chat.expect("llmctl: error: there is no command /nonsense")
    chat.say('"""two\rlines"""')
    chat.expect("\n" + ANSWER + "\n")
    chat.say("/show")
    chat.expect("messages: 4")
    chat.say("")
    chat.say("/set max-tokens 1")
    chat.say("x")
    chat.expect("\nParis\n")
    chat.expect("warning: The answer was cut at --max-tokens 1.")
    chat.say("/exit")
    assert chat.wait() == 0
    history = (tmp_path / "home" / "history").read_text(encoding="utf-8")
    assert "+What is the answer?\n" in history
    assert '+"""two\n+lines"""\n' in history
    assert (tmp_path / "home" / "history").stat().st_mode & 0o077 == 0


def test_history_and_completion(terminal, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "history").write_text("\n# before\n+an earlier question\n", encoding="utf-8")
    chat = terminal()
    chat.expect(PROMPT)
    chat.type("\x1b[A")  # up
    chat.expect("an earlier question")
    chat.type("\r")
    chat.expect(ANSWER)
    chat.expect(PROMPT)
    chat.type("/tok\t")
    chat.expect("ens")
    chat.type("\r")
    chat.expect("of 20000 tokens")
    chat.expect(PROMPT)
    chat.type(CTRL_D)
    assert chat.wait() == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(terminal):
    chat = terminal("--logit-bias", "2=-inf", "--temp", "0")
    chat.say("Talk for ever.")
    chat.expect(" more more more")
    chat.type(CTRL_C)
    chat.say("/set max-tokens 2")  # the prompt is back
    chat.say("/stats")
    chat.expect("generated: ")
    chat.say("Again?")
    chat.expect("\nParis is\n")
    chat.say("/show")
    chat.expect("messages: 4")
    chat.expect(PROMPT)
    chat.type("half a line")
    chat.expect("half a line")
    chat.type(CTRL_C)  # drops it, and does not count
    chat.expect(PROMPT)
    chat.type(CTRL_C)
    chat.expect("Ctrl-D or /exit leaves; so does Ctrl-C a second time.")
    chat.expect(PROMPT)
    chat.type(CTRL_C)
    assert chat.wait() == 0
    assert "Traceback" not in chat.shown


def test_a_line_between_two_ctrl_c_keeps_the_chat(terminal):
    chat = terminal()
    chat.expect(PROMPT)
    chat.type(CTRL_C)
    chat.say("x")
    chat.expect(ANSWER)
    chat.expect(PROMPT)
    chat.type(CTRL_C)
    chat.expect("Ctrl-D or /exit leaves")
    chat.expect(PROMPT)
    chat.type("a line that is dropped")
    chat.expect("a line that is dropped")
    chat.type(CTRL_C)
    chat.expect(PROMPT)
    chat.type(CTRL_C)
    chat.expect("Ctrl-D or /exit leaves")
    chat.say('""" """')  # nothing to answer
    chat.expect(PROMPT)
    chat.type(CTRL_D)
    assert chat.wait() == 0


def test_a_full_context_is_visible_and_not_the_end(terminal):
    chat = terminal("-c", "64")
    chat.say("x" * 100)
    chat.expect("llmctl: error: the prompt has 119 tokens, the context holds 64")
    chat.say("Short?")
    chat.expect(ANSWER)
    chat.say("A longer one?")
    chat.expect("the context of 64 tokens is full")
    chat.say("And one more?")
    chat.expect("the context holds 64")
    chat.say("/clear")
    chat.say("A longer one?")
    chat.expect(ANSWER)
    chat.expect(PROMPT)
    chat.type(CTRL_D)
    assert chat.wait() == 0


@pytest.mark.parametrize("answering", [False, True])
def test_sigterm_leaves_the_terminal_as_it_was(terminal, answering):
    chat = terminal("--logit-bias", "2=-inf", "--temp", "0")
    chat.expect(PROMPT)
    if answering:
        chat.type("x\r")
        chat.expect(" more more")
    os.kill(chat.pid, signal.SIGTERM)
    assert chat.wait() == 143
    assert termios.tcgetattr(chat._terminal) == chat.settings
    assert "Traceback" not in chat.shown


@pytest.mark.parametrize("answering", [False, True])
def test_a_closed_terminal_ends_the_chat_at_once(terminal, answering):
    chat = terminal("--logit-bias", "2=-inf", "--temp", "0")
    chat.expect(PROMPT)
    if answering:
        chat.type("x\r")
        chat.expect(" more more")
    chat.hang_up()
    begin = time.monotonic()
    assert chat.wait() != 0
    assert time.monotonic() - begin < 5


def test_a_history_that_cannot_be_written_is_said(terminal, tmp_path):
    (tmp_path / "home" / "history").mkdir(parents=True)
    chat = terminal("-n", "1")
    chat.expect("Is a directory; what is typed here is not kept")
    chat.say("x")
    chat.expect("\nParis\n")
    chat.expect(PROMPT)
    chat.type(CTRL_D)
    assert chat.wait() == 0


def test_a_model_without_a_template_cannot_chat(terminal, untemplated):
    chat = terminal(model=untemplated)
    chat.expect("there can be no chat")
    chat.expect("--no-chat")
    assert chat.wait() == 1


def test_no_chat_without_a_prompt_is_wrong_usage(terminal):
    chat = terminal("--no-chat")
    chat.expect("there is no prompt")
    assert chat.wait() == 2
