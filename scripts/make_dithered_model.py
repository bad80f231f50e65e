#!/usr/bin/env python3
"""Move the half-precision SmolLM2 off the 4-bit grid it was unfolded from, so that quantizers can be compared on it.

    python scripts/make_dithered_model.py OUT       # OUT/smollm2-135m-dithered, and what it is made from

The weights of OUT/smollm2-135m-fp16 lie on the grid of the Q4_1 file they come from: what hits that grid looks perfect. Here
every weight gets noise, uniform over one step of its own block's grid, which is as far as the original weight can have been from
the stored one. The perplexity rises from about 18 to 24 on WikiText-2; the model is a real network, and its weights lie nowhere
special. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from get_models import ensure_fp16, ensure_gguf, locked

NAME = "smollm2-135m-dithered"
SEED = 20261130


def steps_of(tensor) -> np.ndarray:
    """float32 of the tensor's shape: the distance of two neighbours on the grid of each weight's Q4_1 block."""
    from llmctl.kernels.formats.layouts import LAYOUTS

    scales = tensor.blocks.view(LAYOUTS["Q4_1"])["d"].astype(np.float32)
    return np.repeat(scales, tensor.format.elements_per_block, axis=-1)


def dithered(weight, steps: np.ndarray, generator):
    """weight float16 (N, K), a torch tensor → the same with noise of up to half a step to both sides."""
    import torch

    noise = torch.rand(weight.shape, generator=generator) - 0.5
    return (weight.float() + noise * torch.from_numpy(steps)).half()


def make_dithered_model(gguf_path: Path, fp16: Path, folder: Path) -> None:
    """Write `folder`: the half-precision `fp16` with noise as large as the steps in the Q4_1 file it was unfolded from."""
    import torch
    from safetensors.torch import load_file, save_file

    from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
    from llmctl.runtime.models.weights import ModelWeights

    shutil.copytree(fp16, folder)
    tensors = load_file(fp16 / "model.safetensors")
    grid = ModelWeights(GgufCheckpoint(gguf_path))
    generator = torch.Generator().manual_seed(SEED)
    for name in grid.names():
        if grid.stored_entry(name).format.name == "Q4_1":
            tensors[name] = dithered(tensors[name], steps_of(grid.read(name)), generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def ensure_dithered(out: Path) -> Path:
    """The folder inside `out`, made if it is not there yet, with what it is made from."""
    gguf_path, fp16, target = ensure_gguf(out, "smollm2"), ensure_fp16(out, "smollm2"), out / NAME
    with locked(out, NAME):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=out, prefix=f".{NAME}-") as scratch:
                make_dithered_model(gguf_path, fp16, Path(scratch) / NAME)
                (Path(scratch) / NAME).rename(target)
    return target


def main(arguments: list[str] | None = None) -> int:
    """Make the folder and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the models; made if missing")
    print(ensure_dithered(parser.parse_args(arguments).out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
