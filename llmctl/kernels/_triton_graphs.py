"""Steps that decode, captured as CUDA graphs: one launch replays the kernels of a whole forward pass.

A graph belongs to a number of sequences (rounded up; those that are missing store nothing), the tokens that each has, and a width
of block tables. All that changes from step to step lies in one block of memory (`StepState`), brought over with one copy. What is
no such step, a prompt above all, runs kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from llmctl.errors import OutOfMemoryError
from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.attention._triton_batch import SHORT, DevicePageMap, to_device
from llmctl.kernels.triton_lib.launch import power_of_two

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Sequences of a graph. More run kernel by kernel: launches no longer matter there."""
_LEAST_PAGES = 64
_WARM_UPS = 2
_ALIGNMENT = 16
_log = logging.getLogger(__name__)

Forward = Callable[[BatchDescription, torch.Tensor], torch.Tensor]


class Recorder(Protocol):
    """What can record kernels."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Run once or more, and record. Returns what replays it, and where a replay leaves the result. RuntimeError where that
        cannot be done."""

    def to_host(self, values: torch.Tensor) -> np.ndarray:
        """The numbers, once they are there."""


class CudaRecorder:
    """CUDA graphs of the current device, which share their memory: one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):  # every kernel is compiled and every library is loaded before the capture
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        self._pool = graph.pool()
        return graph.replay, result

    @staticmethod
    def to_host(values: torch.Tensor) -> np.ndarray:
        kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        kept.copy_(values, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return kept.numpy()


def recorder_for(device: str) -> Recorder | None:
    """None where there are no graphs: on a CPU."""
    return CudaRecorder() if device.startswith("cuda") else None


class StepState:
    """Named arrays in one block of memory, on the host and on the device.

    arrays: numpy, to be written to; tensors: the same after `send`.
    """

    def __init__(self, shapes: dict[str, tuple[tuple[int, ...], type]], device: str) -> None:
        sizes = {name: int(np.prod(shape)) * np.dtype(kind).itemsize for name, (shape, kind) in shapes.items()}
        starts, total = {}, 0
        for name, size in sizes.items():
            starts[name], total = total, total + -(-size // _ALIGNMENT) * _ALIGNMENT
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self.arrays: dict[str, np.ndarray] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        for name, (shape, kind) in shapes.items():
            part = slice(starts[name], starts[name] + sizes[name])
            self.arrays[name] = self._host.numpy()[part].view(kind).reshape(shape)
            dtype = torch.from_numpy(np.empty(0, kind)).dtype
            self.tensors[name] = self._device[part].view(dtype).view(shape)

    def send(self) -> None:
        """Bring the arrays to the device."""
        self._device.copy_(self._host, non_blocking=True)


@dataclass(frozen=True)
class StepShape:
    """What a graph is captured for. queries: tokens of each sequence. pages: width of the block tables of every page map.
    inv_freqs: numbers of the frequencies of every rope, and whether each token has its own. hidden: numbers of a token that come
    from layers elsewhere, 0 for none."""

    sequences: int
    queries: int
    pages: tuple[int, ...]
    inv_freqs: tuple[tuple[int, bool], ...]
    hidden: int = 0

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.sequences * self.queries


def shape_of(batch: BatchDescription, rows: np.ndarray) -> StepShape | None:
    """The graph that a batch of numpy arrays can be run by, None where it is no decoding of few sequences."""
    counts = np.diff(batch.cu_seqlens_q)
    if not len(counts) or len(counts) > SIZES[-1] or counts.min() != counts.max() or counts[0] > SHORT:
        return None
    if not np.array_equal(rows, np.arange(len(batch.token_ids))):
        return None
    widest = (max(len(table) for table in page_map.block_tables) for page_map in batch.page_maps)
    pages = tuple(power_of_two(width, _LEAST_PAGES) for width in widest)
    inv_freqs = tuple((values.shape[-1], values.ndim == 2) for values in batch.inv_freqs)
    hidden = 0 if batch.hidden is None else batch.hidden.shape[1]
    return StepShape(next(size for size in SIZES if size >= len(counts)), int(counts[0]), pages, inv_freqs, hidden)


class _Step:
    """One shape's memory, and its graph once it is captured."""

    def __init__(self, shape: StepShape, block_size: int, device: str) -> None:
        self.shape = shape
        self.state = StepState(_arrays_of(shape), device)
        self.batch, self.rows = self._describe(block_size), self.state.tensors["rows"]
        self.replay: Callable[[], None] | None = None
        self.logits: torch.Tensor | None = None
        self._clear()

    def _describe(self, block_size: int) -> BatchDescription:
        """What kernels read, and no numbers of the host: those would be frozen into the graph."""
        tensors, queries = self.state.tensors, self.shape.queries
        unknown: Any = None

        def page_map(i: int) -> DevicePageMap:
            own = (tensors[f"{name}{i}"] for name in ("lens", "tables"))
            return DevicePageMap(tensors[f"slots{i}"], unknown, unknown, *own, tensors["starts"], queries, 0)

        return BatchDescription(
            tensors["token_ids"],
            tensors["positions"],
            [tensors[f"inv_freq{i}"] for i in range(len(self.shape.inv_freqs))],
            unknown,
            [page_map(i) for i in range(len(self.shape.pages))],
            block_size,
            hidden=tensors.get("hidden"),
        )

    def _clear(self) -> None:
        """No sequence at all: nothing is stored, and each reads one token of page 0."""
        for name, array in self.state.arrays.items():
            array[...] = -1 if name.startswith("slots") else 1 if name.startswith("lens") else 0
        self.state.arrays["starts"][:] = np.arange(self.shape.sequences + 1) * self.shape.queries
        self.state.arrays["rows"][:] = np.arange(self.shape.tokens)
        self.state.send()

    def fill(self, batch: BatchDescription) -> None:
        """Bring a batch of numpy arrays of this shape, or of fewer sequences, to the device."""
        arrays, count = self.state.arrays, len(batch.token_ids)
        arrays["token_ids"][:count], arrays["positions"][:count] = batch.token_ids, batch.positions
        arrays["token_ids"][count:] = arrays["positions"][count:] = 0
        if batch.hidden is not None:
            arrays["hidden"][:count], arrays["hidden"][count:] = batch.hidden, 0
        for i, values in enumerate(batch.inv_freqs):
            own = values.ndim == 2
            arrays[f"inv_freq{i}"][: count if own else None] = values
        for i, page_map in enumerate(batch.page_maps):
            sequences = len(page_map.context_lens)
            slots, lens, tables = (arrays[f"{name}{i}"] for name in ("slots", "lens", "tables"))
            slots[:count], slots[count:] = page_map.slot_mapping, -1
            lens[:sequences], lens[sequences:] = page_map.context_lens, 1
            tables[sequences:] = 0
            for row, table in zip(tables, page_map.block_tables, strict=False):
                row[: len(table)], row[len(table) :] = table, -1
        self.state.send()


def _arrays_of(shape: StepShape) -> dict[str, tuple[tuple[int, ...], type]]:
    tokens, sequences = shape.tokens, shape.sequences
    arrays: dict[str, tuple[tuple[int, ...], type]] = {
        "token_ids": ((tokens,), np.int64),
        "positions": ((tokens,), np.int64),
        "rows": ((tokens,), np.int64),
        "starts": ((sequences + 1,), np.int32),
    }
    if shape.hidden:
        arrays["hidden"] = ((tokens, shape.hidden), np.float32)
    for i, (half, own) in enumerate(shape.inv_freqs):
        arrays[f"inv_freq{i}"] = ((tokens, half) if own else (half,), np.float32)
    for i, pages in enumerate(shape.pages):
        arrays[f"slots{i}"] = ((tokens,), np.int64)
        arrays[f"lens{i}"] = ((sequences,), np.int32)
        arrays[f"tables{i}"] = ((sequences, pages), np.int32)
    return arrays


class Steps:
    """A forward pass, ready to run: by graphs where it can be, else kernel by kernel. `reason`: why steps that decode do not run
    by graphs, None while they do."""

    def __init__(self, forward: Forward, device: str, upload: Callable[[np.ndarray], torch.Tensor]) -> None:
        """forward: float32 logits of a batch on the device."""
        self._forward, self._device, self._upload = forward, device, upload
        self._recorder = recorder_for(device)
        self.reason = None if self._recorder else f"{device} has none"
        self._steps: dict[StepShape, _Step] = {}

    @property
    def captured(self) -> list[StepShape]:
        """The shapes of the graphs there are."""
        return [shape for shape, step in self._steps.items() if step.replay is not None]

    def run(self, batch: BatchDescription, rows: np.ndarray) -> np.ndarray:
        """As the function that `Ops.compile` returns. OutOfMemoryError tells what would take less."""
        try:
            shape = shape_of(batch, rows) if self._recorder is not None else None
            step = self._step(shape, batch.block_size) if shape is not None else None
            if step is None:
                return self._forward(to_device(batch, self._upload), self._upload(rows)).cpu().numpy()
            step.fill(batch)
            step.replay()
            return self._recorder.to_host(step.logits[: len(rows)])
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"no memory on {self._device} to compute {len(batch.token_ids)} tokens at once: a lower --gpu-memory-utilization "
                "leaves more beside the cache, fewer --gpu-layers leave more beside the weights"
            ) from error

    def _step(self, shape: StepShape, block_size: int) -> _Step | None:
        """The step of this shape, captured; None where that failed."""
        if shape not in self._steps:
            step = self._steps[shape] = _Step(shape, block_size, self._device)
            try:
                step.replay, step.logits = self._recorder.record(lambda: self._forward(step.batch, step.rows))
            except torch.OutOfMemoryError:
                self._give_up("no memory is left for them")
            except RuntimeError as error:
                self._give_up(str(error).splitlines()[0])
        step = self._steps[shape]
        return step if step.replay is not None else None

    def _give_up(self, reason: str) -> None:
        """What was captured before goes on being used."""
        if self.reason is None:
            _log.warning("decoding without a CUDA graph, kernel by kernel: %s", reason)
        self.reason = reason
