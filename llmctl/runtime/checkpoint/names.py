"""One table of tensor names, used both ways: Hugging Face ↔ GGUF, with the transforms that go with a name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np

from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.quant_tensor import QuantTensor

Tensor = np.ndarray | QuantTensor | PackedIntTensor

_LAYER = re.compile(r"^(model\.layers|blk|transformer\.h)\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_OLD_EXPERT = re.compile(r"^(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight$")  # files of before experts were stacked
EXPERT = "{}"
"""Stands for the number of an expert in the names of tables, and in the names of tensors that hold all of them."""


@dataclass(frozen=True)
class GgufNames:
    """How GGUF spells a family's tensors.

    top / layer: Hugging Face module → GGUF module, outside and inside a layer, without `.weight` / `.bias`; a tensor that is
    called otherwise in one of them stands there with its whole name. A module of every expert, `mlp.experts.{}.gate_proj`, is
    one tensor in GGUF.
    permuted: layer modules whose rows GGUF interleaves for its rotary pairing, with the config key of their head count.
    plus_one: GGUF stores 1 + w for every norm where Hugging Face stores w. flat: layer modules whose matrix of one row GGUF
    stores as a vector.
    """

    top: dict[str, str]
    layer: dict[str, str]
    permuted: dict[str, str]
    plus_one: bool = False
    flat: frozenset[str] = frozenset()

    def to_gguf(self, name: str) -> str | None:
        """GGUF name of a Hugging Face tensor, None if the table has none."""
        return _translate(name, self.top, self.layer, "blk")

    def to_hf(self, name: str) -> str | None:
        """Hugging Face name of a GGUF tensor, None if the table has none. Of one that holds all experts of a layer their number
        in the name is still open (EXPERT)."""
        old = _OLD_EXPERT.match(name)
        name = f"{old[1]}_exps.weight" if old else name
        found = _translate(name, _inverse(self.top), _inverse(self.layer), "model.layers")
        return found.replace(EXPERT, old[2]) if found and old else found

    def heads_key(self, hf_name: str) -> str | None:
        """Config key of the head count whose rows are permuted for this tensor, None if it is stored as it is."""
        found = _LAYER.match(hf_name)
        return self.permuted.get(found[3].rpartition(".")[0]) if found else None

    def is_stack(self, hf_name: str) -> bool:
        """True when GGUF stores the tensor together with those of the other experts."""
        found = _LAYER.match(hf_name)
        return found is not None and _EXPERT.search(found[3]) is not None

    def is_flat(self, hf_name: str) -> bool:
        """True when GGUF stores the tensor's one row as a vector."""
        found = _LAYER.match(hf_name)
        return found is not None and found[3].removesuffix(".weight") in self.flat

    def has_offset_norm(self, hf_name: str) -> bool:
        """True when GGUF stores 1 + w for this tensor."""
        return self.plus_one and hf_name.endswith("norm.weight")


@dataclass(frozen=True)
class HfNames:
    """How a family's Hugging Face folders spell their tensors, where that is not what this program calls them.

    top / layer: canonical module → module in the folder, as in `GgufNames`; empty where nothing is renamed. layers: what stands
    before a layer's number. bare: what older folders leave out before every name. transposed: canonical layer modules whose
    weight is stored as (in_features, out_features). joined_experts: all experts of a layer are stored as one tensor, and are so
    written: (experts, in_features, out_features), gate and up column by column in turn. rows: canonical layer tensor → what every
    row of it is called that is stored as a tensor of its own, its number left open.
    """

    top: dict[str, str] = field(default_factory=dict)
    layer: dict[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    bare: str = ""
    transposed: frozenset[str] = frozenset()
    joined_experts: bool = False
    rows: dict[str, str] = field(default_factory=dict)

    def to_canonical(self, name: str) -> str:
        """Our name of a tensor in a folder; one that is not in the table stays what it is."""
        if not self.top and not self.layer:
            return name
        whole = name if name.startswith((self.bare, *self.top.values())) else self.bare + name
        return _translate(whole, _inverse(self.top), _inverse(self.layer), "model.layers") or name

    def to_folder(self, name: str) -> str:
        """The reverse."""
        return _translate(name, self.top, self.layer, self.layers) or name

    def row_names(self, name: str, count: int) -> list[str]:
        """What a folder calls the `count` rows of the tensor of this canonical name; empty where it is stored as one."""
        found = _LAYER.match(name)
        pattern = self.rows.get(found[3]) if found else None
        return [f"{self.layers}.{found[2]}.{pattern.format(row)}" for row in range(count)] if found and pattern else []

    def row_of(self, name: str) -> tuple[str, int] | None:
        """Of a folder's tensor that is a row of another, the other's canonical name and the row's number."""
        found = _LAYER.match(name)
        for whole, pattern in self.rows.items() if found else ():
            before, after = pattern.split("{}")
            number = found[3].removeprefix(before).removesuffix(after)
            if found[3] == f"{before}{number}{after}" and number.isascii() and number.isdigit():
                return f"model.layers.{found[2]}.{whole}", int(number)
        return None

    def is_transposed(self, name: str) -> bool:
        """Whether folders store the tensor of this canonical name with its axes swapped."""
        found = _LAYER.match(name)
        return found is not None and found[3].removesuffix(".weight") in self.transposed


def _inverse(table: dict[str, str]) -> dict[str, str]:
    return {gguf: hf for hf, gguf in table.items()}


def _translate(name: str, top: dict[str, str], layer: dict[str, str], prefix: str) -> str | None:
    whole = _LAYER.match(name)
    if whole and whole[3] in layer:
        return f"{prefix}.{whole[2]}.{layer[whole[3]]}"
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if found := _LAYER.match(module):
        inner = layer.get(found[3])
        if inner is None and (expert := _EXPERT.search(found[3])):
            inner = layer.get(_EXPERT.sub(EXPERT, found[3]))
            inner = inner and inner.replace(EXPERT, expert[0])
        return inner and f"{prefix}.{found[2]}.{inner}.{kind}"
    outer = top.get(module)
    return outer and f"{outer}.{kind}"


def interleave_rows(tensor: Tensor, num_heads: int) -> Tensor:
    """Hugging Face row order (halves of a head apart) → GGUF llama order (pairs side by side)."""
    return take_rows(tensor, _row_order(tensor.shape[0], num_heads))


def deinterleave_rows(tensor: Tensor, num_heads: int) -> Tensor:
    """The inverse of `interleave_rows`. Blocks run along the row, so quantized rows move whole."""
    return take_rows(tensor, halves_order(tensor.shape[0], num_heads))


def halves_order(rows: int, num_heads: int, rotary_dim: int | None = None) -> np.ndarray:
    """Numbers of the rows that come first, second … when pairs side by side become halves of a head. rotary_dim: rows of a
    head that rotate, None for all; the others stay."""
    return np.argsort(_row_order(rows, num_heads, rotary_dim))


def _row_order(rows: int, num_heads: int, rotary_dim: int | None = None) -> np.ndarray:
    order = np.arange(rows).reshape(num_heads, -1)
    turned = order[:, :rotary_dim]
    pairs = turned.reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(num_heads, -1)
    return np.concatenate([pairs, order[:, turned.shape[1] :]], axis=1).reshape(-1)


def take_rows(tensor: Tensor, order: np.ndarray | slice) -> Tensor:
    """The rows of these numbers; a slice of them is a view."""
    if isinstance(tensor, QuantTensor):
        blocks = tensor.blocks[order]
        return QuantTensor(tensor.format, (len(blocks), *tensor.shape[1:]), blocks)
    if isinstance(tensor, PackedIntTensor):
        zeros = None if tensor.zero_points is None else tensor.zero_points[order]
        codes, scales = tensor.codes[order], tensor.scales[order]
        return replace(tensor, shape=(len(codes), *tensor.shape[1:]), codes=codes, scales=scales, zero_points=zeros)
    return tensor[order]


def take_expert(tensor: Tensor, expert: int) -> Tensor:
    """One expert's matrix, or bias, of a tensor (experts, …): a view."""
    if isinstance(tensor, QuantTensor):
        return QuantTensor(tensor.format, tensor.shape[1:], tensor.blocks[expert])
    assert isinstance(tensor, np.ndarray), type(tensor)
    return tensor[expert]


TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
EXPERT_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{}.up_proj": "ffn_up_exps",
    "mlp.experts.{}.down_proj": "ffn_down_exps",
}
QK_NORM_NAMES = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
NORMS_AFTER_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SANDWICH_NAMES = {**NORMS_AFTER_NAMES, "pre_feedforward_layernorm": "ffn_norm"}
LLAMA_PERMUTED = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
