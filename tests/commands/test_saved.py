"""--prompt-cache, /save, /load and --continue: the same answers as without, and no file of something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from chat_terminal import CTRL_D, PROMPT

from llmctl.commands.chat import ChatOptions, Conversation
from llmctl.commands.saved_chat import load_chat, save_chat
from llmctl.commands.session import Request, open_session
from llmctl.errors import FormatError, UnsupportedError, UsageError

ANSWER = "Paris is the answer."
LONG = "x" * 70 + "R"


def document(done) -> dict:
    assert done.code == 0, done.err
    return json.loads(done.out)


# --- --prompt-cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [("--seed", "3"), ("--temp", "0"), ("--seed", "4", "--regex", "( one| two){5}")])
def test_the_answer_is_that_of_a_cold_run(call, scripted, tmp_path, options):
    file = tmp_path / "cache"
    run = ("run", scripted, "-p", LONG, "--no-chat", "-n", "30", "--json", *options)
    cold = document(call(*run))
    first, second = (document(call(*run, "--prompt-cache", file)) for _ in range(2))
    assert cold["token_ids"] == first["token_ids"] == second["token_ids"]
    prompt, answer = first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]
    assert first["usage"]["cached_tokens"] == 0
    assert second["usage"]["cached_tokens"] == min((prompt + answer - 1) // 16 * 16, prompt - 1), "the file keeps whole pages"


def test_another_prompt_with_the_same_beginning_uses_what_it_can(call, scripted, tmp_path):
    run = ("run", scripted, "--no-chat", "-n", "5", "--json", "--temp", "0", "--prompt-cache", tmp_path / "cache")
    document(call(*run, "-p", LONG))
    got = document(call(*run, "-p", "x" * 40 + "A"))
    assert (got["text"], got["usage"]["cached_tokens"]) == ("Paris is the answer.", 40)
    assert document(call(*run, "-p", "yA"))["usage"]["cached_tokens"] == 0


def test_the_real_models_say_the_same(llmctl, smollm2_gguf, gemma3_gguf, tmp_path):
    for model in (smollm2_gguf, gemma3_gguf):
        file = tmp_path / model.name
        run = ("run", model, "-p", "Count the words of this sentence, one by one. " * 3, "--json", "-n", "12", "--seed", "5")
        cold, first, second = (json.loads(llmctl(*run, *more).stdout) for more in ((), *[("--prompt-cache", file)] * 2))
        assert cold["token_ids"] == first["token_ids"] == second["token_ids"]
        assert second["usage"]["cached_tokens"] >= 16


@pytest.fixture
def kept(call, scripted, tmp_path) -> Path:
    file = tmp_path / "cache"
    document(call("run", scripted, "-p", LONG, "--no-chat", "-n", "3", "--json", "--prompt-cache", file))
    return file


@pytest.mark.parametrize("options", [("--kv-type", "f32"), ("--activations", "float"), ("--kv-type", "f16")])
def test_a_cache_made_otherwise_is_refused(call, scripted, kept, options):
    before = kept.read_bytes()
    done = call("run", scripted, "-p", LONG, "--no-chat", "--prompt-cache", kept, *options)
    assert (done.code, done.out) == (1, "")
    assert f"{kept}: made with" in done.err
    assert kept.read_bytes() == before


def test_a_cache_of_another_model_is_refused(call, scripted, kept, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(scripted, other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = call("run", other, "-p", LONG, "--no-chat", "--prompt-cache", kept)
    assert (done.code, done.out) == (1, "")
    assert "the cache of another model; remove the file, or name another one" in done.err


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "model", "header"])
def test_a_file_that_is_no_cache_is_refused(call, scripted, kept, damage):
    data = kept.read_bytes()
    found = {
        "empty": b"",
        "cut": data[:-1],
        "text": b"hello " * 100,
        "model": (scripted / "model.safetensors").read_bytes(),
        "header": data.replace(b'\\"messages\\"', b"").replace(b'"firsts":"[0]"', b'"firsts":"[9]"'),
    }[damage]
    kept.write_bytes(found)
    done = call("run", scripted, "-p", LONG, "--no-chat", "--prompt-cache", kept)
    assert (done.code, done.out) == (1, "")
    assert len(done.err.splitlines()) == 1
    assert str(kept) in done.err
    assert "unexpected" not in done.err


def test_a_place_that_cannot_be_written_and_a_backend_that_cannot(call, scripted, tmp_path):
    run = ("run", scripted, "-p", LONG, "--no-chat", "-n", "3", "-q")
    done = call(*run, "--prompt-cache", tmp_path / "no" / "cache")
    assert done.code == 1
    assert "does not exist" in done.err
    done = call(*run, "--prompt-cache", tmp_path / "cache", "--backend", "reference")
    assert (done.code, done.out) == (1, "")
    assert "the reference backend cannot save its cache" in done.err


def test_where_it_has_no_place(call, scripted):
    assert "not for --batch" in call("run", "/no", "--batch", "x", "--prompt-cache", "y").err
    assert "--continue is for the chat" in call("run", scripted, "-p", "x", "--continue").err


# --- chats ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(scripted):
    def begin(backend: str = "native", model: Path = scripted, **loading: object) -> Conversation:
        chosen = {"backend": backend, "device": "cpu", "dtype": "float32", "kv_type": None, "ctx_size": None, **loading}
        request = Request(str(model), None, None, False, [], {"seed": 2}, chosen, None, False)
        session = open_session(request)
        return Conversation(session, session.opened.load(), ChatOptions(markdown=False))

    return begin


def test_a_chat_that_is_loaded_goes_on_exactly(start, tmp_path, capsys):
    first = start()
    first.system = "Be brief, and never speak of the weather in the mountains."
    for question in ("One?", "Two?"):
        first.reply_to(question)
    count = save_chat(first, tmp_path / "chat")
    assert count >= 64
    second = start()
    assert f"4 messages from {tmp_path / 'chat'}; {count} tokens" in load_chat(second, tmp_path / "chat")
    assert (second.messages, second.system) == (first.messages, first.system)
    ahead, again = first.reply_to("Three?"), second.reply_to("Three?")
    assert [t.token_id for t in ahead.tokens] == [t.token_id for t in again.tokens]
    assert again.stats.cached_tokens == count
    assert ahead.stats.prompt_tokens == again.stats.prompt_tokens


@pytest.mark.parametrize("most_bytes", [None, 0])
def test_inspect_kv_opens_a_saved_chat(start, call, scripted, tmp_path, capsys, most_bytes):
    """With its cache, and as text where the cache was too large to keep."""
    first = start()
    for question in ("One?", "Two?", "Three?"):
        first.reply_to(question)
    count = save_chat(first, tmp_path / "chat", most_bytes=most_bytes)
    capsys.readouterr()
    live = document(call("inspect-kv", scripted, "--session", tmp_path / "chat", "--view", "live", "--json", "-q"))["live"]
    text = "".join(live["texts"][0])
    assert text.startswith("<|im_start|>user\nOne?<|im_end|>")
    assert "Two?" in text
    assert (live["found_tokens"] > 0) == (count > 0)


def test_a_chat_of_other_kernels_is_loaded_without_its_cache(start, tmp_path, capsys):
    first = start()
    first.reply_to("One?")
    save_chat(first, tmp_path / "chat")
    for other in (start(kv_type="f32"), start(backend="reference")):
        assert "its cache is not used" in load_chat(other, tmp_path / "chat")
        assert other.messages == first.messages
        assert other.reply_to("Two?").text == ANSWER


def test_what_cannot_be_saved_or_loaded(start, scripted, tmp_path, capsys):
    with pytest.raises(UsageError, match="nothing to save"):
        save_chat(start(), tmp_path / "chat")
    reference = start(backend="reference")
    reference.reply_to("One?")
    with pytest.raises(UnsupportedError, match="cannot save"):
        save_chat(reference, tmp_path / "chat")
    first = start()
    first.reply_to("One?")
    save_chat(first, tmp_path / "chat")
    other = tmp_path / "other"
    shutil.copytree(scripted, other)
    (other / "config.json").write_text((scripted / "config.json").read_text(encoding="utf-8") + " ", encoding="utf-8")
    with pytest.raises(FormatError, match="a chat with another model"):
        load_chat(start(model=other), tmp_path / "chat")
    with pytest.raises(FormatError, match="not a cache"):
        load_chat(first, scripted / "model.safetensors")
    assert len(first.messages) == 2


def test_save_load_and_continue_on_a_terminal(terminal, tmp_path):
    chat = terminal("--temp", "0")
    chat.say("x" * 40)
    chat.expect(ANSWER)
    chat.say(f"/save {tmp_path / 'chat'}")
    chat.expect("2 messages and the cache of ")
    chat.say("/clear")
    chat.say(f"/load {tmp_path / 'chat'}")
    chat.expect("2 messages from ")
    chat.say("More?")
    chat.expect(ANSWER)
    chat.expect(PROMPT)
    chat.type(CTRL_D)
    assert chat.wait() == 0
    assert (tmp_path / "home" / "last-chat.safetensors").stat().st_mode & 0o077 == 0
    again = terminal("--temp", "0", "--continue")
    again.expect("4 messages from ")
    again.say("/show")
    again.expect("messages: 4")
    again.say("And more?")
    again.expect(ANSWER)
    again.say("/stats")
    again.expect("of them cached")
    again.expect(PROMPT)
    again.type(CTRL_D)
    assert again.wait() == 0
    assert ", 0 of them cached" not in again.shown


def test_continue_without_an_earlier_chat(terminal):
    chat = terminal("--continue")
    chat.expect("--continue: there is no earlier chat")
    assert chat.wait() == 2
