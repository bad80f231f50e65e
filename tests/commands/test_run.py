"""llmctl run, one answer: what goes to which stream, what is refused and when, sampling, signals, encodings."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from make_tiny_model import make_tiny_model

from llmctl.commands.prompt_input import join_prompt, split_arguments
from llmctl.errors import UsageError
from llmctl.kernels.backend import default_kv_type

ANSWER = "Paris is the answer."
MORE = ("-p", "M", "--no-chat", "--temp", "0")  # " more" until the context is full
NUMBERS = ("-p", "R", "--no-chat")  # numbers, drawn, until the context is full


def document(done) -> dict:
    assert done.code == 0, done.err
    return json.loads(done.out)


def one_line(done, code: int, *words: str) -> None:
    assert (done.code, done.out) == (code, "")
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith("llmctl: error: ")
    for expected in words:
        assert expected in done.err


# --- which argument is which ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "option", "expected"),
    [
        (None, None, None, (None, None)),
        ("model", "prompt", None, ("model", "prompt")),
        ("smollm2", None, None, ("smollm2", None)),
        ("hf:owner/name:Q4_K_M", None, None, ("hf:owner/name:Q4_K_M", None)),
        ("missing file.gguf", None, None, ("missing file.gguf", None)),
        ("./my models", None, None, ("./my models", None)),
        ("~/my models", None, None, ("~/my models", None)),
        ("/tmp", None, None, ("/tmp", None)),
        ("", None, None, ("", None)),
        ("Why is the sky blue?", None, None, (None, "Why is the sky blue?")),
        ("Why?", None, None, (None, "Why?")),
        ("空は何色", None, None, (None, "空は何色")),
        ("Hello", None, None, ("Hello", None)),
        ("two words", None, "prompt", ("two words", "prompt")),
        (None, None, "prompt", (None, "prompt")),
        ("model", None, "", ("model", "")),
    ],
)
def test_which_argument_is_the_prompt(first, second, option, expected):
    assert split_arguments(first, second, option) == expected


def test_a_path_that_exists_is_the_model_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("is this a model?").mkdir()
    assert split_arguments("is this a model?", None, None) == ("is this a model?", None)


def test_the_prompt_twice_is_refused():
    with pytest.raises(UsageError, match="given twice"):
        split_arguments("model", "prompt", "prompt")


@pytest.mark.parametrize(
    ("piped", "file", "prompt", "whole"),
    [
        (None, None, None, None),
        (None, None, "", ""),
        ("piped\n", None, None, "piped"),
        ("piped\n\n", None, None, "piped\n"),
        ("piped\r\n", None, None, "piped"),
        ("piped", None, "prompt", "piped\nprompt"),
        ("piped\n", "file", "prompt\n", "piped\nfile\nprompt\n"),
        ("piped", "file\n", None, "piped\nfile"),
    ],
)
def test_parts_of_the_prompt(piped, file, prompt, whole):
    assert join_prompt(piped, file, prompt) == whole


def test_a_lone_prompt_goes_to_the_default_model_and_its_name_to_stderr(call, scripted, monkeypatch):
    monkeypatch.setenv("LLMCTL_MODEL", str(scripted))
    done = call("run", "What is the answer?")
    assert (done.code, done.out) == (0, ANSWER + "\n")
    assert done.err == f"Using {scripted}: {scripted}\n"


def test_a_lone_unknown_name_is_an_error_that_names_the_other_reading(call):
    one_line(call("run", "Hello"), 1, "Hello: no such file", "if it is the prompt: -p Hello")
    one_line(call("run", "Hello", "-p", "x"), 1, "Hello: no such file")
    assert "if it is the prompt" not in call("run", "Hello", "-p", "x").err


def test_a_lone_prompt_with_an_unknown_model_in_the_environment_is_still_the_prompt(call, monkeypatch):
    monkeypatch.setenv("LLMCTL_MODEL", "missing")
    one_line(call("run", "What is the answer?"), 1, "missing (from LLMCTL_MODEL): no such file")
    assert "if it is the prompt" not in call("run", "What is the answer?").err


# --- stdout is the answer ---------------------------------------------------------------------------------------------


def test_the_answer_is_all_of_stdout(call, scripted):
    assert call("run", scripted, "What is the answer?") == (0, ANSWER + "\n", "")


def test_quiet_and_verbose_never_change_the_answer(call, scripted):
    quiet = call("run", scripted, "What?", "-n", "2", "--quiet")
    usual = call("run", scripted, "What?", "-n", "2")
    verbose = call("run", scripted, "What?", "-n", "2", "--verbose")
    assert quiet.out == usual.out == verbose.out == "Paris is\n"
    assert quiet.err == ""
    assert usual.err == "The answer was cut at --max-tokens 2.\n"
    assert "\x1b" not in verbose.err


def test_an_answer_that_ends_its_line_gets_no_second_line_break(call, scripted):
    bias = f"--logit-bias={3 + ord(chr(10))}=100"  # a line break, whatever came before
    assert call("run", scripted, "-p", "M", "--no-chat", "-n", "2", bias).out == "\n\n"


def test_verbose_names_what_was_used_and_what_it_took(call, scripted):
    err = call("run", scripted, "What?", "-v", "--top-k", "7", "--seed", "11", "-c", "500", "-t", "1").err
    assert f"model: {scripted} (llama, " in err
    assert f"backend: native on cpu, 1 threads, float32, int8 activations, {default_kv_type('native')} cache" in err
    assert "context: 500 tokens" in err
    order = ["repetition_penalty 1.0", "presence_penalty 0.0", "frequency_penalty 0.0", "top_k 7", "top_p 0.95", "min_p 0.05"]
    assert " -> ".join([*order, "temperature 0.8"]) in err
    assert "seed: 11" in err
    assert "prompt: 24 tokens, 0 of them cached, " in err
    assert "generated: 6 tokens, " in err
    assert "first token after: " in err
    assert "loaded in " in err
    assert "peak memory " in err
    assert "experts: " not in err


def test_verbose_tells_how_evenly_experts_were_chosen(call, tmp_path):
    folder = make_tiny_model(tmp_path / "tiny", "mixtral", tokenizer="bpe", num_hidden_layers=2)
    err = call("run", folder, "-p", "M", "--no-chat", "-n", "3", "-v").err
    words = r"experts: the busiest had ([0-9.]+)% of its layer's choices \(even would be ([0-9.]+)%\), (\d+) of (\d+) were never"
    line = re.search(words, err)
    assert line, err
    busiest, even, idle, total = map(float, line.groups())
    assert (even, total) == (pytest.approx(200 / total, abs=0.1), 2 * round(100 / even))
    assert even < busiest <= 100
    assert idle < total


def test_json_is_one_document(call, scripted):
    done = call("run", scripted, "What?", "--json", "--seed", "5")
    got = document(done)
    assert done.err == ""
    assert done.out.endswith("}\n")
    assert (got["version"], got["text"], got["finish_reason"], got["stop_string"]) == (1, ANSWER, "stop", None)
    assert got["usage"] == {"prompt_tokens": 24, "cached_tokens": 0, "completion_tokens": 6, "total_tokens": 30}
    assert got["token_ids"][-1] == 2
    assert len(got["token_ids"]) == 6
    assert (got["model"], got["path"], got["family"]) == (str(scripted), str(scripted), "llama")
    kept = default_kv_type("native")
    assert (got["backend"], got["device"], got["dtype"], got["kv_type"]) == ("native", "cpu", "float32", kept)
    assert got["activations"] == "int8"
    assert got["context_length"] == 20_000
    assert got["sampling"]["seed"] == 5
    assert got["sampling"]["temperature"] == 0.8
    timings = got["timings"]
    assert timings["ttft_ms"] > 0
    assert timings["load_s"] > 0
    assert timings["prefill_tokens_per_s"] == pytest.approx(24 / timings["prefill_s"])
    assert timings["decode_tokens_per_s"] == pytest.approx(5 / timings["decode_s"])
    assert got["peak_memory_bytes"] > 1 << 20


def test_zero_tokens(call, scripted):
    assert call("run", scripted, "What?", "-n", "0", "-q") == (0, "\n", "")
    got = document(call("run", scripted, "What?", "-n", "0", "--json"))
    assert (got["text"], got["token_ids"], got["finish_reason"]) == ("", [], "length")
    assert got["timings"]["decode_tokens_per_s"] is None


def test_minus_one_is_no_limit(call, scripted):
    assert call("run", scripted, "What?", "-n", "-1") == (0, ANSWER + "\n", "")


def test_other_number_types_give_the_same_answer(call, scripted):
    reference = ("--backend", "reference")
    for arguments in (("--dtype", "bfloat16"), ("--kv-type", "f16"), ("--kv-type", "bf16", "--dtype", "float16")):
        assert call("run", scripted, "What?", "--temp", "0", *reference, *arguments).out == ANSWER + "\n"
    for arguments in (("--kv-type", "f32"), ("--kv-type", "bf16"), ("--activations", "float")):
        assert call("run", scripted, "What?", "--temp", "0", *arguments).out == ANSWER + "\n"


def test_without_the_native_kernels_a_warning_says_what_computes(llmctl, scripted, broken_extension):
    done = llmctl("run", scripted, "What?", "-q", env=broken_extension)
    assert (done.returncode, done.stdout) == (0, ANSWER + "\n")
    assert done.stderr == (
        "llmctl: warning: the slow reference backend computes, since the native extension cannot be loaded: "
        "the fault of the test\n"
    )
    done = llmctl("run", scripted, "What?", "-q", "--backend", "native", env=broken_extension)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "--backend native: the native extension cannot be loaded" in done.stderr


def test_an_instruction_set_that_is_not_here_is_refused(llmctl, scripted):
    done = llmctl("run", scripted, "What?", env={"LLMCTL_ISA": "sse1"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "LLMCTL_ISA: there is no instruction set called 'sse1'; available: " in done.stderr
    assert done.stderr.count("\n") == 1


def test_every_instruction_set_gives_the_same_answer(llmctl, scripted):
    from llmctl.kernels.native import _native

    for isa in _native.available_isas():
        assert llmctl("run", scripted, "What?", "-q", env={"LLMCTL_ISA": isa}).stdout == ANSWER + "\n", isa


# --- where the prompt comes from --------------------------------------------------------------------------------------


def test_piped_stdin_comes_before_the_prompt(call, scripted):
    raw = ("run", scripted, "--no-chat", "--json", "--temp", "0")
    got = document(call(*raw, "-p", "A", stdin=b"R\nR"))
    assert (got["text"], got["usage"]["prompt_tokens"]) == (ANSWER, len("R\nR\nA"))
    got = document(call(*raw, stdin=b"first\nA\n"))
    assert (got["text"], got["usage"]["prompt_tokens"]) == (ANSWER, len("first\nA"))


def test_a_prompt_file_comes_between(call, scripted, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbffile\n")
    raw = ("run", scripted, "--no-chat", "--json", "-f", file, "-n", "1")
    assert document(call(*raw))["usage"]["prompt_tokens"] == len("file")
    got = document(call(*raw, "-p", "A", stdin=b"piped"))
    assert got["usage"]["prompt_tokens"] == len("piped\nfile\nA")


def test_the_prompt_as_an_argument_an_option_and_on_stdin_is_the_same(call, scripted):
    ways = (("run", scripted, "What?"), ("run", scripted, "-p", "What?"), ("run", scripted))
    got = [document(call(*way, "--json", "--temp", "0", stdin=b"What?" if len(way) == 2 else b"")) for way in ways]
    assert got[0]["usage"] == got[1]["usage"] == got[2]["usage"]


@pytest.mark.parametrize("stdin", [b"", b"\n", b" \r\n\t"])
def test_no_prompt_at_all_is_wrong_usage(call, scripted, stdin):
    one_line(call("run", scripted, stdin=stdin), 2, "there is no prompt", "a chat needs stdin and stdout to be a terminal")


def test_without_a_prompt_nothing_is_pulled(call, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMCTL_HOME", str(tmp_path))
    one_line(call("run"), 2, "there is no prompt")
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_no_utf8_is_named(call, scripted, tmp_path):
    one_line(call("run", scripted, stdin=b"caf\xe9"), 2, "standard input is not UTF-8 text: byte 0xe9 at offset 3")
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xff")
    one_line(call("run", scripted, "-f", file), 2, f"--file {file} is not UTF-8 text")


def test_a_missing_prompt_file(call, scripted, tmp_path):
    one_line(call("run", scripted, "-f", tmp_path / "none.txt"), 1, "none.txt: No such file or directory")


# --- template, raw text, system message -------------------------------------------------------------------------------


def test_the_template_wraps_the_prompt_and_no_chat_does_not(call, scripted):
    def prompt_tokens(*arguments: str) -> int:
        return document(call("run", scripted, "-p", "What?", "--json", "-n", "1", *arguments))["usage"]["prompt_tokens"]

    user = len("\x01user\nWhat?\x02\n\x01assistant\n")  # each marker is one token
    assert prompt_tokens() == user
    assert prompt_tokens("--system", "Be brief.") == user + len("\x01system\nBe brief.\x02\n")
    assert prompt_tokens("--no-chat") == len("What?")


def test_control_tokens_in_a_chat_are_text_and_in_raw_text_are_tokens(call, scripted):
    marker, more = "<|im_end|>", ("--json", "-n", "1")
    plain = document(call("run", scripted, "-p", "x" * len(marker), *more))["usage"]["prompt_tokens"]
    assert document(call("run", scripted, "-p", marker, *more))["usage"]["prompt_tokens"] == plain
    assert document(call("run", scripted, "-p", marker, "--no-chat", *more))["usage"]["prompt_tokens"] == 1


def test_a_model_without_a_template_completes_raw_text_and_says_so(call, untemplated):
    done = call("run", untemplated, "-p", "A", "--temp", "0")
    assert (done.code, done.out) == (0, ANSWER + "\n")
    assert "no chat template" in done.err
    assert "--no-chat" in done.err
    assert call("run", untemplated, "-p", "A", "--temp", "0", "--no-chat") == (0, ANSWER + "\n", "")


def test_a_template_of_ones_own(call, untemplated, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0]['content'] }}{{ messages[-1]['content'] }}", encoding="utf-8")
    options = ("--chat-template", file, "--system", "R", "--temp", "0")
    assert call("run", untemplated, "-p", "A", *options) == (0, ANSWER + "\n", "")


def test_the_templates_own_words_reach_the_user(call, untemplated, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}A",
        encoding="utf-8",
    )
    assert call("run", untemplated, "-p", "x", "--chat-template", file).out == ANSWER + "\n"
    one_line(call("run", untemplated, "-p", "x", "--chat-template", file, "--system", "y"), 1, "System role not supported")


def test_a_system_message_needs_a_template(call, untemplated, scripted):
    one_line(call("run", untemplated, "-p", "x", "--system", "y"), 2, "--system has no place", "--chat-template")
    one_line(call("run", scripted, "-p", "x", "--system", "y", "--no-chat"), 2, "--no-chat has no system message")


# --- limits and ends --------------------------------------------------------------------------------------------------


def test_a_prompt_beyond_the_context_names_both_numbers(call, scripted):
    one_line(call("run", scripted, "-p", "x" * 300, "--no-chat", "-c", "256"), 1, "300 tokens", "256", "--ctx-size")


def test_the_answer_stops_at_the_context_and_stderr_says_so(call, scripted):
    arguments = ("run", scripted, "-p", "x" * 249 + "M", "--no-chat", "-c", "256", "-n", "50", "--temp", "0")
    done = call(*arguments)
    assert (done.code, done.out) == (0, " more" * 6 + "\n")
    assert "the context of 256 tokens is full (250 of the prompt, 6 of the answer)" in done.err
    assert call(*arguments, "-q").err == ""
    assert document(call(*arguments, "--json"))["finish_reason"] == "length"


def test_stop_strings(call, scripted):
    assert call("run", scripted, "What?", "--stop", "the ans", "--stop", "zzz").out == "Paris is \n"
    got = document(call("run", scripted, "What?", "--stop", "answer", "--json"))
    assert (got["text"], got["finish_reason"], got["stop_string"]) == ("Paris is the ", "stop", "answer")
    assert got["sampling"]["stop"] == ["answer"]


def test_end_tokens_of_the_generation_config_join_those_of_the_tokenizer(call, make_scripted):
    folder = make_scripted(eos_token_id=[3 + ord(".")])
    got = document(call("run", folder, "What?", "--json"))
    assert (got["text"], got["finish_reason"]) == ("Paris is the answer", "stop")
    folder = make_scripted(eos_token_id=3 + ord("Z"))  # an int, and the tokenizer's own still counts
    assert call("run", folder, "What?").out == ANSWER + "\n"


def test_logit_bias(call, scripted):
    forbid = ("--logit-bias", "2=-inf", "-n", "8", "--temp", "0")
    assert call("run", scripted, "What?", *forbid).out == ANSWER + " more" * 3 + "\n"
    force = ("--logit-bias", f"{3 + ord('Z')}=90.5", "-n", "3")
    assert call("run", scripted, "What?", *force).out == "ZZZ\n"


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_text(call, scripted):
    def draw(*arguments: object) -> dict:
        return document(call("run", scripted, *NUMBERS, "-n", "12", "--json", *arguments))

    first = draw("--seed", "1")
    assert draw("--seed", "1")["text"] == first["text"] != draw("--seed", "2")["text"]
    unseeded = draw()
    assert draw("--seed", unseeded["sampling"]["seed"])["text"] == unseeded["text"]
    assert draw()["sampling"]["seed"] != unseeded["sampling"]["seed"]


def test_every_sampling_flag_arrives(call, scripted):
    flags = {
        "--temp": ("temperature", 0.7),
        "--top-k": ("top_k", 5),
        "--top-p": ("top_p", 0.5),
        "--min-p": ("min_p", 0.25),
        "--repeat-penalty": ("repetition_penalty", 1.5),
        "--presence-penalty": ("presence_penalty", 0.5),
        "--frequency-penalty": ("frequency_penalty", -0.5),
        "--seed": ("seed", 9),
        "--max-tokens": ("max_tokens", 3),
    }
    arguments = [word for flag, (_, value) in flags.items() for word in (flag, value)]
    sampling = document(call("run", scripted, "x", "--json", "--logit-bias", "7=1.5", *arguments))["sampling"]
    assert {name: sampling[name] for name, _ in flags.values()} == dict(flags.values())
    assert sampling["logit_bias"] == {"7": 1.5}
    assert sampling["order"][-1] == "temperature"


def test_the_penalties_and_filters_really_work(call, scripted):
    numbers = ("run", scripted, *NUMBERS, "--seed", "3")
    assert len(set(call(*numbers, "-n", "8", "--presence-penalty", "20").out.split())) == 8
    assert len(set(call(*numbers, "-n", "30", "--top-k", "2").out.split())) == 2
    assert len(set(call(*numbers, "-n", "30", "--top-p", "0.3").out.split())) == 3
    assert len(set(call(*numbers, "-n", "60").out.split())) == 8


def test_command_line_over_file_over_default(call, make_scripted):
    folder = make_scripted(temperature=0.25, top_k=3, do_sample=True)
    done = call("run", folder, "What?", "--top-k", "9", "--json", "--verbose")
    sampling = document(done)["sampling"]
    assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == (0.25, 9, 0.95)
    assert "of these from the model's file: temperature 0.25\n" in done.err


def test_a_file_that_recommends_nonsense_is_named_and_can_be_overruled(call, make_scripted):
    folder = make_scripted(top_p=7.0)
    one_line(call("run", folder, "What?"), 1, str(folder), "top_p must be between 0 and 1, found 7.0")
    assert call("run", folder, "What?", "--top-p", "0.9").out == ANSWER + "\n"
    one_line(call("run", make_scripted(top_k=1.5), "What?"), 1, "top_k must be a whole number, found 1.5")
    one_line(call("run", make_scripted(temperature="hot"), "What?"), 1, "recommends for sampling what cannot be")


@pytest.fixture
def make_scripted(scripted, tmp_path_factory):
    """A copy of the scripted model with a generation_config.json of these fields."""

    def make(**fields: object) -> Path:
        folder = tmp_path_factory.mktemp("scripted")
        shutil.copytree(scripted, folder, dirs_exist_ok=True)
        (folder / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
        return folder

    return make


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temp", "-1"], "temperature must be at least 0, found -1"),
        (["--temp", "warm"], "--temp"),
        (["--top-p", "1.5"], "top_p must be between 0 and 1"),
        (["--min-p", "nan"], "min_p must be"),
        (["--repeat-penalty", "0"], "repetition_penalty must be above 0"),
        (["--frequency-penalty", "inf"], "frequency_penalty must be a finite number"),
        (["-n", "-2"], "--max-tokens"),
        (["--seed", "-1"], "--seed"),
        (["-c", "0"], "--ctx-size"),
        (["-t", "0"], "--threads"),
        (["--kv-type", "q3"], "--kv-type"),
        (["--dtype", "bfloat16"], "--dtype bfloat16 needs --backend triton or reference"),
        (["--kv-type", "k=q8_0"], "one for each side: k=q8_0,v=q4_0"),
        (["--backend", "vulkan"], "--backend"),
        (["--backend", "native", "--device", "cuda"], "the native backend computes on the CPU"),
        (["--activations", "float", "--backend", "reference"], "--activations float"),
        (["--logit-bias", "x=1"], "expected ID=BIAS"),
        (["--logit-bias", "5"], "expected ID=BIAS"),
        (["--logit-bias", "5=inf"], "must be a number or -inf"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "token 5 twice"),
        (["--stop", ""], "--stop needs some text"),
        (["--no-chat", "--chat-template", "/dev/null"], "the file is empty"),
        (["--draft", "4"], "--num-draft-tokens 4"),
        (["--num-draft-tokens", "4"], "--draft"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_looked_for(call, arguments, words):
    one_line(call("run", "/no/such/model.gguf", "-p", "x", *arguments), 2, words)


def test_no_chat_with_a_template_is_refused(call, scripted, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("A", encoding="utf-8")
    one_line(call("run", scripted, "-p", "x", "--no-chat", "--chat-template", file), 2, "leave out --chat-template")


def test_a_bias_on_a_token_that_is_not_there(call, scripted):
    one_line(call("run", scripted, "-p", "x", "--logit-bias", "272=1"), 2, "tokens 0 to 271, found 272")


def test_a_context_beyond_the_models(call, scripted):
    one_line(call("run", scripted, "-p", "x", "-c", "20001"), 2, "20001", "20000")


def test_broken_and_foreign_models(call, scripted, tmp_path):
    empty = tmp_path / "empty.gguf"
    empty.touch()
    one_line(call("run", empty, "x y"), 1, f"{empty}: the file is empty (0 bytes)")
    one_line(call("run", tmp_path / "missing.gguf", "x y"), 1, "missing.gguf: no such file")
    text = tmp_path / "notes.gguf"
    text.write_text("these are notes", encoding="utf-8")
    one_line(call("run", text, "x y"), 1, "a text file, not a model")
    shutil.copytree(scripted, tmp_path / "foreign")
    config = tmp_path / "foreign" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("llama", "qwen9"), encoding="utf-8")
    one_line(call("run", tmp_path / "foreign", "x y"), 1, "qwen9")
    config.unlink()
    one_line(call("run", tmp_path / "foreign", "x y"), 1, "config.json")
    shutil.copytree(scripted, tmp_path / "silent")
    (tmp_path / "silent" / "tokenizer.json").unlink()
    (tmp_path / "silent" / "tokenizer_config.json").unlink()
    one_line(call("run", tmp_path / "silent", "x y"), 1, "no tokenizer")


def test_errors_come_before_torch(scripted, untemplated, tmp_path):
    """Everything that can be refused without the weights is refused without importing the backend."""
    refused = [
        ["run", str(tmp_path / "missing.gguf"), "x y"],
        ["run", str(scripted), "x", "--temp", "-1"],
        ["run", str(scripted)],
        ["run", str(scripted), "x" * 300, "-c", "256"],
        ["run", str(scripted), "x", "--logit-bias", "99999=1"],
        ["run", str(untemplated), "x", "--system", "y"],
        ["bench", str(scripted), "-p", "99999"],
        ["bench", str(scripted), "-p", "0", "-n", "0"],
    ]
    code = (
        "import json, sys; from llmctl.cli import main\n"
        "codes = [main(arguments) for arguments in json.loads(sys.argv[1])]\n"
        "assert 'torch' not in sys.modules; print(codes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(refused)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[1, 2, 2, 1, 2, 2, 1, 2]\n", done.stderr
    assert len(done.stderr.splitlines()) == len(refused)


# --- as a process: pipes, signals, encodings, terminals ---------------------------------------------------------------


@contextlib.contextmanager
def started(script: Path, *arguments: object, **options: object):
    """A running llmctl; it does not outlive the block."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    process = subprocess.Popen([script, *map(str, arguments)], **streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.mark.parametrize("option", ["--prompt", "--system", "--stop"])
def test_text_for_the_model_is_utf_8_or_an_error(call, scripted, option):
    rest = () if option == "--prompt" else ("-p", "x")
    one_line(call("run", scripted, *rest, option, os.fsdecode(b"caf\xe9")), 2, "is not valid UTF-8")
    done = call("run", scripted, *rest, option, "Wort f\udcc3\udcbcr")  # as Python decodes it in an ASCII locale
    assert (done.code, done.out) == (0, ANSWER + "\n")


def test_streams_to_files(llmctl_script, scripted, tmp_path):
    out, err, prompt = tmp_path / "out", tmp_path / "err", tmp_path / "prompt"
    prompt.write_text("What is the answer?\n", encoding="utf-8")
    with out.open("wb") as stdout, err.open("wb") as stderr, prompt.open("rb") as stdin:
        done = subprocess.run([llmctl_script, "run", scripted, "-v"], stdin=stdin, stdout=stdout, stderr=stderr, check=False)
    assert done.returncode == 0
    assert out.read_bytes() == b"Paris is the answer.\n"
    assert b"\x1b" not in err.read_bytes()
    assert b"\r" not in err.read_bytes()


def test_every_piece_arrives_as_it_is_made(llmctl_script, scripted):
    with started(llmctl_script, "run", scripted, *MORE) as process:
        assert os.read(process.stdout.fileno(), 5) == b" more"
        assert process.poll() is None, "the text came only at the end"


def test_ctrl_c_keeps_the_partial_answer(llmctl_script, scripted):
    with started(llmctl_script, "run", scripted, *MORE) as process:
        first = os.read(process.stdout.fileno(), 5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    text = (first + out).decode()
    assert process.returncode == 130
    assert text == " more" * text.count(" more") + "\n"
    assert err == b""


def test_ctrl_c_with_json_gives_the_document_of_what_there_is(llmctl_script, scripted):
    with started(llmctl_script, "run", scripted, *MORE, "--json", "-v") as process:
        while b"sampling:" not in process.stderr.readline():
            pass
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    got = json.loads(out)
    assert got["finish_reason"] == "abort"
    assert got["text"] == " more" * got["usage"]["completion_tokens"]


def test_ctrl_c_while_the_model_loads(llmctl_script, scripted):
    environment = {**os.environ, "LLMCTL_MODEL": str(scripted)}
    with started(llmctl_script, "run", *MORE, "-n", "3000", env=environment) as process:
        assert process.stderr.readline().startswith(b"Using ")  # next comes the import of the backend
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == b""
    assert out.replace(b" more", b"").strip() == b""


def test_sigterm_ends_without_noise(llmctl_script, scripted):
    with started(llmctl_script, "run", scripted, *MORE) as process:
        os.read(process.stdout.fileno(), 5)
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert err == b""


def test_a_reader_that_leaves_is_no_error(llmctl_script, scripted):
    with started(llmctl_script, "run", scripted, *MORE) as process:
        assert os.read(process.stdout.fileno(), 1) == b" "
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 141
        process.stdout = None


def test_a_slow_producer_does_not_hide_a_missing_model(llmctl_script, tmp_path):
    with started(llmctl_script, "run", tmp_path / "missing.gguf", stdin=subprocess.PIPE) as process:
        assert b"no such file" in process.stderr.read()
        assert process.wait(30) == 1
        process.stdin.close()


def test_an_encoding_that_lacks_the_character(llmctl, scripted):
    done = llmctl("run", scripted, "-p", "E", "--no-chat", env={"PYTHONIOENCODING": "cp1252"}, encoding="cp1252")
    assert (done.returncode, done.stdout, done.stderr) == (0, "?\n", "")


def test_a_character_of_several_tokens(call, scripted):
    assert call("run", scripted, "-p", "E", "--no-chat") == (0, "🙂\n", "")


def test_a_folder_with_a_name_beyond_ascii(call, scripted, tmp_path):
    folder = tmp_path / "modèle ü"
    shutil.copytree(scripted, folder)
    assert document(call("run", folder, "-p", "What?", "--json"))["path"] == str(folder)


@pytest.mark.parametrize(("prompt", "code", "out"), [("-p What", 0, b"Paris is the answer.\n"), ("", 2, b"")])
def test_closed_stdin_is_empty(llmctl_script, scripted, prompt, code, out):
    command = f"exec {llmctl_script} run {scripted} {prompt} <&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (code, out)


def test_a_full_disk_is_an_error(llmctl_script, scripted):
    with Path("/dev/full").open("wb") as full:
        command = [llmctl_script, "run", scripted, "-p", "x"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert b"No space left" in done.stderr


def on_terminal(script: Path, *arguments: object) -> tuple[int, bytes]:
    """Run with stdin, stdout and stderr on one terminal; (exit code, what it showed)."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(script, [str(script), *map(str, arguments)])
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other side is gone
        while select.select([terminal], [], [], 60)[0] and (data := os.read(terminal, 65536)):
            shown += data
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def test_a_prompt_on_a_terminal_is_answered_once(llmctl_script, scripted):
    code, shown = on_terminal(llmctl_script, "run", scripted, "What is the answer?")
    assert code == 0
    assert shown.endswith(b"Paris is the answer.\r\n")
    assert b"Loading" in shown


def test_escape_sequences_of_the_model_do_not_reach_the_terminal(llmctl_script, scripted, call):
    _, shown = on_terminal(llmctl_script, "run", scripted, "-p", "B", "--no-chat", "-q")
    assert "\ufffd[3m" in shown.decode()
    assert call("run", scripted, "-p", "B", "--no-chat").out == "\x1b[3m\n"  # into a pipe the text is as it is


def test_json_needs_a_prompt_also_on_a_terminal(llmctl_script, scripted):
    code, shown = on_terminal(llmctl_script, "run", scripted, "--json")
    assert code == 2
    assert b"there is no prompt" in shown


def test_the_real_model_answers(llmctl, smollm2_gguf):
    done = llmctl("run", smollm2_gguf, "Name the capital of France.", "--temp", "0", "-n", "16", "-t", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "The capital of France is Paris.\n"
