"""Steps by graphs, with stand-ins for what only a GPU has: what is captured when, and what a replay sees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from llmctl.errors import OutOfMemoryError
from llmctl.kernels import _triton_graphs as graphs
from llmctl.kernels._triton_graphs import CudaRecorder, Steps, shape_of
from llmctl.kernels.attention import BatchDescription, PageMap


class Replaying:
    """Records by keeping what to run; a replay runs it again and leaves the result where the first one was."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.records, self.replays, self.failure = 0, 0, failure

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.records += 1
        if self.failure is not None:
            raise self.failure
        kept = run().clone()

        def replay() -> None:
            self.replays += 1
            kept.copy_(run())

        return replay, kept

    @staticmethod
    def to_host(values: torch.Tensor) -> np.ndarray:
        return values.numpy().copy()


def forward(batch: BatchDescription, rows: torch.Tensor) -> torch.Tensor:
    """Everything that a step brings, in numbers a test can tell apart: [rows, 6]."""
    tokens, page_map = len(batch.token_ids), batch.page_maps[0]
    sequence = torch.bucketize(torch.arange(tokens), page_map.starts[1:], right=True)
    columns = [
        batch.token_ids,
        batch.positions,
        page_map.slot_mapping,
        page_map.lens[sequence],
        page_map.tables[sequence].clamp(min=0).sum(1),  # kernels do not look at pages a sequence does not have
        (batch.positions[:, None] * batch.inv_freqs[0]).sum(1),
    ]
    return torch.stack([column.float() for column in columns], dim=1)[rows]


def step(*contexts: int, queries: int = 1, own_freqs: bool = False) -> tuple[BatchDescription, np.ndarray]:
    """Sequences of these lengths, each with its last tokens."""
    positions = np.concatenate([np.arange(n - queries, n) for n in contexts])
    tables = [np.arange(7 * i, 7 * i + -(-n // 16)) for i, n in enumerate(contexts)]
    slots = np.concatenate([t[np.arange(n - queries, n) // 16] * 16 for t, n in zip(tables, contexts, strict=True)])
    freqs = np.array([0.5, 0.25], np.float32)
    freqs = np.tile(freqs, (len(positions), 1)) * positions[:, None].astype(np.float32) if own_freqs else freqs
    starts = list(range(0, len(positions) + 1, queries))
    batch = BatchDescription(positions + 1000, positions, [freqs], starts, [PageMap(slots, list(contexts), tables)], 16)
    return batch, np.arange(len(positions))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Steps, Any]]:
    """Steps on the CPU over a recorder, or none."""

    def build(recorder: Any = None) -> tuple[Steps, Any]:
        monkeypatch.setattr(graphs, "recorder_for", lambda device: recorder)
        return Steps(forward, "cpu", torch.from_numpy), recorder

    return build


STEPS = [
    step(5),
    step(21, 3, 40),
    step(22, 4, 41),
    step(23),
    step(30, 12, 9, 8),
    step(9, 33, queries=4),
    step(50, queries=4),
    step(6, own_freqs=True),
    step(90, 7, own_freqs=True),
    step(40, 20, 8, queries=8),
]


def test_every_replay_gives_what_kernel_by_kernel_gives(make: Callable[..., Any]) -> None:
    eager, _ = make(None)
    captured, recorder = make(Replaying())
    for number, (batch, rows) in enumerate(STEPS):
        np.testing.assert_array_equal(captured.run(batch, rows), eager.run(batch, rows), err_msg=str(number))
    assert recorder.replays == len(STEPS)
    sizes = {(shape.sequences, shape.queries) for shape in captured.captured}
    assert sizes == {(1, 1), (4, 1), (2, 4), (1, 4), (2, 1), (4, 8)}
    assert captured.reason is None
    assert eager.captured == []
    assert eager.reason == "cpu has none"


def test_a_shape_is_captured_once_and_for_wider_tables_again(make: Callable[..., Any]) -> None:
    captured, recorder = make(Replaying())
    for context in (5, 800, 1024):
        captured.run(*step(context))
    assert recorder.records == 1
    captured.run(*step(1025))
    captured.run(*step(5))
    assert [shape.pages for shape in captured.captured] == [(64,), (128,)]
    assert recorder.records == 2


def test_prompts_and_mixed_steps_have_no_graph() -> None:
    batch, rows = step(9, 33, queries=4)
    assert shape_of(batch, rows) is not None
    assert shape_of(batch, rows[3::4]) is None, "only some logits are wanted"
    assert shape_of(*step(40, queries=9)) is None, "a prompt"
    assert shape_of(*step(*[3] * 65)) is None, "many sequences"
    assert shape_of(replace(batch, cu_seqlens_q=[0, 3, 8]), rows) is None, "sequences of two kinds"


def test_a_capture_that_fails_is_told_once_and_steps_go_on(make: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    captured, recorder = make(Replaying(RuntimeError("operation not permitted when stream is capturing\nmore")))
    eager, _ = make(None)
    for each in (step(5), step(6), step(6, 7)):
        np.testing.assert_array_equal(captured.run(*each), eager.run(*each))
    assert captured.reason == "operation not permitted when stream is capturing"
    assert [record.message for record in caplog.records] == [
        "decoding without a CUDA graph, kernel by kernel: operation not permitted when stream is capturing"
    ]
    assert recorder.records == 2, "a shape that failed is not tried again"


def test_no_memory_for_a_graph_is_its_reason_and_no_memory_at_all_an_error(make: Callable[..., Any]) -> None:
    captured, _ = make(Replaying(torch.OutOfMemoryError("CUDA out of memory")))
    captured.run(*step(5))
    assert captured.reason == "no memory is left for them"

    def fails(batch: BatchDescription, rows: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemoryError, match=r"to compute 1 tokens at once.*--gpu-memory-utilization"):
        Steps(fails, "cpu", torch.from_numpy).run(*step(5))


def test_cuda_warms_up_aside_then_captures_into_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of torch.cuda and their order; the second graph takes the first one's memory."""
    calls: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            calls.append("wait")

        def synchronize(self) -> None:
            calls.append("synchronize")

    class Graph:
        def pool(self) -> str:
            return "pool"

        def replay(self) -> None:
            calls.append("replay")

    @contextlib.contextmanager
    def stream(aside: Stream) -> Iterator[None]:
        calls.append("aside")
        yield
        calls.append("back")

    @contextlib.contextmanager
    def graph(recorded: Graph, pool: str | None) -> Iterator[None]:
        calls.append(f"capture {pool}")
        yield
        calls.append("captured")

    current = Stream()
    for name, value in {"Stream": Stream, "CUDAGraph": Graph, "stream": stream, "graph": graph}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    recorder = CudaRecorder()

    def run() -> torch.Tensor:
        calls.append("run")
        return torch.ones(2)

    replay, result = recorder.record(run)
    replay()
    assert torch.equal(result, torch.ones(2))
    assert calls == ["wait", "aside", "run", "run", "back", "wait", "capture None", "run", "captured", "replay"]
    calls.clear()
    recorder.record(run)
    assert "capture pool" in calls
