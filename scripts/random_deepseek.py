"""The shape of a small DeepSeek V3 for make_random_model.py: one billion parameters, of which a token passes 28 %."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmctl.runtime.models.deepseek import FAMILY
from llmctl.runtime.models.gguf_config import metadata_from_config


@dataclass(frozen=True)
class DeepSeekShape:
    """What it is made of, in the words of its config.json."""

    hidden: int = 1024
    layers: int = 12
    heads: int = 16
    intermediate: int = 4096
    context: int = 8192
    rank: int = 512
    query_rank: int = 768
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    dense_layers: int = 1
    experts: int = 48
    top_k: int = 6
    groups: int = 8
    top_groups: int = 4
    expert_size: int = 512

    architecture = FAMILY.gguf_arch

    def metadata(self, rows: int) -> dict[str, Any]:
        """GGUF's keys, as convert writes them. rows: of the embedding."""
        values = {
            **{"model_type": "deepseek_v3", "vocab_size": rows, "hidden_size": self.hidden, "num_hidden_layers": self.layers},
            **{"num_attention_heads": self.heads, "intermediate_size": self.intermediate, "rms_norm_eps": 1e-6},
            **{"max_position_embeddings": self.context, "kv_lora_rank": self.rank, "q_lora_rank": self.query_rank},
            **{"qk_nope_head_dim": self.nope_dim, "qk_rope_head_dim": self.rope_dim, "v_head_dim": self.value_dim},
            **{"first_k_dense_replace": self.dense_layers, "n_routed_experts": self.experts, "num_experts_per_tok": self.top_k},
            **{"n_group": self.groups, "topk_group": self.top_groups, "moe_intermediate_size": self.expert_size},
        }
        return metadata_from_config(FAMILY.read_config(values), FAMILY)

    def tensors(self, rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """GGUF names and torch-order shapes, in the file's order."""
        yield "token_embd.weight", (rows, self.hidden)
        for i in range(self.layers):
            parts = {**self._attention(), **(self._dense() if i < self.dense_layers else self._sparse())}
            yield from ((f"blk.{i}.{name}", size) for name, size in parts.items())
        yield "output_norm.weight", (self.hidden,)
        yield "output.weight", (rows, self.hidden)

    def _attention(self) -> dict[str, tuple[int, ...]]:
        return {
            "attn_norm.weight": (self.hidden,),
            "attn_q_a.weight": (self.query_rank, self.hidden),
            "attn_q_a_norm.weight": (self.query_rank,),
            "attn_q_b.weight": (self.heads * (self.nope_dim + self.rope_dim), self.query_rank),
            "attn_kv_a_mqa.weight": (self.rank + self.rope_dim, self.hidden),
            "attn_kv_a_norm.weight": (self.rank,),
            "attn_k_b.weight": (self.heads, self.rank, self.nope_dim),
            "attn_v_b.weight": (self.heads, self.value_dim, self.rank),
            "attn_output.weight": (self.hidden, self.heads * self.value_dim),
            "ffn_norm.weight": (self.hidden,),
        }

    def _dense(self) -> dict[str, tuple[int, ...]]:
        return self._matrices("", (), self.intermediate)

    def _sparse(self) -> dict[str, tuple[int, ...]]:
        router = {"ffn_gate_inp.weight": (self.experts, self.hidden), "exp_probs_b.bias": (self.experts,)}
        shared = self._matrices("_shexp", (), self.expert_size)
        return {**router, **self._matrices("_exps", (self.experts,), self.expert_size), **shared}

    def _matrices(self, suffix: str, leading: tuple[int, ...], size: int) -> dict[str, tuple[int, ...]]:
        return {
            f"ffn_gate{suffix}.weight": (*leading, size, self.hidden),
            f"ffn_up{suffix}.weight": (*leading, size, self.hidden),
            f"ffn_down{suffix}.weight": (*leading, self.hidden, size),
        }
