"""Times transformers for bench_peers.py: a line of JSON [n_prompt, n_gen, n_depth] in, {"seconds": …} out, until stdin ends.

    python scripts/transformers_worker.py FOLDER THREADS

The model runs in bfloat16 on the CPU with the loop that costs least: a cache, logits of the last token, argmax, no
`generate`. A warm-up run of the same test comes first.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging


class Timer:
    """One loaded model."""

    def __init__(self, folder: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._generator = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def seconds(self, n_prompt: int, n_gen: int, n_depth: int) -> float:
        """Of a prompt of n_prompt tokens and n_gen more, one by one, after n_depth that are not timed."""
        cache = DynamicCache(config=self._model.config)
        ids = self._ids(max(1, n_prompt))
        if n_depth:
            self._step(self._ids(n_depth), cache)
        begin = time.perf_counter()
        if n_prompt:
            ids = self._step(ids, cache)
        for _ in range(n_gen):
            ids = self._step(ids, cache)
        return time.perf_counter() - begin

    def _ids(self, count: int) -> torch.Tensor:
        return torch.randint(0, self._model.config.vocab_size, (1, count), generator=self._generator)

    def _step(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Run ids [1, n]; the likeliest next one [1, 1]."""
        return self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)


def main() -> int:
    """Serve until stdin ends."""
    folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # past_key_values has another name from 5.24 on
    timer = Timer(folder)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        n_prompt, n_gen, n_depth = json.loads(line)
        timer.seconds(n_prompt, min(n_gen, 1), 0)
        print(json.dumps({"seconds": timer.seconds(n_prompt, n_gen, n_depth)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
