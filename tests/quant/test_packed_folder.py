"""GPTQ, AWQ and compressed-tensors into each other: bit for bit there and back, and refused with the reason where not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_packed_model import Choices, make_packed_model, packed_tensors, quantization_config, round_weight, save

from llmctl.errors import OutputError, UnsupportedError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.quant.packed_folder import packed_path, plan_packed, write_packed
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.packed import find_packed, read_module
from llmctl.runtime.loading import load_model

Tiny = Callable[..., Path]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def convert(source: Path, target: str, output: Path, **options: Any) -> Path:
    write_packed(plan_packed(source, target), output, **options)
    return output


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(folder) as checkpoint:
        return {name: np.array(checkpoint.read(name)) for name in checkpoint.names()}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    if left.keys() != right.keys():
        return False
    pairs = [(left[name], right[name]) for name in left]
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.fixture
def packed(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """A tiny model in a layout, its plain float32 values beside it in `values`."""

    def make(choices: Choices, **tiny_choices: Any) -> Path:
        source = tiny("llama", **SIZES, **tiny_choices)
        return make_packed_model(source, tmp_path / "packed", choices, values=tmp_path / "values")

    return make


ROUNDS = [
    (Choices("gptq_v2", 4, 32, symmetric=False), ["awq"]),
    (Choices("gptq_v2", 4, 64, symmetric=False), ["awq", "compressed-tensors"]),
    (Choices("gptq", 4, 64), ["compressed-tensors", "awq"]),
    (Choices("gptq", 4, 32, signed_scales=True), ["awq"]),
    (Choices("gptq", 4, 64, act_order=True), ["compressed-tensors"]),
    (Choices("gptq", 3, 32, act_order=True), ["compressed-tensors"]),
    (Choices("gptq_v2", 8, -1, symmetric=False), ["compressed-tensors"]),
    (Choices("gptq", 2, 32), ["compressed-tensors"]),
    (Choices("awq", 4, 64, symmetric=False), ["gptq"]),
    (Choices("awq", 4, -1), ["compressed-tensors", "gptq"]),
    (Choices("compressed-tensors", 4, 32, symmetric=False), ["gptq", "awq"]),
    (Choices("compressed-tensors", 3, -1), ["gptq"]),
]


@pytest.mark.parametrize(("choices", "way"), ROUNDS)
def test_there_and_back_bit_for_bit(packed: Callable[..., Path], tmp_path: Path, choices: Choices, way: list[str]) -> None:
    source = packed(choices)
    folder = source
    for step, target in enumerate([*way, choices.layout.removesuffix("_v2")]):
        folder = convert(folder, target, tmp_path / f"step{step}")
        stated = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert stated["quant_method"] == target
        assert values_of(folder).keys() == values_of(source).keys()
        assert all(np.array_equal(one, values_of(source)[name]) for name, one in values_of(folder).items())
    assert same(tensors_of(folder), tensors_of(source))


def values_of(folder: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(folder) as checkpoint:
        return {name: dequantize(read_module(module)) for name, module in find_packed(checkpoint).modules.items()}


@given(
    st.sampled_from((2, 3, 4, 8)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from((32, 64, -1)),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_bits_and_groups(
    tmp_path_factory: pytest.TempPathFactory, bits: int, rows: int, columns: int, group_size: int, symmetric: bool, order: bool
) -> None:
    """GPTQ → compressed-tensors → GPTQ, and over AWQ where that is possible: the same tensors, every bit."""
    choices = Choices("gptq" if symmetric else "gptq_v2", bits, group_size, symmetric, act_order=order)
    shape, rng = (32 * rows, 64 * columns), np.random.default_rng(rows + columns)
    tensors = packed_tensors(round_weight(rng.standard_normal(shape).astype(np.float32), choices, rng), choices)
    folder = tmp_path_factory.mktemp("any")
    save({f"model.layers.0.m.{suffix}": tensor for suffix, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization_config(choices, [])}))
    way = ["compressed-tensors", "gptq"]
    ordered = order and group_size not in (-1,) and shape[1] > group_size
    if bits == 4 and not ordered:
        way = ["compressed-tensors", "awq", "gptq"]
    result = folder
    for step, target in enumerate(way):
        result = convert(result, target, folder.parent / f"{folder.name}-{step}")
    assert same(tensors_of(result), tensors_of(folder))


def test_the_model_says_the_same(packed: Callable[..., Path], tmp_path: Path, logits: Callable[[Path], np.ndarray]) -> None:
    source = packed(Choices("gptq", 4, 32, act_order=True))
    other = convert(source, "compressed-tensors", tmp_path / "other")
    assert np.array_equal(logits(other), logits(source))
    np.testing.assert_allclose(logits(source), logits(tmp_path / "values"), rtol=0, atol=1e-6)
    assert load_model(other).tokenizer is not None


def test_files_and_configs(packed: Callable[..., Path], tmp_path: Path) -> None:
    source = packed(Choices("awq", 4, 32, symmetric=False), tie_word_embeddings=False)
    folder = convert(source, "gptq", tmp_path / "gptq")
    config = json.loads((folder / "config.json").read_text())
    stated = config["quantization_config"]
    assert {stated["quant_method"], stated["method"]} == {"gptq"}
    assert {stated["checkpoint_format"], stated["format"]} == {"gptq_v2"}
    assert (stated["bits"], stated["group_size"], stated["sym"], stated["desc_act"]) == (4, 32, False, False)
    assert json.loads((folder / "quantize_config.json").read_text()) == stated
    before = json.loads((source / "config.json").read_text())
    assert {key: value for key, value in config.items() if key != "quantization_config"} == {
        key: value for key, value in before.items() if key != "quantization_config"
    }
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    again = convert(folder, "compressed-tensors", tmp_path / "again")
    assert not (again / "quantize_config.json").exists()
    assert json.loads((again / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]


def test_symmetric_gptq_is_version_1(packed: Callable[..., Path], tmp_path: Path) -> None:
    folder = convert(packed(Choices("awq", 4, 64)), "gptq", tmp_path / "gptq")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["checkpoint_format"] == "gptq"
    zeros = tensors_of(folder)["model.layers.0.mlp.up_proj.qzeros"]
    assert set(zeros.view(np.uint32).reshape(-1).tolist()) == {0x77777777}


def test_modules_left_alone_stay_so(packed: Callable[..., Path], tmp_path: Path) -> None:
    choices = Choices("compressed-tensors", 4, 32, skip=("layers.1.mlp.down_proj",))
    source = packed(choices)
    name = "model.layers.1.mlp.down_proj"
    awq = convert(source, "awq", tmp_path / "awq")
    assert json.loads((awq / "config.json").read_text())["quantization_config"]["modules_to_not_convert"] == ["lm_head", name]
    gptq = convert(awq, "gptq", tmp_path / "gptq")
    stated = json.loads((gptq / "config.json").read_text())["quantization_config"]
    assert stated["dynamic"] == {r"-:^model\.layers\.1\.mlp\.down_proj$": {}}
    back = convert(gptq, "compressed-tensors", tmp_path / "back")
    assert name in json.loads((back / "config.json").read_text())["quantization_config"]["ignore"]
    assert same(tensors_of(back), tensors_of(source))


def test_mixed_bits_are_rules_and_groups(packed: Callable[..., Path], tmp_path: Path) -> None:
    """One module in 8 bits among modules in 4: `dynamic` in GPTQ, a config group of its own in compressed-tensors."""
    source = packed(Choices("gptq", 4, 32))
    other = make_packed_model(source.parent / "values", tmp_path / "eight", Choices("gptq", 8, 64))
    name, tensors = "model.layers.0.mlp.up_proj", tensors_of(source)
    tensors |= {key: tensor for key, tensor in tensors_of(other).items() if key.startswith(name)}
    save(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {r".*\.0\.mlp\.up_proj": {"bits": 8, "group_size": 64}}
    (source / "config.json").write_text(json.dumps(config))
    mixed = convert(source, "compressed-tensors", tmp_path / "mixed")
    groups = json.loads((mixed / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [name] in [group["targets"] for group in groups.values()]
    assert same(tensors_of(convert(mixed, "gptq", tmp_path / "back")), tensors)
    with pytest.raises(UnsupportedError, match="AWQ has 4-bit codes, these have 8"):
        plan_packed(source, "awq")


@pytest.mark.parametrize(
    ("choices", "target", "reason"),
    [
        (Choices("gptq", 4, 32, act_order=True), "awq", "AWQ has no activation order"),
        (Choices("gptq", 3, 32), "awq", "AWQ has 4-bit codes, these have 3"),
        (Choices("gptq", 4, 128), "awq", "192 columns are not a multiple of 128"),
        (Choices("gptq", 4, 128), "compressed-tensors", "192 columns are not a multiple of 128"),
        (Choices("compressed-tensors", 5, 32), "gptq", "2, 3, 4 or 8 bits, these have 5"),
        (Choices("compressed-tensors", 4, 32, scale_dtype="float32"), "gptq", "float32 scales would be rounded"),
        (Choices("compressed-tensors", 4, 32, scale_dtype="float32"), "awq", "scales are float16 there"),
        (Choices("fp8"), "gptq", "holds F8_E4M3, gptq is of whole numbers"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    packed: Callable[..., Path], choices: Choices, target: str, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        plan_packed(packed(choices), target)


def test_awq_needs_outputs_in_32s(tmp_path: Path) -> None:
    choices, rng = Choices("gptq", 4, 32), np.random.default_rng(0)
    tensors = packed_tensors(round_weight(rng.standard_normal((40, 64)).astype(np.float32), choices, rng), choices)
    save({f"model.layers.0.m.{suffix}": tensor for suffix, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization_config(choices, [])}))
    with pytest.raises(UnsupportedError, match="multiple of 32 outputs, there are 40"):
        plan_packed(tmp_path, "awq")


def test_bfloat16_scales_that_float16_holds_are_converted(packed: Callable[..., Path], tmp_path: Path) -> None:
    source = packed(Choices("compressed-tensors", 4, 32, scale_dtype="bfloat16"))
    folder = convert(source, "gptq", tmp_path / "gptq")
    assert tensors_of(folder)["model.layers.0.mlp.up_proj.scales"].dtype == np.float16
    assert tensors_of(source)["model.layers.0.mlp.up_proj.weight_scale"].dtype == ml_dtypes.bfloat16
    assert all(np.array_equal(one, values_of(source)[name]) for name, one in values_of(folder).items())


def test_a_folder_of_plain_weights_is_refused(tiny: Tiny) -> None:
    with pytest.raises(UnsupportedError, match="no weight here is quantized; llmctl quantize"):
        plan_packed(tiny("llama"), "gptq")


def test_shards_and_the_output_folder(packed: Callable[..., Path], tmp_path: Path) -> None:
    source = packed(Choices("gptq_v2", 4, 32, symmetric=False))
    plan = plan_packed(source, "awq")
    assert plan.name == "packed-AWQ"
    with pytest.raises(OutputError, match="input"):
        packed_path(plan, source, force=True)
    done: list[tuple[int, int]] = []
    sharded = tmp_path / "sharded"
    write_packed(plan, sharded, max_shard_bytes=60_000, progress=lambda *at: done.append(at))
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    assert done[-1] == (plan.nbytes, plan.nbytes)
    assert same(tensors_of(sharded), tensors_of(convert(source, "awq", tmp_path / "single")))
