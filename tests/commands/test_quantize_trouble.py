"""What goes wrong while a model is calibrated: killed, a full disk, Ctrl-C, wrong files. Nothing is lost, and it is said.

See `test_safe_writing` for `convert`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_tiny_model import make_tiny_model
from safetensors.numpy import load_file, save_file

from llmctl.cli import main
from llmctl.quant.statistics import Importances, write_imatrix
from llmctl.runtime.checkpoint import open_checkpoint

SHORT = ["--num-samples", "6", "--seq-len", "40", "--no-check", "--threads", "1"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("trouble") / "tiny-llama", "llama", tokenizer="bpe", num_hidden_layers=2)


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """Of the model, to be broken."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command in this process, which must fail; gives what it says."""

    def run(model: Path, *options: str) -> str:
        code = main(["quantize", str(model), *SHORT, *options])
        out, err = capsys.readouterr()
        assert (code in (1, 2), out) == (True, ""), (code, out, err)
        assert "fault of llmctl" not in err
        return err

    return run


KILLED = """
import json, os, random, shutil, signal, sys
from pathlib import Path
from llmctl.cli import main
import llmctl.commands.calibrated, llmctl.quant.calibrated  # before the fork

arguments, output = json.loads(sys.argv[1]), Path(sys.argv[2])
CALLS = ("write", "fsync", "ftruncate", "rename", "replace", "mkdir", "unlink", "rmdir")

def run(more, number=0):
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
    left = [number]
    def killing(function):
        def call(*a, **k):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*a, **k)
        return call
    for name in CALLS:
        setattr(os, name, killing(getattr(os, name)))
    code = main([*arguments, *more, "--quiet"])
    if number == 0:
        Path("calls").write_text(str(-left[0]))
    os._exit(code)

def content():
    found = sorted(path for path in [output, *output.rglob("*")] if path.is_file())
    return {str(path): path.read_bytes() for path in found}

assert run([]) == 0
expected, calls = content(), int(Path("calls").read_text())
moments = random.Random(1).sample(range(1, calls + 1), 7) + [calls // 2, calls]
resumed = 0
for number in moments:
    shutil.rmtree(output) if output.is_dir() else output.unlink()
    status = run([], number)
    # What killed runs left may spare a later one a call or two: then it is done before the last moments come.
    assert status == -signal.SIGKILL or status == 0 and number > calls - 5, (number, calls, status)
    if content():  # all was done but for cleaning up
        assert content() == expected, number
        continue
    state = output.parent / f".{output.name}.work" / "state.json"
    resumed += state.exists()
    assert run(["--resume"] if state.exists() else []) == 0, number
    assert content() == expected, number
    left = [name for name in os.listdir(output.parent) if name.startswith(".")]
    assert not left, (number, left)
assert resumed > 3, resumed
"""


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (("--method", "awq"), "out"),
        (("--method", "gptq", "--format", "gguf", "--type", "Q4_0", "--pure"), "out.gguf"),
    ],
)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(
    tiny: Path, tmp_path: Path, options: tuple[str, ...], output: str
) -> None:
    target = tmp_path / "place" / output
    target.parent.mkdir()
    arguments = ["quantize", str(tiny), *SHORT, *options, "-o", str(target)]
    command = [sys.executable, "-c", KILLED, json.dumps(arguments), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run_apart(model: Path, *options: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """In a process of its own. limit: bytes a file may have, in place of a full disk."""

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "llmctl", "quantize", str(model), *SHORT, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limited if limit else None)


@pytest.mark.parametrize("limit", [20_000, 200_000])
def test_a_disk_that_fills_up_is_said_and_the_work_goes_on_from_there(tiny: Path, here: Path, limit: int) -> None:
    """While layers are kept, or when the result is written."""
    options = ("--method", "gptq", "-o", "out")
    done = run_apart(tiny, *options, limit=limit)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.rstrip().rpartition("\n")[2].startswith("llmctl: error: ")
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (here / "out").exists()
    resumed = run_apart(tiny, *options, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert sorted(path.name for path in here.iterdir()) == ["out"]
    assert run_apart(tiny, "--method", "gptq", "-o", "whole").returncode == 0
    assert (here / "out" / "model.safetensors").read_bytes() == (here / "whole" / "model.safetensors").read_bytes()


def test_an_interrupt_ends_it_and_it_can_go_on(tiny: Path, here: Path) -> None:
    command = [sys.executable, "-m", "llmctl", "quantize", str(tiny), *SHORT, "--method", "gptq", "-o", "out"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    first, deadline = here / ".out.work" / "layer-00000.npz", time.monotonic() + 120
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert not (here / "out").exists()
    assert run_apart(tiny, "--method", "gptq", "-o", "out", "--resume").returncode == 0
    assert sorted(path.name for path in here.iterdir()) == ["out"]


def test_a_layer_that_was_damaged_meanwhile_is_named(tiny: Path, here: Path, refused: Callable[..., str]) -> None:
    assert run_apart(tiny, "--method", "gptq", "-o", "out", limit=200_000).returncode == 1
    kept = here / ".out.work" / "layer-00000.npz"
    kept.write_bytes(kept.read_bytes()[:-1000])
    found = refused(tiny, "--method", "gptq", "-o", "out", "--resume")
    assert "layer-00000.npz: cannot be read" in found
    assert "leave --resume out to begin anew" in found


@pytest.mark.parametrize("damage", ["cut", "empty", "no config", "no JSON", "no model"])
def test_broken_checkpoints_are_refused_with_their_name(copy: Path, here: Path, refused: Callable[..., str], damage: str) -> None:
    file = copy / ("model.safetensors" if damage in ("cut", "empty", "no model") else "config.json")
    if damage in ("no config", "no model"):
        file.unlink()
    else:
        file.write_bytes({"cut": file.read_bytes()[:-1], "empty": b"", "no JSON": b"{"}[damage])
    found = refused(copy, "--method", "gptq", "-o", "out")
    assert str(copy) in found
    assert list(here.iterdir()) == []


def test_without_a_tokenizer_there_is_no_text(copy: Path, here: Path, refused: Callable[..., str]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink(missing_ok=True)
    found = refused(copy, "--method", "awq", "-o", "out")
    assert "tokenizer" in found
    assert list(here.iterdir()) == []
    assert main(["quantize", str(copy), "--method", "rtn", "--format", "gptq", "-o", "out"]) == 0, "which reads no text"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "there is no text to calibrate with"),
        ("a.txt", b" \n\n", "there is no text to calibrate with"),
        ("a.txt", b"\xff\xfe\x00", "is not UTF-8 text (byte 0)"),
        ("a.jsonl", b"", "there is no text to calibrate with"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": ', "a.jsonl, line 2: is no JSON"),
        ("a.jsonl", b'{"prompt": 3}', "a.jsonl, line 1: expected an object with one of"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "a.jsonl, line 1: "),
        ("a.jsonl", b'{"messages": [5]}', "a.jsonl, line 1: "),
        ("a.jsonl", b'{"messages": []}', "a.jsonl, line 1: "),
    ],
)
def test_texts_that_are_none_are_refused(
    tiny: Path, here: Path, refused: Callable[..., str], name: str, content: bytes, message: str
) -> None:
    (here / name).write_bytes(content)
    assert message in refused(tiny, "--method", "gptq", "-o", "out", "--calibration", name)
    assert [path.name for path in here.iterdir()] == [name]


def test_conversations_are_written_by_the_template_and_all_their_tokens_are_used(tiny: Path, here: Path) -> None:
    """A line each of every form; long and short rows alike, none padded."""
    lines = [
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody " * 60}]},
        {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "Nothing."}]},
        {"text": "Short."},
    ]
    (here / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    done = run_apart(tiny, "--method", "gptq", "-o", "out", "--calibration", "chats.jsonl", "--num-samples", "99", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["calibration"]["documents"] == 3
    assert found["calibration"]["rows"] > 3
    assert {module["tokens"] for module in found["modules"]} == {found["calibration"]["tokens"]}
    assert f"{found['calibration']['rows']} rows, {found['calibration']['tokens']} tokens" in done.stderr


def test_a_folder_that_may_not_be_written_is_refused_before_the_work(tiny: Path, here: Path, refused: Callable[..., str]) -> None:
    if os.geteuid() == 0:  # who may write everywhere but where the system itself keeps its own
        target = Path("/proc/out")
    else:
        (here / "locked").mkdir(mode=0o500)
        target = here / "locked" / "out"
    found = refused(tiny, "--method", "gptq", "-o", str(target))
    assert str(target.parent) in found
    assert "Layer" not in found
    assert "missing/out" in refused(tiny, "--method", "gptq", "-o", "missing/out")
    assert not (here / "missing").exists()


def test_a_model_in_the_output_place_stays_unless_told(tiny: Path, here: Path, refused: Callable[..., str]) -> None:
    """Even while it is mapped by somebody who runs it; --force puts the new one there, and the old one can still be read."""
    assert run_apart(tiny, "--method", "rtn", "--format", "gguf", "--type", "Q8_0", "-o", "out.gguf").returncode == 0
    before = (here / "out.gguf").read_bytes()
    options = ("--method", "gptq", "--format", "gguf", "--type", "Q4_0", "-o", "out.gguf")
    assert "--force" in refused(tiny, *options)
    assert (here / "out.gguf").read_bytes() == before
    running = open_checkpoint(here / "out.gguf")
    wanted = np.array(running.read("blk.0.attn_q.weight").blocks)
    running.release_all()
    assert run_apart(tiny, *options, "--force").returncode == 0
    assert (here / "out.gguf").read_bytes() != before
    assert np.array_equal(running.read("blk.0.attn_q.weight").blocks, wanted)


def test_the_source_is_never_the_output(copy: Path, refused: Callable[..., str]) -> None:
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    refused(copy, "--method", "gptq", "-o", str(copy), "--force")
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


@pytest.mark.parametrize("method", ["gptq", "awq", "ptq", "rtn"])
def test_importances_of_another_model_are_refused_before_the_work(
    tiny: Path, here: Path, refused: Callable[..., str], method: str
) -> None:
    names = {"blk.0.ffn_down.weight": np.ones((1, 96), np.float32)}
    write_imatrix(here / "other.gguf", Importances(names, {"blk.0.ffn_down.weight": np.array([9])}), ["x"], 1, 9)
    form = ("--format", "gguf", "--type", "Q4_0")
    command = ["quantize", str(tiny), "--method", method, *form, "-o", "out.gguf", "--imatrix", "other.gguf"]
    if method == "rtn":
        assert main(command) == 1
    else:
        assert "it is of another model" in refused(tiny, *command[2:])
    assert [path.name for path in here.iterdir()] == ["other.gguf"]


def test_rows_that_no_group_divides_say_what_does(tmp_path: Path, here: Path, refused: Callable[..., str]) -> None:
    folder = make_tiny_model(tmp_path / "odd", "llama", tokenizer="bpe", num_hidden_layers=1, intermediate_size=150)
    found = refused(folder, "--method", "gptq", "--group-size", "32", "-o", "out")
    assert "--group-size 32 does not divide the 150 columns of model.layers.0.mlp.down_proj" in found
    assert "-1" in found
    assert list(here.iterdir()) == []
    assert run_apart(folder, "--method", "gptq", "-o", "out").returncode == 0, "a scale a row by default"


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_tied_head_is_left_alone_and_flag_and_file_agree(tmp_path: Path, here: Path, method: str) -> None:
    folder = make_tiny_model(tmp_path / "tied", "llama", tokenizer="bpe", num_hidden_layers=1, tie_word_embeddings=True)
    assert run_apart(folder, "--method", method, "-o", "out").returncode == 0
    assert json.loads((here / "out" / "config.json").read_text("utf-8"))["tie_word_embeddings"] is True
    made, source = tensors_of(here / "out"), tensors_of(folder)
    assert not [name for name in made if name.startswith("lm_head")]
    assert np.array_equal(made["model.embed_tokens.weight"], source["model.embed_tokens.weight"])


def test_zeros_and_equal_columns_make_no_number_that_is_none(copy: Path, here: Path) -> None:
    """A row and a group of zeros decode to zeros; of two equal inputs, and few tokens, the Hessian is singular."""
    weights = tensors_of(copy)
    up = weights["model.layers.0.mlp.up_proj.weight"]
    up[3], up[1] = 0, up[0]
    weights["model.layers.0.mlp.down_proj.weight"][:, 32:64] = 0
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    text = here / "few.txt"
    text.write_text("Two words.", "utf-8")
    for form, output in (("gptq", "out"), ("gguf", "out.gguf")):
        done = run_apart(copy, "--method", "gptq", "--format", form, "-o", output, "--calibration", "few.txt", "--json")
        assert done.returncode == 0, done.stderr
        assert all(np.isfinite(module["relative_rms_error"]) for module in json.loads(done.stdout)["modules"])
        made = values_of(here / output, "model.layers.0.mlp.up_proj.weight")
        assert not made[3].any()
        assert np.isfinite(made).all()
        assert not values_of(here / output, "model.layers.0.mlp.down_proj.weight")[:, 32:64].any()


def values_of(path: Path, name: str) -> np.ndarray:
    from llmctl.kernels.formats.codecs import dequantize
    from llmctl.runtime.models.weights import ModelWeights

    found: Any = ModelWeights(open_checkpoint(path)).read(name)
    return np.asarray(dequantize(found))
