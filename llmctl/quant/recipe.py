"""Which tensor gets which type, as data, and how a type gives way where a row is not a whole number of its blocks.

The mixes are llama.cpp's, so that a file named Q4_K_M is what people expect of that name: some tensors, or those of some layers,
have more bits than the others. The head (`output.weight`, or `token_embd.weight` where the model has one matrix for both) is
the matrix that rounding hurts most: it has Q6_K at least.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from llmctl.errors import UnsupportedError, UsageError
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.runtime.checkpoint.file_types import FILE_TYPES

AUTO = "auto"

Shape = tuple[int, ...]

# Small tensors whose rounding costs quality and saves nothing: routers, positions, convolutions, codebooks. Norms and
# everything with one axis are in float32 too, the only type llama.cpp's kernels take there.
_KEPT_ENDINGS = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ffn_gate_tid2eid.weight"),
    *("position_embd.weight", "token_types.weight", "shortconv.conv.weight", "attn_rel_b.weight"),
    *("indexer.k_proj.weight", "indexer.q_proj.weight"),
)
_KEPT_PARTS = re.compile(
    r"altup|laurel|per_layer_model_proj|ssm_conv1d|\.position_embd|sam\.(?:pos_embd|neck\.|net_)|\.rel_pos|\.patch_(?:embd|merger)"
    r"|a\.rvq\.codebook|mm\.a\.code_embd"
    r"|time_mix_(?:first|[wva][0-2]|g[12]|decay_w[12]|lerp_fused)\.weight"
)
_LAYER = re.compile(r"blk\.(\d+)\.")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_HEAD = "output.weight"
# What mixes tell apart, by a part of the name; the first that fits. Values may be fused with queries and keys.
_KINDS = (
    *(("attn_qkv.weight", "attn_v"), ("attn_kv_b.weight", "attn_v"), ("attn_v.weight", "attn_v"), ("attn_k.weight", "attn_k")),
    *(("attn_output.weight", "attn_output"), ("ffn_down", "ffn_down")),
)


@dataclass(frozen=True)
class ModelFacts:
    """What mixes ask of a model.

    heads_per_kv_head: of the first layer. tied: the embedding is the head. importance: there is an importance matrix.
    """

    architecture: str = ""
    layers: int = 0
    experts: int = 0
    heads_per_kv_head: int = 1
    tied: bool = False
    importance: bool = False

    @property
    def is_70b(self) -> bool:
        """One of the models with 80 layers whose values are small beside the rest, so that more bits cost them little."""
        if self.architecture == "llama":
            return self.layers == 80 and self.heads_per_kv_head > 1
        return (self.architecture, self.layers) in {("qwen2", 80), ("deci", 80), ("olmo", 80), ("jais2", 68)}


@dataclass(frozen=True)
class Place:
    """Where a tensor stands among those of its kind: index of count. wanted: its type so far."""

    index: int
    count: int
    model: ModelFacts
    wanted: str


Condition = Callable[[Place], bool]


@dataclass(frozen=True)
class Rule:
    """Tensors of a kind have this type where all conditions hold."""

    kind: str
    type: str
    where: tuple[Condition, ...] = ()

    def applies(self, kind: str, place: Place) -> bool:
        """Whether a tensor of this kind in this place has the rule's type."""
        return kind == self.kind and all(condition(place) for condition in self.where)


def _first(count: int) -> Condition:
    return lambda place: place.index < count


def _first_part(parts: int) -> Condition:
    return lambda place: place.index < place.count // parts


def _more(place: Place) -> bool:
    """The first and the last eighth, and every third between: where rounding was found to cost most."""
    eighth = place.count // 8
    return place.index < eighth or place.index >= 7 * place.count // 8 or (place.index - eighth) % 3 == 2


def _shared_values(place: Place) -> bool:
    return place.model.heads_per_kv_head >= 4


def _eight_experts(place: Place) -> bool:
    return place.model.experts == 8


def _other_experts(place: Place) -> bool:
    return place.model.experts != 8


def _falcon(place: Place) -> bool:
    return place.model.architecture == "falcon"


def _not_falcon(place: Place) -> bool:
    return place.model.architecture != "falcon"


def _importance(place: Place) -> bool:
    return place.model.importance


def _no_importance(place: Place) -> bool:
    return not place.model.importance



_EXPERTS_OUTPUT = Rule("attn_output", "Q5_K", (_eight_experts, _not_falcon))
# The first rule that applies, by mix.
_RULES: dict[str, tuple[Rule, ...]] = {
    "Q4_0": (Rule("ffn_down", "Q4_1", (_importance, _first_part(8))),),
    "Q5_0": (Rule("ffn_down", "Q5_1", (_importance, _first_part(8))),),
    "IQ4_NL": (
        Rule("attn_v", "Q5_K", (_shared_values,)),
        Rule("ffn_down", "Q5_K", (_no_importance, _first_part(8))),
        _EXPERTS_OUTPUT,
    ),
    "Q2_K": (
        Rule("attn_v", "Q4_K", (_shared_values,)),
        Rule("attn_v", "Q3_K"),
        Rule("ffn_down", "Q3_K"),
        _EXPERTS_OUTPUT,
        Rule("attn_output", "Q3_K", (_not_falcon,)),
    ),
    "Q2_K_S": (Rule("attn_v", "Q4_K", (_shared_values,)), Rule("ffn_down", "Q4_K", (_first_part(8),))),
    "Q3_K_S": (_EXPERTS_OUTPUT,),
    "Q3_K_M": (
        Rule("attn_v", "Q5_K", (_first(2),)),
        Rule("attn_v", "Q4_K"),
        Rule("ffn_down", "Q5_K", (_first_part(16),)),
        Rule("ffn_down", "Q4_K", (_not_falcon,)),
        Rule("ffn_down", "Q4_K", (_more,)),
        _EXPERTS_OUTPUT,
        Rule("attn_output", "Q4_K", (_not_falcon,)),
    ),
    "Q3_K_L": (
        Rule("attn_v", "Q5_K"),
        Rule("ffn_down", "Q4_K", (_falcon,)),
        Rule("ffn_down", "Q5_K"),
        Rule("attn_output", "Q4_K", (_falcon,)),
        Rule("attn_output", "Q5_K", (_other_experts,)),
    ),
    "Q4_K_S": (
        Rule("attn_v", "Q5_K", (_first(4),)),
        Rule("ffn_down", "Q5_K", (_not_falcon, _first_part(8))),
        _EXPERTS_OUTPUT,
    ),
    "Q4_K_M": (
        Rule("attn_v", "Q6_K", (_more,)),
        Rule("ffn_down", "Q6_K", (_falcon, _first_part(16))),
        Rule("ffn_down", "Q5_K", (_falcon, _more)),
        Rule("ffn_down", "Q6_K", (_not_falcon, _more)),
        _EXPERTS_OUTPUT,
    ),
    "Q5_K_M": (Rule("attn_v", "Q6_K", (_more,)), Rule("ffn_down", "Q6_K", (_more,))),
}
# The last rule that applies, in all mixes and after theirs.
_COMMON_RULES = (
    Rule("attn_v", "Q5_K", (lambda place: place.model.is_70b and place.wanted in ("Q3_K", "Q4_K"),)),
    Rule("attn_v", "Q8_0", (_eight_experts,)),
    Rule("attn_k", "Q8_0", (_eight_experts,)),
)
# What a type gives way to where rows are not a whole number of its blocks; then to F16, which takes any.
_FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class Recipe:
    """One way to type a model.

    name: as asked for on the command line and in file names. file_type: GGUF's general.file_type.
    matrices, head: types of the weights with two or more axes, and of the one that makes the logits. rules: exceptions.
    stacks: type of the matrices stacked for experts, where that is another. needs_importance: with few bits, only garbage comes
    of it without.
    """

    name: str
    file_type: int
    matrices: Format
    head: Format
    rules: tuple[Rule, ...] = ()
    stacks: Format | None = None
    needs_importance: bool = False


_FILE_TYPES = {name: number for number, name in FILE_TYPES.items()}
# Type or mix asked for → types of the matrices and of the head.
_TYPES = {
    **{name: (name, name) for name in ("F32", "F16", "BF16", "Q8_0")},
    **{name: (name, "Q6_K") for name in ("Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "Q6_K", "Q2_K")},
    **{f"{name}_{size}": (name, "Q6_K") for name in ("Q5_K", "Q4_K", "Q3_K") for size in "MS"},
    **{"Q3_K_L": ("Q3_K", "Q6_K"), "Q2_K_S": ("Q2_K", "Q6_K"), "MXFP4": ("MXFP4", "Q8_0"), "MXFP4_MOE": ("Q8_0", "Q8_0")},
}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

RECIPES: dict[str, Recipe] = {
    name: Recipe(
        name,
        _FILE_TYPES[name.removesuffix("_MOE")],
        matrices=FORMATS[matrices],
        head=FORMATS[head],
        rules=_RULES.get(name, ()),
        stacks=FORMATS["MXFP4"] if name == "MXFP4_MOE" else None,
        needs_importance=name == "Q2_K_S",
    )
    for name, (matrices, head) in _TYPES.items()
}


@dataclass(frozen=True)
class Choice:
    """The type of one tensor. replaced: the type the recipe has for it, where its rows do not fit that; else None."""

    format: Format
    replaced: Format | None = None


def recipe_by_name(name: str) -> Recipe | None:
    """The recipe of this name, whatever its case; None for "auto", which keeps what the source has.

    Raises UnsupportedError for a type there is no encoder for, UsageError for a name that none has.
    """
    if name.lower() == AUTO:
        return None
    if found := RECIPES.get(_ALIASES.get(name.upper(), name.upper())):
        return found
    if name.upper() in FORMATS:
        raise UnsupportedError(f"type {name!r} can be read, but not written; types are {AUTO}, {', '.join(RECIPES)}")
    near = get_close_matches(name.upper(), [AUTO.upper(), *RECIPES], n=1)
    hint = f"did you mean {near[0]}? Types" if near else "types"
    raise UsageError(f"there is no type {name!r}; {hint} are {AUTO}, {', '.join(RECIPES)}")


def is_matrix(name: str, shape: Shape) -> bool:
    """Whether a recipe applies to the GGUF tensor; the others are kept in float32."""
    return (
        len(shape) > 1 and name.endswith("weight") and not name.endswith(_KEPT_ENDINGS) and _KEPT_PARTS.search(name) is None
    )


def is_embedding(name: str) -> bool:
    """Whether the GGUF tensor is looked up by token."""
    return name in _EMBEDDINGS


def model_facts(metadata: Mapping[str, Any], names: Iterable[str], *, importance: bool = False) -> ModelFacts:
    """What the metadata of a GGUF file (plain values) and the names of its tensors say; what they do not is taken for none."""
    architecture = str(metadata.get("general.architecture", ""))

    def count(key: str) -> int:
        value = metadata.get(f"{architecture}.{key}", 0)
        value = next(iter(value), 0) if isinstance(value, (list, tuple)) else value
        return value if isinstance(value, int) else 0

    heads = count("attention.head_count")
    kv_heads = count("attention.head_count_kv") if f"{architecture}.attention.head_count_kv" in metadata else heads
    return ModelFacts(
        architecture,
        layers=count("block_count"),
        experts=count("expert_count"),
        heads_per_kv_head=heads // kv_heads if kv_heads else 0,
        tied=_HEAD not in set(names),
        importance=importance,
    )


def choose_types(
    tensors: Iterable[tuple[str, Shape]], recipe: Recipe, model: ModelFacts, *, pure: bool = False
) -> dict[str, Choice]:
    """The type of every GGUF tensor, given by name and torch-order shape.

    pure: one type for all matrices, the head included.
    """
    ordered = sorted(tensors, key=lambda tensor: (_layer(tensor[0]), tensor[0]))
    num_values = sum(_kind(name) == "attn_v" for name, _ in ordered)
    seen: Counter[str] = Counter()
    choices = {}
    for name, shape in ordered:
        if not is_matrix(name, shape):
            choices[name] = Choice(FORMATS["F32"])
            continue
        kind = _kind(name)
        index = _layer(name) if kind == "ffn_down" and model.experts > 1 else seen[kind]
        count = num_values if kind == "attn_v" else model.layers
        place = Place(index, count, model, recipe.matrices.name)
        wanted = (recipe.stacks or recipe.matrices) if pure else _wanted(name, kind, shape, recipe, place)
        choices[name] = _fitting(wanted, shape)
        seen[kind] += 1
    return choices


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def _kind(name: str) -> str:
    return next((kind for part, kind in _KINDS if part in name), "")


def _wanted(name: str, kind: str, shape: Shape, recipe: Recipe, place: Place) -> Format:
    if name == _HEAD or (place.model.tied and name in _EMBEDDINGS):
        return FORMATS["Q8_0"] if _falcon(place) and not recipe.head.is_plain else recipe.head
    if name in _EMBEDDINGS or recipe.matrices.is_plain:
        return recipe.matrices
    if recipe.stacks is not None:
        return recipe.stacks if len(shape) > 2 else recipe.matrices
    wanted = next((rule.type for rule in recipe.rules if rule.applies(kind, place)), recipe.matrices.name)
    for rule in _COMMON_RULES:
        if rule.applies(kind, Place(place.index, place.count, place.model, wanted)):
            wanted = rule.type
    return FORMATS[wanted]


def _fitting(wanted: Format, shape: Shape) -> Choice:
    """The type, or what it gives way to where rows of this length are not whole blocks of it."""
    used = wanted
    while shape[-1] % used.elements_per_block:
        used = FORMATS[_FALLBACKS.get(used.name, "F16")]
    return Choice(used, replaced=wanted if used != wanted else None)
