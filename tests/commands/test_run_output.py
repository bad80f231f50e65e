"""llmctl run: what answers must be, and what scripts read: structure, banned strings, events, log-probabilities, all samplers."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess

import pytest

ANSWER = "Paris is the answer."
RAW = ("-p", "A", "--no-chat")
NUMBERS = ("-p", "R", "--no-chat")


def document(done) -> dict:
    assert done.code == 0, done.err
    return json.loads(done.out)


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def one_line(done, code: int, *words: str) -> None:
    assert (done.code, done.out) == (code, "")
    assert len(done.err.splitlines()) == 1, done.err
    for expected in words:
        assert expected in done.err


# --- structure --------------------------------------------------------------------------------------------------------

SCHEMA = '{"type": "object", "properties": {"n": {"enum": [" one", " two"]}}, "required": ["n"], "additionalProperties": false}'


def test_a_schema_as_text_and_as_a_file(call, scripted, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(SCHEMA, encoding="utf-8")
    for schema in (SCHEMA, file):
        done = call("run", scripted, "What?", "--json-schema", schema, "--seed", "3")
        assert done.code == 0, done.err
        assert json.loads(done.out)["n"] in (" one", " two")


@pytest.mark.parametrize("way", [(), ("--no-chat",), ("--temp", "0"), ("--mirostat", "2"), ("--samplers", "top_k")])
def test_an_expression_holds_whatever_else_is_asked_for(call, scripted, way):
    got = document(call("run", scripted, "-p", "R", "--regex", "( one| two){3}!", "--json", *way))
    assert re.fullmatch("( one| two){3}!", got["text"])
    assert (got["finish_reason"], got["token_ids"][-1]) == ("stop", 2)
    assert got["sampling"]["structure"] == "--regex"
    assert got["timings"]["constraint_s"] > 0


def test_a_grammar_in_either_notation(call, scripted, tmp_path):
    for name, source in {"g.lark": 'start: " one" " two"{1,3}\n', "g.gbnf": 'root ::= " one" " two"{1,3}\n'}.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
        done = call("run", scripted, *NUMBERS, "--grammar", tmp_path / name, "--logit-bias", "2=5", "-v")
        assert re.fullmatch(" one( two){1,3}\n", done.out)
        assert re.search(r"grammar and banned strings: \d+ µs a token, \d+\.\d% of the time", done.err)


def test_an_answer_cut_before_it_is_complete_is_a_failure(call, scripted):
    done = call("run", scripted, *NUMBERS, "--regex", "( one){9}", "-n", "3")
    assert (done.code, done.out) == (1, " one one one\n")
    assert "cut at --max-tokens 3. It is not yet what --regex asks for" in done.err
    assert call("run", scripted, *NUMBERS, "--regex", "( one){2,9}", "-n", "3").code == 0  # complete, if not at its longest


def test_a_stop_string_ends_a_grammar(call, scripted):
    assert call("run", scripted, *NUMBERS, "--regex", "( one){9}", "--stop", "e one") == (0, " on\n", "")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--regex", "(a"], 2, "--regex: at 1(8): invalid regex"),
        (["--regex", ""], 2, "there is nothing in it"),
        (["--json-schema", "{"], 2, "--json-schema is not JSON"),
        (["--json-schema", '{"type": 5}'], 2, "--json-schema: "),
        (["--json-schema", "none.json"], 1, "none.json: No such file"),
        (["--grammar", "none.lark"], 1, "none.lark: No such file"),
        (["--regex", "a", "--json-schema", "{}"], 2, "--json-schema and --regex exclude each other"),
        (["--json", "--json-lines"], 2, "exclude each other"),
        (["--logprobs", "3"], 2, "add one of them"),
        (["--ban", ""], 2, "--ban needs some text"),
        (["--mirostat", "1"], 2, "must be 0 or 2, found 1 (2 replaces version 1)"),
        (["--mirostat-ent", "3"], 2, "--mirostat-ent needs --mirostat 2"),
        (["--mirostat", "2", "--top-k", "3"], 2, "--top-k has no effect with --mirostat"),
        (["--mirostat", "2", "--samplers", "top_k"], 2, "--samplers has no effect with --mirostat"),
        (["--samplers", "top_k;heat"], 2, "no step 'heat'"),
        (["--samplers", "top_k", "--min-p", "0.1"], 2, "--min-p has no effect since --samplers leaves out min_p"),
        (["--dry-base", "2"], 2, "--dry-base has no effect without --dry-multiplier"),
        (["--dry-sequence-breaker", "x"], 2, "no effect without --dry-multiplier"),
        (["--xtc-threshold", "0.2"], 2, "--xtc-threshold has no effect without --xtc-probability"),
        (["--typical", "1.5"], 2, "typical_p must be between 0 and 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_looked_for(call, tmp_path, monkeypatch, options, code, words):
    monkeypatch.chdir(tmp_path)
    one_line(call("run", "/no/such/model.gguf", "-p", "x", *options), code, words)


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_every_step_arrives(call, scripted):
    flags = {
        "--typical": ("typical_p", 0.9),
        "--repeat-last-n": ("repetition_window", 5),
        "--dry-multiplier": ("dry_multiplier", 0.8),
        "--dry-base": ("dry_base", 1.5),
        "--dry-allowed-length": ("dry_allowed_length", 3),
        "--dry-penalty-last-n": ("dry_window", 100),
        "--xtc-probability": ("xtc_probability", 0.25),
        "--xtc-threshold": ("xtc_threshold", 0.2),
    }
    options = [word for flag, (_, value) in flags.items() for word in (flag, value)]
    got = document(call("run", scripted, "x", "--json", "--dry-sequence-breaker", "a", *options, "--ban", "zz"))["sampling"]
    assert {name: got[name] for name, _ in flags.values()} == dict(flags.values())
    assert (got["dry_breakers"], got["banned"], got["mirostat_tau"]) == (["a"], ["zz"], None)
    shown = call("run", scripted, "x", "-v", *options).err
    assert "dry_multiplier 0.8 -> top_k 40 -> typical_p 0.9 -> top_p 0.95 -> min_p 0.05 -> xtc_probability 0.25 -> temp" in shown


def test_mirostat_and_the_order_are_shown(call, scripted):
    got = document(call("run", scripted, "x", "--json", "--mirostat", "2", "--mirostat-ent", "3", "--mirostat-lr", "0.2"))
    assert (got["sampling"]["mirostat_tau"], got["sampling"]["mirostat_eta"]) == (3.0, 0.2)
    assert got["sampling"]["order"][-2:] == ["temperature", "mirostat_tau"]
    got = document(call("run", scripted, "x", "--json", "--samplers", "temp;min-p, typ_p"))
    assert got["sampling"]["order"] == ["logit_bias", "temperature", "min_p", "typical_p"]


def test_the_steps_really_work(call, scripted):
    numbers = ("run", scripted, *NUMBERS, "-n", "30")
    assert len(set(call(*numbers, "--seed", "1").out.split())) == 8
    xtc = call(*numbers, "--xtc-probability", "1", "--xtc-threshold", "0.1", "--top-p", "1", "--top-k", "0", "--min-p", "0")
    assert set(xtc.out.split()) == {"eight"}  # of equals the last one stays
    assert len(set(call(*numbers, "--typical", "0.3").out.split())) == 3
    loop = call("run", scripted, "-p", "M", "--no-chat", "-n", "12", "--temp", "0", "--dry-multiplier", "40", "--dry-base", "1")
    assert loop.out != " more" * 12 + "\n"
    one = call(*numbers, "--samplers", "top_k", "--top-k", "1")
    assert set(one.out.split()) == {"one"}


def test_a_seed_gives_the_same_text_for_any_number_of_threads(call, scripted):
    def draw(*options: object) -> str:
        more = ("--xtc-probability", "0.3", "--typical", "0.95")
        return call("run", scripted, *NUMBERS, "-n", "25", "--seed", "7", *more, *options).out

    assert draw("-t", "1") == draw("-t", "2") == draw("-t", "3")


def test_banned_strings_do_not_come(call, scripted):
    assert call("run", scripted, *RAW, "--temp", "0").out == ANSWER + "\n"
    done = call("run", scripted, *RAW, "--temp", "0", "--ban", "the answer", "--ban", "Paris is not", "-n", "12")
    assert done.out.startswith("Paris is the")
    assert "the answer" not in done.out
    words = set(call("run", scripted, *NUMBERS, "-n", "40", "--ban", "o", "--ban", " six").out.split())
    assert words == {"three", "five", "seven", "eight"}


# --- events and log-probabilities -------------------------------------------------------------------------------------


def test_events_come_one_a_line_and_say_what_the_document_says(call, scripted):
    options = ("run", scripted, "What?", "--seed", "5", "--logprobs", "2")
    whole, done = document(call(*options, "--json")), call(*options, "--json-lines")
    start, *tokens, end = lines(done.out)
    assert (start["event"], start["model"], start["prompt_tokens"]) == ("start", str(scripted), 24)
    assert {event["version"] for event in lines(done.out)} == {1}
    assert {event["event"] for event in tokens} == {"token"}
    assert "".join(event["text"] for event in tokens) == end["text"] == whole["text"] == ANSWER
    assert [event["token_id"] for event in tokens] == end["token_ids"] == whole["token_ids"]
    assert [event["logprob"] for event in tokens] == [entry["logprob"] for entry in whole["logprobs"]]
    assert end["event"] == "end"
    assert set(end) - {"event"} == set(whole)
    assert done.err == ""


def test_an_error_in_the_middle_is_the_last_event(call, scripted):
    run = ("run", scripted, "-p", "A", "--no-chat", "--json-lines", "--temp", "0")
    done = call(*run, "--regex", "Paris is the answer.", "--ban", " is")
    events = [json.loads(line) for line in done.out.splitlines()]
    assert [event["event"] for event in events] == ["start", "token", "error"]
    assert done.code == 1
    assert events[-1]["error"] in done.err


def test_logprobs_are_probabilities_and_hold_the_tokens_true_bytes(call, scripted):
    got = document(call("run", scripted, "-p", "E", "--no-chat", "--json", "--logprobs", "3", "--temp", "0"))
    entries = got["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]) == "🙂".encode()
    assert [entry["token"] for entry in entries[:4]] == ["\ufffd"] * 4
    assert [entry["token_id"] for entry in entries] == got["token_ids"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) <= 1 + 1e-6
    assert "logprobs" not in document(call("run", scripted, "-p", "E", "--no-chat", "--json"))
    assert document(call("run", scripted, "x", "--json", "--logprobs", "0"))["logprobs"][0]["top_logprobs"] == []


def test_events_arrive_as_they_are_made_and_ctrl_c_ends_them_in_order(llmctl_script, scripted):
    command = [llmctl_script, "run", scripted, "-p", "M", "--no-chat", "--temp", "0", "--json-lines"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        first = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert [event["event"] for event in first] == ["start", "token", "token"]
    end = lines(out.decode())[-1]
    assert (process.returncode, err, end["event"], end["finish_reason"]) == (130, b"", "end", "abort")


def test_json_stays_json_in_an_encoding_without_the_character(llmctl, scripted):
    for option in ("--json", "--json-lines"):
        done = llmctl("run", scripted, "-p", "E", "--no-chat", option, env={"PYTHONIOENCODING": "cp1252"}, encoding="cp1252")
        assert done.returncode == 0
        last = json.loads(done.stdout if option == "--json" else done.stdout.splitlines()[-1])
        assert last["text"] == "🙂"
