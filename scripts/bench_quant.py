#!/usr/bin/env python3
"""How close a model stays to itself at every size: llmctl's GPTQ beside llama-quantize with its importance matrix.

    python scripts/bench_quant.py MODEL --text TEXT --out FOLDER --llama-imatrix ~/llama.cpp/bin/llama-imatrix
    python scripts/bench_quant.py MODEL --text TEXT --out FOLDER --types Q4_K_M,Q4_0 --fit --bpw 4.5,5 --svg PLOT.svg

MODEL is a Hugging Face folder or a GGUF file of floating-point numbers. Both tools calibrate on the first half of the text and
are measured on the second, with llmctl eval, against the model in F16. The last column is the divergence by that of llama.cpp's
file of the same type. With --fit there is also, for each type, ours of no more bytes with types by measurement; its ratio is to
ours of that type. Below the table: how many bytes we need for the divergence of each of llama.cpp's files, on the line through
our own. Files in the folder are used again, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kl_plot import kl_svg
from peer_programs import PeerError, find_program, run_program

from llmctl.commands.console import format_table

TYPES = "Q3_K_M,Q4_0,Q4_K_M,Q5_K_M,Q6_K"
OURS, PEER = "llmctl", "llama.cpp"
_FITTED = "as "  # before the type whose bytes are the limit


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
    """Makes files in a folder and measures them on the held-out half of the text."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._out = options, options.out
        self._out.mkdir(parents=True, exist_ok=True)
        self.calibration, self._held_out = split_text(options.text, self._out)
        self._reference = self._made("f16.gguf", lambda path: llmctl("convert", options.model, "--type", "F16", "-o", path))

    def quantized(self, label: str, name: str, wanted: Sequence[object]) -> Point:
        """What `llmctl quantize` with these options makes as a file or folder of this name."""
        command = ["quantize", self._options.model, "--no-check", "-t", self._options.threads, *wanted]
        return self.measured(OURS, label, name, lambda path: llmctl(*command, "-o", path))

    @property
    def text_options(self) -> list[object]:
        """Of `llmctl quantize`: what to calibrate on."""
        return ["--calibration", self.calibration, "--num-samples", self._options.chunks, "--seq-len", 512]

    def measured(self, tool: str, label: str, name: str, make: Callable[[Path], object]) -> Point:
        """The file or folder, made where it is not there yet, beside the model in F16."""
        path = self._made(name, make)
        kept = self._made(f"{path.name}.json", lambda report: self._evaluate(path, report))
        found = json.loads(kept.read_text())["comparison"]
        files = [path] if path.is_file() else list(path.glob("*.safetensors"))
        nbytes = sum(file.stat().st_size for file in files)
        return Point(tool, label, nbytes, found["kl"]["value"], found["kl_99"], found["same_top"]["value"])

    def seconds(self, name: str) -> float | None:
        """That making the file or folder took; None if it was there before that was noted."""
        noted = self._out / f"{name}.seconds"
        return float(noted.read_text()) if noted.exists() else None

    def note_seconds(self, name: str, seconds: float) -> None:
        """For `seconds`."""
        (self._out / f"{name}.seconds").write_text(f"{seconds:.2f}\n")

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        """The file or folder of this name, made under another first."""
        path = self._out / name
        if not path.exists():
            part, begin = path.with_name(f"part-{name}"), time.perf_counter()
            if part.is_dir():
                shutil.rmtree(part)
            part.unlink(missing_ok=True)
            make(part)
            self.note_seconds(name, time.perf_counter() - begin)
            part.replace(path)
        return path

    def _evaluate(self, path: Path, report: Path) -> None:
        against = ["--against", self._reference, "--text", self._held_out, "--ctx", "512", "--activations", "float", "--json"]
        chunks = ["--chunks", str(self._options.eval_chunks), "-t", str(self._options.threads)]
        report.write_text(llmctl("eval", path, *against, *chunks))


class GgufBench(Bench):
    """Types of GGUF files, of both tools."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._imatrix_program = find_program("llama-imatrix", options.llama_imatrix, "LLAMA_IMATRIX")
        self._quantize_program = find_program("llama-quantize", None, "LLAMA_QUANTIZE", beside=self._imatrix_program)
        super().__init__(options)

    def peer(self, type_name: str) -> Point:
        """llama-quantize's file of a type."""
        threads = str(self._options.threads)
        matrix = self._made("imatrix.gguf", self._imatrix)
        command = [self._quantize_program, "--imatrix", matrix, self._reference]

        def make(path: Path) -> None:
            run_program([*map(str, command), str(path), type_name, threads], None)

        return self.measured(PEER, type_name, f"{PEER}-{type_name}.gguf", make)

    def ours(self, type_name: str) -> Point:
        """Ours of a type."""
        return self._gptq(type_name, type_name, ["--type", type_name])

    def fitted(self, uniform: Point) -> Point:
        """Ours of no more bytes than another file, types as they are worth it."""
        return self._gptq(_FITTED + uniform.type, f"as-{uniform.type}", ["--target-size", f"{uniform.nbytes / 1000}K"])

    def within(self, bits: str) -> Point:
        """Ours of so many bits a weight, types as they are worth it."""
        return self._gptq(f"{bits} bpw", f"{bits}-bpw", ["--target-bpw", bits])

    def _gptq(self, label: str, name: str, wanted: Sequence[object]) -> Point:
        options = ["--method", "gptq", "--format", "gguf", *wanted, *self.text_options]
        return self.quantized(label, f"{OURS}-{name}.gguf", options)

    def _imatrix(self, path: Path) -> None:
        sizes = ["-c", "512", "--chunks", str(self._options.chunks), "-t", str(self._options.threads)]
        files = ["-m", self._reference, "-f", self.calibration, "-o", path]
        run_program([str(self._imatrix_program), *map(str, files), *sizes, "--process-output"], None)


def llmctl(*arguments: object) -> str:
    """What the command prints."""
    return run_program([sys.executable, "-m", "llmctl", *map(str, arguments)], None).stdout


def table(points: Sequence[Point]) -> list[str]:
    """A line a file, the smallest first."""
    files, rows = {(point.tool, point.type): point for point in points}, []
    for point in sorted(points, key=lambda point: (point.nbytes, point.tool)):
        peer = files.get((PEER, point.type)) if point.tool == OURS else None
        if point.type.startswith(_FITTED):
            peer = files.get((OURS, point.type.removeprefix(_FITTED)))
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


def plot(points: Sequence[Point]) -> str:
    """An SVG picture: ours of the named types, ours of measured ones, and llama.cpp's."""
    lines: dict[str, list[tuple[str, int, float]]] = {}
    for point in points:
        measured = point.type.startswith(_FITTED) or point.type.endswith(" bpw")
        name = f"{point.tool}, types by measurement" if measured else point.tool
        lines.setdefault(name, []).append(("" if measured else point.type, point.nbytes, point.kl))
    return kl_svg("Divergence from the model in F16, by size of the file", lines)


def text_arguments(description: str | None) -> argparse.ArgumentParser:
    """What every bench of files asks for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files; made if missing")
    parser.add_argument("--chunks", type=int, default=128, help="of 512 tokens to calibrate on (default: %(default)s)")
    parser.add_argument("--eval-chunks", type=int, default=48, help="of 512 tokens to measure on (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def _points(options: argparse.Namespace) -> list[Point]:
    bench, points = GgufBench(options), []
    for name in options.types.split(","):
        points += [bench.peer(name), bench.ours(name)]
        if options.fit:
            points.append(bench.fitted(points[-1]))
    return points + [bench.within(bits) for bits in filter(None, options.bpw.split(","))]


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 1 with a line on stderr where a program is missing or fails."""
    parser = text_arguments(__doc__)
    parser.add_argument("--types", default=TYPES, help="of both tools (default: %(default)s)")
    parser.add_argument("--fit", action="store_true", help="also ours of each type's bytes with types by measurement")
    parser.add_argument("--bpw", default="", help="bits a weight for --target-bpw, separated by commas")
    parser.add_argument("--llama-imatrix", type=Path, help="llama-quantize lies beside it (or LLAMA_IMATRIX, or on PATH)")
    parser.add_argument("--svg", type=Path, help="write a plot of divergence against bytes here")
    options = parser.parse_args(arguments)
    try:
        points = _points(options)
    except (PeerError, OSError, ValueError, KeyError) as error:
        print(f"bench_quant: {error}", file=sys.stderr)
        return 1
    print("\n".join([*table(points), "", *equal_quality(points)]))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    if options.svg is not None:
        options.svg.write_text(plot(points), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
