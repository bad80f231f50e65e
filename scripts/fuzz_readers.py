#!/usr/bin/env python3
"""Damage model files and see that reading them ends in an answer or an error of ours: quickly, and in little memory.

    nice python scripts/fuzz_readers.py --count 20000
    python scripts/fuzz_readers.py --start 1234 --count 1 --keep /tmp/case      # one file again, to look at it

Every file is opened, listed, its small tensors decoded, its tokenizer loaded and used, and the whole verified, as a GGUF file
and as a folder of safetensors, in a process of its own that may not grow by more than --megabytes. A crash, another exception
than LlmctlError, more than --seconds of computing, or more memory is a fault; the exit code is 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fuzz_mutations import changed_gguf, damaged, damaged_json, damaged_safetensors

SECONDS, MEGABYTES = 2.0, 200
_PATIENCE = 60  # wall seconds after which a worker that says nothing is taken for hung, however busy the machine
_SMALL = 1 << 16  # elements of a tensor that is decoded


@dataclass
class Totals:
    """What became of the files."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    largest: int = 0


# --- samples ---------------------------------------------------------------------------------------------------------------


def make_samples(folder: Path) -> None:
    """Sound models to be damaged: one folder each. transformers makes two of them, so this is a process of its own."""
    from make_tiny_model import make_tiny_model

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    for family, tokenizer in (("llama", "bpe"), ("gemma3", "sentencepiece")):
        gemma = {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 2}
        choices = {**small, **gemma} if family == "gemma3" else small
        made = make_tiny_model(folder / family, family, tokenizer=tokenizer, **choices)
        _make_gguf(made, folder / f"{family}-gguf", "Q4_0")
    _make_all_formats(folder / "formats-gguf")
    _make_sharded(folder / "llama", folder / "sharded")
    _make_packed(folder / "llama", folder)


def _make_gguf(source: Path, target: Path, type_name: str) -> None:
    from llmctl.quant.convert import make_plan, write
    from llmctl.quant.recipe import recipe_by_name
    from llmctl.quant.source import open_source

    target.mkdir()
    write(make_plan(open_source(source), recipe_by_name(type_name)), target / "m.gguf")


def _make_all_formats(target: Path) -> None:
    """A tensor of every type, metadata of every type."""
    import numpy as np

    from llmctl.kernels.formats.quant_tensor import QuantTensor
    from llmctl.kernels.formats.spec import FORMATS
    from llmctl.runtime.checkpoint.dtypes import PLAIN_DTYPES
    from llmctl.runtime.checkpoint.gguf_writer import GgufWriter

    target.mkdir()
    metadata: dict[str, Any] = {"general.architecture": "x", "x.block_count": 1, "b": True, "f": 0.5, "n": [[1, 2], [3]]}
    metadata |= {"s": ["a", "", "long " * 20], "i": [1, -2], "general.alignment": 64, "split.count": 1}
    with GgufWriter(target / "m.gguf", metadata) as writer:
        for name, form in FORMATS.items():
            writer.declare(name, form, (2, 256))
        for name, form in FORMATS.items():
            raw = np.random.default_rng(1).integers(0, 256, (2, form.row_bytes(256)), np.uint8)
            writer.write(name, raw.view(PLAIN_DTYPES[name]) if form.is_plain else QuantTensor(form, (2, 256), raw))


def _make_sharded(source: Path, target: Path) -> None:
    """The tensors in two files, and the index."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    weight_map = {}
    for number in range(2):
        name = f"model-0000{number + 1}-of-00002.safetensors"
        part = {key: weights[key] for key in list(weights)[number::2]}
        save_file(part, target / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(weight.nbytes for weight in weights.values())}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def _make_packed(source: Path, folder: Path) -> None:
    """The projections as GPTQ, AWQ, compressed-tensors and float8 store them."""
    from make_packed_model import Choices, make_packed_model

    layouts = {
        "gptq": Choices("gptq", 4, 32, act_order=True),
        "gptq-3": Choices("gptq_v2", 3, 32, symmetric=False),
        "awq": Choices("awq", 4, 32, symmetric=False),
        "compressed": Choices("compressed-tensors", 4, 32, symmetric=False),
        "fp8": Choices("fp8"),
    }
    for name, choices in layouts.items():
        make_packed_model(source, folder / name, choices)


# --- one file ----------------------------------------------------------------------------------------------------------------


def damage_one(samples: Path, number: int, seed: int, target: Path) -> Path:
    """Case `number`: a copy of a sample with one of its files damaged. Returns what is to be opened."""
    rng = Random(f"{seed}:{number}")
    sample = rng.choice(sorted(folder for folder in samples.iterdir() if folder.is_dir()))
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(sample, target)
    files = sorted(file for file in target.iterdir() if file.suffix in (".gguf", ".safetensors", ".json", ".model"))
    weights = [file for file in files if file.suffix in (".gguf", ".safetensors")]
    victim = rng.choice(weights if rng.random() < 0.6 else files)
    if victim.suffix != ".gguf" or rng.random() < 0.6 or not changed_gguf(sample / victim.name, victim, rng):
        victim.write_bytes(_damaged_file(sample / victim.name, rng))
    return target / "m.gguf" if (target / "m.gguf").exists() else target


def _damaged_file(victim: Path, rng: Random) -> bytes:
    content = victim.read_bytes()
    if victim.suffix == ".safetensors":
        return damaged_safetensors(content, rng)
    if victim.suffix == ".json":
        return damaged_json(content, rng)
    # A GGUF header: the keys with the vocabulary, then the tensors; half of the faults fall into its first bytes.
    return damaged(content, rng.choice((600, 3000, len(content) // 2, len(content))), rng)


def read_all(path: Path) -> str:
    """What the commands do with a model. Returns the name of the error it was refused with, or what its verification said."""
    from llmctl.errors import LlmctlError
    from llmctl.quant.verify import verify

    outcome = "sound"
    for step in (_read_tensors, _read_weights, _use_tokenizer):
        try:
            step(path)
        except LlmctlError as error:
            outcome = _named(error)
    try:
        report = verify(path)
    except LlmctlError as error:
        return _named(error)
    for finding in report.findings:
        _check_text(finding.message)
    return outcome if report.ok or outcome != "sound" else "faults found"


def _named(error: Exception) -> str:
    _check_text(str(error))
    return type(error).__name__


def _check_text(text: str) -> None:
    """An error is one line that ends, whatever the file says."""
    assert "\n" not in text, text
    assert 0 < len(text) < 4000, len(text)


def _read_tensors(path: Path) -> None:
    from llmctl.kernels.formats.codecs import dequantize
    from llmctl.kernels.formats.quant_tensor import QuantTensor
    from llmctl.runtime.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        for value in checkpoint.metadata.values():
            if hasattr(value, "tolist"):
                value.tolist()
        for entry in checkpoint.entries():
            tensor = checkpoint.read(entry.name)
            if entry.num_elements > _SMALL:
                continue
            if isinstance(tensor, QuantTensor) or tensor.dtype.kind == "f":
                dequantize(tensor)
            else:
                tensor.tobytes()


def _read_weights(path: Path) -> None:
    """As the model sees them: rows in order, codes with their scales."""
    from llmctl.kernels.formats.codecs import dequantize
    from llmctl.runtime.checkpoint import open_checkpoint
    from llmctl.runtime.models.weights import ModelWeights

    with open_checkpoint(path) as checkpoint:
        weights = ModelWeights(checkpoint)
        for name in weights.names():
            if weights.stored(name).num_elements <= _SMALL:
                dequantize(weights.read(name))


def _use_tokenizer(path: Path) -> None:
    from llmctl.runtime.checkpoint import open_checkpoint
    from llmctl.runtime.tokenizer import load_tokenizer

    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        for text in ("Hello  world 123\n", "été 北京 \0 <|im_start|>user", ""):
            tokenizer.decode(tokenizer.encode(text, parse_special=True))


# --- a worker ----------------------------------------------------------------------------------------------------------------


def work(samples: Path, first: int, count: int, seed: int, megabytes: int) -> None:
    """Files `first` … in this process, a JSON line before and after each."""
    import numpy  # noqa: F401

    from llmctl.quant import verify  # noqa: F401
    from llmctl.runtime.tokenizer import load_tokenizer  # noqa: F401

    logging.getLogger("llmctl").addHandler(logging.NullHandler())
    warnings.simplefilter("error")  # one that reaches the user's terminal is a fault too
    with tempfile.TemporaryDirectory() as name:
        read_all(damage_one(samples, -1, seed, Path(name) / "case"))  # what is imported late is imported now
        _limit_memory(megabytes)
        for number in range(first, first + count):
            path = damage_one(samples, number, seed, Path(name) / "case")
            print(json.dumps({"begin": number}), flush=True)
            print(json.dumps({"end": number, **_measured(lambda path=path: read_all(path))}), flush=True)


def _limit_memory(megabytes: int) -> None:
    """What is only reserved counts too: a claim of a terabyte that nobody touches is a MemoryError."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (megabytes << 20),) * 2)


def _measured(function: Callable[[], str]) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    before, started = _status("VmRSS"), time.process_time()
    fault = None
    try:
        outcome = function()
    except BaseException as error:
        outcome, fault = f"fault: {type(error).__name__}", traceback.format_exc()
    return {"outcome": outcome, "fault": fault, "seconds": time.process_time() - started, "bytes": _status("VmHWM") - before}


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


# --- the run -----------------------------------------------------------------------------------------------------------------


def run(samples: Path, first: int, count: int, seed: int, limits: tuple[float, int], totals: Totals) -> None:
    """All files, in workers of a few thousand; one that dies or hangs is a fault, and the next goes on behind it."""
    end = first + count
    while first < end:
        first = _run_worker(samples, first, min(2000, end - first), seed, limits, totals)


def _run_worker(samples: Path, first: int, count: int, seed: int, limits: tuple[float, int], totals: Totals) -> int:
    """Returns the number of the next file."""
    with tempfile.TemporaryDirectory() as home:
        arguments = [str(samples), str(first), str(count), str(seed), str(limits[1])]
        environment = {**os.environ, "LLMCTL_HOME": home, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--work", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            begun = _follow(process, limits, totals)
            process.kill()
    if begun is None:
        return first + count
    totals.faults.append(f"file {begun}: the process ended with {process.returncode} or said nothing for {_PATIENCE} s")
    totals.outcomes["fault: process"] += 1
    return begun + 1


def _follow(process: subprocess.Popen[str], limits: tuple[float, int], totals: Totals) -> int | None:
    """Read what a worker says. Returns the number of the file at which it ended or hung, None if it did them all."""
    import selectors

    assert process.stdout is not None
    begun: int | None = -1
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(_PATIENCE):
            line = process.stdout.readline()
            if not line:
                return None if process.wait() == 0 else begun
            said = json.loads(line)
            begun = said.get("begin", begun)
            if "end" in said:
                _count(said, limits, totals)
    return begun


def _count(said: dict[str, Any], limits: tuple[float, int], totals: Totals) -> None:
    totals.outcomes[said["outcome"]] += 1
    totals.slowest, totals.largest = max(totals.slowest, said["seconds"]), max(totals.largest, said["bytes"])
    if said["fault"]:
        totals.faults.append(f"file {said['end']}: {said['fault']}")
    if said["seconds"] > limits[0]:
        totals.faults.append(f"file {said['end']}: took {said['seconds']:.1f} s of computing")
    if said["bytes"] > limits[1] << 20:
        totals.faults.append(f"file {said['end']}: took {said['bytes'] >> 20} MB")


def main(arguments: list[str] | None = None) -> int:
    """The whole run; 1 if there were faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="files to damage and read")
    parser.add_argument("--start", type=int, default=0, help="number of the first: a number and a seed make a file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="most computing for one file")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="most memory for one file")
    parser.add_argument("--samples", type=Path, help="folder for the sound models, made if it is missing")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="put the first file there instead of reading any")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        samples = options.samples or Path(name) / "samples"
        if not samples.exists():
            samples.mkdir(parents=True)
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "LLMCTL_HOME": name}
            subprocess.run([sys.executable, __file__, "--samples-into", samples], check=True, env=environment)
        if options.keep is not None:
            print(damage_one(samples, options.start, options.seed, options.keep))
            return 0
        totals = Totals()
        run(samples, options.start, options.count, options.seed, (options.seconds, options.megabytes), totals)
    _print(totals, options.count)
    return 1 if totals.faults else 0


def _print(totals: Totals, count: int) -> None:
    for fault in totals.faults:
        print(fault, file=sys.stderr)
    print(f"{count} damaged files: {len(totals.faults)} faults")
    for outcome, number in totals.outcomes.most_common():
        print(f"  {number:6} {outcome}")
    print(f"  at most {totals.slowest:.2f} s of computing and {totals.largest / 1e6:.0f} MB for one file")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), *map(int, sys.argv[3:7]))
    elif sys.argv[1:2] == ["--samples-into"]:
        make_samples(Path(sys.argv[2]))
    else:
        sys.exit(main())
