"""Calibration text on its way through a model, one layer after the other, with the model on disk.

Only the layer under way is in memory. What its projections read is collected as often as is asked for, with whatever stands for
their weights by then, before the text moves on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmctl.errors import FormatError, LlmctlError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.quant.activations import Activations
from llmctl.quant.capture import Batch, CaptureOps, SeenEnough
from llmctl.quant.statistics import Statistics
from llmctl.quant.workers import Workers
from llmctl.runtime.checkpoint.names import take_rows
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.machine import return_free_memory
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.decoder import DecoderLayer, embedded
from llmctl.runtime.models.weights import ModelWeights

_EMBEDDING, _POSITIONS = "model.embed_tokens.weight", "model.embed_positions.weight"


@dataclass
class LayerWeights:
    """The tensors of one layer by Hugging Face name; `replaced` ones stand in for those of the checkpoint.

    For the decoder it is what `ModelWeights` is.
    """

    source: ModelWeights
    ops: CaptureOps
    index: int
    replaced: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.source.config

    @property
    def checkpoint(self) -> Any:
        """The files."""
        return self.source.checkpoint

    def fork(self) -> LayerWeights:
        """The layer as it stands, for a trial."""
        return LayerWeights(self.source, self.ops, self.index, dict(self.replaced))

    def full(self, name: str) -> str:
        """The whole name of a tensor or module of this layer."""
        return f"model.layers.{self.index}.{name}"

    def read(self, name: str) -> Any:
        """As `ModelWeights.read`; the ops are told whose matrix they prepare next."""
        self.ops.reading = name
        return self.replaced[name] if name in self.replaced else self.source.read(name)

    def release(self, name: str) -> None:
        """As `ModelWeights.release`."""
        if name not in self.replaced:
            self.source.release(name)

    def matrix(self, module: str) -> torch.Tensor:
        """The weight of a module of this layer as it stands, float32 [N, K]. FormatError if a number is not finite."""
        name = self.full(module) + ".weight"
        values = np.array(dequantize(self.read(name)), np.float32)
        self.release(name)
        if not np.isfinite(values).all():
            row, column = np.argwhere(~np.isfinite(values))[0]
            raise FormatError(
                f"{self.checkpoint.path}: tensor {quoted(name)} holds NaN or infinity in row {row}, column {column}: "
                "weights must be finite, so the source is damaged"
            )
        return torch.from_numpy(values)

    def build(self) -> DecoderLayer:
        """The layer as it stands, ready to run."""
        self.ops.forget()
        return DecoderLayer(self.ops, self.config, self.config.layers[self.index], self, self.index)


class Walk:
    """rows: token ids. batch_tokens: most tokens of rows that run together. lanes: threads, each with statistics of its own
    while it collects. spill: folder for the activations, None to keep them in memory. device: where layers run and sums are
    made; activations rest, and statistics end, in the machine's memory."""

    def __init__(
        self,
        weights: ModelWeights,
        rows: list[list[int]],
        *,
        batch_tokens: int,
        lanes: int,
        spill: Path | None = None,
        device: str = "cpu",
    ) -> None:
        self.weights, self.ops, self.lanes = weights, CaptureOps(device), lanes
        self.batches = [Batch(self.ops, weights.config, part) for part in _in_batches(rows, batch_tokens)]
        self._half_way = False
        self.activations = Activations([batch.num_tokens for batch in self.batches], weights.config.hidden_size, spill)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(batch.num_tokens for batch in self.batches)

    def embed(self, table: np.ndarray | None = None) -> None:
        """The text's embeddings, by another table where one is given. Only the rows that occur in the text are read."""
        config, table = self.weights.config, self.weights.read(_EMBEDDING) if table is None else table
        positions = self.ops.prepare_weight(self.weights.read(_POSITIONS)) if config.learned_positions else None
        for index, batch in enumerate(self.batches):
            used, places = np.unique(batch.token_ids, return_inverse=True)
            rows, places = self.ops.prepare_weight(take_rows(table, used)), self.ops.bring(places)
            x = embedded(self.ops, config, places, rows, batch.description.positions, positions)
            self.activations.write(index, x)
        self.weights.release(_EMBEDDING)
        self.ops.forget()

    def layer(self, index: int) -> LayerWeights:
        """A layer's tensors, as the checkpoint has them."""
        return LayerWeights(self.weights, self.ops, index)

    def collect(self, layer: LayerWeights, modules: Sequence[str], *, products: bool = True) -> dict[str, Statistics]:
        """Statistics of the inputs of these modules, the layer as it stands; none of those that no token reached."""
        built = layer.build()
        wanted = {layer.full(module) + ".weight": module for module in modules}
        lanes = list(Workers(self.lanes).in_order(
            lambda lane: self._collect_lane(built, wanted, lane, products), range(self.lanes)
        ))  # fmt: skip
        self.ops.forget()
        return_free_memory()
        seen = {module: [lane[module] for lane in lanes if module in lane] for module in modules}
        found = {module: _merged(parts) for module, parts in seen.items() if parts}
        for module, statistics in found.items():
            if not statistics.is_finite:
                raise LlmctlError(
                    f"what {quoted(layer.full(module))} reads is NaN or infinite on the calibration text: the weights before it "
                    "are broken, or overflow"
                )
        return found

    def _collect_lane(
        self, built: DecoderLayer, wanted: dict[str, str], lane: int, products: bool
    ) -> dict[str, Statistics]:
        found: dict[str, Statistics] = {}
        for index in range(lane, len(self.batches), self.lanes):
            missing = set(wanted)

            def see(name: str, x: torch.Tensor, missing: set[str] = missing) -> None:
                if name not in missing:
                    return
                missing.discard(name)
                module = wanted[name]
                found.setdefault(module, Statistics(x.shape[1], products=products, device=self.ops.device)).add(x)
                if not missing:
                    raise SeenEnough

            with self.ops.watched(see):
                try:
                    self._forward(built, index)
                except SeenEnough:
                    continue
        return found

    def entering(self, index: int) -> torch.Tensor:
        """What comes into the layer under way, of one batch, on the device."""
        return self.activations.read(index).to(self.ops.device)

    def _forward(self, built: DecoderLayer, index: int) -> torch.Tensor:
        """A batch through what is left of the layer."""
        x = self.entering(index)
        return built.feed_forward(x) if self._half_way else self.batches[index].forward(built, x)

    def advance(self, layer: LayerWeights) -> None:
        """The text through the layer, or the rest of it, as it stands."""
        built = layer.build()
        self._replace(lambda index: self._forward(built, index))
        self._half_way = False

    def advance_half(self, layer: LayerWeights) -> None:
        """The text through the attention of the layer as it stands, which then need not be computed again. Nothing happens in
        models whose halves read the same input, or when it was done before."""
        if self._half_way or layer.config.parallel:
            return
        built = layer.build()
        self._replace(lambda index: self.batches[index].attend(built, self.entering(index)))
        self._half_way = True

    def _replace(self, forward: Callable[[int], torch.Tensor]) -> None:
        def run(lane: int) -> None:
            for index in range(lane, len(self.batches), self.lanes):
                self.activations.write(index, forward(index))

        list(Workers(self.lanes).in_order(run, range(self.lanes)))
        self.ops.forget()

    def outputs(self, layer: LayerWeights, batches: Collection[int]) -> list[torch.Tensor]:
        """What comes next, a half of the layer or, where halves read the same input, all of it, makes of some batches; nothing
        moves on."""
        built = layer.build()

        def made(index: int) -> torch.Tensor:
            if self._half_way or layer.config.parallel:
                return self._forward(built, index)
            return self.batches[index].attend(built, self.entering(index))

        found = list(Workers(self.lanes).in_order(made, batches))
        self.ops.forget()
        return_free_memory()
        return found


def _in_batches(rows: list[list[int]], most: int) -> list[list[list[int]]]:
    """Rows in order, as many together as have at most `most` tokens."""
    found: list[list[list[int]]] = []
    for row in rows:
        if not found or sum(map(len, found[-1])) + len(row) > most:
            found.append([])
        found[-1].append(row)
    return found


def _merged(parts: list[Statistics]) -> Statistics:
    """The sums of all lanes, added in their order; the parts are used up."""
    total = parts[0]
    for part in parts[1:]:
        total.merge(part)
    total.finish()
    return total


@contextmanager
def one_thread_each(fast: bool) -> Iterator[None]:
    """Within: torch computes on one thread a call (the threads are ours) and, if `fast`, multiplies in bfloat16 with sums in
    float32, which processors that have it do several times as fast."""
    threads, precision = torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision
    torch.set_num_threads(1)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if fast else precision
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.matmul.fp32_precision = precision
