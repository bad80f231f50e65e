#!/usr/bin/env python3
"""What GPTQ and AWQ are worth over plain rounding on the same grid of packed integers, and how llm-compressor does beside them.

    python scripts/bench_packed.py MODEL --text TEXT --out FOLDER --grids 4:64,4:32,3:32
    python scripts/bench_packed.py MODEL --text TEXT --out FOLDER --grids 4:128 --llm-compressor PYTHON

Symmetric groups, bits:columns. All calibrate on the first half of the text and are measured on the second, with llmctl eval,
against the model in F16. BELOW RTN: how much less the model diverges than by plain rounding with the same groups. RATIO: our
divergence by that of llm-compressor with the same method, grid and rows of tokens; PYTHON is that of an environment that has
it. SECONDS: of llmctl the whole command, of llm-compressor without imports and the reading of the model. What is in the folder
is not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_quant import OURS, Bench, Point, text_arguments
from peer_programs import PeerError, run_program

from llmctl.commands.console import format_table
from llmctl.quant.calibration import read_calibration
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.tokenizer import load_tokenizer

PEER, PLAIN = "llm-compressor", "rtn"
_WORKER = Path(__file__).with_name("llmcompressor_worker.py")


@dataclass(frozen=True)
class Made:
    """One folder. seconds: that making it took, None if that was not noted."""

    tool: str
    method: str
    grid: str
    kl: float
    same_top: float
    seconds: float | None


class PackedBench(Bench):
    """Folders of packed integers."""

    def ours(self, method: str, grid: str) -> Made:
        """By `llmctl quantize`."""
        bits, group_size = grid.split(":")
        wanted = ["--method", method, "--format", "gptq", "--symmetric", "--bits", bits, "--group-size", group_size]
        name = _name(OURS, method, grid)
        point = self.quantized(method, name, [*wanted, *([] if method == PLAIN else self.text_options)])
        return self._finished(point, grid, name)

    def peer(self, python: Path, method: str, grid: str) -> Made:
        """By llm-compressor, of the same rows."""
        rows, name = self._made("rows.json", self._write_rows), _name(PEER, method, grid)
        own: list[float] = []

        def make(path: Path) -> None:
            sizes = [method, *grid.split(":"), self._options.threads]
            done = run_program([*map(str, (python, _WORKER, self._options.model, rows, path, *sizes))], None)
            own.append(json.loads(done.stdout.splitlines()[-1])["seconds"])

        point = self.measured(PEER, method, name, make)
        if own:
            self.note_seconds(name, own[0])
        return self._finished(point, grid, name)

    def _finished(self, point: Point, grid: str, name: str) -> Made:
        return Made(point.tool, point.type, grid, point.kl, point.same_top, self.seconds(name))

    def _write_rows(self, path: Path) -> None:
        """The token ids that `llmctl quantize` calibrates on."""
        tokenizer = load_tokenizer(open_checkpoint(self._options.model))
        found = read_calibration(self.calibration, tokenizer, num_samples=self._options.chunks, row_length=512, seed=0)
        path.write_text(json.dumps(found.rows))


def _name(tool: str, method: str, grid: str) -> str:
    return f"{tool}-{method}-{grid.replace(':', 'bit-g')}"


def table(found: Sequence[Made]) -> list[str]:
    """A line a folder."""
    known, rows = {(one.tool, one.method, one.grid): one.kl for one in found}, []
    for one in found:
        plain, peer = known.get((OURS, PLAIN, one.grid)), known.get((PEER, one.method, one.grid))
        below = "" if plain is None or one.method == PLAIN else f"{100 * (1 - one.kl / plain):.1f} %"
        ratio = "" if peer is None or one.tool == PEER else f"{one.kl / peer:.3f}"
        seconds = "" if one.seconds is None else f"{one.seconds:.0f}"
        rows.append((one.grid, one.method, one.tool, f"{one.kl:.5f}", f"{100 * one.same_top:.1f} %", below, ratio, seconds))
    head = ("GRID", "METHOD", "TOOL", "KL", "SAME TOP", "BELOW RTN", "RATIO", "SECONDS")
    return format_table(head, rows, right=(3, 4, 5, 6, 7))


def _measure(options: argparse.Namespace) -> list[Made]:
    bench, found = PackedBench(options), []
    for grid in options.grids.split(","):
        for method in options.methods.split(","):
            found.append(bench.ours(method, grid))
            if options.llm_compressor is not None and method != PLAIN:
                found.append(bench.peer(options.llm_compressor, method, grid))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 1 with a line on stderr where a program is missing or fails."""
    parser = text_arguments(__doc__)
    parser.add_argument("--grids", default="4:64,4:32,3:32", help="bits:columns, separated by commas (default: %(default)s)")
    parser.add_argument("--methods", default="rtn,awq,gptq", help="of llmctl quantize (default: %(default)s)")
    parser.add_argument("--llm-compressor", type=Path, metavar="PYTHON", help="of an environment that has it")
    options = parser.parse_args(arguments)
    try:
        found = _measure(options)
    except (PeerError, OSError, ValueError, KeyError) as error:
        print(f"bench_packed: {error}", file=sys.stderr)
        return 1
    print("\n".join(table(found)))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
