"""The forward pass over calibration text, watched: the decoder's own layers over ops that note what their projections read.

Sequences are whole and independent, so a layer needs no cache: attention reads the keys and values that the batch itself makes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.attention._reference import attention_of_sequence
from llmctl.kernels.moe import Experts, Routing
from llmctl.kernels.moe._reference import route
from llmctl.runtime.cache.memory import LayerShape
from llmctl.runtime.engine.model_runner import describe
from llmctl.runtime.engine.scheduler import ScheduledChunk
from llmctl.runtime.engine.sequence import Sequence
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.decoder import DecoderLayer
from llmctl.runtime.models.rotary_tables import RotaryTables
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.sampler import Sampler

See = Callable[[str, torch.Tensor], None]
"""Called with the name of a projection's weight and its input, float32 [T, K]."""


class SeenEnough(Exception):
    """Raised by a `See` to end a forward pass whose rest nobody needs."""


@dataclass
class HeldKeys:
    """Keys and values [T, num_kv_heads, head_dim] of one layer. latent: where there are no values, how many columns of the keys
    they are."""

    latent: int | None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


class CaptureOps(ReferenceOps):
    """The reference ops in float32, one thread, where every prepared matrix knows the name it was read by.

    reading: name of the tensor that the next prepared matrix comes from; set by whoever reads it.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device, "float32", 1)
        self.reading = ""
        self._names: dict[int, tuple[str, torch.Tensor]] = {}
        self._local = threading.local()

    def prepare_weight(self, weight: Any) -> torch.Tensor:
        prepared = super().prepare_weight(weight)
        self._names[id(prepared)] = (self.reading, prepared)  # which is kept, so that its id stays its own
        return prepared

    def bring(self, array: np.ndarray) -> torch.Tensor:
        """To the device."""
        return self._upload(array)

    def forget(self) -> None:
        """Let go of the matrices prepared so far."""
        self._names.clear()

    @contextmanager
    def watched(self, see: See) -> Iterator[None]:
        """In this thread, within: the inputs of named projections go to `see`."""
        self._local.see = see
        try:
            yield
        finally:
            self._local.see = None

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        see = getattr(self._local, "see", None)
        if see is not None and id(weight) in self._names:
            see(self._names[id(weight)][0], x)
        return functional.linear(x, weight, bias)

    def gated_activation(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:  # type: ignore[override]
        """As the reference's, in the gate's memory where it can be: this is where a layer has most numbers at once."""
        if activation != "silu":
            return super().gated_activation(gate, up, activation)
        return functional.silu(gate, inplace=True).mul_(up)

    def moe(  # type: ignore[override]
        self, x: torch.Tensor, router_logits: torch.Tensor, experts: Experts, routing: Routing, activation: str
    ) -> torch.Tensor:
        """As the reference's, through `linear`, so that every expert's input is seen."""
        chosen, weights = route(router_logits, routing)
        y = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, ranks = (chosen == expert).nonzero(as_tuple=True)
            biases = (None if one is None else one[expert] for one in (experts.gate_bias, experts.up_bias, experts.down_bias))
            gate_bias, up_bias, down_bias = biases
            own = x[tokens]
            sides = self.linear(own, experts.gate[expert], gate_bias), self.linear(own, experts.up[expert], up_bias)
            made = self.linear(self.gated_activation(*sides, activation), experts.down[expert], down_bias)
            y.index_add_(0, tokens, made * weights[tokens, ranks, None])
        return y

    @staticmethod
    def store_kv(  # type: ignore[override]
        keys: torch.Tensor, values: torch.Tensor | None, pages: HeldKeys, batch: BatchDescription
    ) -> None:
        pages.keys, pages.values = keys, keys[..., : pages.latent] if values is None else values

    @staticmethod
    def attention(  # type: ignore[override]
        queries: torch.Tensor,
        pages: HeldKeys,
        batch: BatchDescription,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        anchors: int = 0,
    ) -> torch.Tensor:
        assert anchors == 0, "a whole text has no anchors"
        keys, values = pages.keys, pages.values
        assert keys is not None
        assert values is not None
        out = queries.new_empty(*queries.shape[:2], values.shape[-1])
        for begin, end in zip(batch.cu_seqlens_q, batch.cu_seqlens_q[1:], strict=False):
            own = slice(begin, end)
            parts, unseen = (queries[own], keys[own], values[own]), sliding_window is not None and sliding_window < end - begin
            if softcap is None and sinks is None and not unseen:
                out[own] = _causal(*parts, scale)
            else:
                out[own] = attention_of_sequence(*parts, scale, sliding_window, softcap, sinks)
        return out


def _causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """[t, heads, head_dim] each → [t, num_heads, head_dim]."""
    heads = (part.transpose(0, 1)[None] for part in (queries, keys, values))
    grouped = queries.shape[1] != keys.shape[1]
    return functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=grouped)[0].transpose(0, 1)


class OwnKeys:
    """What stands for a KV cache: a place for the keys and values of the layer under way."""

    def __init__(self, config: ModelConfig) -> None:
        self._layers = config.kv_layers()

    def layer(self, index: int) -> HeldKeys:
        """As `KvCache.layer`."""
        return HeldKeys(self._layers[index].latent)

    def shape(self, index: int) -> LayerShape:
        """As `KvCache.shape`."""
        return self._layers[index]

    def group(self, index: int) -> int:
        """As `KvCache.group`: nothing is paged."""
        return 0

    def keep_queries(self, index: int, queries: torch.Tensor, batch: BatchDescription) -> None:
        """As `KvCache.keep_queries`: nobody asks for them."""


class Batch:
    """Some whole sequences, laid end to end, with their positions and angles."""

    def __init__(self, ops: CaptureOps, config: ModelConfig, rows: list[list[int]]) -> None:
        self.tables = RotaryTables(ops, config)
        params = SamplingParams(temperature=0)
        chunks = [ScheduledChunk(Sequence(ids, params, Sampler(params)), len(ids)) for ids in rows]
        self._config = config
        self.description = describe(chunks, (), self.tables).convert(ops.bring)
        self.tables.prepare(self.description)
        self.token_ids = np.concatenate([np.array(ids, np.int64) for ids in rows])

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.token_ids)

    def forward(self, layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] through one layer."""
        return layer.forward(x, self.description, OwnKeys(self._config), self.tables)

    def attend(self, layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] through the first half of a layer whose halves follow each other."""
        return layer.attend(x, self.description, OwnKeys(self._config), self.tables)[0]

