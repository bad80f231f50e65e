"""Packed checkpoints as GPTQ, AWQ and compressed-tensors write them: the values that come out, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from make_packed_model import Choices, Rounded, packed_tensors, quantization_config, round_weight, save

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.runtime.checkpoint.packed import PackedTensors, find_packed, read_module
from llmctl.runtime.checkpoint.packed_integers import StoredIntegers
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint

MODULE = "model.layers.0.mlp.up_proj"
Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Writes one module: `folder(tensors by suffix, quantization_config, {file beside: its values})`."""

    def write(tensors: dict[str, np.ndarray], config: dict[str, Any] | None, beside: dict[str, Any] | None = None) -> Path:
        save({f"{MODULE}.{suffix}": tensor for suffix, tensor in tensors.items()}, tmp_path / "model.safetensors")
        stated = {} if config is None else {"quantization_config": config}
        for name, values in {"config.json": stated, **(beside or {})}.items():
            (tmp_path / name).write_text(json.dumps(values), "utf-8")
        return tmp_path

    return write


def found(path: Path) -> PackedTensors:
    return find_packed(SafetensorsCheckpoint(path))


def read(path: Path) -> Any:
    return read_module(found(path).modules[f"{MODULE}.weight"])


def rounded(choices: Choices, rows: int = 64, columns: int = 256, seed: int = 0) -> Rounded:
    rng = np.random.default_rng(seed)
    return round_weight(rng.standard_normal((rows, columns)).astype(np.float32), choices, rng)


def made(folder: Folder, choices: Choices, **shape: int) -> tuple[Rounded, Path]:
    expected = rounded(choices, **shape)
    return expected, folder(packed_tensors(expected, choices), quantization_config(choices, []))


CASES = {
    **{f"{layout}-{bits}": Choices(layout, bits, 64) for layout in ("gptq", "gptq_v2") for bits in (2, 3, 4, 8)},
    **{f"gptq_v2-{bits}-asymmetric": Choices("gptq_v2", bits, 32, symmetric=False) for bits in (2, 3, 4, 8)},
    **{f"gptq-{bits}-order": Choices("gptq", bits, 64, act_order=True) for bits in (2, 3, 4, 8)},
    "gptq-whole-rows": Choices("gptq", 4, -1),
    "gptq-asymmetric-order": Choices("gptq_v2", 4, 128, symmetric=False, act_order=True),
    "gptq-signed": Choices("gptq", 4, 64, signed_scales=True),
    "gptq-bfloat16": Choices("gptq", 4, 64, scale_dtype="bfloat16"),
    "awq": Choices("awq", 4, 64, symmetric=False),
    "awq-symmetric": Choices("awq", 4, 32),
    "awq-whole-rows": Choices("awq", 4, -1, symmetric=False),
    **{f"ct-{bits}": Choices("compressed-tensors", bits, 64) for bits in range(2, 9)},
    **{f"ct-{bits}-asymmetric": Choices("compressed-tensors", bits, 64, symmetric=False) for bits in range(2, 9)},
    **{f"ct-old-{bits}": Choices("compressed-tensors-old", bits, 64, symmetric=False) for bits in (2, 3, 5, 6, 8)},
    "ct-order": Choices("compressed-tensors", 4, 64, act_order=True),
    "ct-whole-rows": Choices("compressed-tensors", 4, -1, scale_dtype="float32"),
    "ct-bytes": Choices("compressed-tensors-int8", 8, -1),
    "ct-bytes-asymmetric": Choices("compressed-tensors-int8", 8, 64, symmetric=False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_layout_means_what_was_packed(folder: Folder, name: str) -> None:
    choices = CASES[name]
    expected, path = made(folder, choices)
    tensor = read(path)
    assert isinstance(tensor, PackedIntTensor)
    assert np.array_equal(dequantize(tensor), expected.values())
    assert tensor.bits == (4 if choices.bits <= 4 else 8)
    assert (tensor.zero_points is None) == choices.symmetric
    assert (tensor.column_order is not None) == choices.act_order
    module = found(path).modules[f"{MODULE}.weight"]
    assert module.shape == (64, 256)
    assert abs(module.native_bytes - tensor.nbytes) <= tensor.nbytes // 4


@pytest.mark.parametrize("layout", ["gptq_v2", "compressed-tensors"])
@pytest.mark.parametrize(("columns", "group_size", "order", "kernel_group"), [
    (192, 128, False, 64),  # the last group is half as long
    (192, 128, True, 64),
    (160, 1000, False, 160),  # longer than the row
    (96, 32, True, 32),
])
def test_groups_that_do_not_divide_the_row(
    folder: Folder, layout: str, columns: int, group_size: int, order: bool, kernel_group: int
) -> None:
    choices = Choices(layout, 4, group_size, symmetric=False, act_order=order)
    expected, path = made(folder, choices, columns=columns)
    tensor = read(path)
    assert np.array_equal(dequantize(tensor), expected.values())
    assert tensor.columns_per_group == kernel_group


@pytest.mark.parametrize(("columns", "group_size"), [(64, 16), (72, 24), (40, -1)])
def test_groups_no_kernel_reads_are_unpacked_exactly(folder: Folder, columns: int, group_size: int) -> None:
    expected, path = made(folder, Choices("gptq", 4, group_size), columns=columns)
    values = read(path)
    assert values.dtype == np.float32
    assert np.array_equal(values, expected.values())
    assert found(path).modules[f"{MODULE}.weight"].native_bytes == values.nbytes


def test_an_order_that_is_none_costs_nothing(folder: Folder) -> None:
    """desc_act with groups in order, as GPTQ with static groups writes it."""
    choices = Choices("gptq", 4, 64)
    path = folder(packed_tensors(rounded(choices), choices), {**quantization_config(choices, []), "desc_act": True})
    assert read(path).column_order is None


def test_without_g_idx(folder: Folder) -> None:
    choices = Choices("gptq", 4, 64)
    expected = rounded(choices)
    tensors = packed_tensors(expected, choices)
    del tensors["g_idx"]
    assert np.array_equal(dequantize(read(folder(tensors, quantization_config(choices, [])))), expected.values())


def test_version_1_wraps_each_zero_point_by_itself(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """Zero points of 0 are stored as 15: read with a carry into the next field they would all be wrong."""
    choices = Choices("gptq", 4, 64, symmetric=False)
    expected = rounded(choices)
    expected.zeros[::3] = 0
    path = folder(packed_tensors(expected, choices), quantization_config(choices, []))
    assert np.array_equal(dequantize(read(path)), expected.values())
    assert "zero points of 0" in caplog.text


def test_a_symmetric_config_over_other_zero_points_is_named(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    choices = Choices("gptq_v2", 4, 64, symmetric=False)
    expected = rounded(choices)
    path = folder(packed_tensors(expected, choices), {**quantization_config(choices, []), "sym": True})
    assert np.array_equal(dequantize(read(path)), expected.values())
    assert "though the config says sym" in caplog.text


@pytest.mark.parametrize(
    ("config", "beside"),
    [
        (None, {"quantize_config.json": {"bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}}),
        (None, {"quantize_config.json": {"w_bit": 4, "q_group_size": 64, "format": "gptq_v2", "method": "gptq"}}),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, {"quantize_config.json": {"checkpoint_format": "gptq_v2"}}),
        ({"method": "GPTQ", "w_bit": 4, "bits": 4, "group_size": 64, "format": "gptq_v2"}, None),
    ],
)
def test_where_and_how_settings_are_spelled(folder: Folder, config: Any, beside: Any) -> None:
    choices = Choices("gptq_v2", 4, 64, symmetric=False)
    expected = rounded(choices)
    path = folder(packed_tensors(expected, choices), config, beside)
    assert np.array_equal(dequantize(read(path)), expected.values())


def test_words_in_capitals_are_no_difference(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    choices = Choices("awq", 4, 64)
    expected = rounded(choices)
    beside = {"quant_config.json": {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}}
    config = {**quantization_config(choices, []), "version": "Gemm", "format": "gemm"}
    assert np.array_equal(dequantize(read(folder(packed_tensors(expected, choices), config, beside))), expected.values())
    assert not caplog.text


def test_awq_without_zero_points(folder: Folder) -> None:
    choices = Choices("awq", 4, 64)
    expected = rounded(choices)
    tensors = packed_tensors(expected, choices)
    del tensors["qzeros"]
    path = folder(tensors, {**quantization_config(choices, []), "zero_point": False})
    assert np.array_equal(dequantize(read(path)), expected.values())


def test_settings_that_differ_are_named_and_the_first_counts(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    choices = Choices("gptq", 4, 64)
    expected = rounded(choices)
    beside = {"quantize_config.json": {"bits": 4, "group_size": 128}}
    path = folder(packed_tensors(expected, choices), quantization_config(choices, []), beside)
    assert np.array_equal(dequantize(read(path)), expected.values())
    assert "differ in group_size: the first counts" in caplog.text


@pytest.mark.parametrize("spelling", ["", "+:"])
def test_dynamic_rules_override(folder: Folder, spelling: str) -> None:
    choices = Choices("gptq", 8, 32)
    expected = rounded(choices)
    dynamic = {r"-:.*\.down_proj": {}, rf"{spelling}model\.layers\.0\..*up": {"bits": 8, "group_size": 32}, ".*": {"bits": 3}}
    config = {**quantization_config(Choices("gptq", 4, 128), []), "dynamic": dynamic}
    assert np.array_equal(dequantize(read(folder(packed_tensors(expected, choices), config))), expected.values())


def test_config_groups_by_name_pattern_and_class(folder: Folder) -> None:
    choices = Choices("compressed-tensors", 3, 32)
    expected = rounded(choices)

    def group(target: str, bits: int) -> dict[str, Any]:
        weights = {"num_bits": bits, "group_size": 32, "strategy": "group"}
        return {"targets": [target], "weights": weights}

    config = quantization_config(choices, [])
    for groups in ([("Linear", 4), ("re:.*up_proj", 3)], [("re:.*", 4), (MODULE, 3)], [("Linear", 3)]):
        config["config_groups"] = {f"group_{i}": group(*one) for i, one in enumerate(groups)}
        assert np.array_equal(dequantize(read(folder(packed_tensors(expected, choices), config))), expected.values())


def test_g_idx_of_minus_ones_is_none(folder: Folder) -> None:
    choices = Choices("compressed-tensors", 4, 64)
    expected = rounded(choices)
    tensors = {**packed_tensors(expected, choices), "weight_g_idx": np.full(256, -1, np.int32)}
    assert np.array_equal(dequantize(read(folder(tensors, quantization_config(choices, [])))), expected.values())


def test_one_scale_for_the_whole_weight(folder: Folder) -> None:
    choices = Choices("compressed-tensors-int8", 8, -1)
    tensors = packed_tensors(rounded(choices), choices) | {"weight_scale": np.array([0.5], np.float16)}
    config = quantization_config(choices, [])
    config["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    assert np.array_equal(dequantize(read(folder(tensors, config))), tensors["weight"] * np.float32(0.5))


def test_scales_of_activations_are_no_weights(folder: Folder) -> None:
    choices = Choices("compressed-tensors-int8", 8, -1)
    tensors = packed_tensors(rounded(choices), choices) | {"input_scale": np.ones(1, np.float16)}
    assert found(folder(tensors, quantization_config(choices, []))).of_activations == (f"{MODULE}.input_scale",)


def test_bits_beyond_the_canonical_ones_are_kept_when_stored(folder: Folder) -> None:
    expected, path = made(folder, Choices("gptq_v2", 3, 64, symmetric=False))
    stored = found(path).modules[f"{MODULE}.weight"].read()
    assert isinstance(stored, StoredIntegers)
    assert stored.bits == 3
    assert np.array_equal(stored.codes(), expected.codes)
    assert np.array_equal(stored.all_zero_points(), expected.zeros)
    assert stored.scales.dtype == np.float16


def change(tensors: dict[str, np.ndarray], changes: dict[str, Any]) -> dict[str, np.ndarray]:
    changed = tensors | {suffix: value(tensors[suffix]) if callable(value) else value for suffix, value in changes.items()}
    return {suffix: tensor for suffix, tensor in changed.items() if tensor is not None}


def beyond(tensor: np.ndarray) -> np.ndarray:
    tensor = tensor.copy()
    tensor[3] = 4
    return tensor


def not_finite(tensor: np.ndarray) -> np.ndarray:
    tensor = tensor.copy()
    tensor[1, 2] = np.inf
    return tensor


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("gptq", {"scales": None}, "up_proj.scales' is missing"),
        ("gptq", {"qzeros": None}, "up_proj.qzeros' is missing"),
        ("gptq", {"g_idx": beyond}, "up_proj.g_idx' puts column 3 into group 4, expected 0 to 3"),
        ("gptq", {"g_idx": lambda t: -t}, r"g_idx' puts column 64 into group -1"),
        ("gptq", {"g_idx": lambda t: t.astype(np.int64)}, "g_idx' holds I64, expected I32"),
        ("gptq", {"g_idx": lambda t: t[:-8]}, r"qweight' has shape \(32, 64\), expected \(31, 64\)"),
        ("gptq", {"scales": not_finite}, "scales' holds inf in row 1, column 2"),
        ("gptq", {"scales": lambda t: t[:2]}, r"scales' has shape \(2, 64\), expected \(4, 64\) for 4-bit codes of 64 x 256"),
        ("gptq", {"scales": lambda t: t.astype(np.int32)}, "scales' holds I32, expected F16 or BF16 or F32"),
        ("gptq", {"qzeros": lambda t: t[:, :4]}, r"qzeros' has shape \(4, 4\), expected \(4, 8\)"),
        ("gptq", {"qweight": lambda t: t[0]}, "expected 2 axes"),
        ("gptq", {"weight": np.ones((64, 256), np.float16)}, "is there twice, once of them quantized"),
        ("awq", {"qweight": lambda t: t.copy().view(np.int16)}, "gemv_fast of llm-awq.* version gemm"),
        ("awq", {"qweight": lambda t: t[:100]}, "not whole groups of 64"),
        ("awq", {"qzeros": lambda t: t[:1]}, r"qzeros' has shape \(1, 8\)"),
        ("compressed-tensors", {"weight_shape": np.array([64, 512])}, r"_packed' has shape \(64, 32\), expected \(64, 64\)"),
        ("compressed-tensors", {"weight_shape": np.array([63, 256])}, "weight_packed' has shape"),
        ("compressed-tensors", {"weight_shape": np.array([64, 0])}, "weight_packed' has shape"),
        ("compressed-tensors", {"weight_shape": None}, "weight_shape' is missing"),
        ("compressed-tensors", {"weight_scale": lambda t: t[:, :1]}, r"weight_scale' has shape \(64, 1\), expected \(64, 4\)"),
        ("compressed-tensors", {"weight_scale": None}, "weight_scale' is missing"),
        ("compressed-tensors", {"weight_g_idx": np.full(256, 9, np.int32)}, "weight_g_idx' puts column 0 into group 9"),
    ],
)  # fmt: skip
def test_damage_is_named(folder: Folder, layout: str, changes: dict[str, Any], message: str) -> None:
    choices = Choices(layout, 4, 64)
    tensors = change(packed_tensors(rounded(choices), choices), changes)
    with pytest.raises((FormatError, UnsupportedError), match=message):
        read(folder(tensors, quantization_config(choices, [])))


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("gptq", {"checkpoint_format": "gptq_p"}, "layout 'gptq_p' is not read; write .* the format gptq or gptq_v2"),
        ("gptq", {"checkpoint_format": "marlin"}, "layout 'marlin'"),
        ("gptq", {"is_marlin_format": True}, "layout 'marlin'"),
        ("gptq", {"format": "gptq_v2"}, "checkpoint_format and format contradict"),
        ("gptq", {"bits": 9}, "'bits' must be a number of bits from 2 to 8, found 9"),
        ("gptq", {"bits": None}, "found None"),
        ("gptq", {"group_size": 0}, "'group_size' must be"),
        ("gptq", {"sym": "yes"}, "'sym' must be true or false"),
        ("gptq", {"dynamic": ["x"]}, "'dynamic' must be an object"),
        ("gptq", {"dynamic": {"(": {}}}, "no regular expression"),
        ("gptq", {"dynamic": {"(a+)+$": {}}}, "no pattern for module names that is safe"),
        ("gptq", {"dynamic": {r"-:.*up_proj": {}}}, "is quantized, but .* says the module is not"),
        ("gptq", {"quant_method": "bitsandbytes"}, r"'bitsandbytes' cannot be read: .*model.dequantize\(\)"),
        ("gptq", {"quant_method": "hqq"}, "'hqq' cannot be read: take the original weights"),
        ("gptq", {"quant_method": "compressed-tensors"}, "holds packed codes, but .* says compressed-tensors"),
        ("gptq", {"quant_method": 3}, "quant_method must be one of"),
        ("awq", {"version": "gemv_fast"}, "AWQ layout 'gemv_fast' is not read; .* version gemm"),
        ("awq", {"bits": 3}, "AWQ codes have 4 bits"),
        ("awq", {"modules_to_not_convert": ["mlp"]}, "modules_to_not_convert names 'mlp'"),
        ("awq", {"modules_to_not_convert": "mlp"}, "must be a list of names"),
        ("compressed-tensors", {"format": "marlin-24"}, "format 'marlin-24' is not read"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not read"),
        ("compressed-tensors", {"ignore": ["re:.*up_proj"]}, "the list 'ignore' .* names its module"),
        ("compressed-tensors", {"config_groups": {}}, "no group in .* has its module for a target"),
        ("compressed-tensors", {"config_groups": []}, "config_groups must be an object|no group"),
        ("compressed-tensors", {"config_groups": {"g": {"targets": ["Linear"]}}}, "object 'weights'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_followed(folder: Folder, layout: str, changes: dict[str, Any], message: str) -> None:
    choices = Choices(layout, 4, 64)
    config = {**quantization_config(choices, []), **changes}
    with pytest.raises((FormatError, UnsupportedError), match=message):
        read(folder(packed_tensors(rounded(choices), choices), config))


def test_codes_without_any_settings(folder: Folder) -> None:
    choices = Choices("gptq", 4, 64)
    with pytest.raises(FormatError, match="holds packed codes, but no config beside it says how"):
        found(folder(packed_tensors(rounded(choices), choices), None))


@pytest.mark.parametrize("suffix", ["weight.absmax", "weight.quant_state.bitsandbytes__nf4", "SCB"])
def test_bitsandbytes_is_told_by_its_tensors(folder: Folder, suffix: str) -> None:
    with pytest.raises(UnsupportedError, match=r"bitsandbytes, which cannot be read: .*model.dequantize\(\)"):
        found(folder({"weight": np.ones((8, 8), np.uint8), suffix: np.ones(4, np.float32)}, None))


def float8(rows: int = 200, columns: int = 300) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize(
    ("scales", "block"),
    [
        (np.float32(0.3), None),  # no axis at all
        (np.full((1,), 0.3, np.float32), None),
        (np.full((1, 1), 0.3, ml_dtypes.bfloat16), None),
        (np.linspace(0.1, 2, 200, dtype=np.float32)[:, None], None),
        (np.linspace(0.1, 2, 200, dtype=np.float32), None),
        (np.arange(1, 7, dtype=np.float32).reshape(2, 3) / 7, None),
        (np.arange(1, 7, dtype=np.float32).reshape(2, 3) / 7, [128, 128]),
        (np.arange(1, 21, dtype=np.float32).reshape(4, 5) / 7, [64, 64]),
    ],
)
def test_float8_times_its_scales(folder: Folder, name: str, scales: Any, block: Any) -> None:
    weight, scales = float8(), np.asarray(scales)
    path = folder({"weight": weight, name: scales}, {"quant_method": "fp8", "weight_block_size": block})
    size = block or [128, 128]
    spread = scales.astype(np.float32)
    if scales.size in (6, 20):
        spread = np.repeat(np.repeat(spread, size[0], 0), size[1], 1)[:200, :300]
    elif scales.size == 200:
        spread = spread.reshape(200, 1)
    values = read(path)
    assert values.dtype == np.float32
    assert np.array_equal(values, weight.astype(np.float32) * spread)


@pytest.mark.parametrize(
    ("weights", "scales"),
    [
        ({"strategy": "tensor"}, np.array([0.3], np.float32)),
        ({"strategy": "channel"}, np.linspace(0.1, 2, 200, dtype=np.float32)[:, None].astype(ml_dtypes.bfloat16)),
        ({"strategy": "block", "block_structure": [64, 64]}, np.arange(1, 21, dtype=np.float32).reshape(4, 5) / 7),
        ({"strategy": "group", "group_size": 100}, np.linspace(0.1, 2, 600, dtype=np.float32).reshape(200, 3)),
    ],
)
def test_float8_of_compressed_tensors(folder: Folder, weights: dict[str, Any], scales: np.ndarray) -> None:
    weight = float8()
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "symmetric": True, **weights}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    tensors = {"weight": weight, "weight_scale": scales, "input_scale": np.ones(1, np.float32)}
    values, spread = read(folder(tensors, config)), scales.astype(np.float32)
    if scales.ndim == 2:
        step = {1: 300, 5: 64, 3: 100}[scales.shape[1]]
        rows = np.arange(200) // (64 if len(scales) == 4 else 1)
        spread = scales.astype(np.float32)[rows[:, None], np.arange(300)[None] // step]
    assert np.array_equal(values.astype(np.float32), weight.astype(np.float32) * spread)


def test_float8_is_bfloat16_where_that_is_exact(folder: Folder) -> None:
    weight = float8()
    values = read(folder({"weight": weight, "weight_scale": np.float32(0.375)}, None))
    assert values.dtype == ml_dtypes.bfloat16
    assert np.array_equal(values.astype(np.float32), weight.astype(np.float32) * np.float32(0.375))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight_scale": np.float32(np.nan)}, "weight_scale' holds a scale that is not finite"),
        ({"weight_scale": np.ones((3, 3), np.float32)}, r"weight_scale' has shape \(3, 3\), expected \(2, 3\)"),
        ({"weight_scale": np.ones((2, 3), np.int32)}, "weight_scale' holds I32"),
    ],
)
def test_float8_scales_are_checked(folder: Folder, tensors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read(folder({"weight": float8(), **tensors}, None))


def test_float8_that_is_no_number_is_named(folder: Folder) -> None:
    weight = float8()
    weight[5, 7] = np.nan
    with pytest.raises(FormatError, match=r"up_proj.weight' holds no finite number in row 5, column 7"):
        read(folder({"weight": weight, "weight_scale": np.float32(1)}, None))


@pytest.mark.parametrize("axes", [(6, 64), (3, 6, 96)])
def test_mxfp4_of_gpt_oss(folder: Folder, axes: tuple[int, ...]) -> None:
    from make_packed_model import mxfp4_tensors

    weight = np.random.default_rng(5).standard_normal(axes).astype(np.float32)
    tensors, expected = mxfp4_tensors(weight)
    tensors = {suffix.replace("weight", "gate_up"): tensor for suffix, tensor in tensors.items()}
    module = found(folder(tensors, {"quant_method": "mxfp4"})).modules[f"{MODULE}.gate_up"]
    assert module.shape == axes
    assert np.array_equal(dequantize(read_module(module)), expected)


def test_mxfp4_exponents_are_checked(folder: Folder) -> None:
    tensors = {"w_blocks": np.zeros((4, 2, 16), np.uint8), "w_scales": np.full((4, 2), 255, np.uint8)}
    with pytest.raises(FormatError, match="w_scales' holds an exponent of 255"):
        read_module(found(folder(tensors, None)).modules[f"{MODULE}.w"])
    with pytest.raises(FormatError, match=r"w_blocks' has shape \(4, 2, 15\), expected \(4, 2, 16\)"):
        found(folder({**tensors, "w_blocks": np.zeros((4, 2, 15), np.uint8)}, None))


