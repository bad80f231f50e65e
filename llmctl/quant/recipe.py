"""Which tensor gets which type, as data, and how a type gives way where a row is not a whole number of its blocks.

Q4_0 to Q5_1 give the head (`output.weight`, or `token_embd.weight` where the model has one matrix for both) Q8_0: the head
is the matrix that rounding hurts most. llama.cpp gives it Q6_K, and Q8_0 only where its rows are not a multiple of 256;
there is no encoder for Q6_K here yet, so it is Q8_0 for all. An embedding that is not the head is a matrix like the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmctl.errors import UnsupportedError
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.runtime.checkpoint.file_types import FILE_TYPES

AUTO = "auto"

# Small tensors whose rounding costs quality and saves nothing: routers, positions, convolutions. Norms and everything
# with one axis are in float32 too, the only type llama.cpp's kernels take there.
_KEPT_ENDINGS = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "position_embd.weight",
    "token_types.weight",
    "ssm_conv1d.weight",
    "shortconv.conv.weight",
)


@dataclass(frozen=True)
class Recipe:
    """One way to type a model.

    name: as asked for on the command line and in file names. file_type: GGUF's general.file_type.
    matrices, head: types of the weights with two or more axes, and of the one that makes the logits.
    """

    name: str
    file_type: int
    matrices: Format
    head: Format


_FILE_TYPES = {name: number for number, name in FILE_TYPES.items()}
# Type asked for → type of the head.
_HEADS = {name: name for name in ("F32", "F16", "BF16", "Q8_0")} | dict.fromkeys(("Q5_1", "Q5_0", "Q4_1", "Q4_0"), "Q8_0")

RECIPES: dict[str, Recipe] = {
    name: Recipe(name, _FILE_TYPES[name], matrices=FORMATS[name], head=FORMATS[head]) for name, head in _HEADS.items()
}


@dataclass(frozen=True)
class Choice:
    """The type of one tensor. replaced: the type the recipe has for it, where its rows do not fit that; else None."""

    format: Format
    replaced: Format | None = None


def recipe_by_name(name: str) -> Recipe | None:
    """The recipe of this name, whatever its case; None for "auto", which keeps what the source has.

    Raises UnsupportedError for a type there is no encoder for, or none at all.
    """
    if name.lower() == AUTO:
        return None
    if found := RECIPES.get(name.upper()):
        return found
    raise UnsupportedError(f"type {name!r} cannot be written yet; types are {AUTO}, {', '.join(RECIPES)}")


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a recipe applies to the GGUF tensor; the others are kept in float32."""
    return len(shape) > 1 and name.endswith(".weight") and not name.endswith(_KEPT_ENDINGS)


def head_name(names: set[str]) -> str:
    """The GGUF tensor that makes the logits: with tied embeddings it is the embedding."""
    return "output.weight" if "output.weight" in names else "token_embd.weight"


def choose(name: str, shape: tuple[int, ...], recipe: Recipe, *, head: str, pure: bool = False) -> Choice:
    """The type of one GGUF tensor of this torch-order shape.

    head: see `head_name`. pure: one type for all matrices, the head included.
    Rows that are not a whole number of blocks fall back to F16, which takes any.
    """
    if not is_matrix(name, shape):
        return Choice(FORMATS["F32"])
    wanted = recipe.head if name == head and not pure else recipe.matrices
    if shape[-1] % wanted.elements_per_block:
        return Choice(FORMATS["F16"], replaced=wanted)
    return Choice(wanted)
