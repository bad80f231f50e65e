"""The native CPU backend: C++ kernels chosen at run time by instruction set. `_native` is the compiled extension.

An installation may lack it (there was no compiler): ask `why_missing` before importing what needs it.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from llmctl.errors import UsageError

_FOLDER = Path(__file__).parent
_ISA_NAMES = {
    "amx": "AMX with AVX-512",
    "avx512bf16": "AVX-512 VNNI and BF16",
    "avx512": "AVX-512 VNNI",
    "avxvnni": "AVX2 with VNNI",
    "avx2": "AVX2",
    "neon": "NEON with dot products",
    "generic": "plain C++ without vector instructions",
}


def why_missing() -> str | None:
    """None where the extension can be used, else the reason in one line. Imports the extension."""
    try:
        from llmctl.kernels.native import _native  # noqa: F401 (whether it can be imported is the question)
    except ImportError as error:
        return _reason(error)
    return None


def instruction_set() -> str:
    """What the kernels run on here, as "AVX-512 VNNI (avx512)": the best this machine has, or what LLMCTL_ISA forces. Errors:
    UsageError where that is nothing this machine has; ImportError where `why_missing` has a reason."""
    from llmctl.kernels.native import _native

    try:
        isa = _native.active_isa()
    except ValueError as error:
        raise UsageError(f"LLMCTL_ISA: {error}") from None
    return f"{_ISA_NAMES[isa]} ({isa})"


def _reason(error: ImportError) -> str:
    note = _FOLDER / "_not_built.txt"  # hatch_build.py writes it
    if note.is_file():
        return f"the native extension is not built: {note.read_text('utf-8').strip()}"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if (_FOLDER / f"_native{suffix}").is_file():
        return f"the native extension cannot be loaded: {error}"
    others = sorted(path.name for path in _FOLDER.glob("_native.*.so"))
    if others:
        return f"the native extension was built for another Python ({others[0]}, this one needs {suffix}): install llmctl again"
    return "the native extension is not built: install llmctl again where there is a C++ compiler"
