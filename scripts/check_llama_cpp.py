#!/usr/bin/env python3
"""Do llama.cpp and transformers agree on the GGUF files that convert writes, for every family llama.cpp has?

    LLAMA_CPP_LIB_PATH=BUILD/bin python scripts/check_llama_cpp.py --python PYTHON_WITH_LLAMA_CPP [FAMILY …]

For each family: a tiny random folder made by transformers, converted to a GGUF file in F32, loaded by llama.cpp with a float32
cache. transformers continues a prompt greedily; llama.cpp is given the same tokens, and must name the same next token at
every step up to the first at which the reference's two best logits are closer than 1e-3. The largest difference of a logit
and its share of their standard deviation are printed beside it. Exit code 1 if a family disagrees.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from make_tiny_model import make_tiny_model

from llmctl.quant.convert import make_plan, write
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.source import open_source

WORKER = Path(__file__).with_name("llama_cpp_worker.py")
NUM_PROMPT, NUM_STEPS = 40, 24
CLOSE = 1e-3
_NO_WINDOW = {"use_sliding_window": False, "layer_types": None}
_FIVE_TO_ONE = {"num_hidden_layers": 7, "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]}
_MSCALE = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}
_LOW_MSCALE = {**_MSCALE, "mscale": 0.7, "mscale_all_dim": 0.7}
# Family → choices that both GGUF and llama.cpp can say.
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": _NO_WINDOW,
    "qwen3": _NO_WINDOW,
    "mixtral": {},
    "qwen2_moe": {"norm_topk_prob": False, "mlp_only_layers": [], **_NO_WINDOW},
    "qwen3_moe": {"mlp_only_layers": [], "use_sliding_window": False},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, **_FIVE_TO_ONE},
    "phi3": {"sliding_window": None, "rope": "longrope"},
    "smollm3": {},
    "ministral3": {},
    "olmo2": {},
    "granite": {},
    "glm4": {},
    "starcoder2": {"sliding_window": None},
    "stablelm": {},
    "cohere": {},
    "cohere2": {},
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "rope": _LOW_MSCALE},  # llama.cpp groups as V3 does
    "deepseek_v3": {"rope": _MSCALE},
    "gpt2": {},
    "olmo3": {},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},  # it rounds the borders of this yarn
    "exaone4": {"hidden_size": 192, "sliding_window": None, "layer_types": ["full_attention"] * 4},
}


@dataclass(frozen=True)
class Agreement:
    """What one family came to."""

    family: str
    steps: int
    """Steps at which the next token agreed, before `ended`."""
    ended: str
    """"all", "close" (the reference's two best logits), or "differs"."""
    largest: float
    spread: float

    def __str__(self) -> str:
        relative = self.largest / self.spread
        return f"{self.family:12} {self.steps:3} of {NUM_STEPS} {self.ended:8} {self.largest:.1e} {relative:.1e} of std"


def compare(found: np.ndarray, expected: np.ndarray, family: str) -> Agreement:
    """found, expected: logits [NUM_STEPS, vocab_size]."""
    steps, ended = len(expected), "all"
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        second, first = np.sort(theirs)[-2:]
        if first - second < CLOSE or ours.argmax() != theirs.argmax():
            steps, ended = step, "close" if first - second < CLOSE else "differs"
            break
    return Agreement(family, steps, ended, float(np.abs(found - expected).max()), float(expected.std()))


def reference(folder: Path) -> tuple[list[int], np.ndarray]:
    """A prompt with transformers' greedy continuation, and its logits [NUM_STEPS, vocab_size] after each of the tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = np.random.default_rng(5).integers(3, model.config.vocab_size, NUM_PROMPT).tolist()
    rows = []
    with torch.no_grad():
        for _ in range(NUM_STEPS):
            rows.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].numpy())
            ids.append(int(rows[-1].argmax()))
    return ids[:-1], np.stack(rows)


def llama_cpp_logits(python: str, file: Path, token_ids: list[int]) -> np.ndarray:
    """[NUM_STEPS, vocab_size]; RuntimeError with llama.cpp's last words if it ends badly."""
    request = json.dumps({"path": str(file), "token_ids": token_ids, "num_prompt": NUM_PROMPT})
    done = subprocess.run([python, str(WORKER)], input=request, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise RuntimeError(f"code {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
    return np.asarray(json.loads(done.stdout)["logits"])


def check(family: str, python: str, work: Path) -> Agreement:
    """Make, convert, run on both sides."""
    # Named without the family: llama.cpp strips spaces behind markers for models that call themselves phi-3.
    folder, file = work / family / "model", work / f"{family}.gguf"
    make_tiny_model(folder, family, tokenizer="bpe", **CASES[family])
    write(make_plan(open_source(folder), recipe_by_name("F32")), file)
    token_ids, expected = reference(folder)
    return compare(llama_cpp_logits(python, file, token_ids), expected, family)


def main(arguments: list[str] | None = None) -> int:
    """A line a family."""
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(CASES)}; all without one")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    options = parser.parse_args(arguments)
    if unknown := set(options.families) - set(CASES):
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    failed = False
    with tempfile.TemporaryDirectory() as work:
        for family in options.families or CASES:
            try:
                result = check(family, options.python, Path(work))
                print(result, flush=True)
                failed |= result.ended == "differs" or result.steps == 0
            except RuntimeError as error:
                print(f"{family:12} {error}", flush=True)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
