"""Which families there are, found by Hugging Face model_type or by GGUF architecture."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from llmctl.errors import FormatError, UnsupportedError, UsageError
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models import (
    cohere,
    deepseek,
    exaone4,
    gemma,
    gemma3,
    glm4,
    gpt2,
    gpt_oss,
    granite,
    llama,
    mistral3,
    mixtral,
    olmo2,
    phi3,
    qwen,
    qwen_moe,
    smollm3,
    stablelm,
    starcoder2,
)
from llmctl.runtime.models.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral3.FAMILY,
    mixtral.FAMILY,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen_moe.QWEN2_MOE,
    qwen_moe.QWEN3_MOE,
    gemma.GEMMA,
    gemma.GEMMA2,
    gemma3.FAMILY,
    phi3.FAMILY,
    smollm3.FAMILY,
    olmo2.FAMILY,
    granite.FAMILY,
    glm4.FAMILY,
    exaone4.FAMILY,
    starcoder2.FAMILY,
    stablelm.FAMILY,
    cohere.COHERE,
    cohere.COHERE2,
    deepseek.FAMILY,
    gpt2.FAMILY,
    gpt_oss.FAMILY,
)


def family_by_model_type(model_type: object) -> Family:
    """The family of a config.json; UnsupportedError naming the type and its nearest relatives."""
    known = {name: family for family in FAMILIES for name in family.model_types}
    return _pick(known, model_type, "config.json: model_type")


def family_by_gguf_arch(arch: object, *, sparse: bool = False) -> Family:
    """The family of a GGUF file; UnsupportedError naming the architecture and its nearest relatives. sparse: the file has
    experts, which of two families of one architecture decides for the one that has them."""
    known = {family.gguf_arch: family for family in sorted(FAMILIES, key=lambda family: family.sparse == sparse)}
    return _pick(known, arch, "general.architecture")


def chosen_family(name: str | None) -> Family | None:
    """The family that a model is to be taken for one of; None, for the one it says it is, where none is named."""
    return None if name is None else family_by_name(name)


def family_by_name(name: str) -> Family:
    """The family of this name, or of a model_type or GGUF architecture of it; UsageError naming those there are.

    Of a model_type it is the family with that one alone: DeepSeek V3 is not read as V2, nor Mistral without its window.
    """
    known = {family.gguf_arch: family for family in reversed(FAMILIES)}
    known |= {key: family for family in FAMILIES for key in (family.name, *family.model_types)}
    if name not in known:
        raise UsageError(f"--as {name}: there is no such family; known: {', '.join(family.name for family in FAMILIES)}")
    family = known[name]
    return replace(family, model_types=(name,)) if name != family.name and name in family.model_types else family


def config_taken_for(values: dict[str, Any], family: Family | None) -> tuple[Family, dict[str, Any]]:
    """The family of a config.json, and its values as one of that family. family: to be taken for one of, None for what it says.

    Errors: as `family_by_model_type`.
    """
    stated = values.get("model_type")
    if family is None:
        return family_by_model_type(stated), values
    return family, values if stated in family.model_types else {**values, "model_type": family.model_types[0]}


def _pick(known: dict[str, Family], name: object, where: str) -> Family:
    if name is None or (isinstance(name, str) and not name):
        raise UnsupportedError(f"{where} is missing, so the architecture is unknown; known: {', '.join(known)}")
    if not isinstance(name, str):
        raise FormatError(f"{where} must be a string, found {quoted(name)}")
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3)
    if not near:
        raise UnsupportedError(
            f"{where} {quoted(name)} is not supported yet; --as FAMILY takes it for one of another: {', '.join(known)}"
        )
    relatives = ", ".join(map(repr, near))
    raise UnsupportedError(
        f"{where} {quoted(name)} is not supported yet; its nearest relatives are {relatives}: "
        f"--as {near[0]} takes it for one of them, with every command that reads a model"
    )
