"""A whole decode step of a model with the shapes of an 8B, for scripts/gpu_check.py: eager and by graph, at several contexts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from gpu_kernels import BLOCK_SIZE, Bench, copied, make_weight
from gpu_rows import Row, failed

from llmctl.kernels import _triton_graphs as graphs
from llmctl.kernels._triton import TritonOps
from llmctl.kernels.attention import BatchDescription, PageMap
from llmctl.kernels.linear._triton import TritonWeight
from llmctl.runtime.cache.kv_cache import KvCache
from llmctl.runtime.cache.memory import Demand, plan_cache
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.decoder import Decoder
from llmctl.runtime.models.registry import chosen_family
from llmctl.runtime.models.weights import StoredWeight

SHAPE_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
SHAPE_TINY = SHAPE_8B | {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 1, "max_position_embeddings": 256,
}  # fmt: skip
_STEPS = 20
_BUDGET_MS = 2.0
"""Predicted for a step by graph at a short context: the weights' 1.14 ms at full bandwidth, and what lies between."""


class MadeOps(TritonOps):
    """Weights are made where they are used: one of each format and shape, copied on the device for every layer."""

    def __init__(self, device: str) -> None:
        super().__init__(device, "bfloat16")
        self._made: dict[tuple[str, tuple[int, ...]], TritonWeight] = {}

    def prepare_weight(self, weight: Any) -> TritonWeight:
        key = (weight.form, weight.shape)
        if key not in self._made:
            self._made[key] = super().prepare_weight(make_weight(weight.form, *weight.shape))
        return copied(self._made[key])


class MadeWeights:
    """What the decoder reads weights from: descriptions, in the types that Q4_K_M gives them."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.checkpoint = config, SimpleNamespace(path="8B-shaped")

    def read(self, name: str) -> np.ndarray | StoredWeight:
        """A norm's numbers, or the description of a matrix."""
        c = self.config
        rows = {"q_proj": c.num_heads * c.head_dim, "k_proj": c.num_kv_heads * c.head_dim, "v_proj": c.num_kv_heads * c.head_dim}
        rows |= dict.fromkeys(("gate_proj", "up_proj"), c.intermediate_size)
        rows |= dict.fromkeys(("lm_head", "embed_tokens"), c.vocab_size)
        module = name.split(".")[-2]
        if "norm" in module:
            return np.ones(c.hidden_size, np.float32)
        columns = {"o_proj": c.num_heads * c.head_dim, "down_proj": c.intermediate_size}.get(module, c.hidden_size)
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        is_fine = module == "lm_head" or (module in ("v_proj", "down_proj") and layer % 2 == 0)
        return StoredWeight("Q6_K" if is_fine else "Q4_K", (rows.get(module, c.hidden_size), columns), 0, 0)

    def release(self, name: str) -> None:
        """Nothing is mapped."""


def time_decode(bench: Bench, shape: dict[str, Any], contexts: tuple[int, ...]) -> None:
    """A row for every context, eager and by graph; the two must agree."""
    config = chosen_family("llama").read_config(shape)
    ops = MadeOps(bench.device)
    decoder = Decoder(ops, MadeWeights(config))
    layers, longest = config.kv_layers(), max(contexts)
    cache = KvCache(ops, layers, plan_cache(layers, "bf16", Demand(longest)), "bf16")
    for pages in (cache.layer(i) for i in range(config.num_layers)):
        pages.keys.numbers.normal_()
        pages.values.numbers.normal_()
    nbytes = float(sum(weight.nbytes for weight in _weights_of(decoder)))
    for context in contexts:
        if bench.report.is_late:
            bench.report.add(Row("decode.8B", f"context={context}", remark="left out: the time is used up"))
            continue
        per_token = 2.0 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
        _time_step(bench, decoder, cache, context, nbytes + per_token * context)


def _weights_of(decoder: Decoder) -> list[TritonWeight]:
    parts = [decoder.lm_head]
    for layer in decoder.layers:
        a, m = layer.attention, layer.mlp
        parts += [a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj]
    return [part.weight for part in parts]


def _time_step(bench: Bench, decoder: Decoder, cache: KvCache, context: int, nbytes: float) -> None:
    batch, rows = _step(context, decoder), np.zeros(1, np.int64)
    predicted = max(_BUDGET_MS * 1e3, 1e-3 * nbytes / bench.ceilings.read_gb_per_s / 0.7)
    found = {}
    for config in ("eager", "graph"):
        try:
            run = _compiled(decoder, cache, config)
            found[config] = run(batch, rows).copy()
            us = _median_us(lambda run=run: run(batch, rows), 1 if bench.device == "cpu" else _STEPS)
        except Exception as failure:
            bench.report.add(Row("decode.8B", f"context={context}", config, remark=failed(failure)))
            continue
        rate = 1e-3 * nbytes / us
        remark = "" if np.array_equal(found[config], found["eager"]) else "FAILED: not the eager step's logits"
        row = Row("decode.8B", f"context={context}", config, microseconds=us, predicted_us=predicted, remark=remark)
        bench.report.add(replace(row, gigabytes_per_s=rate, of_ceiling=rate / bench.ceilings.read_gb_per_s))


def _compiled(decoder: Decoder, cache: KvCache, config: str) -> Callable[[BatchDescription, np.ndarray], np.ndarray]:
    """The step as the engine has it, with graphs or without."""
    usual = graphs.recorder_for
    try:
        if config == "eager":
            graphs.recorder_for = lambda device: None
        forward = lambda batch, rows: decoder.forward(batch, cache, rows)  # noqa: E731
        return decoder.ops.compile(forward, [rope.rotary_dim // 2 for rope in decoder.tables.ropes])
    finally:
        graphs.recorder_for = usual


def _step(context: int, decoder: Decoder) -> BatchDescription:
    pages = np.arange(-(-context // BLOCK_SIZE))
    last = np.array([context - 1])
    frequencies = decoder.tables.frequencies(lambda: np.array([context]))
    return BatchDescription(last * 0 + 7, last, frequencies, [0, 1], [PageMap(last, [context], [pages])], BLOCK_SIZE)


def _median_us(run: Callable[[], Any], count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        run()  # ends with the logits on the host
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)
