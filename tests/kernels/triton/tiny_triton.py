"""Tiny models through the Triton backend, in float32 and with exact activations, so as to meet the reference's numbers."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from make_tiny_model import make_tiny_model

from llmctl.runtime.loading import LoadedModel, load_model

IDS = np.random.default_rng(5).integers(3, 384, 8).tolist()
EXACT = {"backend": "triton", "dtype": "float32", "activations": "float", "kv_type": "f32"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    "mixtral": {},
    "deepseek_v3": {},
}


_FOLDER = tempfile.TemporaryDirectory(prefix="tiny-triton-")


@functools.cache
def tiny_folder(family: str) -> Path:
    """Two layers, made once in a process."""
    return make_tiny_model(Path(_FOLDER.name) / family, family, num_hidden_layers=2, **FAMILIES[family])


def tiny_model(family: str, **choices: Any) -> LoadedModel:
    """Loaded by the Triton backend, with these choices instead of the exact ones."""
    return load_model(tiny_folder(family), **{**EXACT, **choices})
