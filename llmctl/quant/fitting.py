"""A plan within a number of bytes: every group of matrices in the type that is worth its bytes, by measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from llmctl.errors import UnsupportedError, UsageError
from llmctl.kernels.formats.spec import Format
from llmctl.quant.budget import Assignment, Group, Option, assign, check_size
from llmctl.quant.convert import Plan, PlannedTensor, make_plan, planned_file_bytes
from llmctl.quant.divergence import EMBEDDING, Divergence
from llmctl.quant.head import head_module
from llmctl.quant.recipe import RECIPES, Recipe
from llmctl.quant.survey import RoundedWeights, Surveyed, measure, survey, survey_embedding, survey_head, types_for
from llmctl.quant.walk import Walk
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.topology import layer_modules
from llmctl.runtime.models.weights import ModelWeights

_ALIGNMENT = 32
_PROBED_TOKENS = 1024
_SURVEYED_TOKENS = 8192


def aimed_numbers(config: ModelConfig) -> int:
    """float32 numbers that `fit` holds beside a layer: text at the entrance of every layer, and the head as it is and rounded."""
    entrances = _PROBED_TOKENS * (config.num_layers + 2) + _SURVEYED_TOKENS
    return entrances * config.hidden_size + 2 * config.vocab_size * config.hidden_size


@dataclass(frozen=True)
class Budget:
    """nbytes: of the whole file; or bits_per_weight: over all its tensors. One of them."""

    nbytes: int | None = None
    bits_per_weight: float | None = None

    def for_groups(self, plan: Plan, names: set[str]) -> int:
        """Bytes left for the tensors of these GGUF names; UsageError where the others alone need more."""
        rest = sum(_padded(tensor.nbytes) for tensor in plan.tensors if tensor.source.name not in names)
        if self.nbytes is not None:
            header = planned_file_bytes(plan) - sum(_padded(tensor.nbytes) for tensor in plan.tensors)
            left = self.nbytes - header - rest
        else:
            assert self.bits_per_weight is not None
            weights = sum(tensor.num_elements for tensor in plan.tensors)
            left = int(self.bits_per_weight * weights / 8) - rest
        if left < 0:
            raise UsageError(f"what is not rounded needs {-left} bytes more than the size that was asked for")
        return left


@dataclass(frozen=True)
class Fitted:
    """plan: with types that fit. expected: divergence by the measured costs; measured: of the rounded weights on a few rows of
    text, theirs and that of the recipe the plan was compared with, which was kept where it came out better. nats."""

    plan: Plan
    expected: float
    measured: float
    recipe: str | None
    recipe_measured: float | None


def fit(
    plan: Plan,
    weights: ModelWeights,
    rows: Sequence[list[int]],
    budget: Budget,
    *,
    batch_tokens: int,
    lanes: int,
    damping: float,
    progress: Callable[[str, int, int], None] | None = None,
) -> Fitted:
    """The plan with the types that the budget allows. plan: of any recipe; what it does not round stays as it is there.

    rows: token ids of the calibration text. progress: called with (what is done, done, all).
    """
    _check(plan, weights, budget)
    tell = progress or (lambda what, done, total: None)
    walk = Walk(weights, _some(rows, _SURVEYED_TOKENS), batch_tokens=batch_tokens, lanes=lanes)
    groups = survey(walk, damping, lambda done, total: tell("Losses of all types", done, total))
    if types_for(weights.config.hidden_size):
        groups.append(survey_head(walk, damping))
        if not weights.config.tie_word_embeddings:
            groups.append(survey_embedding(weights, rows))
    walk.activations.close()
    divergence = Divergence(weights, _some(rows, _PROBED_TOKENS), batch_tokens=batch_tokens, lanes=lanes)
    slopes = measure(groups, walk, divergence, lambda done, total: tell("What losses do", done, total))
    planned = _by_module(plan, weights)
    options = [_group(one, slope, planned) for one, slope in zip(groups, slopes, strict=True)]
    names = {planned[module].source.name for one in groups for module in one.names}
    found = assign(options, budget.for_groups(plan, names))
    return _better(plan, weights, found, planned, divergence, budget)


def _check(plan: Plan, weights: ModelWeights, budget: Budget) -> None:
    """UnsupportedError for models with matrices that are in no tensor of the file, UsageError for a size that the smallest types
    exceed: before anything is measured."""
    planned = _by_module(plan, weights)
    missing = [module for module in _modules(weights) if module not in planned]
    if missing:
        raise UnsupportedError(
            f"{plan.source.path}: {missing[0]} is in no tensor of a GGUF file, so a size cannot be aimed at; --type chooses a mix"
        )
    tensors = {tensor.source.name: tensor for tensor in planned.values()}
    sized = {name: tensor for name, tensor in tensors.items() if types_for(tensor.source.shape[-1])}
    smallest = (_padded(_nbytes(types_for(tensor.source.shape[-1])[0], tensor)) for tensor in sized.values())
    check_size(sum(smallest), budget.for_groups(plan, set(sized)))


def _modules(weights: ModelWeights) -> list[str]:
    """Whole names of all that gets a type by measurement; an embedding that is not the head does, too."""
    config = weights.config
    layers = [f"model.layers.{index}.{name}" for index in range(config.num_layers) for name in layer_modules(config, index)]
    return [*layers, *dict.fromkeys((head_module(config), EMBEDDING.removesuffix(".weight")))]


def _some(rows: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Rows from the whole of the text, of about so many tokens."""
    count = max(1, min(len(rows), tokens * len(rows) // max(1, sum(map(len, rows)))))
    return [rows[index * len(rows) // count] for index in range(count)]


def _by_module(plan: Plan, weights: ModelWeights) -> dict[str, PlannedTensor]:
    """The tensor that a module is, or that it is stacked in, by whole Hugging Face name of the module."""
    planned, to_gguf = {tensor.source.name: tensor for tensor in plan.tensors}, weights.family.gguf_names.to_gguf
    names = {module: to_gguf(f"{module}.weight") for module in _modules(weights)}
    return {module: planned[name] for module, name in names.items() if name in planned}


def _group(one: Surveyed, slope: float, planned: Mapping[str, PlannedTensor]) -> Group:
    tensors = {planned[name].source.name: planned[name] for name in one.names}.values()  # each stack of experts once
    options = []
    for form_name, loss in one.losses.items():
        form = one.formats[form_name]
        options.append(Option(form, sum(_padded(_nbytes(form, tensor)) for tensor in tensors), loss * slope))
    return Group(one.names, tuple(options))


def _nbytes(form: Format, tensor: PlannedTensor) -> int:
    shape = tensor.source.shape
    return prod(shape[:-1]) * form.row_bytes(shape[-1])


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def retyped(plan: Plan, formats: Mapping[str, Format]) -> Plan:
    """The plan with other types. formats: by GGUF name."""
    tensors = []
    for tensor in plan.tensors:
        form = formats.get(tensor.source.name)
        if form is not None:
            tensor = replace(tensor, format=form, nbytes=_nbytes(form, tensor), replaced=None)
        tensors.append(tensor)
    bits = 8 * sum(t.nbytes for t in tensors) / sum(t.num_elements for t in tensors)
    return replace(plan, tensors=tensors, type_name=f"{bits:.2f}bpw")


def _better(
    plan: Plan,
    weights: ModelWeights,
    found: Assignment,
    planned: Mapping[str, PlannedTensor],
    divergence: Divergence,
    budget: Budget,
) -> Fitted:
    """The assignment, or the largest recipe that fits the budget where that diverges less when both are rounded."""
    formats = {planned[module].source.name: form for module, form in found.formats.items()}
    fitted = retyped(plan, formats)
    measured = divergence(RoundedWeights(weights, found.formats))
    uniform = _largest_recipe(plan, budget, set(formats))
    if uniform is None:
        return Fitted(fitted, found.cost, measured, None, None)
    recipe, other = uniform
    uniform_types = {module: tensor.format for module, tensor in _by_module(other, weights).items() if module in found.formats}
    theirs = divergence(RoundedWeights(weights, uniform_types))
    return Fitted(fitted if measured <= theirs else other, found.cost, measured, recipe.name, theirs)


def _largest_recipe(plan: Plan, budget: Budget, names: set[str]) -> tuple[Recipe, Plan] | None:
    """The recipe with the most bytes within the budget; None if none is."""
    best: tuple[int, Recipe, Plan] | None = None
    for recipe in RECIPES.values():
        if recipe.matrices.is_plain or recipe.needs_importance or recipe.stacks is not None:
            continue
        other = make_plan(plan.source, recipe)
        size = sum(_padded(tensor.nbytes) for tensor in other.tensors if tensor.source.name in names)
        if size <= budget.for_groups(other, names) and (best is None or size > best[0]):
            best = size, recipe, other
    return best[1:] if best is not None else None
