"""Which backend serves, and what it says of itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from llmctl.errors import UnsupportedError, UsageError
from llmctl.kernels import _reference_devices, backend, native
from llmctl.kernels.backend import (
    MOST_THREADS,
    Compute,
    capabilities,
    choose_compute,
    default_kv_type,
    fit_head_dim,
    make_ops,
    torch_device,
)
from llmctl.kernels.formats.spec import FORMATS


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Sets whether the native extension can be used: None, or why not."""
    return lambda missing: monkeypatch.setattr(backend, "why_missing", lambda: missing)


Here = Callable[["str | None"], None]


def test_auto_is_the_native_backend_on_a_cpu(here: Here) -> None:
    here(None)
    assert choose_compute() == Compute("native", "cpu", "float32", default_kv_type("native"), "int8")
    assert choose_compute(kv_type="q8_0", activations="float") == Compute("native", "cpu", "float32", "q8_0", "float")


def test_auto_falls_back_with_the_reason_and_native_does_not(here: Here) -> None:
    here("no compiler")
    assert choose_compute() == Compute("reference", "cpu", "float32", "f32", None, fallback="no compiler")
    assert choose_compute("reference").fallback is None
    with pytest.raises(UsageError, match="--backend native: no compiler"):
        choose_compute("native")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a GPU of this compute capability into the machine, with its driver."""

    def put(capability: str) -> None:
        device = _reference_devices.CudaDevice(0, "card", capability, 1 << 34)
        monkeypatch.setattr(_reference_devices, "cuda_devices", lambda: [device])
        monkeypatch.setattr(backend, "_DRIVERS", (__file__,))
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    return put


@pytest.mark.parametrize("missing", [None, "no compiler"])
def test_cuda_means_triton_whatever_is_missing(here: Here, gpu: Callable[[str], None], missing: str | None) -> None:
    here(missing)
    gpu("9.0")
    assert choose_compute(device="cuda") == Compute("triton", "cuda", "bfloat16", "bf16", "int8")
    assert choose_compute("triton", "auto", "float16", "q8_0", "float") == Compute("triton", "cuda", "float16", "q8_0", "float")
    assert choose_compute("reference", "cuda", "bfloat16") == Compute("reference", "cuda", "bfloat16", "f32")
    with pytest.raises(UsageError, match="not on cuda"):
        choose_compute("native", "cuda")


def test_auto_is_the_gpu_where_there_is_one(here: Here, gpu: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    here(None)
    assert choose_compute(device="auto").device == "cpu"
    gpu("8.0")
    assert choose_compute(device="auto").backend == "triton"
    assert choose_compute("native", "auto").device == "cpu"
    monkeypatch.setattr(_reference_devices, "cuda_devices", list)
    assert choose_compute(device="auto") == choose_compute()


def test_without_a_driver_torch_is_not_even_asked() -> None:
    code = "import sys\nfrom llmctl.kernels.backend import choose_compute\nchoose_compute(device='auto')"
    code += "\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["auto", "triton", "reference"])
def test_cuda_that_torch_does_not_see_is_refused(here: Here, name: str) -> None:
    here(None)
    with pytest.raises(UsageError, match=r"--device cuda: torch sees no CUDA device; llmctl doctor"):
        choose_compute(name, "cuda")


def test_what_triton_cannot_do_the_reference_does_with_the_reason(here: Here, gpu: Callable[[str], None]) -> None:
    here(None)
    gpu("9.0")
    kept = choose_compute(device="cuda", kv_type="k=q8_0,v=q4_0")
    assert (kept.backend, kept.device) == ("reference", "cuda")
    assert "v=q4_0: the triton backend keeps f32" in kept.fallback
    gpu("7.5")
    assert "card has compute capability 7.5, 8.0 is needed" in choose_compute(device="cuda").fallback
    with pytest.raises(UsageError, match=r"--backend triton: card has compute capability 7.5"):
        choose_compute("triton", "cuda")


def test_calibration_runs_on_the_gpu_where_there_is_one(gpu: Callable[[str], None]) -> None:
    assert (torch_device("auto"), torch_device("cpu")) == ("cpu", "cpu")
    with pytest.raises(UsageError, match=r"--device cuda: torch sees no CUDA device"):
        torch_device("cuda")
    gpu("7.5")
    assert (torch_device("auto"), torch_device("cuda"), torch_device("cpu")) == ("cuda", "cuda", "cpu")


def test_triton_on_a_cpu_is_the_interpreter(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here(None)
    with pytest.raises(UsageError, match=r"--backend triton: it computes on CUDA.*TRITON_INTERPRET=1"):
        choose_compute("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_compute("triton", "auto") == Compute("triton", "cpu", "bfloat16", "bf16", "int8")
    with pytest.raises(UsageError, match="--backend triton: TRITON_INTERPRET=1 is set"):
        choose_compute("triton", "cuda")
    assert [c.available for c in capabilities() if c.backend == "triton"] == [True] * 11


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"backend": "vulkan"}, "'vulkan'.*auto.*native, triton, reference"),
        ({"device": "tpu"}, "unknown device 'tpu'; expected auto or one of cpu, cuda"),
        ({"backend": "triton", "kv_type": "q4_0"}, "--backend triton: it computes on CUDA"),
        ({"dtype": "int3"}, "'int3'.*float32"),
        ({"dtype": "bfloat16"}, "float32: --dtype bfloat16 needs --backend triton or reference"),
        ({"kv_type": "q4_1"}, "q4_1: there is no such cache type; expected f32, .*q4_0, or one for each side"),
        ({"kv_type": "k=q8_0", "backend": "reference"}, "one for each side: k=q8_0,v=q4_0"),
        ({"activations": "int4"}, "'int4'.*int8, float"),
        ({"activations": "int8", "backend": "reference"}, "--activations int8.*the reference backend has no such choice"),
    ],
)
def test_what_a_backend_does_not_have_is_a_usage_error(here: Here, choices: dict[str, str], words: str) -> None:
    here(None)
    with pytest.raises(UsageError, match=words):
        choose_compute(**choices)


def test_heads_that_native_attention_does_not_have_are_computed_by_the_reference(here: Here) -> None:
    here(None)
    for head_dim in (1, 96, 100, 576):
        assert fit_head_dim(choose_compute(), head_dim, "auto") == choose_compute()
    fitted = fit_head_dim(choose_compute(kv_type="f16"), 577, "auto", "cpu", "float32", "f16", None)
    assert (fitted.backend, fitted.kv_type) == ("reference", "f16")
    assert "this model's have 577" in fitted.fallback
    assert fit_head_dim(choose_compute("reference"), 577, "reference") == choose_compute("reference")


def test_heads_that_the_backend_asked_for_does_not_have_are_refused_with_a_way_out(here: Here) -> None:
    here(None)
    with pytest.raises(UnsupportedError, match="have 577: --backend reference"):
        fit_head_dim(choose_compute("native"), 577, "native", "cpu")


@pytest.mark.parametrize("threads", [0, MOST_THREADS + 1, 10**30])
def test_a_number_of_threads_that_no_pool_can_have_is_refused(threads: int) -> None:
    with pytest.raises(UsageError, match=f"1 to {MOST_THREADS} on this machine, found {threads}"):
        make_ops(choose_compute("reference"), threads)


def test_capabilities_name_every_op_of_the_op_set_that_has_a_folder() -> None:
    ops = {capability.op for capability in capabilities()}
    activations = {"activation", "gated_activation"}
    weights = {"linear", "head_linear", "embedding", "moe"}
    assert ops == {*weights, "rms_norm", "layer_norm", "rotary", *activations, "store_kv", "attention"}


def test_linear_serves_every_weight_format() -> None:
    for linear in (c for c in capabilities() if c.op == "linear"):
        assert set(linear.formats) == {name for name in FORMATS if name not in ("I8", "I16", "I32", "I64")}


def test_what_is_missing_is_said_of_every_op(here: Here) -> None:
    here("no compiler")
    native = [(c.available, c.reason) for c in capabilities() if c.backend == "native"]
    assert native == [(False, "no compiler")] * 11


def fake_installation(folder: Path, *names: str) -> Path:
    """A copy of the native package without its extension, with these files beside it."""
    shutil.copy(Path(native.__file__), folder)
    for name in names:
        (folder / name).write_text("none of c++, g++ is on PATH\n" if name.endswith("txt") else "not an extension")
    return folder


SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "not built: install llmctl again"),
        (("_not_built.txt",), "not built: none of c++, g++ is on PATH"),
        (("_native.cpython-27.so",), f"another Python (_native.cpython-27.so, this one needs {SUFFIX})"),
        ((f"_native{SUFFIX}",), "cannot be loaded: import of llmctl.kernels.native._native halted"),
    ],
)
def test_why_the_extension_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple, words: str) -> None:
    monkeypatch.setattr(native, "_FOLDER", fake_installation(tmp_path, *names))
    monkeypatch.setitem(sys.modules, "llmctl.kernels.native._native", None)  # makes its import fail
    monkeypatch.delattr(native, "_native", raising=False)
    assert words in str(native.why_missing())


def test_asking_for_capabilities_does_not_import_torch() -> None:
    code = "import sys; from llmctl.kernels.backend import capabilities; capabilities(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_cache_is_bf16_where_the_machine_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa, kept in (("AMX (amx)", "bf16"), ("BF16 (avx512bf16)", "bf16"), ("AVX-512 (avx512)", "f16"), ("AVX2 (avx2)", "f16")):
        monkeypatch.setattr("llmctl.kernels.backend.instruction_set", lambda isa=isa: isa)
        assert choose_compute().kv_type == kept
