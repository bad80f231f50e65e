"""What a template is found to understand."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmctl.errors import ChatTemplateError
from llmctl.runtime.tokenizer.template_features import searched_texts, template_features

TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "data/templates").iterdir()}

THINKING = {
    "Apertus-8B-Instruct": ("enable_thinking",),
    "Bielik-11B-v3.0-Instruct": ("enable_thinking",),
    "Cohere2MoE": ("reasoning_effort", "skip_thinking"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("enable_thinking",),
    "GLM-4.7-Flash": ("enable_thinking", "clear_thinking"),
    "Kimi-K3": ("thinking", "thinking_effort"),
    "LFM2.5-8B-A1B": ("preserve_thinking",),
    "Reka-Edge": ("enable_thinking",),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("enable_thinking",),
    "deepseek-ai-DeepSeek-V3.2": ("enable_thinking", "thinking"),
    "deepseek-ai-DeepSeek-V4": ("enable_thinking", "thinking", "reasoning_effort", "drop_thinking"),
    "google-gemma-4-31B-it": ("enable_thinking",),
    "inclusionai-ling-3.0-flash": ("enable_thinking", "thinking_option"),
    "llama-cpp-rwkv-world": ("enable_thinking",),
    "muse-glimmer": ("reasoning_strength",),
    "openbmb-MiniCPM5-1B": ("enable_thinking",),
    "poolside-Laguna-XS-2.1": ("enable_thinking",),
    "tencent-Hy3": ("reasoning_effort", "preserved_thinking"),
}
# Gemma 2 raises; this Hermes template cannot do without tools.
NO_SYSTEM = {"google-gemma-2-2b-it", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"}
NO_TOOLS = {
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_features_of_public_templates(name: str) -> None:
    features = template_features(TEMPLATES[name])
    assert features.thinking == THINKING.get(name, ())
    assert features.system_role == (name not in NO_SYSTEM)
    assert features.tools == (name not in NO_TOOLS)
    assert features.variables.isdisjoint({"messages", "tools", "add_generation_prompt", "raise_exception", "namespace"})


def test_variables_are_what_the_caller_may_set() -> None:
    template = (
        "{% set own = 1 %}{% if messages %}{% set sometimes = 2 %}{% endif %}{{ own }}{{ sometimes }}"
        "{% if asked is not defined %}{% set asked = true %}{% endif %}{{ asked }}"
        "{% set given = given | default(1) %}{{ given }}{{ bos_token }}{{ plain }}"
        "{% for m in messages %}{{ m.role }}{{ loop.index }}{% endfor %}{{ strftime_now('%d') }}{{ documents }}"
    )
    assert template_features(template).variables == {"asked", "given", "bos_token", "plain"}


def test_a_template_that_is_no_template() -> None:
    with pytest.raises(ChatTemplateError, match=r"line 2: TemplateSyntaxError"):
        template_features("a\n{% if %}")


def test_what_a_template_looks_for() -> None:
    template = (
        "{% set end = '</b>' %}{% if '<a>' in x or '<c>' not in x %}{% endif %}{{ x.split(end)[0].rstrip('\n') }}"
        "{{ x | replace('<d>', '<e>') }}{{ '<f>' ~ x }}{% if x == '<g>' %}{% endif %}{{ x.startswith('<h>') }}"
    )
    assert searched_texts(template) == {"</b>", "<a>", "<c>", "<d>", "<e>", "<h>"}
    assert "</think>" in searched_texts(TEMPLATES["GLM-4.7-Flash"])
