"""Logits and greedy tokens of llama.cpp: the other side of check_llama_cpp.py, a process of its own so that a crash in the
library is a failed answer and not a dead check.

Needs the package llama-cpp-python; with LLAMA_CPP_LIB_PATH=FOLDER it uses the libllama of an own build there. Request on
stdin: {"path", "token_ids": [id, …], "num_prompt"}. Answer on stdout: one line of JSON, {"logits": [[vocab_size], …]} after
token num_prompt − 1 and after every later one: the tokens are fed as one prompt and then one by one, so both ways are seen.
Keys and values are float32 and attention is the plain one: nothing is rounded that the file did not round.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

F32 = 0  # ggml's type id
FLASH_ATTENTION_OFF = 0


def logits(path: str, token_ids: list[int], num_prompt: int) -> list[list[float]]:
    """Rows of logits, see above. RuntimeError if the file is refused."""
    import llama_cpp as api
    import numpy as np

    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    if not model:
        raise RuntimeError(f"{path}: llama.cpp refuses to load it")
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = max(len(token_ids), 32)
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = F32
    params.flash_attn_type = FLASH_ATTENTION_OFF
    params.swa_full = True
    context = api.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"{path}: llama.cpp makes no context of {len(token_ids)} tokens")
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    rows = []
    for ids in [token_ids[:num_prompt], *([token] for token in token_ids[num_prompt:])]:
        array = (api.llama_token * len(ids))(*ids)
        if status := api.llama_decode(context, api.llama_batch_get_one(array, len(ids))):
            raise RuntimeError(f"llama_decode returned {status}")
        pointer = api.llama_get_logits_ith(context, -1)
        rows.append(np.ctypeslib.as_array(pointer, shape=(vocab_size,)).tolist())
    return rows


def main() -> None:
    """Answer one request; the library's own lines, which go to stdout and stderr alike, are kept out of the answer."""
    request: dict[str, Any] = json.load(sys.stdin)
    answer = os.dup(1)
    os.dup2(2, 1)
    rows = logits(request["path"], request["token_ids"], request["num_prompt"])
    with os.fdopen(answer, "w") as stream:
        json.dump({"logits": rows}, stream)


if __name__ == "__main__":
    main()
