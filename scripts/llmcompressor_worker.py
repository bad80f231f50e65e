"""One quantization by llm-compressor, for bench_packed.py; run with the Python of an environment that has it.

    python scripts/llmcompressor_worker.py MODEL ROWS.json OUT gptq|awq BITS GROUP_SIZE THREADS [DTYPE]

ROWS.json: lists of token ids. Symmetric integers, all linear layers but the head, its own defaults otherwise. Prints
{"seconds": …}, imports and the reading of the model not counted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

MODIFIERS = {"gptq": GPTQModifier, "awq": AWQModifier}


def main(model: str, rows: str, out: str, method: str, bits: str, group_size: str, threads: str, dtype: str = "float32") -> None:
    torch.set_num_threads(int(threads))
    ids = json.loads(Path(rows).read_text())
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    weights = {"num_bits": int(bits), "type": "int", "symmetric": True, "strategy": "group", "group_size": int(group_size)}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    recipe = MODIFIERS[method](ignore=["lm_head"], config_groups=groups)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    begin = time.perf_counter()
    oneshot(
        model=network,
        dataset=data,
        recipe=recipe,
        num_calibration_samples=len(ids),
        max_seq_length=max(map(len, ids)),
        shuffle_calibration_samples=False,
    )
    seconds = time.perf_counter() - begin
    network.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
