"""inspect-kv with a text: its pages, its attention, what other caches would do to it, and the reports of all that."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from make_tiny_model import make_tiny_model

PROMPT = "A long prompt, of forty tokens and some more, for pages."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Grouped heads, windows of 8 in some layers, a byte-level tokenizer and a chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "gemma3", "gemma3", tokenizer="bpe", max_position_embeddings=512)


@pytest.fixture
def inspect(call, tiny):
    """The JSON document of a call about the tiny model."""

    def run(*arguments: object, model: Path = tiny, code: int = 0) -> dict:
        done = call("inspect-kv", model, *arguments, "--no-chat", "--json", "--quiet")
        assert (done.code, done.err) == (code, "")
        document = json.loads(done.out)
        assert document["version"] == 1
        return document

    return run


# --- live -------------------------------------------------------------------------------------------------------------


def test_every_token_lies_in_the_page_that_the_table_says(inspect):
    document = inspect("-p", PROMPT, "--view", "live")
    live, length = document["live"], document["text"]["num_tokens"]
    assert live["lengths"] == [length]
    assert "".join(document["text"]["pieces"]) == PROMPT
    window, full = sorted(live["groups"], key=lambda group: group["sliding_window"] is None)
    (table,) = full["tables"]
    assert [page["first"] for page in table] == list(range(0, length, 16))
    assert [page["tokens"] for page in table] == [16] * (length // 16) + [length % 16] * (length % 16 > 0)
    assert (full["pages_held"], full["tokens_held"]) == (len(table), length)
    assert full["waste"] == pytest.approx(1 - length / (16 * len(table)))
    assert window["tables"][0][-1]["tokens"] == table[-1]["tokens"]


def kept_positions(head: dict) -> list[int]:
    """Of a head in the live view."""
    return [position for first, count in head["runs"] for position in range(first, first + count)]


def test_snapkv_is_shown_as_it_left_every_head(inspect):
    text = PROMPT * 2
    document = inspect("-p", text, "--view", "live", "--kv-policy", "snapkv", "--kv-budget", "0.5", "-n", "3")
    live, full = document["live"], inspect("-p", text, "--view", "live", "-n", "3")["live"]
    assert full["kept"] is None
    kept, length = live["kept"], live["lengths"][0]
    budget = -(-document["text"]["num_tokens"] // 2)
    for group, whole in zip(live["groups"], full["groups"], strict=True):
        heads = [head for layer in group["layers"] for head in kept["layers"][layer]]
        positions = [kept_positions(head) for head in heads]
        assert all(head["kept"] == len(own) for head, own in zip(heads, positions, strict=True))
        (table,), (whole_table,) = group["tables"], whole["tables"]
        if group["sliding_window"] is not None:  # its own, and no other than without a policy
            assert table == whole_table
            assert all(own == list(range(length - len(own), length)) for own in positions)
            continue
        assert {len(own) for own in positions} == {budget + 3} == {group["tokens_held"]}
        assert all(own[-35:] == list(range(length - 35, length)) for own in positions)  # the window, and what followed
        assert len({tuple(own) for own in positions}) > 1
        dropped = np.mean([[place not in own for place in range(length)] for own in map(set, positions)], axis=0)
        assert kept["dropped"] == pytest.approx(dropped)
        assert [page["first"] for page in table[: budget // 16]] == [None] * (budget // 16)
        assert sum(page["tokens"] for page in table) == budget + 3
        assert group["pages_held"] < whole["pages_held"]
    assert live["bytes_held"] < full["bytes_held"]
    assert kept["bytes"] < kept["full_bytes"]


def test_sinks_are_shown_with_the_last_tokens(inspect):
    live = inspect("-p", PROMPT * 2, "--view", "live", "--kv-policy", "sinks,snapkv", "--kv-budget", "0.25,0.5")["live"]
    length = live["lengths"][0]
    policy_group = max(live["groups"], key=lambda group: group["sliding_window"])
    budget = -(-length // 4)
    for layer in policy_group["layers"]:
        for head in live["kept"]["layers"][layer]:
            assert head["runs"] == [[0, 4], [length - budget + 5, budget - 5]]  # the next token is one of the budget's
            assert head["kept"] == budget - 1
    assert live["kept"]["kv_policy"].startswith("sinks")


def test_what_is_kept_is_drawn_and_what_is_dropped_cut_out(call, tiny, tmp_path):
    options = ("--view", "live", "--kv-policy", "snapkv", "--kv-budget", "0.5", "--no-chat", "-q")
    done = call("inspect-kv", tiny, "-p", PROMPT * 2, *options)
    assert re.search(r"KEPT  snapkv, \d+ tokens: each head keeps \d+ to \d+ of \d+ tokens", done.out)
    assert "head 0" in done.out
    assert "[-" in done.out.partition("is cut out:")[2]
    assert "by head" in done.out
    page = tmp_path / "kept.html"
    assert call("inspect-kv", tiny, "-p", PROMPT * 2, *options, "-o", page).code == 0
    html = page.read_text("utf-8")
    assert re.search(r"alt='layer 1: its heads keep \d+", html)
    assert "<del>" in html


def test_pages_that_no_query_sees_any_more_are_gone(inspect):
    groups = inspect("-p", PROMPT, "--view", "live", "-n", "1")["live"]["groups"]
    firsts = {group["sliding_window"]: group["tables"][0][0]["first"] for group in groups}
    assert firsts[None] == 0
    assert firsts[8] > 0


def test_sequences_share_the_pages_of_their_prompt(inspect):
    live = inspect("-p", PROMPT, "--view", "live", "--batch", "3", "-n", "2")["live"]
    full = next(group for group in live["groups"] if group["sliding_window"] is None)
    length = live["lengths"][0]
    assert live["lengths"] == [length] * 3
    whole = (length - 2) // 16
    for tables in zip(*full["tables"], strict=True):
        index = tables[0]["first"] // 16
        assert {page["holders"] for page in tables} == ({3} if index < whole else {1})
        assert len({page["page"] for page in tables}) == (1 if index < whole else 3)
    assert full["pages_shared"] == whole
    assert full["pages_held"] == whole + 3 * (len(full["tables"][0]) - whole)


def test_bytes_by_layer_add_up(inspect):
    document = inspect("-p", PROMPT, "--view", "live", "--kv-type", "f16")
    live, each = document["live"], document["layers"][0]["bytes_per_token"]["f16"]
    assert live["kv_type"] == "f16"
    assert live["bytes_held"] == sum(live["layer_bytes"])
    for group in live["groups"]:
        assert {live["layer_bytes"][layer] for layer in group["layers"]} == {group["pages_held"] * 16 * each}


def test_ranges_are_the_same_with_and_without_the_attention(inspect):
    alone, beside = (inspect("-p", PROMPT, "--view", view)["live"] for view in ("live", "live,attention"))
    assert (alone["keys"], alone["values"]) == (beside["keys"], beside["values"])
    assert all(head["low"] < 0 < head["high"] for layer in alone["keys"] for head in layer)


def test_a_saved_cache_is_found(call, inspect, tiny, tmp_path):
    file = tmp_path / "kept"
    assert call("run", tiny, "-p", PROMPT, "--no-chat", "-n", "1", "--quiet", "--prompt-cache", file).code == 0
    live = inspect("--session", file, "--view", "live")["live"]
    assert live["lengths"] == [len(live["texts"][0])]
    assert live["found_tokens"] > 0
    assert PROMPT.startswith("".join(live["texts"][0]))


def test_a_saved_cache_made_otherwise_is_computed_again(call, tiny, tmp_path):
    file = tmp_path / "kept"
    assert call("run", tiny, "-p", PROMPT, "--no-chat", "-n", "1", "--prompt-cache", file).code == 0
    done = call("inspect-kv", tiny, "--session", file, "--view", "live", "--kv-type", "f32", "--json")
    assert done.code == 0
    assert json.loads(done.out)["live"]["found_tokens"] == 0
    assert "computed again" in done.err


# --- attention --------------------------------------------------------------------------------------------------------


def test_shares_are_shares(inspect):
    document = inspect("-p", PROMPT, "--view", "attention")
    found = document["attention"]
    assert sum(found["received"]) == pytest.approx(1, abs=1e-4)
    assert sum(found["received_last"]) == pytest.approx(1, abs=1e-4)
    assert [top["share"] for top in found["top"]] == sorted((top["share"] for top in found["top"]), reverse=True)
    for top in found["top"]:
        assert top["share"] == pytest.approx(found["received_last"][top["position"]], abs=1e-6)
        assert top["head_share"] >= top["share"]
    heads = [head for layer in found["layers"] for head in layer["heads"]]
    assert all(0 <= head["sink_share"] + head["recent_share"] <= 1 + 1e-6 for head in heads)
    assert len(found["places"]["shares"]) == document["num_layers"]


@pytest.mark.parametrize("text", ["A", PROMPT])
def test_the_picture_in_words(call, tiny, text):
    done = call("inspect-kv", tiny, "-p", text)
    assert done.code == 0
    assert "\x1b" not in done.out
    for words in ("LIVE", "ATTENTION", "sinks", "recent", "spread", "⟦"):
        assert words in done.out
    assert "<|im_start|>user" in done.out  # as run would send it


def test_narrow_terminals_get_narrow_maps(call, tiny, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = call("inspect-kv", tiny, "-p", PROMPT, "--view", "attention").out.splitlines()
    maps = [line for line in lines if set("▁▂▃▄▅▆▇█") & set(line)]
    assert maps
    assert max(map(len, maps)) <= 40


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_an_encoding_without_blocks_gets_other_shades(llmctl, tiny, encoding):
    done = llmctl("inspect-kv", tiny, "-p", PROMPT, env={"PYTHONIOENCODING": encoding}, encoding=encoding)
    assert done.returncode == 0
    assert "▁" not in done.stdout
    assert set("@#*=") & set(done.stdout)


def test_colour_only_where_it_may_be(tiny, llmctl_script):
    import pty

    def on_a_terminal(**environment: str) -> str:
        parent, child = pty.openpty()
        command = [llmctl_script, "inspect-kv", tiny, "-p", PROMPT, "--view", "attention"]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment}
        with subprocess.Popen(command, stdin=child, stdout=child, stderr=subprocess.DEVNULL, env=environment) as process:
            os.close(child)
            written = b""
            while True:
                try:
                    piece = os.read(parent, 1 << 16)
                except OSError:
                    break
                written += piece
                if not piece:
                    break
            assert process.wait() == 0
        os.close(parent)
        return written.decode()

    assert "\x1b[38;5;" in on_a_terminal()
    assert "\x1b" not in on_a_terminal(NO_COLOR="1")


# --- what if ----------------------------------------------------------------------------------------------------------


def test_other_caches_are_compared_with_the_full_one(inspect):
    found = inspect("-p", PROMPT, "--view", "what-if", "-n", "6", "--needles", "2", "-c", "256", "--batch", "3")["what_if"]
    outcomes = {each["kv_type"]: each for each in found["outcomes"] if each["kv_policy"] == "full"}
    assert set(outcomes) == {"f32", "f16", "bf16", "fp8", "q8_0", "q5_1", "q4_0"}
    assert (outcomes["f32"]["kl"], outcomes["f32"]["same_top"]) == (0, 1)
    assert outcomes["f16"]["kl"] < outcomes["q4_0"]["kl"]
    assert outcomes["f16"]["bytes"] * 2 == outcomes["f32"]["bytes"]
    assert all(outcome["dropped"] is None for outcome in outcomes.values())
    assert outcomes["f16"]["context_bytes"] * 2 == outcomes["f32"]["context_bytes"]
    assert (found["context"], found["sequences"], len(found["needle_depths"])) == (256, 3, 2)
    assert all(len(each["needles_found"]) == 2 for each in found["outcomes"])


def test_policies_drop_what_they_say(inspect):
    options = ("--view", "what-if", "-n", "4", "--needles", "0", "--kv-type", "f32", "--kv-budget", "0.25,0.5")
    document = inspect("-p", PROMPT * 3, *options)
    length = document["text"]["num_tokens"]
    full, *others = document["what_if"]["outcomes"]
    assert [(each["kv_policy"], each["budget_share"]) for each in others] == [
        (kind, share) for kind in ("sliding", "sinks", "snapkv") for share in (0.25, 0.5)
    ]
    for each in others:
        budget = -(-length * each["budget_share"] // 1)
        assert each["budget_tokens"] == budget
        assert each["bytes"] < full["bytes"]
        assert each["kl"] > full["kl"] == 0
        assert len(each["dropped"]) == length
        kept = length - sum(each["dropped"])
        assert kept == pytest.approx(budget, abs=6)  # the answer's tokens move a window on
    sliding, sinks, snapkv = (each["dropped"] for each in others[::2])
    assert set(sliding[: length // 2]) == {1}
    assert set(sinks[:4]) == {0}
    assert any(share not in (0, 1) for share in snapkv)  # heads choose for themselves
    assert set(snapkv[-30:]) == {0}


def test_a_policy_that_drops_nothing_is_named(call, tiny):
    done = call("inspect-kv", tiny, "-p", PROMPT[:20], "--no-chat", "--view", "what-if", "-n", "1", "--needles", "0")
    assert done.code == 0
    assert "snapkv would drop none" in done.err
    assert "sliding 25%" in done.out
    assert "snapkv" not in done.out
    assert "[-" in done.out


def test_a_model_of_windows_has_nothing_to_drop(call, tmp_path):
    model = make_tiny_model(tmp_path / "mixtral", "mixtral", tokenizer="bpe", sliding_window=8)
    options = ("--view", "live,attention,what-if", "-n", "1", "--needles", "0", "--kv-type", "f16")
    done = call("inspect-kv", model, "-p", PROMPT, *options)
    assert done.code == 0, done.err
    assert "policies have nothing to drop" in done.err


def test_a_latent_cache_is_looked_at_as_well(call, tmp_path):
    model = make_tiny_model(tmp_path / "deepseek", "deepseek_v3", tokenizer="bpe", max_position_embeddings=512)
    options = ("--view", "plan,live,attention,what-if", "-n", "2", "--needles", "1", "--kv-type", "f16,fp8", "--json")
    done = call("inspect-kv", model, "-p", PROMPT, "--no-chat", *options)
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert len(document["live"]["keys"][0]) == 1
    assert len(document["attention"]["layers"][0]["heads"]) > 1
    assert {each["kv_policy"] for each in document["what_if"]["outcomes"]} >= {"full", "sliding", "sinks"}


def test_needles_that_have_no_room_are_named(call, tiny):
    options = ("--no-chat", "--view", "what-if", "-n", "1", "--needles", "2", "--kv-type", "f16", "--kv-policy", "full")
    done = call("inspect-kv", tiny, "-p", "x" * 470, *options)
    assert done.code == 0
    assert "the needles are left out" in done.err
    assert "NEEDLES" not in done.out


def test_what_is_recommended_fits(inspect):
    arguments = ("-p", PROMPT, "--needles", "0", "-n", "4")
    free = inspect(*arguments, "--view", "what-if")["what_if"]
    sizes = {each["kv_type"]: each["context_bytes"] for each in free["outcomes"] if each["kv_policy"] == "full"}
    for limit in (sizes["f32"], sizes["f16"], sizes["q8_0"]):
        found = inspect(*arguments, "--max-memory", str(limit))["what_if"]
        best = found["outcomes"][found["recommended"]]
        assert best["context_bytes"] <= limit
        assert best["kl"] == min(each["kl"] for each in found["outcomes"] if each["context_bytes"] <= limit)
    assert inspect(*arguments, "--max-memory", "1K")["what_if"]["recommended"] is None


# --- reports ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Notes every element, and that they nest."""

    EMPTY = frozenset({"meta", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def report(call, tiny, tmp_path):
    file = tmp_path / "report.html"
    views = "plan,live,attention,what-if"
    done = call("inspect-kv", tiny, "-p", PROMPT + " <b>&", "--view", views, "--needles", "1", "-n", "2", "-o", file, "-q")
    assert (done.code, done.out, done.err) == (0, f"{file}\n", "")
    return file.read_text("utf-8")


def test_the_page_is_whole_and_loads_nothing(report):
    page = Page(report)
    assert report.startswith("<!doctype html>")
    assert page.all("html") == [{"lang": "en"}]
    assert not page.all("script")
    assert not page.all("link")
    assert "http" not in report.replace("http-equiv", "")
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    assert "@media print" in report
    assert "prefers-color-scheme:dark" in report
    assert "<b>&" not in report


def test_the_page_can_be_heard(report):
    """What has no words of its own has some for those who cannot see it; tables have headers; headings go down in steps."""
    page = Page(report)
    assert all(image.get("alt") for image in page.all("img"))
    assert all(drawing.get("aria-label") for drawing in page.all("svg"))
    assert all(header.get("scope") == "col" for header in page.all("th"))
    levels = [int(tag[1]) for tag, _ in page.elements if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert len(page.all("table")) == len(page.all("caption"))


def test_the_page_says_all_of_it(report):
    page = Page(report)
    words = "".join(page.texts)
    for heading in ("Plan", "Live", "Attention", "What if"):
        assert heading in page.texts
    assert PROMPT + " <b>&" in words
    assert "Recommended" in words or "None has a KL" in words
    assert len(page.all("del")) >= 3  # what each policy drops
    assert len(page.all("svg")) == 5  # peaks of keys and values; sinks, recent, spread


def test_the_picture_is_a_picture(call, tiny, tmp_path):
    file = tmp_path / "maps.png"
    assert call("inspect-kv", tiny, "-p", PROMPT, "-o", file, "-q").code == 0
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (depth, kind) == (8, 3)
    at, parts = 8, {}
    while at < len(data):
        (size,), name = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        content = data[at + 8 : at + 8 + size]
        assert zlib.crc32(name + content) == struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0]
        parts[name], at = content, at + 12 + size
    pixels = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, width + 1)[:, 1:]
    assert pixels[0, 0] == 255  # the first query has nothing but its own token
    assert pixels[0, 5] == 1  # and sees nothing after it
    assert len(parts[b"PLTE"]) == 768


def test_a_report_takes_no_other_files_place(call, tiny, tmp_path):
    file = tmp_path / "report.html"
    file.write_text("mine")
    done = call("inspect-kv", tiny, "-p", PROMPT, "-o", file)
    assert (done.code, done.out) == (1, "")
    assert "--force replaces it" in done.err
    assert file.read_text() == "mine"
    assert call("inspect-kv", tiny, "-o", file, "--force", "-q").code == 0
    assert file.read_text("utf-8").startswith("<!doctype")


# --- refusals and ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-p", ""], 2, "the prompt is empty"),
        (["-p", "x" * 600], 1, "the context holds"),
        (["-p", "x", "--session", "y"], 2, "either a prompt or --session"),
        (["-f", "binary"], 2, "is not UTF-8 text"),
        (["--session", "binary"], 1, "not a sound cache"),
        (["--session", "missing"], 1, "No such file"),
        (["-p", "x", "--kv-type", "k=f16"], 2, "there is no such cache type"),
        (["-p", "x", "-o", "no/x.html"], 1, "does not exist"),
        (["-p", "x", "--kv-policy", "some"], 2, "expected full, sliding, sinks, snapkv"),
        (["-p", "x", "--kv-budget", "300"], 2, "expected a share of the text"),
    ],
)
def test_refusals(call, tiny, tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\xff\xfe\x00\x01" * 20)
    done = call("inspect-kv", tiny, *arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert len(done.err.splitlines()) == 1


def test_a_prompt_that_fills_the_context_is_shown(inspect):
    document = inspect("-p", "x" * 40, "-c", "41", "--view", "live,attention,what-if", "--needles", "0", "-n", "9")
    assert document["text"]["num_tokens"] == 40
    assert document["live"]["lengths"] == [41]  # the token that there is room for is computed as well
    assert document["what_if"]["places"] == 1


def test_a_closed_pipe_is_silent(llmctl_script, tiny):
    command = [llmctl_script, "inspect-kv", tiny, "-p", PROMPT]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        error = process.stderr.read().decode()
        assert process.wait() in (0, 141)
    assert "Traceback" not in error
    assert "error" not in error


def test_ctrl_c_ends_it_and_leaves_nothing(llmctl_script, smollm2_gguf, tmp_path):
    file = tmp_path / "report.html"
    command = [llmctl_script, "inspect-kv", smollm2_gguf, "-p", "word " * 3000, "-o", file]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert "Following" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_torch_is_not_imported(smollm2_gguf):
    import sys

    code = (
        "import sys; from llmctl.cli import main; "
        "code = main(['inspect-kv', sys.argv[1], '-p', 'Hello', '--view', 'live,attention,what-if', '--needles', '0', '-n', '2', "
        "'--kv-type', 'f16', '--json']); assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(smollm2_gguf)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["what_if"]["outcomes"][0]["same_top"] == 1
