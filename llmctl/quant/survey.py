"""What every type would cost every group of matrices, measured on text: what `budget` chooses from.

One walk through the unrounded model gives the loss of every type, of a sample of each matrix's rows, with errors fed back as
they will be. How much the output suffers from a loss is measured by rounding the groups of a few layers at a time.

Experts of a layer are stacked in a GGUF file, so they have one type: their losses count by the tokens that chose them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmctl.kernels.encode import Encoder
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.grids import GRIDS
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.quant.budget import Probe, slopes
from llmctl.quant.divergence import EMBEDDING, Divergence
from llmctl.quant.grid_gptq import Prepared, Solver, loss, prepare, solve_prepared
from llmctl.quant.head import head_module, head_rows, head_statistics
from llmctl.quant.pipeline import GROUPS_AT_ONCE
from llmctl.quant.statistics import Statistics
from llmctl.quant.walk import LayerWeights, Walk
from llmctl.runtime.checkpoint.names import take_rows
from llmctl.runtime.models.topology import InputGroup, layer_topology
from llmctl.runtime.models.weights import ModelWeights

_SAMPLE = 96  # rows of a matrix that stand for all
_EXPERT_SAMPLE = 12  # at least so many of each where a tensor holds several matrices
_HEAD_SAMPLE = 1024  # the same of the head
_ZONES = 12  # parts of the model that are probed apart, each kind of group in each
_PROBE_BITS = 4.6  # the widest type a probe rounds to: coarse enough to stand out
_SMALLEST_BITS = 3.0  # narrower types are not worth their loss in models that have wider ones beside them

Progress = Callable[[int, int], None]


@dataclass
class Surveyed:
    """Projections of one layer that have one type: those that read the same input, of experts those of all of them.

    names: whole module names. losses: by type, a token of the text. probe_loss: of the probe.
    """

    names: tuple[str, ...]
    layer: int
    kind: str
    losses: dict[str, float] = field(default_factory=dict)
    probe_loss: float = 0.0

    @property
    def formats(self) -> dict[str, Format]:
        """The types whose losses are known."""
        return {name: FORMATS[name] for name in self.losses}


def types_for(columns: int) -> list[Format]:
    """The types that rows of this length can have, the smallest first; none if no block divides them."""
    found = [FORMATS[name] for name in GRIDS if not columns % FORMATS[name].elements_per_block]
    return sorted((form for form in found if form.bits_per_weight > _SMALLEST_BITS), key=lambda form: form.bits_per_weight)


def survey(walk: Walk, damping: float, progress: Progress | None = None) -> list[Surveyed]:
    """The losses of all groups of all layers. walk: at the start of the text; it is used up."""
    found: list[Surveyed] = []
    walk.embed()
    solver = Solver.on(1, damping, passes=0)
    count = walk.weights.config.num_layers
    for index in range(count):
        layer = walk.layer(index)
        found += _survey_layer(walk, layer, solver)
        walk.advance(layer)
        if progress is not None:
            progress(index + 1, count)
    return found


def _survey_layer(walk: Walk, layer: LayerWeights, solver: Solver) -> list[Surveyed]:
    groups = [group for group in layer_topology(layer.config, layer.index) if types_for(_columns(layer, group))]
    tensors = [_tensors(layer, group) for group in groups]
    found: dict[tuple[str, ...], Surveyed] = {}
    for start in range(0, len(groups), GROUPS_AT_ONCE):
        part = slice(start, start + GROUPS_AT_ONCE)
        statistics = walk.collect(layer, [group.leader for group in groups[part]])
        for group, key in zip(groups[part], tensors[part], strict=True):
            one = found.setdefault(key, _blank(layer, group))
            one.names = (*one.names, *map(layer.full, group.modules))
            if (seen := statistics.get(group.leader)) is not None:  # else an expert that no token chose
                sample = max(_EXPERT_SAMPLE, _SAMPLE // tensors.count(key))
                _add_losses(one, solver, layer, group.modules, seen, seen.count / walk.num_tokens, sample)
    return list(found.values())


def _tensors(layer: LayerWeights, group: InputGroup) -> tuple[str, ...]:
    """The tensors of a GGUF file that hold the group's matrices."""
    names = (layer.full(module) + ".weight" for module in group.modules)
    return tuple(layer.source.family.gguf_names.to_gguf(name) or name for name in names)


def _blank(layer: LayerWeights, group: InputGroup) -> Surveyed:
    """Without any loss: all types are as good where no token comes."""
    return Surveyed((), layer.index, group.leader, {form.name: 0.0 for form in types_for(_columns(layer, group))})


def _columns(layer: LayerWeights, group: InputGroup) -> int:
    return layer.source.stored(layer.full(group.modules[0]) + ".weight").shape[-1]


def survey_head(walk: Walk, damping: float) -> Surveyed:
    """The losses of the matrix that makes the logits. walk: at the end of the text."""
    weights = walk.weights
    module = head_module(weights.config)
    count = weights.stored(f"{module}.weight").shape[0]
    one = Surveyed((module,), weights.config.num_layers, "head")
    prepared = prepare(head_statistics(walk).take_hessian().numpy(), damping)
    rows = np.concatenate(list(head_rows(weights, max(1, count // _HEAD_SAMPLE))))
    if prepared is not None:
        _add_rows(one, Solver.on(1, damping, passes=0), rows, count / len(rows), prepared)
    return one


def survey_embedding(weights: ModelWeights, rows: Sequence[Sequence[int]]) -> Surveyed:
    """The losses of an embedding that is not the head: Σ (ŵ − w)² of the rows that the text looks up, a token."""
    ids, counts = np.unique(np.concatenate([np.array(row) for row in rows]), return_counts=True)
    table = np.array(dequantize(take_rows(weights.read(EMBEDDING), ids)), np.float32)
    encoder, shares = Encoder(1), counts / counts.sum()

    def lost(form: Format) -> float:
        error = dequantize(encoder.encode(table, form)) - table
        return float(shares @ (error * error).sum(axis=1))

    forms = types_for(table.shape[1])
    losses = {form.name: lost(form) for form in forms}
    return Surveyed((EMBEDDING.removesuffix(".weight"),), -1, "embedding", losses, lost(probe_type(table.shape[1])))


def _add_losses(
    one: Surveyed, solver: Solver, layer: LayerWeights, modules: Sequence[str], seen: Statistics, weight: float, sample: int
) -> None:
    """seen: of the modules' input, whose products are used up. weight: of the losses. sample: rows of a matrix that are looked
    at."""
    prepared = prepare(seen.take_hessian().numpy(), solver.damping)
    if prepared is None:
        return
    for module in modules:
        matrix = layer.matrix(module).numpy()
        rows = np.ascontiguousarray(matrix[:: max(1, len(matrix) // sample)])
        _add_rows(one, solver, rows, weight * len(matrix) / len(rows), prepared)


def _add_rows(one: Surveyed, solver: Solver, rows: np.ndarray, share: float, hessian: Prepared) -> None:
    """share: what the loss of each of `rows` counts, as the matrix rows that it stands for."""
    importance = np.ascontiguousarray(np.diagonal(hessian.raw))
    for form in types_for(rows.shape[1]):
        found = dequantize(solve_prepared(solver, rows, hessian, form, importance))
        one.losses[form.name] = one.losses.get(form.name, 0.0) + share * loss(rows, found, hessian.raw)
    nearest = dequantize(solver.encoder.encode(rows, probe_type(rows.shape[1])))
    one.probe_loss += share * loss(rows, nearest, hessian.raw)


def probe_type(columns: int) -> Format:
    """What rows of this length are rounded to on trial."""
    return [form for form in types_for(columns) if form.bits_per_weight <= _PROBE_BITS][-1]


class RoundedWeights(Mapping[str, np.ndarray]):
    """float32 by whole tensor name, of modules rounded to nearest. Each is made when it is asked for: one is in memory at a time.

    formats: by whole module name.
    """

    def __init__(self, weights: ModelWeights, formats: Mapping[str, Format]) -> None:
        self._weights, self._formats, self._encoder = weights, formats, Encoder(1)

    def __getitem__(self, name: str) -> np.ndarray:
        module = name.removesuffix(".weight")
        form = self._formats[module]
        if module == head_module(self._weights.config):
            return np.concatenate([self._round(rows, form) for rows in head_rows(self._weights)])
        values = np.array(dequantize(self._weights.read(name)), np.float32)
        self._weights.release(name)
        return self._round(values, form)

    def _round(self, values: np.ndarray, form: Format) -> np.ndarray:
        return values if form.is_plain else dequantize(self._encoder.encode(values, form))

    def __iter__(self) -> Iterator[str]:
        return (f"{module}.weight" for module in self._formats)

    def __len__(self) -> int:
        return len(self._formats)


def measure(groups: Sequence[Surveyed], walk: Walk, divergence: Divergence, progress: Progress | None = None) -> list[float]:
    """Divergence per loss of every group, in their order: measured for a few layers at a time."""
    zones = _zones(groups)
    probes = {}
    for done, (key, members) in enumerate(zones.items(), 1):
        weights = walk.weights
        names = [name for one in members for name in one.names]
        coarse = {name: probe_type(weights.stored(f"{name}.weight").shape[-1]) for name in names}
        probes[key] = Probe(sum(one.probe_loss for one in members), divergence(RoundedWeights(weights, coarse)))
        if progress is not None:
            progress(done, len(zones))
    found = slopes(probes)
    by_group = {id(one): found[key] for key, members in zones.items() for one in members}
    return [by_group[id(one)] for one in groups]


def _zones(groups: Sequence[Surveyed]) -> dict[str, list[Surveyed]]:
    """The groups that are probed together: of one kind, in neighbouring layers."""
    layers = max(one.layer for one in groups) + 1
    found: dict[str, list[Surveyed]] = {}
    for one in groups:
        found.setdefault(f"{one.kind} {one.layer * min(_ZONES, layers) // layers}", []).append(one)
    return found
