"""Signals that end the program: what is under way is undone, whatever the command; afterwards the exit is silent."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

WRITING = """
import signal, sys, time
from pathlib import Path
from llmctl import cli
from llmctl.commands import group
from llmctl.runtime.checkpoint.output_file import OutputFile

def work(arguments):
    file = OutputFile(Path(sys.argv[1]) / "model.gguf")
    try:
        print("begun", flush=True)
        time.sleep(float(sys.argv[2]))
        file.write(b"x")
        file.commit()
    finally:
        file.abort()
    return 0

cli._invoke = work
sys.exit(cli.main())
"""
ENDING = "import atexit, sys, time\nfrom llmctl import cli\ncli._invoke = lambda arguments: 0\natexit.register(time.sleep, 20)\n"
ENDING += "code = cli.main()\nprint('ended', flush=True)\nsys.exit(code)"


def begun(code: str, *arguments: object, ignoring: signal.Signals | None = None) -> subprocess.Popen[str]:
    def ignore() -> None:
        if ignoring is not None:
            signal.signal(ignoring, signal.SIG_IGN)

    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignore,
    )
    assert process.stdout.readline() in ("begun\n", "ended\n")
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_half_written_file(tmp_path, number):
    with begun(WRITING, tmp_path, 60) as process:
        assert [file.name for file in tmp_path.iterdir()] == [".model.gguf.partial"]
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (128 + number, "")
    assert not list(tmp_path.iterdir())


def test_what_is_ignored_stays_ignored(tmp_path):
    with begun(WRITING, tmp_path, 1, ignoring=signal.SIGHUP) as process:
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=30) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_exit_is_silent(number):
    with begun(ENDING) as process:
        process.send_signal(number)
        _, err = process.communicate(timeout=15)
    assert (process.returncode, err) == (-number, "")
