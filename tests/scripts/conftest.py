"""The stub model of tests/runtime, which pytest offers only there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("runtime_conftest", Path(__file__).parents[1] / "runtime" / "conftest.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
stub_model = _module.stub_model
