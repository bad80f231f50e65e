"""--as FAMILY: every command that reads a model takes one of an unknown name for a family that is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

COMMANDS = {
    "run": ("run", "{model}", "-p", "A", "--temp", "0"),
    "bench": ("bench", "{model}", "-p", "4", "-n", "2", "-r", "1", "--json"),
    "eval": ("eval", "{model}", "--text", "{text}", "--ctx", "16", "--chunks", "1"),
    "eval --against": ("eval", "{known}", "--against", "{model}", "--text", "{text}", "--ctx", "16", "--chunks", "1"),
    "inspect-kv": ("inspect-kv", "{model}"),
    "convert": ("convert", "{model}", "-o", "{out}.gguf"),
    "convert --to safetensors": ("convert", "{model}", "--to", "safetensors", "-o", "{out}"),
    "convert --vocab-only": ("convert", "{model}", "--vocab-only", "-o", "{out}.gguf"),
    "quantize": ("quantize", "{model}", "-o", "{out}.gguf", "--type", "Q8_0"),
    "verify --against": ("verify", "{model}", "--against", "{file}"),
}


@pytest.fixture(scope="module")
def models(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The scripted model as it is, as a GGUF file, and as a folder of a model type that nobody knows."""
    from llmctl.quant.convert import make_plan, write
    from llmctl.quant.recipe import recipe_by_name
    from llmctl.quant.source import open_source

    folder = tmp_path_factory.mktemp("brand")
    shutil.copytree(scripted, folder / "model")
    config = json.loads((scripted / "config.json").read_text("utf-8"))
    (folder / "model" / "config.json").write_text(json.dumps({**config, "model_type": "brand"}), "utf-8")
    (folder / "text.txt").write_text("A river. " * 20, "utf-8")
    write(make_plan(open_source(scripted), recipe_by_name("F32")), folder / "known.gguf")
    return {"model": folder / "model", "known": scripted, "file": folder / "known.gguf", "text": folder / "text.txt"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_reads_a_model(call, models, tmp_path, name):
    arguments = [part.format(**models, out=tmp_path / "out") for part in COMMANDS[name]]
    refused = call(*arguments)
    assert refused.code != 0
    assert "'brand' is not supported yet" in refused.err
    assert "--as FAMILY" in refused.err
    option = "--against-as" if name == "eval --against" else "--as"
    done = call(*arguments, option, "llama")
    assert (done.code, done.out != "") == (0, True), done.err


def test_inspect_says_what_a_token_reads(call, models):
    assert json.loads(call("inspect", models["model"], "--json").out)["active"] is None
    taken = json.loads(call("inspect", models["model"], "--as", "llama", "--json").out)
    assert taken["active"] == json.loads(call("inspect", models["known"], "--json").out)["active"]
    wrong = call("inspect", models["model"], "--as", "deepseek")
    assert (wrong.code, wrong.out) == (1, ""), wrong.err


def test_verify_then_checks_it_against_its_family(call, models):
    assert "not checked against its architecture" in call("verify", models["model"]).out
    taken = call("verify", models["model"], "--as", "llama")
    assert (taken.code, "against its architecture" in taken.out) == (0, False)
    wrong = call("verify", models["model"], "--as", "qwen3")
    assert (wrong.code, "q_norm" in wrong.out + wrong.err) == (1, True)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_family_that_is_none(call, models, tmp_path, name):
    option = "--against-as" if name == "eval --against" else "--as"
    done = call(*(part.format(**models, out=tmp_path / "out") for part in COMMANDS[name]), option, "lama")
    assert (done.code, done.out) == (2, "")
    assert "there is no such family; known: llama, " in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize", "{file}", "--type", "Q8_0"), "leave it out"),
        (("convert", "{file}", "--vocab-only"), "leave it out"),
        (("convert", "{model}", "--to", "awq"), "leave it out"),
        (("inspect-kv", "--shape", "2,3,4"), "--shape says all"),
    ],
)
def test_where_it_would_do_nothing_it_is_refused(call, models, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = call(*(part.format(**models) for part in arguments), "--as", "llama")
    assert (done.code, list(tmp_path.iterdir())) == (2, [])
    assert "--as" in done.err
    assert message in done.err
