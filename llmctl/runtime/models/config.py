"""ModelConfig: what the forward pass needs to know, whatever family and file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.moe import Routing
from llmctl.kernels.swiglu import ACTIVATIONS, GATED_ACTIVATIONS
from llmctl.runtime.cache.memory import LayerShape
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.rope import RopeConfig

MAX_QUERY = 1 << 22  # numbers of all heads, whose rows are put in order: a claim must not cost memory before its tensor is read


@dataclass(frozen=True)
class LayerConfig:
    """Choices of one decoder layer.

    sliding_window: tokens a query sees, itself included; None sees everything before it.
    rope: how its positions turn; None for a layer without positions. sparse: its MLP is a mixture of experts.
    """

    sliding_window: int | None
    rope: RopeConfig | None
    sparse: bool = False


@dataclass(frozen=True)
class ExpertNames:
    """Names of a sparse MLP's modules in Hugging Face's spelling, below the layer; `{}` is an expert's number."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts of a model's sparse layers.

    top_k: experts a token passes. intermediate_size: of one expert. shared_size: of the expert that all tokens pass, or of all
    of those together; None where there is none. shared_gate: its output is multiplied by the sigmoid of a product of its own.
    bias: on the router and on the experts' three matrices. correction_bias: name, below the layer, of the numbers added to the
    scores for the choice, or None. renormalize … scale: as in `Routing`.

    FormatError for choices that cannot be made, such as more experts a token than there are.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    names: ExpertNames = ExpertNames()
    shared_size: int | None = None
    shared_gate: bool = False
    bias: bool = False
    correction_bias: str | None = None
    renormalize: bool = False
    sigmoid: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_by_top2: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        try:
            self.routing()
        except FormatError as error:
            raise FormatError(f"config.json: {error}") from error

    def routing(self, bias: np.ndarray | None = None) -> Routing:
        """How a token's experts are chosen. bias: the numbers of `correction_bias`, float32 [num_experts]."""
        return Routing(
            self.num_experts,
            self.top_k,
            renormalize=self.renormalize,
            sigmoid=self.sigmoid,
            bias=bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_by_top2=self.group_by_top2,
            scale=self.scale,
        )


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention.

    rank: of the latent that all heads' keys and values come from. nope_dim, rope_dim: numbers of a query or key head that do not
    rotate and that do; the latter are the same for all heads of a key. value_dim: of a head's output. query_rank: of the latent
    that queries come from; None: they come from the hidden state.
    """

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None


@dataclass(frozen=True)
class BlockNorms:
    """Names of a block's norms in Hugging Face's spelling: before attention and after it, before the MLP and after it. None:
    there is no such norm."""

    attention: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


# Norms of what a block adds, and none of what it reads.
NORMS_AFTER = BlockNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
NORM_SHARED = BlockNorms("input_layernorm", None, None, None)
NORMS_AROUND = BlockNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and choices of one model, in Hugging Face's names.

    attention_scale: factor on q·k. attention_bias, attention_out_bias: on q/k/v and on o. embedding_scale: factor on embedded
    tokens. norm_offset: added to stored norm weights (1.0 for families that store w of 1 + w). qk_norm: norms of queries and
    keys, over every "head" with one vector of weights, over "each" head with its own, or over "all" heads together. norms: of
    a block. residual_scale: factor on what a block adds. logit_scale multiplies the logits, final_softcap bounds them.
    fused_qkv, fused_gate_up: stored as one matrix, q above k above v and gate above up. rope_interleaved: stored q and k rows
    are in the order of pairs side by side. layer_norm: all norms take the mean away (norm_bias: and add a bias). gated_mlp:
    down(act(gate) · up), else c_proj(act(c_fc)). parallel: attention and MLP read the same normed input. query_growth: queries
    grow with the logarithm of how many original contexts precede them, at this rate. learned_positions: a vector for every
    position is added to the embedded tokens. experts: of the layers that are sparse. latent: keys and values
    come from a latent, and head_dim is that of a query. attention_sinks: a learned score for every head takes part in its
    softmax.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    rope_interleaved: bool = False
    layer_norm: bool = False
    norm_bias: bool = False
    gated_mlp: bool = True
    parallel: bool = False
    qk_norm: Literal["head", "each", "all"] | None = None
    norms: BlockNorms = BlockNorms()
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    query_growth: float | None = None
    learned_positions: bool = False
    attention_sinks: bool = False
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise FormatError(f"config.json: {self.num_heads} query heads cannot share {self.num_kv_heads} kv heads")
        if self.num_heads * self.head_dim > MAX_QUERY:
            raise FormatError(
                f"config.json: {self.num_heads} heads of {self.head_dim} numbers are more than {MAX_QUERY}, the limit of a query"
            )
        if len(self.layers) != self.num_layers:
            raise FormatError(f"config.json: {self.num_layers} layers, but choices for {len(self.layers)}")
        if any(layer.sparse for layer in self.layers) and self.experts is None:
            raise FormatError("config.json: there are sparse layers, but no experts")
        known = GATED_ACTIVATIONS if self.gated_mlp else ACTIVATIONS
        if self.activation not in known:
            raise UnsupportedError(
                f"config.json: activation {quoted(self.activation)} is not supported; known: {', '.join(known)}"
            )

    def kv_layers(self) -> tuple[LayerShape, ...]:
        """What each layer keeps in the KV cache."""
        if latent := self.latent:
            width = latent.rank + latent.rope_dim
            return tuple(LayerShape(1, width, layer.sliding_window, latent.rank) for layer in self.layers)
        return tuple(LayerShape(self.num_kv_heads, self.head_dim, layer.sliding_window) for layer in self.layers)
