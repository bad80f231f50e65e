"""The programs that bench_peers.py runs side by side, each behind the same two questions: how fast, and how soon.

Every measurement of llmctl and of llama.cpp is a process of its own that warms up first; transformers, which takes seconds
to import, stays loaded in one process and sleeps meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from llmctl.runtime.benchmark import BenchTest

WORKER = Path(__file__).with_name("transformers_worker.py")
_LIMIT_S = 1800.0


class PeerError(Exception):
    """A program is missing, or failed: what it is and what it said."""


class Program(Protocol):
    """One of the programs compared."""

    name: str

    def speed(self, test: BenchTest) -> float:
        """Tokens per second of one run."""

    def first_token(self, prompt: str) -> float | None:
        """Seconds from the start of a process until it has answered with one token and is gone; None: it has no such
        command."""

    def close(self) -> None:
        """No more runs come."""


class Llmctl:
    """Ourselves. options: of `llmctl bench` and `llmctl run` alike."""

    name = "llmctl"

    def __init__(self, model: Path, threads: int, options: list[str]) -> None:
        self._model, self._options = str(model), ["-t", str(threads), *options]

    def speed(self, test: BenchTest) -> float:
        sizes = ["-p", str(test.n_prompt), "-n", str(test.n_gen), "-d", str(test.n_depth), "-r", "1"]
        return _rate(self._command("bench", *sizes, "-o", "json", "-q"))

    def first_token(self, prompt: str) -> float:
        return _wall(self._command("run", "-p", prompt, "--no-chat", "-n", "1", "--temp", "0", "-q"))

    def _command(self, name: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "llmctl", name, self._model, *arguments, *self._options]

    def close(self) -> None:
        pass


class LlamaCpp:
    """llama-bench, and the llama-completion beside it. Its own warm-up is left out of the cold start, in its favour."""

    name = "llama.cpp"

    def __init__(self, model: Path, threads: int, bench: Path, completion: Path) -> None:
        self._model, self._threads, self._bench, self._completion = str(model), str(threads), str(bench), str(completion)

    def speed(self, test: BenchTest) -> float:
        sizes = ["-p", str(test.n_prompt), "-n", str(test.n_gen), "-d", str(test.n_depth), "-r", "1"]
        return _rate([self._bench, "-m", self._model, *sizes, "-t", self._threads, "-ngl", "0", "-o", "json"])

    def first_token(self, prompt: str) -> float:
        options = ["-n", "1", "--temp", "0", "-t", self._threads, "-no-cnv", "--no-warmup"]
        return _wall([self._completion, "-m", self._model, "-p", prompt, *options])

    def close(self) -> None:
        pass


class Transformers:
    """transformers in bfloat16 over a Hugging Face folder, its own loop, logits of the last token only."""

    name = "transformers"

    def __init__(self, folder: Path, threads: int) -> None:
        command = [sys.executable, str(WORKER), str(folder), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def speed(self, test: BenchTest) -> float:
        self._process.stdin.write(json.dumps([test.n_prompt, test.n_gen, test.n_depth]) + "\n")
        self._process.stdin.flush()
        return test.num_tokens / self._answer()["seconds"]

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise PeerError(f"transformers: its process ended with code {self._process.returncode}")
        return json.loads(line)

    def first_token(self, prompt: str) -> None:
        return None

    def close(self) -> None:
        with self._process:  # closes both pipes and waits
            pass


def find_program(name: str, stated: Path | None, variable: str, beside: Path | None = None) -> Path:
    """A program: as stated, by an environment variable, beside another one, or on PATH. Errors: PeerError."""
    named = stated or (Path(os.environ[variable]) if os.environ.get(variable) else None)
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise PeerError(f"{name}: {named} is not a program that can be run")
        return Path(found)
    neighbour = beside.with_name(name) if beside else None
    found = shutil.which(neighbour) if neighbour else None
    found = found or shutil.which(name)
    if found is None:
        raise PeerError(f"{name} was not found: name it with --{name}, set {variable}, or use --without llama.cpp")
    return Path(found)


def _rate(command: list[str]) -> float:
    """Tokens per second of the only row that a program prints in llama-bench's JSON."""
    done = run_program(command)
    try:
        (row,) = json.loads(done.stdout)
        return float(row["avg_ts"])
    except (ValueError, KeyError, TypeError) as error:
        raise PeerError(f"{command[0]} printed no row of llama-bench's JSON ({error}): {done.stdout[:300]!r}") from error


def _wall(command: list[str]) -> float:
    begin = time.perf_counter()
    run_program(command)
    return time.perf_counter() - begin


def run_program(command: list[str], limit_s: float | None = _LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run it to its end with no input; PeerError with its last words where it fails, or where it is not done in time."""
    output = {"stdin": subprocess.DEVNULL, "capture_output": True, "encoding": "utf-8", "errors": "replace"}
    try:
        done = subprocess.run(command, timeout=limit_s, check=False, **output)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"{' '.join(command)} was not done after {limit_s:.0f} s") from error
    if done.returncode != 0:
        last = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise PeerError(f"{' '.join(command)} ended with code {done.returncode}: {last}")
    return done
