"""Every family against transformers: tiny random models, float32, within 1e-4 of the logits' spread.

One table of families (scripts/make_tiny_model.py), one set of questions: the logits of one pass and of token after token, a
batch of unequal prompts, the same after a conversion to GGUF and back to a folder, the native backend, and for every switch
of its config that the comparison would break without it.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_tiny_model import make_tiny_model, tiny_config
from transformers import AutoModelForCausalLM

from llmctl.errors import UnsupportedError, UsageError
from llmctl.quant.convert import make_plan, write
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.source import open_source
from llmctl.quant.to_folder import plan_folder, write_folder
from llmctl.runtime.engine.engine import Engine
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model, open_model
from llmctl.runtime.models.config import BlockNorms, ExpertsConfig, LayerConfig, ModelConfig
from llmctl.runtime.models.registry import family_by_model_type
from llmctl.runtime.models.rope import RopeConfig
from llmctl.runtime.sampling.params import SamplingParams

LENGTH = 50  # past every window and original context, not a whole number of pages
IDS = np.random.default_rng(3).integers(3, 384, LENGTH).tolist()
_FULL_QWEN = {"use_sliding_window": False, "layer_types": None}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LITE = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
# Family → choices of cases beyond the tiny model's own. "gguf": what GGUF can say of it.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2": {"gguf": _FULL_QWEN, "tied": {"tie_word_embeddings": True}},
    "qwen3": {"gguf": _FULL_QWEN, "bias": {"attention_bias": True}},
    "gemma": {},
    "gemma2": {"gguf": {"query_pre_attn_scalar": 32}},
    "gemma3": {"gguf": {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention"] * 4}},
    "phi3": {"gguf": {"sliding_window": None, "rope": "longrope"}, "longrope": {"rope": "longrope"}},
    "smollm3": {"yarn": {"rope": "yarn"}, "biases": {"attention_bias": True, "mlp_bias": True}},
    "ministral": {"gguf": {"layer_types": ["sliding_attention"] * 4}},
    "ministral3": {"gguf": {}, "window": {"sliding_window": 8}},
    "olmo2": {"bias": {"attention_bias": True}},
    "olmo3": {"gguf": {"rope": "yarn"}, "yarn": {"rope": "yarn"}, "bias": {"attention_bias": True}},
    "granite": {"biases": {"attention_bias": True, "mlp_bias": True}},
    "glm4": {},
    "starcoder2": {"plain": {"use_bias": False, "sliding_window": None}},
    "stablelm": {
        "parallel": {"use_parallel_residual": True},
        "plain": {"use_qkv_bias": False},
        "gguf": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": False},
    },
    "cohere": {"bias": {"attention_bias": True}, "qk_norm": {"use_qk_norm": True}, "gguf": {"use_qk_norm": True}},
    "cohere2": {},
    "gpt2": {"gelu": {"activation_function": "gelu"}, "unscaled": {"scale_attn_weights": False}},
    "gpt_oss": {"unscaled": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "attention_bias": False}},
    "mixtral": {"window": {"sliding_window": 8}},
    "qwen2_moe": {
        "gguf": {"norm_topk_prob": False, "use_sliding_window": False},
        "sparse": {"decoder_sparse_step": 2, "mlp_only_layers": []},
    },
    "qwen3_moe": {"gguf": {"use_sliding_window": False, "mlp_only_layers": []}, "bias": {"attention_bias": True}},
    "deepseek_v2": {
        "gguf": {"rope": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
        "lite": {**_LITE, "first_k_dense_replace": 0},
        "biases": {"attention_bias": True, "mlp_bias": True},
    },
    "deepseek_v3": {
        "gguf": {"rope": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "mscale": {"rope": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, "rope_interleave": False},
        "lite": {"q_lora_rank": None, "attention_bias": True, "norm_topk_prob": False},
    },
    "exaone4": {"llama3": {"rope": "llama3"}, "all_full": {"sliding_window": None, "layer_types": ["full_attention"] * 4}},
}
ALL = [(family, case) for family, cases in CASES.items() for case in ("own", *cases)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny matrices are faster without threads, and much faster where other work shares the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Folders = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a family's case, made once."""

    @functools.cache
    def make(family: str, case: str) -> Path:
        choices = CASES[family].get(case, {})
        return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family, tokenizer="bpe", **choices)

    return make


@pytest.fixture(scope="module")
def expected(folder: Folders) -> Callable[[str, str], np.ndarray]:
    """Logits [T, vocab_size] of IDS in transformers."""

    @functools.cache
    def logits(family: str, case: str) -> np.ndarray:
        return reference_logits(reference_model(folder(family, case)), IDS)

    return logits


def reference_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def tolerance(logits: np.ndarray) -> float:
    return 1e-4 * max(float(np.std(logits)), 0.01)


def assert_close(found: np.ndarray, logits: np.ndarray, times: float = 1.0) -> None:
    np.testing.assert_allclose(found, logits, atol=times * tolerance(logits), rtol=0)


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize(("family", "case"), ALL)
def test_logits_equal_transformers(folder: Folders, expected: Any, family: str, case: str, chunk: int | None) -> None:
    if chunk == 1 and CASES[family].get(case, {}).get("rope") == "longrope":
        pytest.skip("the factors depend on the length at which a token is decoded: test_against_transformers.py")
    logits = expected(family, case)
    assert np.std(logits) > 0.1
    assert_close(compute_logits(load_model(folder(family, case)), IDS, chunk=chunk), logits)


@pytest.mark.parametrize(("family", "case"), ALL)
def test_native_logits_equal_transformers(folder: Folders, expected: Any, family: str, case: str) -> None:
    model = load_model(folder(family, case), backend="native", threads=1, activations="float", kv_type="f32")
    assert_close(compute_logits(model, IDS), expected(family, case), times=2)


@pytest.mark.parametrize("family", CASES)
def test_greedy_ids_of_unequal_prompts(folder: Folders, family: str) -> None:
    path = folder(family, "own")
    reference, engine = reference_model(path), Engine(load_model(path), max_num_seqs=3, prefill_chunk=7)
    prompts = [IDS[:2], IDS[5:6], IDS[20:41]]
    sequences = [engine.add(ids, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)) for ids in prompts]
    while engine.has_work:
        engine.step()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        logits = reference_logits(reference, sequence.token_ids)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == sequence.completion_token_ids


@pytest.mark.parametrize("family", CASES)
def test_logits_after_gguf_and_back(folder: Folders, expected: Any, tmp_path: Path, family: str) -> None:
    case = "gguf" if "gguf" in CASES[family] else "own"
    source = open_source(folder(family, case))
    file = tmp_path / "model.gguf"
    write(make_plan(source, recipe_by_name("F32")), file)
    assert_close(compute_logits(load_model(file), IDS), expected(family, case), times=2)
    write_folder(plan_folder(file), tmp_path / "back")
    assert_close(reference_logits(reference_model(tmp_path / "back"), IDS), expected(family, case), times=2)


def test_a_folder_of_windows_alone_keeps_its_base(tmp_path: Path) -> None:
    """transformers looks for the rope of the windows, whether or not there are layers without."""
    path = make_tiny_model(tmp_path / "model", "olmo3", tokenizer="bpe", num_hidden_layers=1)
    file = tmp_path / "model.gguf"
    write(make_plan(open_source(path), recipe_by_name("F32")), file)
    write_folder(plan_folder(file), tmp_path / "back")
    logits = reference_logits(reference_model(path), IDS)
    assert_close(reference_logits(reference_model(tmp_path / "back"), IDS), logits, times=2)


OFF: dict[str, Any] = {
    "qk_norm": None,
    "norm_offset": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "attention_softcap": None,
    "final_softcap": None,
    "rope_interleaved": False,
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "query_growth": None,
    "layer_norm": False,
    "norm_bias": False,
    "learned_positions": False,
    "attention_sinks": False,
}


EXPERTS_OFF: dict[str, Any] = {
    "shared_size": None,
    "shared_gate": False,
    "bias": False,
    "correction_bias": None,
    "renormalize": False,
    "sigmoid": False,
    "group_by_top2": False,
    "scale": 1.0,
}


def other_experts(config: ModelConfig) -> dict[str, ModelConfig]:
    """The same for the switches of its experts; top_k and top_groups are one more or less."""
    experts = config.experts
    if experts is None:
        return {}
    off = {name: value for name, value in EXPERTS_OFF.items() if getattr(experts, name) != value}
    off["top_k"] = experts.top_k - 1
    if experts.top_groups < experts.num_groups:
        off["top_groups"] = experts.top_groups + 1
    return {name: replace(config, experts=replace(experts, **{name: value})) for name, value in off.items()}


def without(config: ModelConfig) -> dict[str, ModelConfig]:
    """Switch → the config with this one switch off, for every switch that is on."""
    found = {name: replace(config, **{name: off}) for name, off in OFF.items() if getattr(config, name) != off}
    found |= other_experts(config)
    if config.activation == "clamped_swiglu":
        found["activation"] = replace(config, activation="silu")
    if config.attention_scale != config.head_dim**-0.5:
        found["attention_scale"] = replace(config, attention_scale=config.head_dim**-0.5)
    if config.parallel:
        found["parallel"] = replace(config, parallel=False, norms=replace(config.norms, mlp=config.norms.attention))
    elif config.norms != BlockNorms():
        found["norms"] = replace(config, norms=_other_norms(config.norms))
    plain = RopeConfig("default", 1e4, config.head_dim, config.max_position_embeddings, config.max_position_embeddings)
    ropes = [layer.rope for layer in config.layers if layer.rope is not None] or [plain]
    changes: dict[str, Callable[[LayerConfig], LayerConfig]] = {
        "sliding_window": lambda layer: replace(layer, sliding_window=None),
        "layers_without_rope": lambda layer: replace(layer, rope=layer.rope or ropes[0]),
        "partial_rotary": lambda layer: replace(layer, rope=layer.rope and replace(layer.rope, rotary_dim=config.head_dim)),
        "yarn_truncate": lambda layer: replace(layer, rope=layer.rope and _truncated(layer.rope)),
        "rope_type": lambda layer: replace(layer, rope=layer.rope and _unscaled(layer.rope)),
    }
    for name, change in changes.items():
        layers = tuple(map(change, config.layers))
        share_is_fixed = name == "partial_rotary" and (ropes[0].kind == "longrope" or config.latent is not None)
        if layers != config.layers and not share_is_fixed:
            found[name] = replace(config, layers=layers)
    return found


def _other_norms(norms: BlockNorms) -> BlockNorms:
    if norms.attention is None:
        return BlockNorms(norms.attention_out, None, norms.mlp_out, None)
    return BlockNorms(norms.attention, None, norms.mlp, None)


def _truncated(rope: RopeConfig) -> RopeConfig:
    return replace(rope, parameters={**rope.parameters, "truncate": True}) if rope.parameters.get("truncate") is False else rope


def _unscaled(rope: RopeConfig) -> RopeConfig:
    return replace(rope, kind="default")


@functools.cache
def switches() -> list[tuple[str, str, str]]:
    found = []
    for family, case in ALL:
        values = tiny_config(family, **CASES[family].get(case, {})).to_dict()
        found += [(family, case, name) for name in without(family_by_model_type(values["model_type"]).read_config(values))]
    return found


@pytest.mark.parametrize(("family", "case", "switch"), switches())
def test_every_switch_matters(folder: Folders, expected: Any, family: str, case: str, switch: str) -> None:
    opened = open_model(folder(family, case))
    opened.weights.config = without(opened.config)[switch]
    opened.weights.unneeded = lambda needed: []  # a norm or bias that is switched off
    gap = np.abs(compute_logits(opened.load(), IDS) - expected(family, case)).max()
    assert gap > 10 * tolerance(expected(family, case))


def test_the_switches_are_those_of_the_config() -> None:
    """A new one has to be put into OFF."""
    shapes = {"eos_token_ids", "norms", "experts", "latent", "fused_qkv", "fused_gate_up", "gated_mlp", "parallel"}
    flags = {field.name for field in dataclasses.fields(ModelConfig) if field.default is not dataclasses.MISSING}
    assert flags - shapes == set(OFF)
    choices = {field.name for field in dataclasses.fields(ExpertsConfig) if field.default is not dataclasses.MISSING}
    assert choices - {"names", "num_groups", "top_groups"} == set(EXPERTS_OFF)


def test_a_model_of_an_unknown_name_can_be_taken_for_a_known_one(folder: Folders, expected: Any, tmp_path: Path) -> None:
    path, logits = tmp_path / "model", expected("qwen3", "gguf")
    shutil.copytree(folder("qwen3", "gguf"), path)
    file = tmp_path / "model.gguf"
    write(make_plan(open_source(path), recipe_by_name("F32")), file)
    file.write_bytes(file.read_bytes().replace(b"qwen3", b"brand"))
    config = (path / "config.json").read_text("utf-8")
    (path / "config.json").write_text(config.replace('"model_type": "qwen3"', '"model_type": "brand"'), "utf-8")
    for source in (path, file):
        with pytest.raises(UnsupportedError, match="'brand' is not supported yet"):
            load_model(source)
        assert_close(compute_logits(load_model(source, family="qwen3"), IDS), logits)
    with pytest.raises(UsageError, match="--as brand: there is no such family; known: llama, "):
        load_model(file, family="brand")
