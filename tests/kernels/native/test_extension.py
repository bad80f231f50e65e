"""Other tests are skipped without the extension: this one says so where it could be there."""

from __future__ import annotations

import shutil

import pytest

from llmctl.kernels.native import why_missing


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_extension_is_built() -> None:
    assert why_missing() is None
