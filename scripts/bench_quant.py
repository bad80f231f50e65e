#!/usr/bin/env python3
"""How close a model stays to itself at every size: llmctl's GPTQ beside llama-quantize with its importance matrix.

    python scripts/bench_quant.py MODEL --text TEXT --out FOLDER --llama-imatrix ~/llama.cpp/bin/llama-imatrix
    python scripts/bench_quant.py MODEL --text TEXT --out FOLDER --types Q4_K_M,Q4_0 --bpw 4.5,5 --json RESULT.json

MODEL is a Hugging Face folder or a GGUF file of floating-point numbers. Both tools calibrate on the first half of the text and
are measured on the second, with llmctl eval, against the model in F16. The last column is the divergence by that of llama.cpp's
file of the same type. Below the table: how many bytes we need for the divergence of each of llama.cpp's files, on the line
through our own. Files in the folder are used again, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peer_programs import PeerError, find_program, run_program

from llmctl.commands.console import format_table

TYPES = "Q3_K_M,Q4_0,Q4_K_M,Q5_K_M,Q6_K"
OURS, PEER = "llmctl", "llama.cpp"


@dataclass(frozen=True)
class Point:
    """One file. kl, kl_99: nats; same_top: share of the places where both find the same token most likely."""

    tool: str
    type: str
    nbytes: int
    kl: float
    kl_99: float
    same_top: float


def split_text(text: Path, out: Path) -> tuple[Path, Path]:
    """The first and the second half of the text, cut at the end of a line, as files in `out`."""
    whole = text.read_text("utf-8")
    middle = whole.find("\n", len(whole) // 2) + 1
    if middle == 0:
        raise PeerError(f"{text}: there is no line to cut it at in its second half")
    halves = out / "calibration.txt", out / "held-out.txt"
    for path, part in zip(halves, (whole[:middle], whole[middle:]), strict=True):
        path.write_text(part, "utf-8")
    return halves


class Bench:
    """Makes the files in a folder and measures them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._out = options, options.out
        self._out.mkdir(parents=True, exist_ok=True)
        self._calibration, self._held_out = split_text(options.text, self._out)
        self._imatrix_program = find_program("llama-imatrix", options.llama_imatrix, "LLAMA_IMATRIX")
        self._quantize_program = find_program("llama-quantize", None, "LLAMA_QUANTIZE", beside=self._imatrix_program)
        self._reference = self._made("f16.gguf", lambda path: _llmctl("convert", options.model, "--type", "F16", "-o", path))

    def peer(self, type_name: str) -> Point:
        """llama-quantize's file of a type."""
        threads = str(self._options.threads)
        matrix = self._made("imatrix.gguf", self._imatrix)
        command = [self._quantize_program, "--imatrix", matrix, self._reference]
        return self._measured(PEER, type_name, lambda path: run_program([*map(str, command), str(path), type_name, threads]))

    def ours(self, type_name: str) -> Point:
        """Ours of a type."""
        return self._quantized(type_name, ["--type", type_name])

    def within(self, bits: str) -> Point:
        """Ours of so many bits a weight, types as they are worth it."""
        return self._quantized(f"{bits} bpw", ["--target-bpw", bits])

    def _quantized(self, label: str, wanted: list[str]) -> Point:
        text = ["--calibration", self._calibration, "--num-samples", str(self._options.chunks), "--seq-len", "512"]
        command = ["quantize", self._options.model, "--method", "gptq", "--format", "gguf", *wanted, *text]
        return self._measured(OURS, label, lambda path: _llmctl(*command, "-o", path))

    def _imatrix(self, path: Path) -> None:
        sizes = ["-c", "512", "--chunks", str(self._options.chunks), "-t", str(self._options.threads)]
        files = ["-m", self._reference, "-f", self._calibration, "-o", path]
        run_program([str(self._imatrix_program), *map(str, files), *sizes, "--process-output"])

    def _made(self, name: str, make) -> Path:
        """The file of this name, made under another first."""
        path = self._out / name
        if not path.exists():
            part = path.with_name(f"part-{name}")
            part.unlink(missing_ok=True)
            make(part)
            part.replace(path)
        return path

    def _measured(self, tool: str, label: str, make) -> Point:
        path = self._made(f"{tool}-{label.replace(' ', '-')}.gguf", make)
        kept = self._made(f"{path.name}.json", lambda report: self._evaluate(path, report))
        found = json.loads(kept.read_text())["comparison"]
        return Point(tool, label, path.stat().st_size, found["kl"]["value"], found["kl_99"], found["same_top"]["value"])

    def _evaluate(self, path: Path, report: Path) -> None:
        against = ["--against", self._reference, "--text", self._held_out, "--ctx", "512", "--activations", "float", "--json"]
        chunks = ["--chunks", str(self._options.eval_chunks), "-t", str(self._options.threads)]
        report.write_text(_llmctl("eval", path, *against, *chunks))


def _llmctl(*arguments: object) -> str:
    return run_program([sys.executable, "-m", "llmctl", *map(str, arguments)]).stdout


def table(points: Sequence[Point]) -> list[str]:
    """A line a file, the smallest first."""
    peers = {point.type: point for point in points if point.tool == PEER}
    rows = []
    for point in sorted(points, key=lambda point: (point.nbytes, point.tool)):
        peer = peers.get(point.type) if point.tool == OURS else None
        ratio = f"{point.kl / peer.kl:.3f}" if peer is not None else ""
        size, top = f"{point.nbytes / 1e6:.1f}", f"{100 * point.same_top:.1f} %"
        rows.append((point.type, point.tool, size, f"{point.kl:.5f}", f"{point.kl_99:.4f}", top, ratio))
    return format_table(("TYPE", "TOOL", "MB", "KL", "99 %", "SAME TOP", "RATIO"), rows, right=(2, 3, 4, 5, 6))


def bytes_for(points: Sequence[Point], kl: float) -> float | None:
    """Bytes at which the line through the points, logarithm of the divergence by bytes, reaches `kl`; None outside of it.

    Points that another beats in both are left out.
    """
    best = [p for p in points if not any(q.nbytes <= p.nbytes and q.kl < p.kl for q in points)]
    line = sorted(best, key=lambda point: point.nbytes)
    for left, right in itertools.pairwise(line):
        if right.kl <= kl <= left.kl:
            share = math.log(left.kl / kl) / math.log(left.kl / right.kl) if left.kl > right.kl else 0.0
            return left.nbytes + share * (right.nbytes - left.nbytes)
    return None


def equal_quality(points: Sequence[Point]) -> list[str]:
    """For each of llama.cpp's files, what share of its bytes we need to be as close."""
    ours, lines = [point for point in points if point.tool == OURS], []
    for peer in (point for point in points if point.tool == PEER):
        needed = bytes_for(ours, peer.kl)
        said = "outside of our points" if needed is None else f"{needed / 1e6:.1f} MB, {needed / peer.nbytes:.3f} of its bytes"
        lines.append(f"as close as llama.cpp's {peer.type}: {said}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 1 with a line on stderr where a program is missing or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files; made if missing")
    parser.add_argument("--types", default=TYPES, help="of both tools (default: %(default)s)")
    parser.add_argument("--bpw", default="", help="bits a weight for --target-bpw, separated by commas")
    parser.add_argument("--chunks", type=int, default=128, help="of 512 tokens to calibrate on (default: %(default)s)")
    parser.add_argument("--eval-chunks", type=int, default=48, help="of 512 tokens to measure on (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--llama-imatrix", type=Path, help="llama-quantize lies beside it (or LLAMA_IMATRIX, or on PATH)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    points: list[Point] = []
    try:
        bench = Bench(options)
        for name in options.types.split(","):
            points += [bench.peer(name), bench.ours(name)]
        points += [bench.within(bits) for bits in filter(None, options.bpw.split(","))]
    except (PeerError, OSError, ValueError, KeyError) as error:
        print(f"bench_quant: {error}", file=sys.stderr)
        return 1
    print("\n".join([*table(points), "", *equal_quality(points)]))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
