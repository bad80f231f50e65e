"""Hostile folders of packed weights: whatever a config or a tensor says, the answer is values or one clear error."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_packed_model import Choices, packed_tensors, quantization_config, round_weight, save

from llmctl.errors import LlmctlError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.runtime.checkpoint.packed import find_packed, read_module
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint

MODULE = "model.layers.0.mlp.up_proj"
LAYOUTS = {
    "gptq": Choices("gptq", 4, 32, act_order=True),
    "awq": Choices("awq", 4, 32, symmetric=False),
    "compressed-tensors": Choices("compressed-tensors", 3, 32, symmetric=False, act_order=True),
}
numbers = st.integers(-5, 300) | st.integers() | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.just("re:(a*)*")
anything = st.recursive(
    scalars, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=6), one, max_size=3), max_leaves=6
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, choices in LAYOUTS.items():
        made[name], rng = tmp_path_factory.mktemp(name), np.random.default_rng(1)
        tensors = packed_tensors(round_weight(rng.standard_normal((32, 64)).astype(np.float32), choices, rng), choices)
        save({f"{MODULE}.{suffix}": tensor for suffix, tensor in tensors.items()}, made[name] / "model.safetensors")
    return made


def attempt(folder: Path) -> np.ndarray | None:
    """The values, None for an error of ours; any other exception is the test's failure."""
    try:
        with SafetensorsCheckpoint(folder) as checkpoint:
            for module in find_packed(checkpoint).modules.values():
                return dequantize(read_module(module))
    except LlmctlError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert len(message) < 1200
    return None


def paths(value: Any, before: tuple = ()) -> list[tuple]:
    """Every place in a config that something else can stand in."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [before, *(path for key, item in items for path in paths(item, (*before, key)))]


def replaced(value: Any, path: tuple, other: Any) -> Any:
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], other)
    return copy


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
@settings(max_examples=150)
def test_configs_of_any_kind(folders: dict[str, Path], name: str, data: st.DataObject) -> None:
    config = {**quantization_config(LAYOUTS[name], []), "dynamic": {"-:x": {}, "y": {"bits": 4}}, "ignore": ["re:z"]}
    for _ in range(data.draw(st.integers(1, 2))):
        if isinstance(config, dict):
            config = replaced(config, data.draw(st.sampled_from(paths(config))), data.draw(anything))
    (folders[name] / "config.json").write_text(json.dumps({"quantization_config": config}))
    attempt(folders[name])


@pytest.mark.parametrize("name", LAYOUTS)
def test_mutated_bytes(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    """Damage in shapes, dtypes, scales, indices and shapes of weights."""
    rng, original = random.Random(7), (folders[name] / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization_config(LAYOUTS[name], [])}))
    for _ in range(400):
        damaged = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (tmp_path / "model.safetensors").write_bytes(damaged)
        values = attempt(tmp_path)
        assert values is None or np.isfinite(values).all()
