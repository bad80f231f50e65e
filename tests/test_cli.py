"""The contract of the command line for scripts: streams, exit codes, encodings, pipes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmctl import __version__, cli, errors
from llmctl.commands.group import COMMANDS

HEAVY = {"torch", "triton", "transformers", "numpy", "rich", "tqdm", "huggingface_hub", "tokenizers", "jinja2"}
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def modules_after(script: Path, *arguments: str, **env: str) -> set[str]:
    """Top-level modules that the console script has imported by the end of a command that succeeds."""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "sys.stderr.write('MODULES ' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    )
    command = [sys.executable, "-c", code, script, *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env={**os.environ, **env}, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.rpartition("MODULES ")[2].split())


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), (), *((name, "--help") for name in COMMANDS), ("models", "list")]
)
def test_asking_for_little_imports_nothing_heavy(llmctl_script: Path, arguments: tuple[str, ...]) -> None:
    assert not modules_after(llmctl_script, *arguments) & HEAVY


def test_help_and_version_are_results(llmctl: Run) -> None:
    for arguments in (("--help",), ("-h",), ()):
        done = llmctl(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert all(f"\n  {name} " in done.stdout for name in COMMANDS)
    assert llmctl("--version").stdout == f"llmctl {__version__}\n"
    module = subprocess.run([sys.executable, "-m", "llmctl", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == f"llmctl {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_explains_itself(llmctl: Run, name: str) -> None:
    done = llmctl(name, "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: llmctl {name} ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["rn"], "there is no command 'rn'. Did you mean 'run'? (see 'llmctl --help')"),
        (["Ünïcode"], "there is no command 'Ünïcode' (see 'llmctl --help')"),
        (["--bad"], "--bad"),
        (["models"], "missing command (see 'llmctl models --help')"),
        (["models", "show"], "missing argument 'NAME' (see 'llmctl models show --help')"),
        (["models", "list", "--bad"], "--bad"),
        (["models", "show", "a", "b"], "b"),
        (["models", "show", "../x"], "../x is a path, not the name of a model"),
        (["models", "pull", "hf:x"], "hf:x: expected hf:OWNER/NAME"),
        (["models", "pull", ""], "the name of the model is empty"),
        (["doctor", "--deep=3"], "--deep"),
    ],
)
def test_wrong_usage_is_2_with_one_line(llmctl: Run, arguments: list[str], reason: str) -> None:
    done = llmctl(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("llmctl: error: ")
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr


@contextlib.contextmanager
def broken_pipe() -> Iterator[int]:
    """The writing end of a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor"], ["models", "list", "--json"]])
def test_a_closed_pipe_is_silent(llmctl: Run, arguments: list[str]) -> None:
    with broken_pipe() as writer:
        done = llmctl(*arguments, stdout=writer, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_lost_stderr_does_not_change_the_outcome(llmctl: Run) -> None:
    with broken_pipe() as writer:
        assert llmctl("rn", stdout=subprocess.PIPE, stderr=writer).returncode == 2
        assert llmctl("models", "list", "--json", stdout=subprocess.PIPE, stderr=writer).returncode == 0
    with Path("/dev/full").open("w") as full:
        assert llmctl("rn", stdout=subprocess.PIPE, stderr=full).returncode == 2


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor"], ["models", "list", "--json"]])
def test_a_full_disk_under_stdout_is_named(llmctl: Run, arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = llmctl(*arguments, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "llmctl: error: cannot write the result to standard output: No space left on device\n"


def test_closed_streams_are_no_accident(llmctl_script: Path) -> None:
    def shell(redirections: str) -> subprocess.CompletedProcess[str]:
        command = f'"$0" --version {redirections}'
        return subprocess.run(["sh", "-c", command, llmctl_script], capture_output=True, text=True, check=False)

    assert shell("<&- 2>&-").stdout == f"llmctl {__version__}\n"
    done = shell(">&-")
    assert (done.returncode, done.stderr) == (1, "llmctl: error: cannot write the result: standard output is closed\n")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8", "utf-16"])
def test_no_character_crashes_and_json_stays_valid(llmctl: Run, tmp_path: Path, encoding: str) -> None:
    home = tmp_path / "modèle ü 😀"
    env = {"PYTHONIOENCODING": encoding, "LLMCTL_HOME": str(home)}
    done = llmctl("models", "list", "--json", env=env, encoding=encoding)
    assert (done.returncode, json.loads(done.stdout)["store"]) == (0, str(home / "models"))
    done = llmctl("models", "show", "😀", env=env, encoding=encoding, errors="strict")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("llmctl: error: ")


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        (errors.FormatError("a\nb\x1b[31m"), 1, "llmctl: error: a b\\x1b[31m\n"),
        (errors.UsageError("no"), 2, "llmctl: error: no\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "llmctl: error: /x: Permission denied\n"),
        (OSError("odd"), 1, "llmctl: error: odd\n"),
        (MemoryError(), 1, "llmctl: error: not enough memory\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
        (
            ZeroDivisionError("by 0"),
            1,
            "llmctl: error: unexpected ZeroDivisionError: by 0 "
            "(a fault of llmctl: please report it, with what LLMCTL_DEBUG=1 adds)\n",
        ),
    ],
)
def test_whatever_a_command_raises_ends_in_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failure: BaseException, code: int, line: str
) -> None:
    def fail() -> None:
        raise failure

    monkeypatch.setattr("llmctl.runtime.store.list_models", fail)
    assert cli.main(["models", "list"]) == code
    assert capfd.readouterr() == ("", line)


def test_a_traceback_only_on_request(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise errors.FormatError("broken")

    monkeypatch.setattr("llmctl.runtime.store.list_models", fail)
    monkeypatch.setenv("LLMCTL_DEBUG", "1")
    assert cli.main(["models", "list"]) == 1
    shown = capfd.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("llmctl: error: broken\n")


def on_terminal(script: Path, *arguments: str, typed: str = "", **env: str) -> tuple[int, str]:
    """Exit code and everything shown when all three streams are a terminal."""
    master, slave = pty.openpty()
    settings = {**os.environ, "TERM": "xterm-256color", **env}
    process = subprocess.Popen([script, *arguments], stdin=slave, stdout=slave, stderr=slave, env=settings)
    os.close(slave)
    os.write(master, typed.encode())
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the last writer has left
        while chunk := os.read(master, 4096):
            shown += chunk
    os.close(master)
    return process.wait(timeout=60), shown.decode()


def test_escape_bytes_only_on_a_terminal_that_wants_them(llmctl_script: Path, llmctl: Run) -> None:
    assert "\x1b[1;31merror:" in on_terminal(llmctl_script, "rn")[1]
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        code, shown = on_terminal(llmctl_script, "rn", **env)
        assert code == 2
        assert "llmctl: error: there is no command" in shown
        assert "\x1b" not in shown
    done = llmctl("rn", env={"TERM": "xterm-256color", "FORCE_COLOR": "1"})
    assert "\x1b" not in done.stderr


def complete(llmctl: Run, line: str) -> list[str]:
    words = line.split(" ")
    env = {"_LLMCTL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = llmctl(env=env)
    assert done.stderr == ""
    return done.stdout.split()


def test_the_shell_completes_commands_and_model_names(llmctl: Run, llmctl_script: Path) -> None:
    assert complete(llmctl, "llmctl mod") == ["models"]
    assert complete(llmctl, "llmctl models sh") == ["show"]
    assert complete(llmctl, "llmctl run smo") == ["smollm2"]
    assert complete(llmctl, "llmctl models pull gem") == ["gemma3-270m"]
    assert "_llmctl_completion" in llmctl("--show-completion", "bash").stdout
    env = {"_LLMCTL_COMPLETE": "complete_bash", "COMP_WORDS": "llmctl models pull s", "COMP_CWORD": "3"}
    assert not modules_after(llmctl_script, **env) & HEAVY
