#!/usr/bin/env python3
"""llmctl beside llama.cpp and transformers on the same model, turn by turn, as one table of ratios.

    python scripts/bench_peers.py MODEL.gguf --transformers FOLDER -t 2 --pairs 7 --json OUT.json
    python scripts/bench_peers.py MODEL.gguf --without transformers --tests tg128,cold --llama-bench ~/llama.cpp/bin/llama-bench

In a round every program does the test once, in the opposite order every other round; memory bandwidth is measured before and
after (one GiB read by as many threads), and a round in which it moved by more than --steady is done again, up to three times
as many rounds as asked for. Rates are medians; a ratio is the median of the rounds' ratios with their least and greatest;
SHARE is what reading the weights that a token passes (of experts the chosen ones) takes of the measured bandwidth.

Tests: ppN reads a prompt, tgN generates, @dM after M tokens in the cache; cold is the wall time of a whole process that
answers a prompt of five tokens with one, files and tokenizer cached (its ratio is of the times). --growth adds tg32 from 512
to 8k tokens of context, and batches of 1 to 32 of llmctl.
No program is left out by itself: one that is missing is an error, --without NAME leaves it out.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peer_programs import LlamaCpp, Llmctl, PeerError, Program, Transformers, find_program

from llmctl import __version__
from llmctl.commands.console import format_table
from llmctl.errors import LlmctlError
from llmctl.kernels.native import why_missing
from llmctl.runtime.benchmark import BenchTest
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.loading import read_config
from llmctl.runtime.machine import cpu, default_threads
from llmctl.runtime.models.active import active_weights
from llmctl.runtime.models.weights import ModelWeights

TESTS = "pp512,tg128,tg64@d4096,pp4096,cold"
COLD = "cold"
PROMPT = "The capital of France is"
PEERS = ("llama.cpp", "transformers")
_GROWTH_DEPTHS = (512, 1024, 2048, 4096, 8192)
_REST_S = 0.3  # so that threads which still spin after their work are asleep


@dataclass
class Round:
    """Every program's turn at one test. bandwidth: GB/s before and after. values: tokens/s, or seconds of a cold start."""

    bandwidth: tuple[float, float]
    values: dict[str, float]

    def is_steady(self, limit: float) -> bool:
        """Whether the machine stayed the same meanwhile."""
        before, after = self.bandwidth
        return abs(after / before - 1) <= limit


@dataclass
class Result:
    """One test: the rounds that count, and those that were discarded."""

    test: str
    rounds: list[Round] = field(default_factory=list)
    discarded: list[Round] = field(default_factory=list)

    def median(self, name: str) -> float:
        """Of one program's values."""
        return statistics.median(round.values[name] for round in self.rounds)

    def ratios(self, name: str) -> list[float]:
        """Ours by the other's, round by round, in order of size."""
        return sorted(round.values[Llmctl.name] / round.values[name] for round in self.rounds)

    def share(self, bytes_per_token: int) -> float:
        """Median share of the bandwidth that our decoding takes."""
        used = (r.values[Llmctl.name] * bytes_per_token / (statistics.mean(r.bandwidth) * 1e9) for r in self.rounds)
        return statistics.median(used)


class Bandwidth:
    """Reads one GiB with all threads."""

    def __init__(self, threads: int) -> None:
        if missing := why_missing():
            raise PeerError(f"memory bandwidth cannot be measured: {missing}")
        from llmctl.kernels.native._native import MemoryReader, ThreadPool

        self._reader, self._pool = MemoryReader(1 << 30), ThreadPool(threads)

    def __call__(self) -> float:
        """GB/s, the best of five readings."""
        time.sleep(_REST_S)
        best = self._reader.bytes / min(self._reader.seconds(self._pool) for _ in range(5)) / 1e9
        time.sleep(_REST_S)
        return best


def measure(
    test: str, turns: dict[str, Callable[[], float]], bandwidth: Callable[[], float], pairs: int, steady: float
) -> Result:
    """Run rounds until `pairs` of them were steady, at most three times as many."""
    result = Result(test)
    for number in range(3 * pairs):
        order = list(turns) if number % 2 == 0 else list(turns)[::-1]
        before = bandwidth()
        values = {}
        for name in order:
            values[name] = turns[name]()
            time.sleep(_REST_S)
        round = Round((before, bandwidth()), values)
        (result.rounds if round.is_steady(steady) else result.discarded).append(round)
        if len(result.rounds) == pairs:
            break
    return result


def parse_test(text: str) -> BenchTest:
    """pp512, tg128, tg64@d4096. Errors: PeerError."""
    found = re.fullmatch(r"(?:pp(\d+))?\+?(?:tg(\d+))?(?:@d(\d+))?", text)
    if not found or not (found[1] or found[2]):
        raise PeerError(f"{text!r} is no test: expected ppN, tgN, with @dM for a depth, or {COLD}")
    return BenchTest(*(int(part or 0) for part in found.groups()))


def bytes_per_token(model: Path) -> int:
    """Stored bytes of the weights that one token reads."""
    with open_checkpoint(model) as checkpoint:
        return active_weights(ModelWeights(checkpoint)).nbytes


def table(results: list[Result], peers: list[str], weight_bytes: int) -> list[str]:
    """A row for every test and peer."""
    rows = []
    for result in results:
        steady = f"{len(result.rounds)}/{len(result.rounds) + len(result.discarded)}"
        if not result.rounds:
            rows.append((result.test, "", "", "", "no steady round", "", "", "", steady))
            continue
        names = [name for name in peers if name in result.rounds[0].values]
        for name in names or [""]:
            rows.append((result.test, *_cells(result, name, weight_bytes), steady))
    headers = ("TEST", "PEER", "LLMCTL", "PEER", "RATIO", "FROM … TO", "GB/S", "SHARE", "STEADY")
    return format_table(headers, rows, right=(2, 3, 4, 6, 7, 8))


def _cells(result: Result, name: str, weight_bytes: int) -> tuple[str, ...]:
    digits, unit = (3, " s") if result.test == COLD else (1, "")
    ours = f"{result.median(Llmctl.name):.{digits}f}{unit}"
    speed = statistics.median(statistics.mean(round.bandwidth) for round in result.rounds)
    share = f"{100 * result.share(weight_bytes):.0f} %" if result.test.startswith("tg") else ""
    if not name:
        return "", ours, "", "", "", f"{speed:.1f}", share
    ratios = result.ratios(name)
    spread = f"{ratios[0]:.2f} … {ratios[-1]:.2f}"
    theirs = f"{result.median(name):.{digits}f}{unit}"
    return name, ours, theirs, f"{statistics.median(ratios):.2f} ×", spread, f"{speed:.1f}", share


def chosen_tests(options: argparse.Namespace) -> list[str]:
    """The tests asked for, those of --growth behind them."""
    tests = options.tests.split(",")
    if options.growth:
        room = read_config(options.model).max_position_embeddings - 33
        tests += [f"tg32@d{min(depth, room)}" for depth in _GROWTH_DEPTHS if depth // 2 < room]
    return list(dict.fromkeys(tests))


def programs_of(options: argparse.Namespace) -> list[Program]:
    """Ourselves and every peer that is not left out. Errors: PeerError for one that is missing."""
    ours = ["--backend", options.backend] if options.backend else []
    ours += ["--activations", options.activations] if options.activations else []
    programs: list[Program] = [Llmctl(options.model, options.threads, ours)]
    if "llama.cpp" not in options.without:
        bench = find_program("llama-bench", options.llama_bench, "LLAMA_BENCH")
        completion = find_program("llama-completion", options.llama_completion, "LLAMA_COMPLETION", beside=bench)
        programs.append(LlamaCpp(options.model, options.threads, bench, completion))
    if "transformers" not in options.without:
        if options.transformers is None:
            raise PeerError("transformers needs the same model as a folder: --transformers FOLDER, or --without transformers")
        programs.append(Transformers(options.transformers, options.threads))
    return programs


def run(options: argparse.Namespace, results: list[Result]) -> dict[str, Any]:
    """Do all tests, adding to `results` what is done. Returns what --json writes. Errors: PeerError, at the first failure."""
    tests = {name: None if name == COLD else parse_test(name) for name in chosen_tests(options)}
    bandwidth, programs = Bandwidth(options.threads), programs_of(options)
    try:
        for name, test in tests.items():
            result = measure(name, _turns(programs, test), bandwidth, options.pairs, options.steady)
            results.append(result)
            print(f"{name}: {len(result.rounds)} rounds, {len(result.discarded)} discarded", file=sys.stderr, flush=True)
    finally:
        for program in programs:
            program.close()
    return {**_facts(options), "results": [asdict(result) for result in results], "batch": _batch(options)}


def _turns(programs: list[Program], test: BenchTest | None) -> dict[str, Callable[[], float]]:
    """What each program does in a round; for a cold start only those that have one, after a first time that fills caches."""
    if test is not None:
        return {program.name: lambda program=program: program.speed(test) for program in programs}
    able = [program for program in programs if program.first_token(PROMPT) is not None]
    return {program.name: lambda program=program: program.first_token(PROMPT) for program in able}


def _batch(options: argparse.Namespace) -> dict[str, float] | None:
    """Tokens per second by batch size, of llmctl alone."""
    if not options.growth:
        return None
    script = Path(__file__).with_name("bench_batch.py")
    backend = ["--backend", options.backend] if options.backend else []
    command = [sys.executable, script, options.model, "-t", str(options.threads), "--json", *backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"bench_batch.py failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return {
        "llmctl": __version__,
        "cpu": cpu().model,
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "bytes_per_token": bytes_per_token(options.model),
        "options": asked,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure from the command line, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a file that every program reads")
    parser.add_argument("-t", "--threads", type=int, default=default_threads())
    parser.add_argument("--pairs", type=int, default=7, help="steady rounds of every test (7)")
    parser.add_argument("--steady", type=float, default=0.05, help="what bandwidth may move by in a round (0.05)")
    parser.add_argument("--tests", default=TESTS, help=TESTS)
    parser.add_argument("--growth", action="store_true", help="also context 512 to 8k and batches 1 to 32")
    parser.add_argument("--transformers", type=Path, metavar="FOLDER")
    parser.add_argument("--llama-bench", type=Path, metavar="PROGRAM")
    parser.add_argument("--llama-completion", type=Path, metavar="PROGRAM")
    parser.add_argument("--without", action="append", choices=PEERS, default=[])
    parser.add_argument("--backend")
    parser.add_argument("--activations")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    report, failure = None, None
    try:
        report = run(options, results)
    except (PeerError, LlmctlError) as error:
        failure = f"bench_peers: {error}"
    if results:
        peers = [name for name in PEERS if name not in options.without]
        print("\n".join(table(results, peers, bytes_per_token(options.model))))
    if failure:
        print(failure, file=sys.stderr)
        return 1
    if report["batch"]:
        rows = [(batch, f"{rate:.1f}") for batch, rate in report["batch"].items()]
        print("\n" + "\n".join(format_table(("BATCH", "TOKENS/S"), rows, right=(0, 1))))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
