"""Hugging Face folders made here: transformers loads them, and what went to GGUF comes back as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from make_packed_model import Choices, make_packed_model
from safetensors.numpy import load_file, save_file
from tiny_models import MODELS

from llmctl.errors import FormatError, OutputError, UnsupportedError, UsageError
from llmctl.quant.convert import Written
from llmctl.quant.to_folder import FolderWritten, folder_path, plan_folder, write_folder
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter
from llmctl.runtime.loading import load_model

Convert = Callable[..., Written]
Tiny = Callable[..., Path]
IDS = np.random.default_rng(5).integers(3, 250, 40).tolist()


def to_folder(source: Path, output: Path, type_name: str = "auto", **options: Any) -> FolderWritten:
    return write_folder(plan_folder(source, type_name), output, **options)


def logits_of_transformers(folder: Path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits[0].numpy()


def test_transformers_loads_the_same_model(tiny: Tiny, convert: Convert, logits: Any, tmp_path: Path) -> None:
    """Every choice a config can make, through GGUF and back: the same logits as of the folder it came from."""
    for name, choices in MODELS.items():
        source = tiny(name.partition("-")[0], **choices)
        gguf = convert(source, tmp_path / f"{name}.gguf").output
        folder = to_folder(gguf, tmp_path / name).output
        found = logits_of_transformers(folder)
        np.testing.assert_allclose(found, logits_of_transformers(source), rtol=0, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(found, logits(folder), rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "llama-multi_query", "gemma3", "gemma3-untied"])
def test_tensors_come_back_as_they_were(tiny: Tiny, convert: Convert, tmp_path: Path, name: str, dtype: str) -> None:
    """Byte by byte in their own type, except norms stored as 1 + w, which are within the rounding of that sum."""
    family = name.partition("-")[0]
    source = tiny(family, dtype=dtype, **MODELS[name])
    folder = to_folder(convert(source, tmp_path / "out.gguf").output, tmp_path / "back").output
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(after) == set(before)
    for tensor, expected in before.items():
        assert after[tensor].dtype == expected.dtype
        if family == "gemma3" and tensor.endswith("norm.weight"):
            wide = (expected.astype(np.float32) + 1) - np.float32(1)
            assert np.abs(wide - expected.astype(np.float32)).max() <= 2**-23
            assert after[tensor].tobytes() == wide.astype(expected.dtype).tobytes()
        else:
            assert after[tensor].tobytes() == expected.tobytes(), tensor
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == dtype


# Not phi3: readers give the tokens of a model of that name flags that the tiny tokenizer has not.
OTHERS = ("cohere", "cohere2", "exaone4", "glm4", "granite", "olmo2", "smollm3", "stablelm", "starcoder2")


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_come_back(tiny: Tiny, convert: Convert, tmp_path: Path, family: str) -> None:
    source = tiny(family, tokenizer="bpe")
    folder = to_folder(convert(source, tmp_path / "out.gguf").output, tmp_path / "back").output
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in after.items()} == {name: one.tobytes() for name, one in before.items()}
    np.testing.assert_array_equal(logits_of_transformers(folder), logits_of_transformers(source))


@pytest.mark.parametrize("name", ["llama", "llama-spm", "gemma3", "gemma3-bpe"])
def test_the_tokenizer_comes_along(tiny: Tiny, convert: Convert, tmp_path: Path, name: str) -> None:
    source = tiny(name.partition("-")[0], **MODELS[name])
    folder = to_folder(convert(source, tmp_path / "out.gguf").output, tmp_path / "back").output
    before, after = load_model(source), load_model(folder)
    library = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("the house in 北京", "<|im_start|>user\n12 é", " the  town", "a\tb\n\n"):
        ids = before.tokenizer.encode(text, parse_special=True)
        assert after.tokenizer.encode(text, parse_special=True) == ids
        assert library.encode(text) == ids
    assert after.eos_token_ids == before.eos_token_ids
    assert after.tokenizer.chat_templates == before.tokenizer.chat_templates
    assert after.tokenizer.named_special == before.tokenizer.named_special
    messages = [{"role": "user", "content": "hello"}]
    rendered = library.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert (folder / "tokenizer.model").exists() == (source / "tokenizer.model").exists()


def test_a_gguf_file_can_be_made_of_it_again(tiny: Tiny, convert: Convert, tmp_path: Path) -> None:
    """The second file is the first, but for what is named after the folder."""
    first = convert(tiny("gemma3", rope="linear"), tmp_path / "first.gguf").output
    folder = to_folder(first, tmp_path / "tiny-gemma3").output
    second = convert(folder, tmp_path / "second.gguf").output
    with open_checkpoint(first) as one, open_checkpoint(second) as two:
        assert two.names() == one.names()
        for name in one.names():
            if "norm" not in name:
                assert two.read(name).tobytes() == one.read(name).tobytes()
        keys = [key for key in one.metadata if not key.startswith("general.")]
        assert keys == [key for key in two.metadata if not key.startswith("general.")]
        for key in keys:
            assert str(two.metadata[key]) == str(one.metadata[key]), key


def test_quantized_weights_are_unfolded_to_f16(tiny: Tiny, convert: Convert, logits: Any, tmp_path: Path) -> None:
    gguf = convert(tiny("llama"), tmp_path / "q.gguf", "Q8_0").output
    plan = plan_folder(gguf)
    assert plan.form.name == "F16"
    folder = write_folder(plan, tmp_path / "half").output
    assert {tensor.dtype.name for tensor in load_file(folder / "model.safetensors").values()} == {"float16"}
    exact = to_folder(gguf, tmp_path / "exact", "f32").output
    np.testing.assert_allclose(logits_of_transformers(exact), logits(gguf), rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits_of_transformers(folder), logits(folder), rtol=0, atol=1e-4)


@pytest.mark.parametrize("limit", [20_000, 100_000])
def test_shards_are_loaded(tiny: Tiny, convert: Convert, tmp_path: Path, limit: int) -> None:
    gguf = convert(tiny("llama"), tmp_path / "out.gguf").output
    folder = to_folder(gguf, tmp_path / "split", max_shard_bytes=limit).output
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 3
    whole = to_folder(gguf, tmp_path / "one").output
    np.testing.assert_array_equal(logits_of_transformers(folder), logits_of_transformers(whole))


def test_values_beyond_f16_are_refused(changed: Any, convert: Convert, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    folder = changed("llama", dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    weights[name] = weights[name].copy()
    weights[name][3, 0] = 1e5
    save_file(weights, folder / "model.safetensors")
    gguf = convert(folder, tmp_path / "out.gguf").output
    with pytest.raises(FormatError, match=rf"'{name}': .*does not fit F16.*--type BF16 has room for it"):
        to_folder(gguf, tmp_path / "out", "F16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed", "out.gguf"]
    assert to_folder(gguf, tmp_path / "out").changed == []


def test_plain_numbers_that_change_are_named(changed: Any, convert: Convert, tmp_path: Path) -> None:
    norm = np.linspace(0.9, 1.1, 96).astype(np.float32)
    folder = changed("llama", {"model.norm.weight": norm})
    written = to_folder(convert(folder, tmp_path / "out.gguf", "Q8_0").output, tmp_path / "out")
    assert "model.norm.weight" in written.changed


def test_names_licences_and_sampling_survive(changed: Any, convert: Convert, tmp_path: Path) -> None:
    folder = changed("llama")
    (folder / "README.md").write_text("---\nmodel_name: Tiny One\nlicense: mit\nlanguage: [en, de]\n---\n# hello\n")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20}))
    first = convert(folder, tmp_path / "out.gguf").output
    back = to_folder(first, tmp_path / "back").output
    generation = transformers.GenerationConfig.from_pretrained(back)
    assert (generation.temperature, generation.top_k, generation.do_sample) == (0.6, 20, True)
    second = convert(back, tmp_path / "again.gguf").output
    with open_checkpoint(first) as one, open_checkpoint(second) as two:
        for key in ("general.name", "general.license", "general.languages", "general.sampling.temp"):
            assert str(two.metadata[key]) == str(one.metadata[key])
        assert two.metadata["general.name"] == "Tiny One"


def test_divisors_no_llama3_has_are_written_all_the_same(tiny: Tiny, convert: Convert, logits: Any, tmp_path: Path) -> None:
    gguf = convert(tiny("llama", rope="llama3"), tmp_path / "out.gguf").output
    odd = tmp_path / "odd.gguf"
    divisors = np.linspace(1.0, 5.0, 16).astype(np.float32) ** 1.5
    with open_checkpoint(gguf) as checkpoint, GgufWriter(odd, checkpoint.typed_metadata()) as writer:
        for entry in checkpoint.entries():
            writer.declare(entry.name, entry.format, entry.shape)
        for name in checkpoint.names():
            writer.write(name, divisors if name == "rope_freqs.weight" else checkpoint.read(name))
    folder = to_folder(odd, tmp_path / "odd").output
    assert json.loads((folder / "config.json").read_text())["rope_scaling"]["rope_type"] == "longrope"
    np.testing.assert_allclose(logits_of_transformers(folder), logits(odd), rtol=0, atol=1e-4)
    found = json.loads((to_folder(gguf, tmp_path / "real").output / "config.json").read_text())["rope_scaling"]
    assert found["rope_type"] == "llama3"


def test_a_folder_can_be_made_of_a_folder(tiny: Tiny, tmp_path: Path) -> None:
    """Another type or other shards, everything else as it was."""
    source = tiny("llama")
    folder = to_folder(source, tmp_path / "out", "BF16", max_shard_bytes=100_000).output
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, folder))
    assert after.pop("torch_dtype") == "bfloat16"
    before.pop("dtype")
    assert after == before
    with open_checkpoint(folder) as checkpoint:
        expected = load_file(source / "model.safetensors")["lm_head.weight"].astype(ml_dtypes.bfloat16)
        assert checkpoint.read("lm_head.weight").tobytes() == expected.tobytes()


def test_of_a_multimodal_folder_the_text_model_is_written(changed: Any, tiny: Tiny, tmp_path: Path) -> None:
    folder = changed("gemma3", {"x": np.ones((2, 2), np.float32)})
    weights = load_file(tiny("gemma3") / "model.safetensors")
    nested = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    save_file(nested | {"vision_tower.encoder.weight": np.ones((2, 2), np.float32)}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 4]}))
    plan = plan_folder(folder)
    assert plan.left_out == ["vision_tower.encoder.weight"]
    written = write_folder(plan, tmp_path / "text").output
    config = json.loads((written / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"], "text_config" in config) == ("gemma3_text", [1, 4], False)
    np.testing.assert_array_equal(logits_of_transformers(written), logits_of_transformers(tiny("gemma3")))


def test_packed_weights_are_unfolded(tiny: Tiny, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    values = tmp_path / "values"
    packed = make_packed_model(tiny("llama", **sizes), tmp_path / "packed", Choices("awq", 4, 64), values=values)
    plan = plan_folder(packed, "F32")
    written = write_folder(plan, tmp_path / "plain")
    folder = written.output
    assert written.changed == []
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    expected = load_file(values / "model.safetensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-6, atol=1e-7, err_msg=name)


def test_what_cannot_be_written_so(tiny: Tiny, changed: Any, convert: Convert, tmp_path: Path) -> None:
    gguf = convert(tiny("llama"), tmp_path / "out.gguf").output
    with pytest.raises(UsageError, match="--type Q4_0: a safetensors folder has auto, F16, BF16, F32"):
        plan_folder(gguf, "Q4_0")
    sizes = {"q": 192, "k": 64, "v": 64}
    biases = {f"model.layers.{i}.self_attn.{x}_proj.bias": np.ones(n, np.float32) for i in range(3) for x, n in sizes.items()}
    lopsided = changed("llama", biases, {"attention_bias": True, "attention_out_bias": False})
    odd = convert(lopsided, tmp_path / "odd.gguf").output
    with pytest.raises(UnsupportedError, match=r"odd\.gguf: config\.json cannot say attention_out_bias = False"):
        plan_folder(odd)
    plan = plan_folder(gguf)
    with pytest.raises(OutputError, match="lies in the folder to be written"):
        folder_path(plan, tmp_path, force=True)
    assert re.fullmatch(r"tiny-llama-\d+K-F32", folder_path(plan, None, force=False).name)


def test_a_stopped_run_leaves_nothing(tiny: Tiny, convert: Convert, tmp_path: Path) -> None:
    gguf = convert(tiny("llama"), tmp_path / "out.gguf").output

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_folder(gguf, tmp_path / "out", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
