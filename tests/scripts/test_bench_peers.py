"""The rounds, ratios and errors of bench_peers.py, with programs that say what the test wants."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import bench_batch
import bench_peers
import pytest
from bench_peers import Result, Round, bytes_per_token, chosen_tests, main, measure, parse_test, table
from make_tiny_model import make_tiny_model
from peer_programs import LlamaCpp, Llmctl, PeerError, Transformers, find_program

from llmctl.runtime.benchmark import BenchTest
from llmctl.runtime.checkpoint import open_checkpoint

FAKE = """#!{python}
import json, sys
if "-n" in sys.argv and "--temp" in sys.argv:
    sys.exit(0)
said = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if said["-t"] == "13":
    sys.exit("no such number of threads")
print(json.dumps([{{"avg_ts": 100.0 + int(said["-n"])}}] if said["-t"] != "14" else []))
"""


@pytest.fixture(autouse=True)
def hurry(monkeypatch) -> None:
    monkeypatch.setattr(bench_peers, "_REST_S", 0)


@pytest.fixture(scope="module")
def fake(tmp_path_factory) -> Path:
    """Programs called llama-bench and llama-completion that know the answer."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("llama-bench", "llama-completion"):
        (folder / name).write_text(FAKE.format(python=sys.executable))
        (folder / name).chmod(0o755)
    return folder / "llama-bench"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny", "llama", tokenizer="bpe")


def readings(*values: float) -> Iterator[float]:
    return cycle(values).__next__


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_programs_take_turns_in_alternating_order():
    order: list[str] = []
    turns = {name: lambda name=name: order.append(name) or 1.0 for name in ("a", "b", "c")}
    measure("tg1", turns, readings(10.0), 3, 0.05)
    assert order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]


def test_rounds_in_which_the_machine_changed_do_not_count():
    result = measure("tg1", {"a": lambda: 1.0}, readings(10, 10.4, 10, 10.6, 10, 9.6), 4, 0.05)
    assert [round.bandwidth for round in result.discarded] == [(10, 10.6)] * 2
    assert len(result.rounds) == 4


def test_a_machine_that_never_rests_is_given_up():
    result = measure("tg1", {"llmctl": lambda: 1.0}, readings(10, 20), 2, 0.05)
    assert (len(result.rounds), len(result.discarded)) == (0, 6)
    assert "no steady round" in table([result], ["llama.cpp"], 1)[1]


def test_ratios_are_of_the_rounds_and_the_share_is_of_their_bandwidth():
    values = [(300, 100), (200, 100), (100, 100)]
    rounds = [Round((40.0, 42.0), {"llmctl": ours, "llama.cpp": theirs}) for ours, theirs in values]
    result = Result("tg128", rounds)
    assert result.ratios("llama.cpp") == [1, 2, 3]
    assert result.share(100_000_000) == pytest.approx(200 * 0.1 / 41)
    header, row = table([result], ["llama.cpp"], 100_000_000)
    assert row.split() == ["tg128", "llama.cpp", "200.0", "100.0", "2.00", "×", "1.00", "…", "3.00", "41.0", "49", "%", "3/3"]
    assert header.startswith("TEST   PEER")


def test_only_programs_with_a_command_are_started_cold():
    able = SimpleNamespace(name="able", first_token=lambda prompt: 1.5)
    unable = SimpleNamespace(name="unable", first_token=lambda prompt: None)
    assert {name: turn() for name, turn in bench_peers._turns([able, unable], None).items()} == {"able": 1.5}


# --- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "test"),
    [("pp512", (512, 0, 0)), ("tg128", (0, 128, 0)), ("tg64@d4096", (0, 64, 4096)), ("pp8+tg4@d16", (8, 4, 16))],
)
def test_names_of_tests(text, test):
    assert parse_test(text) == BenchTest(*test)


@pytest.mark.parametrize("text", ["", "pp", "@d5", "tg4@", "warm", "tg4,pp4"])
def test_what_is_no_test(text):
    with pytest.raises(PeerError, match="no test"):
        parse_test(text)


def test_growth_stays_inside_the_context(tiny):
    options = SimpleNamespace(tests="tg4,cold", growth=True, model=tiny)
    assert chosen_tests(options) == ["tg4", "cold"]
    options.model = make_tiny_model(tiny.parent / "long", "llama", max_position_embeddings=2000)
    assert chosen_tests(options)[2:] == ["tg32@d512", "tg32@d1024", "tg32@d1967"]


def test_weights_that_a_token_reads(tiny):
    """An embedding that is not the head is read by the row."""
    with open_checkpoint(tiny) as checkpoint:
        total, rows = checkpoint.total_bytes, checkpoint.entry("model.embed_tokens.weight").nbytes
    assert bytes_per_token(tiny) == total - rows + rows // 384
    tied = make_tiny_model(tiny.parent / "tied", "llama", tie_word_embeddings=True)
    with open_checkpoint(tied) as checkpoint:
        assert bytes_per_token(tied) == checkpoint.total_bytes


# --- programs ---------------------------------------------------------------------------------------------------------


def test_a_missing_program_is_an_error_that_says_what_to_do(monkeypatch, tmp_path, fake):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LLAMA_BENCH", raising=False)
    with pytest.raises(PeerError, match=r"--llama-bench, set LLAMA_BENCH, or use --without"):
        find_program("llama-bench", None, "LLAMA_BENCH")
    with pytest.raises(PeerError, match="not a program"):
        find_program("llama-bench", tmp_path / "none", "LLAMA_BENCH")
    monkeypatch.setenv("LLAMA_BENCH", str(fake))
    assert find_program("llama-bench", None, "LLAMA_BENCH") == fake
    assert find_program("llama-completion", None, "LLAMA_COMPLETION", beside=fake).parent == fake.parent
    monkeypatch.setenv("PATH", str(fake.parent))
    monkeypatch.delenv("LLAMA_BENCH")
    assert find_program("llama-bench", None, "LLAMA_BENCH") == fake


def test_what_a_program_says_is_passed_on_when_it_fails(fake):
    for threads, message in ((13, "no such number of threads"), (14, "no row")):
        with pytest.raises(PeerError, match=message):
            LlamaCpp(Path("m.gguf"), threads, fake, fake).speed(BenchTest(0, 4))
    with pytest.raises(PeerError, match=r"none.gguf.*ended with code"):
        Llmctl(Path("none.gguf"), 1, []).speed(BenchTest(0, 4))


def test_transformers_is_not_left_out_silently(tiny, fake, capsys):
    assert main([str(tiny), "--llama-bench", str(fake), "--tests", "tg2"]) == 1
    assert "--transformers FOLDER, or --without transformers" in capsys.readouterr().err


def test_a_folder_that_transformers_cannot_load_is_an_error(tmp_path):
    with pytest.raises(PeerError, match="ended with code 1"):
        Transformers(tmp_path / "none", 1)


def test_everything_together(tiny, fake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_peers, "Bandwidth", lambda threads: readings(40.0))
    arguments = [tiny, "--llama-bench", fake, "--transformers", tiny, "-t", 1, "--pairs", 1, "--tests", "pp4,tg2@d4,cold"]
    assert main([*map(str, arguments), "--json", str(tmp_path / "out.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["pp4", "llama.cpp"], ["pp4", "transformers"], ["tg2@d4", "llama.cpp"], ["tg2@d4", "transformers"], ["cold", "llama.cpp"]
    ]  # fmt: skip
    report = json.loads((tmp_path / "out.json").read_text())
    assert [result["test"] for result in report["results"]] == ["pp4", "tg2@d4", "cold"]
    values = report["results"][1]["rounds"][0]["values"]
    assert values["llama.cpp"] == 102.0
    assert values["llmctl"] > 0 < values["transformers"]
    assert report["options"]["pairs"] == 1
    assert report["batch"] is None


def test_a_program_that_fails_midway_leaves_what_was_measured(fake, capsys, monkeypatch, tiny):
    monkeypatch.setattr(bench_peers, "Bandwidth", lambda threads: readings(40.0))
    speeds = iter([50.0])
    ours = SimpleNamespace(name="llmctl", speed=lambda test: next(speeds), close=lambda: None)
    theirs = SimpleNamespace(name="llama.cpp", speed=lambda test: LlamaCpp(tiny, test.n_gen, fake, fake).speed(test))
    theirs.close = ours.close
    monkeypatch.setattr(bench_peers, "programs_of", lambda options: [theirs, ours])
    assert main([str(tiny), "--pairs", "1", "--tests", "tg2,tg13"]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[1].split()[:4] == ["tg2", "llama.cpp", "50.0", "102.0"]
    assert "no such number of threads" in output.err


def test_batches(tiny, capsys):
    few = ["--depth", "20", "-n", "2", "-r", "1", "-t", "1", "--backend", "reference"]
    assert bench_batch.main([str(tiny), "--batch", "1,3", *few]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["BATCH", "TOKENS/S", "EACH", "GROWTH"]
    assert [row.split()[0] for row in rows] == ["1", "3"]
    assert rows[0].split()[-2:] == ["1.00", "×"]
    assert bench_batch.main([str(tiny), "--batch", "0"]) == 1
