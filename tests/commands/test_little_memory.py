"""Address space that ends at one place after another: whatever lacks memory says so in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMITS_MB = (90, 150, 205, 260, 400, 600)
THREADS = 64  # whose stacks alone are more


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_too_little_memory_is_one_line(llmctl_script, scripted):
    import resource

    for limit in (megabytes << 20 for megabytes in LIMITS_MB):
        done = subprocess.run(
            [llmctl_script, "run", scripted, "-n", "2", "-t", str(THREADS), "--backend", "native", "word " * 40],
            preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        line = done.stderr.strip()
        assert (done.returncode, len(line.splitlines())) == (1, 1), line
        assert any(words in line for words in ("memory", "threads could not be started", "address space")), line
        assert "unexpected" not in line
