"""llmctl run --batch: order, equality with single runs, bad lines, stopping and going on."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

ANSWER = "Paris is the answer."
RAW = ("--no-chat", "-n", "12", "--seed", "3")


def write(file: Path, *lines: object) -> Path:
    file.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return file


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


@pytest.fixture
def batch(tmp_path) -> Path:
    """Twelve prompts: numbers, which are drawn, and texts of other lengths."""
    prompts = [{"prompt": "xy" * (i % 5) + "RAM"[i % 3], "id": f"n{i}"} for i in range(12)]
    return write(tmp_path / "prompts.jsonl", *prompts)


@pytest.mark.parametrize("parallel", [1, 3, 12])
def test_answers_are_those_of_single_runs_in_the_order_of_the_lines(call, scripted, batch, tmp_path, parallel):
    out = tmp_path / "answers.jsonl"
    done = call("run", scripted, "--batch", batch, "-o", out, *RAW, "--parallel", parallel)
    assert (done.code, done.out) == (0, "")
    answers = read(out)
    assert [(entry["line"], entry["id"]) for entry in answers] == [(i + 1, f"n{i}") for i in range(12)]
    for entry, asked in zip(answers, read(batch), strict=True):
        alone = json.loads(call("run", scripted, "-p", asked["prompt"], "--json", *RAW).out)
        for name in ("text", "token_ids", "finish_reason", "stop_string"):
            assert entry[name] == alone[name]
        assert entry["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
        assert entry["seed"] == 3
    assert not partial(out).exists()


def test_without_an_output_the_answers_go_to_stdout(call, scripted, batch, tmp_path):
    out = tmp_path / "answers.jsonl"
    call("run", scripted, "--batch", batch, "-o", out, *RAW)
    done = call("run", scripted, "--batch", "-", *RAW, stdin=batch.read_bytes())
    assert done.code == 0
    assert [json.loads(line) for line in done.out.splitlines()] == read(out)


def test_a_line_may_differ_from_the_command_line(call, scripted, tmp_path):
    template = write(tmp_path / "t.jinja", "{{ messages[0]['content'] }}{{ messages[-1]['content'] }}")
    file = write(
        tmp_path / "b.jsonl",
        {"prompt": "R", "max_tokens": 2},
        {"prompt": "A", "stop": "the"},
        {"prompt": "A", "stop": ["answer", "zzz"], "temperature": 0},
        {"prompt": "R", "seed": 5, "top_k": 1, "max_tokens": 3},
        {"messages": [{"role": "system", "content": "R"}, {"role": "user", "content": "A"}]},
        {"prompt": "A", "system": "R"},
        {"prompt": "ü€", "id": None},
    )
    options = ("--chat-template", template, "-n", "8", "--seed", "1")
    done = call("run", scripted, "--batch", file, *options)
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [len(entry["token_ids"]) for entry in answers[:1]] == [2]
    assert [entry["text"] for entry in answers[1:3]] == ["Paris is ", "Paris is the "]
    assert answers[3]["seed"] == 5
    assert answers[3]["text"] == " one one one"
    assert answers[4]["text"] == answers[5]["text"] == ANSWER
    assert answers[4]["usage"]["prompt_tokens"] == answers[5]["usage"]["prompt_tokens"] == 2
    assert "id" not in answers[6]


BAD = [
    ("{", "not JSON"),
    ("[1]", "expected a JSON object, found list"),
    ('{"prompt": "x", "promt": "y"}', "no field 'promt'; did you mean prompt?"),
    ("{}", "expected either a prompt or messages"),
    ('{"prompt": "x", "messages": []}', "expected either a prompt or messages"),
    ('{"messages": []}', "messages must be a list of objects"),
    ('{"messages": [{"role": "user"}]}', "each with role and content"),
    ('{"messages": [{"role": "user", "content": 5}]}', "must be texts"),
    ('{"prompt": 7}', "must be texts"),
    ('{"prompt": "x", "temperature": -1}', "temperature must be at least 0"),
    ('{"prompt": "x", "temperature": "hot"}', "temperature"),
    ('{"prompt": "x", "max_tokens": 1.5}', "max_tokens must be a whole number"),
    ('{"prompt": "x", "stop": 5}', "stop must be a text"),
    ('{"prompt": "x", "stop": [""]}', "none of them empty"),
    (json.dumps({"prompt": "x" * 300}), "the context holds 256"),
]


def test_bad_lines_are_named_by_number_and_the_others_answered(call, scripted, tmp_path):
    out = tmp_path / "answers.jsonl"
    file = write(tmp_path / "b.jsonl", "", *(line for line, _ in BAD), {"prompt": "A"})
    file.write_bytes(file.read_bytes() + b'{"prompt": "caf\xe9"}')
    done = call("run", scripted, "--batch", file, "-o", out, "-c", "256")
    assert (done.code, done.out) == (1, "")
    answers = read(out)
    assert [entry["line"] for entry in answers] == [*range(2, len(BAD) + 4)]
    for (line, words), entry in zip(BAD, answers, strict=False):
        assert words in entry["error"], line
        assert f"warning: {file}:{entry['line']}: {entry['error']}"[:200] in done.err
    assert answers[-2]["text"] == ANSWER
    assert "not UTF-8 text: byte 0xe9 at offset 15" in answers[-1]["error"]
    assert f"16 of 17 lines of {file} have no whole answer: lines 2, 3, 4, 5, 6 …" in done.err


def test_structure_holds_in_every_answer_and_a_cut_one_is_a_failure(call, scripted, tmp_path):
    file = write(tmp_path / "b.jsonl", *({"prompt": "R", "seed": i} for i in range(6)), {"prompt": "R", "max_tokens": 1})
    done = call("run", scripted, "--batch", file, "--no-chat", "--regex", "( one| two){3}!")
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert all(entry["text"].count(" ") == 3 and entry["text"].endswith("!") for entry in answers[:6])
    assert len({entry["text"] for entry in answers[:6]}) > 1
    assert [entry["is_complete"] for entry in answers] == [True] * 6 + [False]
    assert done.code == 1
    assert "1 of 7 lines" in done.err


def test_logprobs_in_every_answer(call, scripted, batch):
    done = call("run", scripted, "--batch", batch, *RAW, "--logprobs", "1")
    for line in done.out.splitlines():
        entry = json.loads(line)
        assert [each["token_id"] for each in entry["logprobs"]] == entry["token_ids"]


def test_a_file_that_exists_is_not_replaced_unasked(call, scripted, batch, tmp_path):
    out = write(tmp_path / "answers.jsonl", "mine")
    done = call("run", scripted, "--batch", batch, "-o", out, *RAW)
    assert (done.code, out.read_text(encoding="utf-8")) == (1, "mine\n")
    assert "exists already; --force replaces it" in done.err
    assert call("run", scripted, "--batch", batch, "-o", out, *RAW, "--force").code == 0
    assert len(read(out)) == 12
    assert "the same file as the input" in call("run", scripted, "--batch", batch, "-o", batch, *RAW, "--force").err
    assert "does not exist" in call("run", scripted, "--batch", batch, "-o", tmp_path / "no" / "a", *RAW).err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-p", "x"], "leave out the prompt"),
        (["--json"], "--json"),
        (["-f", "x"], "leave out the prompt"),
        (["--parallel", "0"], "--parallel"),
    ],
)
def test_what_does_not_go_with_a_batch(call, batch, options, words):
    done = call("run", "/no/model", "--batch", batch, *options)
    assert done.code == 2
    assert words in done.err


def test_options_for_a_batch_alone(call, tmp_path):
    for option in (["-o", tmp_path / "x"], ["--parallel", "2"], ["--force"]):
        done = call("run", "/no/model", "-p", "x", *option)
        assert done.code == 2
        assert f"{option[0]} is for --batch" in done.err


def test_an_empty_batch_and_a_missing_one(call, scripted, tmp_path):
    assert "there is no line in it" in call("run", scripted, "--batch", write(tmp_path / "e", "", " ")).err
    done = call("run", scripted, "--batch", tmp_path / "none")
    assert (done.code, done.out) == (1, "")


# --- stopped and gone on with -----------------------------------------------------------------------------------------


@pytest.fixture
def slow(tmp_path) -> Path:
    """Short answers, then long ones."""
    return write(tmp_path / "slow.jsonl", *({"prompt": "A", "max_tokens": 8}, {"prompt": "R", "max_tokens": 19_000}) * 4)


def started(script, scripted, file: Path, out: Path, *options: object) -> subprocess.Popen:
    """A batch that has written an answer and is not at its end."""
    command = [script, "run", scripted, "--batch", file, "-o", out, "--no-chat", "--seed", "1", "--parallel", "2", *options]
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not (partial(out).exists() and partial(out).read_bytes()):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_batch_is_gone_on_with(llmctl_script, llmctl, scripted, slow, tmp_path, number, code):
    out = tmp_path / "answers.jsonl"
    process = started(llmctl_script, scripted, slow, out)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert b"Traceback" not in err
    assert not out.exists()
    before = partial(out).read_bytes()
    if number == signal.SIGINT:
        assert b"the same command goes on from there" in err
    partial(out).write_bytes(before + b'{"version": 1, "li')  # killed in the middle of a line
    again = started(llmctl_script, scripted, slow, out)
    assert again.stderr.readline() == b"Going on after %d of 8 lines that an earlier run answered.\n" % before.count(b"\n")
    assert partial(out).read_bytes().startswith(before)
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=30)
    assert again.returncode == 130
    assert partial(out).read_bytes().startswith(before)


def answered(line: bytes) -> dict:
    """A line of answers, without how much of its prompt another line had left in the cache."""
    row = json.loads(line)
    del row["usage"]["cached_tokens"]
    return row


def test_what_is_gone_on_with_ends_as_if_it_had_not_been_stopped(call, scripted, batch, tmp_path):
    out, whole = tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    assert call("run", scripted, "--batch", batch, "-o", whole, *RAW).code == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    partial(out).write_bytes(b"".join(lines[:5]) + lines[5][:40])
    done = call("run", scripted, "--batch", batch, "-o", out, *RAW)
    assert done.code == 0
    assert "Going on after 5 of 12 lines" in done.err
    assert [answered(line) for line in out.read_bytes().splitlines()] == [answered(line) for line in lines]
    partial(out).write_bytes(b"".join(lines))
    assert call("run", scripted, "--batch", batch, "-o", out, *RAW, "--force").code == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "options", [("--temp", "0.1"), ("--stop", "x"), ("--ban", "x"), ("-c", "300"), ("--activations", "float")]
)
def test_answers_of_other_options_are_not_gone_on_with(call, scripted, batch, tmp_path, options):
    out, whole = tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    call("run", scripted, "--batch", batch, "-o", whole, *RAW)
    kept = b"".join(whole.read_bytes().splitlines(keepends=True)[:5])
    partial(out).write_bytes(kept)
    done = call("run", scripted, "--batch", batch, "-o", out, *RAW, *options)
    assert done.code == 1
    assert f"remove {partial(out)}" in done.err
    assert partial(out).read_bytes() == kept
    assert not out.exists()


def test_two_runs_cannot_write_the_same_answers(llmctl_script, call, scripted, slow, tmp_path):
    out = tmp_path / "answers.jsonl"
    process = started(llmctl_script, scripted, slow, out)
    try:
        assert "another process is writing" in call("run", scripted, "--batch", slow, "-o", out, "--no-chat").err
    finally:
        process.kill()
        process.communicate()


def test_a_reader_that_leaves_is_no_error(llmctl_script, scripted, tmp_path):
    file = write(tmp_path / "many.jsonl", *[{"prompt": "A", "max_tokens": 8}] * 400)
    command = f"{llmctl_script} run {scripted} --batch {file} --no-chat | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (141, b"{", b"Answering\n")


@pytest.mark.parametrize("draft", [(), ("--draft", "ngram", "--num-draft-tokens", "3")])
def test_an_answer_that_can_go_no_further_fails_alone(call, scripted, tmp_path, draft):
    """What a grammar asks for is banned in the second line only, after its first word."""
    prompts = write(tmp_path / "prompts.jsonl", *({"prompt": text} for text in ("M", "A", "MM")))
    run = ("run", scripted, "--batch", prompts, "--no-chat", "--temp", "0", "--parallel", "3", "--ban", " is")
    done = call(*run, "--regex", "( more){4}|Paris is the answer.", *draft)
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [answer["text"] for answer in answers] == [" more" * 4, "Paris", " more" * 4]
    assert [answer["finish_reason"] for answer in answers] == ["stop", "error", "stop"]
    assert "no token may follow" in answers[1]["error"]
    assert not any("error" in answer for answer in (answers[0], answers[2]))
    assert done.code == 1
    assert f"{prompts}:2: no token may follow" in done.err
    assert "1 of 3 lines" in done.err
