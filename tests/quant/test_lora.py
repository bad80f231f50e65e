"""Adapters merged: W + s·B·A in float64 is the judge; what cannot be merged is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmctl.errors import FormatError, LlmctlError, ModelNotFoundError, UnsupportedError
from llmctl.quant.convert import make_plan, plan_warnings, write
from llmctl.quant.lora import Adapter
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.source import open_source
from llmctl.quant.to_folder import plan_folder, write_folder

Tiny = Callable[..., Path]
Make = Callable[..., Path]
Q0 = "model.layers.0.self_attn.q_proj"
UP1 = "model.layers.1.mlp.up_proj"
EMBED = "model.embed_tokens"
PREFIX = "base_model.model."
SHAPES = {"q_proj": (192, 96), "k_proj": (64, 96), "up_proj": (160, 96), "embed_tokens": (384, 96)}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """An adapter as PEFT saves it: `make({module: rank}, {config key: value}, {more tensors})`."""

    def run(ranks: dict[str, int], config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
        folder = tmp_path / f"adapter{len(list(tmp_path.glob('adapter*')))}"
        folder.mkdir()
        rng, found = np.random.default_rng(len(ranks)), {}
        for module, rank in ranks.items():
            out, inner = SHAPES[module.rpartition(".")[2]]
            embedding = module.endswith("embed_tokens")
            a, b = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
            found[f"{PREFIX}{module}.{a}"] = rng.standard_normal((rank, out if embedding else inner)).astype(np.float32)
            found[f"{PREFIX}{module}.{b}"] = rng.standard_normal((inner if embedding else out, rank)).astype(np.float32)
        found |= tensors or {}
        kept = {name: tensor for name, tensor in found.items() if tensor is not None}
        save_file(kept, folder / "adapter_model.safetensors")
        modules = sorted(ranks)
        stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": modules} | (config or {})
        (folder / "adapter_config.json").write_text(json.dumps(stated))
        return folder

    return run


def merged(source: Path, output: Path, *adapters: Adapter) -> dict[str, np.ndarray]:
    write_folder(plan_folder(source, "auto", adapters), output)
    return load_file(output / "model.safetensors")


def product(folder: Path, module: str) -> np.ndarray:
    """B·A in float64."""
    tensors = load_file(folder / "adapter_model.safetensors")
    if module.endswith("embed_tokens"):
        a, b = (tensors[f"{PREFIX}{module}.lora_embedding_{side}"].astype(np.float64) for side in "AB")
        return (b @ a).T
    a, b = (tensors[f"{PREFIX}{module}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    return b @ a


CONFIGS = {
    "plain": ({Q0: 4, UP1: 4}, {}, {Q0: 2.0, UP1: 2.0}),
    "rank-stabilized": ({Q0: 4}, {"use_rslora": True}, {Q0: 8 / sqrt(4)}),
    "patterns": (
        {Q0: 2, UP1: 4},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 32}},
        {Q0: 4.0, UP1: 8.0},
    ),
    "embedding": ({EMBED: 4}, {}, {EMBED: 2.0}),
    "a pattern of names": ({Q0: 4}, {"target_modules": r".*\.0\.self_attn\.q_proj"}, {Q0: 2.0}),
    "layers": ({Q0: 4}, {"target_modules": ["q_proj"], "layers_to_transform": [0]}, {Q0: 2.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_product_is_added(tiny: Tiny, make: Make, tmp_path: Path, name: str) -> None:
    ranks, config, scales = CONFIGS[name]
    source, adapter = tiny("llama"), make(ranks, config)
    before = load_file(source / "model.safetensors")
    after = merged(source, tmp_path / "out", Adapter(adapter))
    for tensor, weight in before.items():
        module = tensor.removesuffix(".weight")
        expected = weight + scales[module] * product(adapter, module) if module in scales else weight
        np.testing.assert_allclose(after[tensor], expected, rtol=0, atol=1e-5)
        assert (after[tensor].tobytes() == weight.tobytes()) == (module not in scales)


def test_several_adapters_with_scales(tiny: Tiny, make: Make, tmp_path: Path) -> None:
    one, two = make({Q0: 4}), make({Q0: 4, UP1: 4})
    after = merged(tiny("llama"), tmp_path / "out", Adapter(one, 0.5), Adapter(two, -1.0))
    weight = load_file(tiny("llama") / "model.safetensors")[f"{Q0}.weight"]
    expected = weight + 0.5 * 2 * product(one, Q0) - 2 * product(two, Q0)
    np.testing.assert_allclose(after[f"{Q0}.weight"], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_gguf_files_hold_the_same(tiny: Tiny, make: Make, tmp_path: Path, kind: str) -> None:
    """Of either source, in GGUF's row order; the type is kept, here float16."""
    source, adapter = tiny("llama", dtype="float16"), Adapter(make({Q0: 4, UP1: 4}))
    expected = merged(source, tmp_path / "direct", adapter)
    if kind == "gguf":
        write(make_plan(open_source(source), None), tmp_path / "base.gguf")
        source = tmp_path / "base.gguf"
    write(make_plan(open_source(source, adapters=[adapter]), recipe_by_name("auto")), tmp_path / "merged.gguf")
    found = merged(tmp_path / "merged.gguf", tmp_path / "back")
    for name, tensor in expected.items():
        assert tensor.dtype == np.float16
        assert found[name].tobytes() == tensor.tobytes()


def test_weights_are_rounded_once(tiny: Tiny, make: Make, tmp_path: Path) -> None:
    """Merged in float32 and then quantized, not by way of float16."""
    source, adapter = tiny("llama", dtype="float16"), Adapter(make({UP1: 4}))
    plan = make_plan(open_source(source, adapters=[adapter]), recipe_by_name("Q8_0"))
    tensor = next(one.source for one in plan.tensors if one.source.name == "blk.1.ffn_up.weight")
    weight = load_file(source / "model.safetensors")[f"{UP1}.weight"].astype(np.float64)
    np.testing.assert_allclose(tensor.read(), weight + 2 * product(adapter.folder, UP1), rtol=0, atol=1e-5)
    assert plan.requantized == []
    stored = sum(one.nbytes for one in load_file(source / "model.safetensors").values())
    assert sum(one.bytes_before for one in plan.tensors) == stored


def test_a_quantized_base_keeps_its_type_and_is_said_to_be_rounded_again(tiny: Tiny, make: Make, tmp_path: Path) -> None:
    base = tmp_path / "base.gguf"
    write(make_plan(open_source(tiny("llama")), recipe_by_name("Q8_0")), base)
    plan = make_plan(open_source(base, adapters=[Adapter(make({UP1: 4}))]), None)
    assert [tensor.source.name for tensor in plan.requantized] == ["blk.1.ffn_up.weight"]
    assert {tensor.format.name for tensor in plan.tensors} == {"Q8_0", "F32"}
    assert any("1 tensor is quantized already (Q8_0) and rounded a second time" in text for text in plan_warnings(plan))


def test_a_copy_of_the_embedding_is_no_change(tiny: Tiny, make: Make, tmp_path: Path) -> None:
    weight = load_file(tiny("llama") / "model.safetensors")["model.embed_tokens.weight"]
    name = f"{PREFIX}{EMBED}.base_layer.weight"
    merged(tiny("llama"), tmp_path / "out", Adapter(make({EMBED: 4}, None, {name: weight})))
    with pytest.raises(UnsupportedError, match="modules trained as a whole are not merged"):
        plan_folder(tiny("llama"), "auto", [Adapter(make({EMBED: 4}, None, {name: weight + 1}))])


BAD = [
    ({Q0: 4}, {"peft_type": "IA3"}, {}, UnsupportedError, "an adapter of type 'IA3'"),
    ({Q0: 4}, {"use_dora": True}, {}, UnsupportedError, "use_dora cannot be merged"),
    ({Q0: 4}, {"bias": "all"}, {}, UnsupportedError, "changes biases"),
    ({Q0: 4}, {"init_lora_weights": "pissa_niter_4"}, {}, UnsupportedError, "began with pissa_niter_4"),
    ({Q0: 4}, {}, {f"{PREFIX}lm_head.weight": np.ones((384, 96), np.float32)}, UnsupportedError, r"lm_head\.weight' is no part"),
    ({Q0: 4}, {}, {f"{PREFIX}{Q0}.lora_B.weight": None}, FormatError, "has no counterpart"),
    ({Q0: 4}, {}, {f"{PREFIX}layers.9.lora_A.weight": np.ones((4, 96), np.float32)}, FormatError, "which the model does not"),
    ({Q0: 4}, {"r": 8}, {}, FormatError, "expected rank 8 between them"),
    ({Q0: 4}, {"lora_alpha": None}, {}, FormatError, "lora_alpha of .* must be a number above zero, found None"),
    ({Q0: 4}, {"target_modules": ["q_proj"]}, {}, FormatError, r"1\.self_attn\.q_proj is among its target_modules, but"),
    ({Q0: 4, UP1: 4}, {"target_modules": [Q0]}, {}, FormatError, "up_proj, which is not among its target_modules"),
    ({Q0: 4}, {"target_modules": "("}, {}, FormatError, "are no names"),
    ({Q0: 4}, {}, {f"{PREFIX}{Q0}.lora_B.weight": np.ones((64, 4), np.float32)}, FormatError, "another model's adapter"),
    ({Q0: 4}, {}, {f"{PREFIX}{Q0}.lora_B.weight": np.full((192, 4), np.nan, np.float32)}, FormatError, "lora_B holds NaN or"),
    ({Q0: 4}, {"modules_to_save": ["lm_head"]}, {}, FormatError, "'lm_head' is among its modules_to_save, but has no"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "config", "tensors", "error", "message"), BAD, ids=[case[4][:30] for case in BAD])
def test_what_cannot_be_merged_is_named(
    tiny: Tiny, make: Make, ranks: Any, config: Any, tensors: Any, error: type[LlmctlError], message: str
) -> None:
    adapter = make(ranks, config, tensors)
    with pytest.raises(error, match=message) as caught:
        open_source(tiny("llama"), adapters=[Adapter(adapter)])
    assert str(adapter) in str(caught.value)


def test_what_is_no_adapter(tiny: Tiny, make: Make, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"there is no adapter_config\.json \(--lora takes a folder that PEFT saved\)"):
        open_source(tiny("llama"), adapters=[Adapter(tmp_path)])
    adapter = make({Q0: 4})
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelNotFoundError, match="a pickle, which is never opened"):
        open_source(tiny("llama"), adapters=[Adapter(adapter)])
