"""Programs that are given too little memory, or what is none of theirs."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmctl.errors import OutOfMemoryError
from llmctl.kernels import _native as native_ops
from llmctl.kernels.native import _native
from llmctl.kernels.ops import StepInterrupted

HIDDEN, OUT = 256, 1024

SCRIPT = f"""
import os
import resource
import numpy as np
from llmctl.kernels.native import _native
HIDDEN, OUT = {HIDDEN}, {OUT}

def limit(extra):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    most = resource.RLIM_INFINITY if extra is None else used + extra
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

def weight(rows, columns):
    blocks = np.zeros((rows, columns // 32 * 34), np.uint8)
    packed = _native.PackedWeight("Q8_0", rows, columns)
    packed.store(blocks)
    return packed

def program():
    made = _native.Program(_native.ThreadPool(1), True)
    hidden, out = made.add_buffer(HIDDEN, False), made.add_buffer(OUT, False)
    op = _native.RowOp(_native.RowKind.Embedding)
    op.out = hidden
    op.set_table(weight(9, HIDDEN))
    segment = _native.Segment()
    segment.set_matrix(weight(OUT, HIDDEN))
    segment.out = out
    made.add_matrix_phase(False, [op], hidden, [segment])
    return made, out

def run(made, tokens):
    ids = np.zeros(tokens, np.int64)
    return made[0].run(ids, ids, [], ids[:0], [0, tokens], [], [], [], made[1])

def attempt(extra):
    made = program()
    run(made, 1)
    limit(extra)
    try:
        run(made, 2048)
    except MemoryError:
        limit(None)
        run(made, 2048)
        return 1
    return 0

ends = []
for extra in range(0, 16 << 20, 1 << 18):  # in a process each: what one frees would be room for the next
    child = os.fork()
    if child == 0:
        os._exit(attempt(extra))
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(sorted(set(ends)))
"""


@pytest.mark.unchecked
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_a_step_after_one_without_memory_has_its_room() -> None:
    """Once the limit is gone the same number of tokens runs: nothing is taken for allocated that was not."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr


def test_vectors_of_another_type_are_refused_not_copied() -> None:
    """A converted copy would be gone by the time the program reads it."""
    op = _native.RowOp(_native.RowKind.RmsNorm)
    with pytest.raises((TypeError, RuntimeError)):
        op.set_weight(np.ones(16, np.float64))


HEADS, HEAD_DIM, PAGES, IDS, HALF = 2, 16, 128, 9, 8


class Step:
    """A program that stores and attends what it embeds, and its run with a step's arrays replaced by name."""

    def __init__(self, layers: int = 1, threads: int = 1, window: int = 0) -> None:
        self.window = window
        self.program = _native.Program(_native.ThreadPool(threads), True)
        width = HEADS * HEAD_DIM
        self.hidden, self.attended = self.program.add_buffer(width, False), self.program.add_buffer(width, False)
        self.cos, self.sin = self.program.add_buffer(HALF, False), self.program.add_buffer(HALF, False)
        self.result = self.program.add_buffer(width, True)
        pages = _native.KvPages(PAGES, HEADS, HEAD_DIM, "f32")
        self.program.add_matrix_phase(False, [self._embedding(width), self._angles(), self._store(pages)], -1, [])
        for _ in range(layers):
            self.program.add_attention_phase(self.hidden, self.attended, pages, 0, HEADS, 1.0, self.window, 0.0)
        self.program.add_matrix_phase(True, [self._take()], -1, [])

    def _embedding(self, width: int) -> Any:
        table = _native.PackedWeight("F32", IDS, width)
        table.store(np.zeros((IDS, width * 4), np.uint8))
        op = _native.RowOp(_native.RowKind.Embedding)
        op.out = self.hidden
        op.set_table(table)
        return op

    def _angles(self) -> Any:
        op = _native.RowOp(_native.RowKind.Angles)
        op.out, op.out2, op.source = self.cos, self.sin, 1
        return op

    def _store(self, pages: Any) -> Any:
        op = _native.RowOp(_native.RowKind.Store)
        op.a, op.b, op.width = self.hidden, self.hidden, HEAD_DIM
        op.set_pages(pages, 0)
        return op

    def _take(self) -> Any:
        op = _native.RowOp(_native.RowKind.Take)
        op.a, op.out = self.hidden, self.result
        return op

    def run(self, tokens: int = 4, **replaced: Any) -> np.ndarray:
        arguments = {
            "token_ids": np.zeros(tokens, np.int64),
            "positions": np.arange(tokens),
            "slots": np.arange(tokens),
            "rows": np.array([tokens - 1]),
            "cu_seqlens_q": [0, tokens],
            "context_lens": [tokens],
            "block_tables": [np.arange(-(-tokens // 16))],
            "inv_freqs": [np.ones(3, np.float32), np.ones(HALF, np.float32)],
            "result": self.result,
        }
        arguments |= replaced
        of_groups = ("slots", "context_lens", "block_tables")
        return self.program.run(**{name: [value] if name in of_groups else value for name, value in arguments.items()})


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"token_ids": np.array([0, 0, IDS, 0])}, "a token id must be 0 to 8, found 9"),
        ({"token_ids": np.array([0, 0, -1, 0])}, "a token id must be 0 to 8, found -1"),
        ({"positions": np.array([0, 1, 2, -3])}, "a position must be 0 to"),
        ({"positions": np.arange(3)}, "one position a token"),
        ({"slots": np.arange(3)}, "one slot a token"),
        ({"slots": np.array([0, 1, 2, PAGES * 16])}, "a slot must be -1 to 2047, found 2048"),
        ({"slots": np.array([0, 1, 2, -2])}, "a slot must be -1 to 2047, found -2"),
        ({"rows": np.array([4])}, "a row of logits must be 0 to 3, found 4"),
        ({"block_tables": [np.array([PAGES])]}, "a page of a block table must be 0 to 127, found 128"),
        ({"block_tables": [np.array([-1])]}, "a page of a block table must be 0 to 127, found -1"),
        ({"block_tables": [np.arange(0)]}, "a block table is too short"),
        ({"context_lens": [17]}, "a block table is too short"),
        ({"context_lens": [3]}, "more queries than keys"),
        ({"cu_seqlens_q": [0, 5]}, "cu_seqlens_q must cover the tokens"),
        ({"inv_freqs": [np.ones(3, np.float32)]}, "frequencies of every rope are needed"),
        ({"inv_freqs": [np.ones(3, np.float32)] * 2}, "not as many as the rope turns pairs"),
        ({"inv_freqs": [np.ones(3, np.float32), np.ones((3, HALF), np.float32)]}, "one row of frequencies a token"),
        ({"result": 5}, "none of the buffers"),
        ({"result": 0, "rows": np.zeros(5, np.int64)}, "more rows than tokens"),
    ],
)
def test_a_step_that_reads_beyond_its_memory_is_refused(replaced: dict[str, Any], message: str) -> None:
    step = Step()
    step.run()
    with pytest.raises(ValueError, match=message):
        step.run(**replaced)
    step.run(slots=np.array([-1, 0, 1, PAGES * 16 - 1]), block_tables=[np.array([PAGES - 1, PAGES])])


def test_pages_that_no_query_sees_may_be_gone() -> None:
    """With a window of 20 the step's first query, at position 60, sees tokens 41 … 60: pages 0 and 1 are not read."""
    step = Step(window=20)
    here = {"slots": np.arange(4), "context_lens": [64]}
    step.run(**here, block_tables=[np.array([-1, -1, 5, 6])])
    with pytest.raises(ValueError, match="a page of a block table must be 0 to 127, found -1"):
        step.run(**here, block_tables=[np.array([-1, -1, -1, 6])])
    with pytest.raises(ValueError, match="slots, context lengths and block tables of every group are needed"):
        step.program.run(*[np.zeros(1, np.int64)] * 2, [], np.zeros(1, np.int64), [0, 1], [], [], [], step.result)


LAYERS, LONG = 400, PAGES * 16  # a step of seconds


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_poll_raises_ends_the_step(threads: int) -> None:
    step = Step(LAYERS, threads)
    step.run()
    polled = []

    def poll() -> None:
        polled.append(time.monotonic())
        if len(polled) == 2:
            raise StepInterrupted

    begin = time.monotonic()
    with pytest.raises(StepInterrupted):
        step.run(LONG, poll=poll)
    assert polled[0] - begin > 0.03
    assert polled[1] - polled[0] > 0.03
    assert time.monotonic() - polled[1] < 2
    assert np.array_equal(step.run(), np.zeros((1, HEADS * HEAD_DIM)))


def test_a_second_thread_is_refused_while_a_step_runs() -> None:
    step = Step(LAYERS)
    refused: list[str] = []

    def enter() -> None:
        try:
            step.run()
        except RuntimeError as error:
            refused.append(str(error))

    def poll() -> None:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        raise StepInterrupted

    with pytest.raises(StepInterrupted):
        step.run(LONG, poll=poll)
    assert refused == ["the program is running already, in another thread"]
    step.run()


@pytest.mark.skipif(sys.platform != "linux", reason="needs setitimer")
@pytest.mark.unchecked  # by the clock
def test_a_signal_handler_ends_a_long_step() -> None:
    step = Step(LAYERS, threads=2)

    def leave(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, leave)
    try:
        begin = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            step.run(LONG, poll=lambda: None)
        assert time.monotonic() - begin < 2
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_a_step_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broke:
        def __init__(self, *_: Any) -> None:
            pass

        def run(self, *_: Any) -> None:
            raise MemoryError

    monkeypatch.setattr(native_ops._native, "Program", Broke)
    monkeypatch.setattr(native_ops, "build", lambda *_: 0)
    run = native_ops.NativeOps(1).compile(lambda batch, rows: None, [])
    batch = native_ops._symbolic_batch(native_ops.Graph(), [])
    with pytest.raises(OutOfMemoryError, match="no memory to compute 7 tokens at once"):
        run(replace(batch, token_ids=np.zeros(7, np.int64)), np.zeros(1, np.int64))


def product(program: Any, columns: int, rows: int) -> tuple[Any, int]:
    """A segment of random Q8_0 weights and the buffer it writes."""
    random, blocks = np.random.default_rng(rows), columns // 32
    stored = np.empty((rows, blocks, 34), np.uint8)
    stored[..., :2] = np.full((rows, blocks, 1), 0.01, np.float16).view(np.uint8)
    stored[..., 2:] = random.integers(0, 256, (rows, blocks, 32))
    weight = _native.PackedWeight("Q8_0", rows, columns)
    weight.store(stored.reshape(rows, -1))
    segment = _native.Segment()
    segment.set_matrix(weight)
    segment.out = program.add_buffer(rows, False)
    return segment, segment.out


@pytest.mark.parametrize("int8", [True, False])
def test_products_have_the_same_bits_for_any_threads(int8: bool) -> None:
    """Few rows, which every worker computes for itself, and many, which are shared out."""

    def outputs(threads: int, tokens: int) -> np.ndarray:
        program = _native.Program(_native.ThreadPool(threads), int8)
        table = _native.PackedWeight("F32", IDS, 64)
        table.store(np.random.default_rng(1).normal(size=(IDS, 64)).astype(np.float32).view(np.uint8))
        op = _native.RowOp(_native.RowKind.Embedding)
        op.out = program.add_buffer(64, False)
        op.set_table(table)
        wide, wide_out = product(program, 64, 1024)
        narrow, result = product(program, 1024, 48)
        program.add_matrix_phase(False, [op], op.out, [wide])
        program.add_matrix_phase(False, [], wide_out, [narrow])
        ids, all_rows = np.arange(tokens) % IDS, np.arange(tokens)
        return program.run(ids, ids, [], all_rows, [0, tokens], [], [], [], result).copy()

    for tokens in (1, 3, 40, 200):
        alone = outputs(1, tokens)
        assert np.isfinite(alone).all()
        for threads in (2, 3):
            np.testing.assert_array_equal(outputs(threads, tokens), alone)


def test_only_long_steps_of_the_main_thread_are_interrupted() -> None:
    """Others would stop for the GIL, and run no signal handler."""
    ops, polls = native_ops.NativeOps(1), []
    thread = threading.Thread(target=lambda: polls.append(ops._poll_for(512)))
    thread.start()
    thread.join()
    assert (polls, ops._poll_for(4)) == ([None], None)
    poll = ops._poll_for(5)
    poll()
    ops.interrupt()
    with pytest.raises(StepInterrupted):
        poll()
