"""Programs that are given too little memory, or what is none of theirs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from llmctl.kernels.native import _native

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
    return made[0].run(ids, ids, ids, ids[:0], [0, tokens], [tokens], [ids], [], made[1])

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


def test_a_row_that_no_token_has_is_refused() -> None:
    program = _native.Program(_native.ThreadPool(1), True)
    out, one = program.add_buffer(4, True), np.zeros(1, np.int64)
    for row in (-1, 1):
        with pytest.raises(ValueError, match="none of the tokens"):
            program.run(one, one, one, np.array([row]), [0, 1], [1], [one], [], out)
