"""Greedy decoding in another engine: ik_llama.cpp, from its prebuilt wheel (ik-llama-cpp-python).

Run as a program of its own, so that a crash or an abort in the foreign library is a failed test and not a dead test run:

    python ik_llama.py < request.json > answer.json

Request: {"path", "prompts": [[id, …], …], "max_tokens", "texts": [text, …]}. Answer: {"prompts": [{"token_ids",
"logits": [vocab_size] after the prompt's last token}, …], "texts": [[id, …], …] as the file's own tokenizer reads them}.
The model is fed token ids, so that it is compared apart from the tokenizer. Keys in float32 and no flash attention are the
nearest the library comes to our reference; its products still round activations to the weights' partner type: to F16 for F16,
to 8-bit blocks for Q8_0 and Q4_0. (Version 0.1.5 computes Q4_1 wrongly in batches of 32 tokens and more.)
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from ik_llama_cpp import _ctypes_api as api
from ik_llama_cpp._internals import make_batch_range

F32 = 0  # ggml's type id


class Model:
    """One GGUF file in ik_llama.cpp with one context."""

    def __init__(self, path: str, context: int) -> None:
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{path}: ik_llama.cpp refuses to load it")
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_threads = params.n_threads_batch = 1  # its threads spin: two of them on a busy machine are far slower
        params.type_k = F32
        params.flash_attn = False
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"{path}: ik_llama.cpp cannot make a context of {context} tokens")
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def feed(self, token_ids: list[int], position: int) -> np.ndarray:
        """Run tokens at a position; logits [vocab_size] after the last."""
        batch = make_batch_range(token_ids, pos_start=position)
        status = api.llama_decode(self.context, batch)
        api.llama_batch_free(batch)
        if status != 0:
            raise SystemExit(f"llama_decode returned {status} at position {position}")
        logits = api.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).copy()

    def greedy(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Continue a prompt until an end token (included) or `max_tokens`."""
        api.llama_kv_cache_clear(self.context)
        logits = self.feed(prompt, 0)
        first, token_ids = logits.tolist(), [int(logits.argmax())]
        while len(token_ids) < max_tokens and not api.llama_token_is_eog(self.model, token_ids[-1]):
            logits = self.feed(token_ids[-1:], len(prompt) + len(token_ids) - 1)
            token_ids.append(int(logits.argmax()))
        return {"token_ids": token_ids, "logits": first}

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, with what the file says belongs around it and without reading control tokens in it."""
        data = text.encode()
        room = len(data) + 8
        ids = (api.llama_token * room)()
        count = api.llama_tokenize(self.model, data, len(data), ids, room, True, False)
        return list(ids[:count])


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    longest = max(len(prompt) for prompt in request["prompts"])
    model = Model(request["path"], longest + request["max_tokens"])
    prompts = [model.greedy(prompt, request["max_tokens"]) for prompt in request["prompts"]]
    json.dump({"prompts": prompts, "texts": [model.tokenize(text) for text in request["texts"]]}, sys.stdout)


if __name__ == "__main__":
    main()
