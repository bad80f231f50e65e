"""Family: everything that tells one architecture from another, as data.

A family file holds one `Family`: how its config is read and how GGUF spells it. It holds no math: that is decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmctl.runtime.checkpoint.names import GgufNames, HfNames
from llmctl.runtime.models.config import ModelConfig

LAYER_NORM_EPS = "attention.layer_norm_epsilon"


@dataclass(frozen=True)
class Family:
    """One architecture.

    name: ours. model_types: `model_type` values of config.json. read_config: Hugging Face config → ModelConfig.
    gguf_arch: `general.architecture`. gguf_names: tensor names and transforms. hf_class: entry of `architectures`.
    hf_keys: the keys of a config.json that only this family has, for writing one.
    complete_gguf: adds the config values that GGUF readers know by heart because no key holds them.
    eps_keys: what config.json and, below `{arch}.`, GGUF call the number that norms add.
    gguf_numbers: config key → GGUF key below `{arch}.`, for numbers only this family has; written from hf_keys.
    gguf_values: config key → GGUF key below `{arch}.`, for whole numbers, flags and numbers that complete_gguf makes something
    of. gguf_keys: keys below `{arch}.` that only this family has, or that say something else than usual.
    sparse: its models have experts.
    gguf_window_pattern: GGUF says layer by layer whether there is a window.
    hf_names: tensor names of folders, where they are not the usual ones. hf_spelling: usual config key → what config.json calls
    it instead. hf_nested_rope: transformers looks for the rope of each type of layer by itself.
    """

    name: str
    model_types: tuple[str, ...]
    read_config: Callable[[dict[str, Any]], ModelConfig]
    gguf_arch: str
    gguf_names: GgufNames
    hf_class: str
    hf_keys: Callable[[ModelConfig], dict[str, Any]]
    complete_gguf: Callable[[dict[str, Any]], dict[str, Any]] = dict
    eps_keys: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    gguf_numbers: Mapping[str, str] = field(default_factory=dict)
    gguf_values: Mapping[str, str] = field(default_factory=dict)
    gguf_keys: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    sparse: bool = False
    gguf_window_pattern: bool = False
    hf_names: HfNames = field(default_factory=HfNames)
    hf_spelling: Mapping[str, str] = field(default_factory=dict)
    hf_nested_rope: bool = False
