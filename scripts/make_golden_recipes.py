"""Make tests/quant/golden_recipes.json: the types llama-quantize gives the tensors of the tests' models.

    python scripts/make_golden_recipes.py /path/to/llama-quantize > tests/quant/golden_recipes.json

The models are headers over sparse files; --dry-run reads no more.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "quant"))

from model_shapes import MODELS, Shapes, summary

from llmctl.quant.recipe import RECIPES, ModelFacts

_LINE = re.compile(r"^\[ *\d+/ *\d+\] (\S+) +- \[.*?\], type = +(\w+), size = .*?(?:\((\w+)\))?$", re.MULTILINE)
_CALLED = {"MXFP4": ["--pure"]}  # llama.cpp has no mix of it for models without experts


def write_header(path: Path, facts: ModelFacts, shapes: Shapes) -> None:
    """A GGUF file in float16 whose data is a hole."""
    heads = 16
    writer = gguf.GGUFWriter(path, facts.architecture)
    writer.add_block_count(facts.layers)
    writer.add_context_length(512)
    writer.add_embedding_length(dict(shapes)["token_embd.weight"][1])
    writer.add_feed_forward_length(512)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // facts.heads_per_kv_head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    if facts.experts:
        writer.add_expert_count(facts.experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(512)
    for name, shape in shapes:
        dtype = np.dtype(np.float32 if len(shape) == 1 or "gate_inp" in name else np.float16)
        writer.add_tensor_info(name, shape, dtype, prod(shape) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + sum(prod(shape) * 4 + 64 for _, shape in shapes))


def write_importance(path: Path) -> None:
    """An importance matrix of something else: a dry run asks no more than whether there is one."""
    writer = gguf.GGUFWriter(path, "none")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["nothing"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 1)
    writer.add_tensor("other.weight.in_sum2", np.ones((1, 32), np.float32))
    writer.add_tensor("other.weight.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def types(program: str, model: Path, recipe: str, importance: Path | None) -> dict[str, str]:
    """Tensor → type, by a dry run."""
    options = _CALLED.get(recipe, []) + (["--imatrix", str(importance)] if importance else [])
    name = "MXFP4_MOE" if recipe == "MXFP4" else recipe
    done = subprocess.run([program, "--dry-run", *options, model, name, "1"], capture_output=True, text=True, check=True)
    text = re.sub(r"\nwarning: .*|, *warning: .*", "", done.stdout + done.stderr)
    return {found[1]: (found[3] or found[2]).upper() for found in _LINE.finditer(text)}


def main() -> None:
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        importance = Path(folder) / "importance.gguf"
        write_importance(importance)
        for title, (facts, shapes) in MODELS.items():
            model = Path(folder) / "model.gguf"
            write_header(model, facts, shapes)
            for recipe in RECIPES:
                for given in (False, True):
                    found = types(sys.argv[1], model, recipe, importance if given else None)
                    assert found.keys() == dict(shapes).keys(), (title, recipe, set(dict(shapes)) ^ set(found))
                    golden[f"{title}: {recipe}{' with importance' * given}"] = summary(found)
    json.dump(golden, sys.stdout, indent=0)
    print()


if __name__ == "__main__":
    main()
