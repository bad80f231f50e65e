"""Which backend serves, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmctl.errors import UsageError
from llmctl.kernels.backend import MOST_THREADS, capabilities, make_ops
from llmctl.kernels.formats.spec import FORMATS


def test_unknown_backend_and_dtype_are_usage_errors_that_list_the_known() -> None:
    with pytest.raises(UsageError, match=r"'vulkan'.*reference"):
        make_ops("vulkan")
    with pytest.raises(UsageError, match=r"'int3'.*float32"):
        make_ops("reference", dtype="int3")


@pytest.mark.parametrize("threads", [0, MOST_THREADS + 1, 10**30])
def test_a_number_of_threads_that_no_pool_can_have_is_refused(threads: int) -> None:
    with pytest.raises(UsageError, match=f"1 to {MOST_THREADS} on this machine, found {threads}"):
        make_ops("reference", threads=threads)


def test_capabilities_name_every_op_of_the_op_set_that_has_a_folder() -> None:
    ops = {capability.op for capability in capabilities()}
    assert ops == {"linear", "embedding", "rms_norm", "rotary", "gated_activation", "store_kv", "attention"}


def test_linear_serves_every_weight_format() -> None:
    linear = next(c for c in capabilities() if c.op == "linear")
    assert set(linear.formats) == {name for name in FORMATS if name not in ("I8", "I16", "I32", "I64")}


def test_asking_for_capabilities_does_not_import_torch() -> None:
    code = "import sys; from llmctl.kernels.backend import capabilities; capabilities(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
