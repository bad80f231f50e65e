"""Models as recipes see them: facts, and names and shapes of the tensors. Small, but with the layers and experts of real ones."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

from llmctl.quant.recipe import ModelFacts

Shapes = list[tuple[str, tuple[int, ...]]]


def _layer(width: int, hidden: int, values: int) -> Shapes:
    return [
        ("attn_norm.weight", (width,)),
        ("attn_q.weight", (width, width)),
        ("attn_k.weight", (values, width)),
        ("attn_v.weight", (values, width)),
        ("attn_output.weight", (width, width)),
        ("ffn_gate.weight", (hidden, width)),
        ("ffn_up.weight", (hidden, width)),
        ("ffn_down.weight", (width, hidden)),
    ]


def _experts(width: int, hidden: int, experts: int) -> Shapes:
    return [
        ("ffn_gate_inp.weight", (experts, width)),
        ("ffn_gate_exps.weight", (experts, hidden, width)),
        ("ffn_up_exps.weight", (experts, hidden, width)),
        ("ffn_down_exps.weight", (experts, width, hidden)),
    ]


def _model(layers: int, layer: Shapes, width: int, *, tied: bool = False) -> Shapes:
    ends = [("token_embd.weight", (64, width)), ("output_norm.weight", (width,))] + [("output.weight", (64, width))] * (not tied)
    return ends + [(f"blk.{i}.{name}", shape) for i in range(layers) for name, shape in layer]


def _fused(width: int, hidden: int) -> Shapes:
    return [
        ("attn_norm.weight", (width,)),
        ("attn_qkv.weight", (width + 128, width)),
        ("attn_output.weight", (width, width)),
        ("ffn_up.weight", (hidden, width)),
        ("ffn_down.weight", (width, hidden)),
    ]


def _shared(width: int, hidden: int) -> Shapes:
    return [
        ("ffn_gate_inp_shexp.weight", (width,)),
        ("ffn_gate_shexp.weight", (hidden, width)),
        ("ffn_up_shexp.weight", (hidden, width)),
        ("ffn_down_shexp.weight", (width, hidden)),
    ]


_DENSE, _ATTENTION = _layer(256, 512, 64), _layer(256, 512, 64)[:5]
MODELS: dict[str, tuple[ModelFacts, Shapes]] = {
    "32 layers": (ModelFacts("llama", 32, 0, 1), _model(32, _DENSE, 256)),
    "30 layers, shared values, tied": (ModelFacts("llama", 30, 0, 4, tied=True), _model(30, _DENSE, 256, tied=True)),
    "3 layers": (ModelFacts("qwen2", 3, 0, 2), _model(3, _DENSE, 256)),
    "70B": (ModelFacts("llama", 80, 0, 8), _model(80, _DENSE, 256)),
    "65B": (ModelFacts("llama", 80, 0, 1), _model(80, _DENSE, 256)),
    "72B": (ModelFacts("qwen2", 80, 0, 8), _model(80, _DENSE, 256)),
    "8 experts": (ModelFacts("llama", 32, 8, 4), _model(32, _ATTENTION + _experts(256, 512, 8), 256)),
    "128 experts": (ModelFacts("qwen3moe", 48, 128, 8), _model(48, _ATTENTION + _experts(256, 512, 128), 256)),
    "60 experts, one shared": (
        ModelFacts("qwen2moe", 24, 60, 1),
        _model(24, _ATTENTION + _experts(256, 512, 60) + _shared(256, 1024), 256),
    ),
    "falcon": (ModelFacts("falcon", 32, 0, 8), _model(32, _fused(256, 512), 256)),
    "falcon, tied": (ModelFacts("falcon", 60, 0, 16, tied=True), _model(60, _fused(256, 512), 256, tied=True)),
    "rows of 576": (ModelFacts("llama", 30, 0, 3, tied=True), _model(30, _layer(576, 1536, 192), 576, tied=True)),
    "rows of 80": (ModelFacts("llama", 8, 0, 2), _model(8, _layer(80, 176, 80), 80)),
}


def summary(types: Mapping[str, str]) -> str:
    """How many tensors of each type, and a hash of which: "61 F32, 220 Q4_K #0123456789ab"."""
    counts = ", ".join(f"{count} {name}" for name, count in sorted(Counter(types.values()).items()))
    lines = "\n".join(f"{name} {types[name]}" for name in sorted(types))
    return f"{counts} #{hashlib.sha256(lines.encode()).hexdigest()[:12]}"
