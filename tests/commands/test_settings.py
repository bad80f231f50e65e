"""llmctl.toml, presets, environment variables, completion: which one counts, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from llmctl.commands import config
from llmctl.commands.config import config_files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def places(tmp_path, monkeypatch, scripted):
    """The platform's folder and a project with a sub-folder, in which the commands run: `places(platform=…, project=…)`."""
    home, project = tmp_path / "home", tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    home.mkdir()
    monkeypatch.setenv("LLMCTL_HOME", str(home))
    monkeypatch.chdir(project / "sub")

    def write(*, platform: str = "", project_file: str = "") -> None:
        for folder, text in ((home, platform), (project, project_file)):
            if text:
                (folder / "llmctl.toml").write_text(text, encoding="utf-8")

    return write


def sampling(done) -> dict:
    assert done.code == 0, done.err
    return json.loads(done.out)["sampling"]


def test_each_place_beats_those_below_it(call, places, scripted, monkeypatch):
    places(
        platform="[run]\ntemp = 0.1\ntop_k = 11\ntop-p = 0.1\nmin_p = 0.1\nseed = 1\n",
        project_file="[run]\ntop_k = 12\ntop_p = 0.2\nmin_p = 0.2\nseed = 2\n[preset.mine]\nmin_p = 0.4\nseed = 4\n",
    )
    monkeypatch.setenv("LLMCTL_RUN_TOP_P", "0.3")
    monkeypatch.setenv("LLMCTL_RUN_MIN_P", "0.3")
    monkeypatch.setenv("LLMCTL_RUN_SEED", "3")
    done = call("run", scripted, "x", "--json", "-v", "--preset", "mine", "--seed", "5")
    got = sampling(done)
    assert [got[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")] == [0.1, 12, 0.3, 0.4, 5]
    said = re.findall(r"setting: (\w+) (\S+) \(from (.*)\)", done.err)
    assert [(name, value) for name, value, _ in said] == [("temp", "0.1"), ("top_k", "12"), ("top_p", "0.3"), ("min_p", "0.4")]
    assert [where.rpartition("/")[2] for *_, where in said] == [
        "llmctl.toml: [run] temp",
        "llmctl.toml: [run] top_k",
        "LLMCTL_RUN_TOP_P",
        "llmctl.toml: [preset.mine] min_p",
    ]
    assert "setting" not in call("run", scripted, "x", "--json").err


def test_a_file_beats_what_the_model_recommends(call, places, scripted, tmp_path):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(scripted, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.9, "top_k": 3}', encoding="utf-8")
    places(project_file="[run]\ntemp = 0.2\n")
    got = sampling(call("run", folder, "x", "--json"))
    assert (got["temperature"], got["top_k"]) == (0.2, 3)


def test_a_preset_may_be_chosen_for_good_and_the_projects_replaces_the_platforms(call, places, scripted, monkeypatch):
    places(
        platform='[run]\npreset = "a"\n[preset.a]\ntop_k = 5\ntemp = 0.5\n[preset.b]\ntop_k = 6\n',
        project_file="[preset.a]\ntop_k = 7\n",
    )
    got = sampling(call("run", scripted, "x", "--json"))
    assert (got["top_k"], got["temperature"]) == (7, 0.8)
    assert sampling(call("run", scripted, "x", "--json", "--preset", "b"))["top_k"] == 6
    monkeypatch.setenv("LLMCTL_RUN_PRESET", "b")
    assert sampling(call("run", scripted, "x", "--json"))["top_k"] == 6


def test_the_model_of_a_file_stands_in_for_one_that_is_not_named(call, places, scripted, untemplated, monkeypatch):
    places(project_file=f'[run]\nmodel = "{scripted}"\n')
    assert call("run", "What is it?").out == "Paris is the answer.\n"
    assert call("run", "-p", "What?").out == "Paris is the answer.\n"
    assert "no chat template" in call("run", untemplated, "A").err
    monkeypatch.setenv("LLMCTL_MODEL", str(untemplated))
    assert f"Using {untemplated}" in call("run", "-p", "A").err
    monkeypatch.delenv("LLMCTL_MODEL")
    places(project_file='[run]\nmodel = "nothing-of-the-kind"\n')
    done = call("run", "-p", "A")
    assert done.code == 1
    assert "nothing-of-the-kind (from " in done.err
    assert "llmctl.toml: [run] model): no such file" in done.err


def test_paths_are_relative_to_the_file_and_lists_are_lists(call, places, scripted, tmp_path):
    (tmp_path / "project" / "g.lark").write_text('start: " one"{2}\n', encoding="utf-8")
    places(project_file='[run]\ngrammar = "g.lark"\nno_chat = true\nstop = ["x", "y"]\nban = "z"\n')
    done = call("run", scripted, "-p", "R", "--json")
    assert json.loads(done.out)["text"] == " one one"
    assert (sampling(done)["stop"], sampling(done)["banned"]) == (["x", "y"], ["z"])


def test_other_commands_have_tables_of_their_own(call, places, scripted):
    places(project_file="[bench]\nrepetitions = 1\nn_gen = 3\nn_prompt = 4\n[run]\ntemp = 0.5\n")
    done = call("bench", scripted, "-o", "json")
    assert done.code in (0, 2), done.err
    assert call("doctor").code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run]\ntpo_k = 5\n", "[run] tpo_k: there is no option --tpo-k; did you mean top_k?"),
        ('[run]\ntop_k = "many"\n', "[run] top_k: 'many' is not a valid int"),
        ('[run]\nthinking = "loud"\n', "[run] thinking: 'loud' is not one of"),
        ("[run]\nprompt = 'x'\n", "[run] prompt: there is no option --prompt"),
        ("[rnu]\n", "there is no command 'rnu' to set; did you mean run?"),
        ("[models]\nx = 1\n", "there is no command 'models' to set"),
        ("temp = 3\n", "there is no command 'temp' to set"),
        ("run = 3\n", "expected tables of options, found 3"),
        ("[preset]\ntemp = 1\n", "[preset]: expected tables of options, found 1"),
        ("[preset.a]\nx = 1\n", "[preset.a] x: there is no option --x"),
        ("[run\n", "is not TOML"),
    ],
)
def test_what_a_file_must_not_say(call, places, tmp_path, text, words):
    places(project_file=text)
    done = call("run", "/no/model", "-p", "x")
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert str(tmp_path / "project" / "llmctl.toml") in done.err
    assert words in done.err


def test_an_unknown_preset_and_a_variable_that_sets_nothing(call, places, monkeypatch):
    assert "no llmctl.toml has any" in call("run", "/no/model", "-p", "x", "--preset", "a").err
    places(project_file="[preset.b]\n[preset.a]\n")
    assert "there are: a, b" in call("run", "/no/model", "-p", "x", "--preset", "c").err
    monkeypatch.setenv("LLMCTL_RUN_TPO_K", "5")
    done = call("run", "/no/model", "-p", "x")
    assert done.code == 2
    assert "LLMCTL_RUN_TPO_K: there is no option --tpo-k; did you mean top_k?" in done.err


def test_a_project_file_of_another_user_is_not_read(places, monkeypatch, capsys, tmp_path):
    places(platform="[run]\n", project_file="[run]\n")
    assert config_files() == [tmp_path / "home" / "llmctl.toml", tmp_path / "project" / "llmctl.toml"]
    monkeypatch.setattr(config, "_is_ours", lambda file: False)
    assert config_files() == [tmp_path / "home" / "llmctl.toml"]
    assert "belongs to another user and is not read" in capsys.readouterr().err


def test_help_and_version_need_no_sound_file(call, places):
    places(project_file="[run\n")
    assert call("--version").code == 0
    assert call("--help").code == 0


def test_the_documented_example_is_sound(call, places, scripted, tmp_path):
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    example = re.search(r"```toml\n(.*?)\n```\n", text, re.DOTALL).group(1)
    places(project_file=example)
    (tmp_path / "project" / "person.gbnf").write_text('root ::= " one"\n', encoding="utf-8")
    assert sampling(call("run", scripted, "x", "--json", "--preset", "coding"))["top_k"] == 20
    assert call("run", scripted, "-p", "R", "--no-chat", "--preset", "person").out == " one\n"


# --- completion -------------------------------------------------------------------------------------------------------

SHELLS = {
    "bash": {"_LLMCTL_COMPLETE": "complete_bash", "COMP_WORDS": "{line}", "COMP_CWORD": "{last}"},
    "zsh": {"_LLMCTL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "{line}"},
    "fish": {
        "_LLMCTL_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": "{line}",
    },
}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_completes_models_presets_and_options(llmctl, places, shell):
    places(project_file="[preset.coding]\n[preset.other]\n")

    def complete(line: str) -> str:
        last = len(line.split(" ")) - 1
        env = {name: value.format(line=line, last=last) for name, value in SHELLS[shell].items()}
        done = llmctl(env=env)
        assert done.stderr == ""
        return done.stdout

    assert "smollm2" in complete("llmctl run smo")
    assert "coding" in complete("llmctl run --preset cod")
    assert "other" not in complete("llmctl run --preset cod")
    assert "--json-schema" in complete("llmctl run --json-s")
    assert "_LLMCTL_COMPLETE=complete_" + shell in llmctl("completion", shell).stdout


def test_bash_itself_completes_with_the_script(llmctl, llmctl_script):
    script = llmctl("completion", "bash").stdout
    ask = 'COMP_WORDS=(llmctl run smo); COMP_CWORD=2; _llmctl_completion llmctl; echo "${COMPREPLY[@]}"'
    env = {**os.environ, "PATH": f"{llmctl_script.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.split() == ["smollm2"]


def test_a_broken_file_does_not_disturb_completion(llmctl, places):
    places(project_file="[run\n")
    env = {"_LLMCTL_COMPLETE": "complete_bash", "COMP_WORDS": "llmctl run --preset c", "COMP_CWORD": "3"}
    done = llmctl(env=env)
    assert (done.stdout, done.stderr) == ("\n", "")
