"""The thread pool of the native kernels: every worker runs, barriers hold, failures come back, forks and ends are clean."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmctl.kernels.native import _native as native

SOURCES = Path(native.__file__).parent
SIZES = [1, 2, 3, 7]


@pytest.mark.parametrize("size", SIZES)
def test_every_worker_runs_once(size):
    pool, seen = native.ThreadPool(size), []
    assert pool.size == size
    for _ in range(20):
        seen.clear()
        pool.run(seen.append)
        assert sorted(seen) == list(range(size))


def test_the_caller_is_worker_0():
    idents = {}
    native.ThreadPool(3).run(lambda worker: idents.__setitem__(worker, threading.get_native_id()))
    assert idents[0] == threading.get_native_id()
    assert len(set(idents.values())) == 3


@pytest.mark.parametrize("size", SIZES)
def test_nobody_passes_a_barrier_before_all_have_come(size):
    pool, arrived, early = native.ThreadPool(size), [], []

    def body(worker):
        for meeting in range(1, 6):
            arrived.append(worker)
            pool.barrier()
            if len(arrived) != meeting * size:
                early.append(worker)
            pool.barrier()

    pool.run(body)
    assert early == []
    assert len(arrived) == 5 * size


def test_work_after_a_long_sleep():
    pool, seen = native.ThreadPool(2), []
    pool.run(seen.append)
    time.sleep(0.02)  # the workers spin for 0.1 ms
    pool.run(seen.append)
    assert sorted(seen) == [0, 0, 1, 1]


@pytest.mark.parametrize("size", SIZES)
def test_a_failure_comes_back_as_it_was_and_the_pool_works_on(size):
    pool, seen = native.ThreadPool(size), []

    def body(worker):
        if worker == size - 1:
            raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        pool.run(body)
    pool.run(seen.append)
    assert len(seen) == size


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_frees_those_at_the_barrier(failing):
    pool = native.ThreadPool(3)

    def body(worker):
        if worker == failing:
            raise ValueError("never comes")
        pool.barrier()

    for _ in range(3):
        with pytest.raises(ValueError, match="never comes"):
            pool.run(body)
    pool.run(lambda worker: pool.barrier())


def test_run_within_run_is_refused():
    pool = native.ThreadPool(2)
    with pytest.raises(RuntimeError, match="running already"):
        pool.run(lambda worker: pool.run(lambda inner: None) if worker == 0 else None)


@pytest.mark.parametrize("size", [0, -3])
def test_a_pool_of_nobody_is_refused(size):
    with pytest.raises(ValueError, match="at least one"):
        native.ThreadPool(size)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_workers_of_its_own():
    pool, seen = native.ThreadPool(3), []
    pool.run(seen.append)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang ends as a failure
        seen.clear()
        pool.run(seen.append)
        other = native.ThreadPool(2)
        other.run(seen.append)
        del other
        os._exit(0 if sorted(seen) == [0, 0, 1, 1, 2] else 1)
    assert os.waitpid(child, 0)[1] == 0
    pool.run(seen.append)  # the parent's are unharmed
    assert len(seen) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_may_let_its_pool_go():
    pool = native.ThreadPool(3)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        del pool
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them")
def test_threads_end_with_their_pool_and_take_no_signals():
    def names():
        return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]

    before = names().count("llmctl-1")
    pool = native.ThreadPool(2)
    pool.run(lambda worker: None)
    assert names().count("llmctl-1") == before + 1
    task = next(t for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text().strip() == "llmctl-1")
    blocked = int(next(x for x in (task / "status").read_text().splitlines() if x.startswith("SigBlk")).split()[1], 16)
    assert blocked >> (signal.SIGINT - 1) & 1
    assert not blocked >> (signal.SIGSEGV - 1) & 1
    del pool
    assert names().count("llmctl-1") == before


@pytest.mark.unchecked
def test_nothing_races(tmp_path):
    """The pool under ThreadSanitizer, in a program of its own."""
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C++ compiler with ThreadSanitizer")
    program = tmp_path / "stress"
    sources = [SOURCES / "thread_pool.cpp", Path(__file__).parent / "thread_pool_stress.cpp"]
    command = [compiler, "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{SOURCES}"]
    built = subprocess.run([*command, *sources, "-o", program], capture_output=True, text=True)
    if "tsan" in built.stderr and "cannot find" in built.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
