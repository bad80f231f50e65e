"""What the planner makes of a recorded forward pass: few phases, everything in them, buffers that are used again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmctl.kernels.native.graph import Graph, Value
from llmctl.kernels.native.plan import Buffers, Planner

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 16, 64, 96


def weight(rows: int) -> SimpleNamespace:
    return SimpleNamespace(rows=rows)


class Recorder:
    """Writes the operations of a llama layer, or of a gemma one with its norms on every side."""

    def __init__(self, head_dim: int = HEAD_DIM) -> None:
        self.graph, self.head_dim = Graph(), head_dim

    def op(self, name: str, *inputs: Value, shape: tuple[int, ...], **attributes: object) -> Value:
        return self.graph.add(name, inputs, shape, **attributes).outputs[0]

    def linear(self, x: Value, rows: int) -> Value:
        return self.op("linear", x, shape=(rows,), weight=weight(rows), bias=None)

    def norm(self, x: Value) -> Value:
        return self.op("rms_norm", x, shape=x.shape, weight=None, factor=1e-5)

    def heads(self, x: Value, count: int) -> Value:
        return Value(x.node, x.index, (count, self.head_dim))

    def layer(self, x: Value, cos: Value, sin: Value, *, gemma: bool) -> Value:
        h = self.norm(x)
        q = self.heads(self.linear(h, HEADS * self.head_dim), HEADS)
        k = self.heads(self.linear(h, KV_HEADS * self.head_dim), KV_HEADS)
        v = self.heads(self.linear(h, KV_HEADS * self.head_dim), KV_HEADS)
        if gemma:
            q, k = self.norm(q), self.norm(k)
        q, k = (self.op("rotary", side, cos, sin, shape=side.shape) for side in (q, k))
        self.graph.add("store_kv", (k, v), pages=None, group=0)
        y = self.op("attention", q, shape=q.shape, pages=None, scale=1.0, window=None, softcap=None, sinks=None)
        y = self.linear(Value(y.node, y.index, (HEADS * self.head_dim,)), HIDDEN)
        x = self.op("add", x, self.norm(y) if gemma else y, shape=x.shape)
        h = self.norm(x)
        gated = self.op("gated_activation", self.linear(h, INNER), self.linear(h, INNER), shape=(INNER,), activation="silu")
        y = self.linear(gated, HIDDEN)
        return self.op("add", x, self.norm(y) if gemma else y, shape=x.shape)


def record(layers: int, *, gemma: bool = False, head_dim: int = HEAD_DIM) -> tuple[Graph, Value]:
    r = Recorder(head_dim)
    cos, sin = r.graph.add("rotary_angles", (), (head_dim // 2,), (head_dim // 2,), source=0, factor=1.0).outputs
    x = r.op("embedding", shape=(HIDDEN,), weight=weight(9), factor=1.0)
    for _ in range(layers):
        x = r.layer(x, cos, sin, gemma=gemma)
    x = r.norm(r.op("take_rows", x, shape=x.shape, is_rows=True))
    return r.graph, r.linear(x, 9)


def stored(graph: Graph, *, flat_norm: bool) -> list[str]:
    """Add keys and values of one input to the graph and store them: the row operations that do not fit into their products."""
    r = Recorder()
    r.graph = graph
    x = r.op("embedding", shape=(HIDDEN,), weight=weight(9), factor=1.0)
    k, v = r.linear(x, KV_HEADS * HEAD_DIM), r.linear(x, KV_HEADS * HEAD_DIM)
    k = r.heads(r.norm(k), KV_HEADS) if flat_norm else r.norm(r.heads(k, KV_HEADS))
    graph.add("store_kv", (k, r.heads(v, KV_HEADS)), pages=None, group=0)
    return [node.op for phase in Planner(graph).plan() for node in phase.before]


def test_keys_and_values_are_both_stored_by_their_products_or_neither() -> None:
    """A norm over all heads at once is none of what a product takes along: its keys would never reach the pages."""
    assert stored(Graph(), flat_norm=False) == ["embedding"]
    assert stored(Graph(), flat_norm=True) == ["embedding", "rms_norm", "store_kv"]


@pytest.mark.parametrize("gemma", [False, True])
def test_a_layer_takes_five_phases(gemma: bool) -> None:
    """Norm, q, k, v, rotary and store; attention; o and residual; norm, gate, up; down and residual."""
    graph, _ = record(3, gemma=gemma)
    phases = Planner(graph).plan()
    kinds = ["attention" if phase.attention else len(phase.products) for phase in phases]
    assert kinds == [3, "attention", 1, 1, 1] * 3 + ([0, 1] if gemma else [1])


def test_heads_that_are_no_whole_tiles_are_finished_row_by_row() -> None:
    """Rotary and store then stand between the products and attention, as a phase of row operations."""
    graph, _ = record(1, head_dim=24)
    phases = Planner(graph).plan()
    between = phases[1]
    assert [node.op for node in between.before] == ["rotary", "rotary", "store_kv"]
    assert not between.products


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_every_operation_is_in_exactly_one_phase(gemma: bool, head_dim: int) -> None:
    graph, _ = record(2, gemma=gemma, head_dim=head_dim)
    done: list[int] = []
    for phase in Planner(graph).plan():
        done += [node.number for node in phase.before] + ([phase.attention.number] if phase.attention else [])
        for p in phase.products:
            parts = [p.linear, p.up, p.norm, p.rotary, p.store if p.is_value else None]
            done += [node.number for node in parts if node]
            done += [p.result.node.number] if p.residual or p.up else []
    assert sorted(done) == [node.number for node in graph.nodes]


@pytest.mark.parametrize("gemma", [False, True])
def test_a_buffer_is_not_used_again_before_its_last_reader(gemma: bool) -> None:
    """Played through phase by phase: whoever reads a value finds it where it was written."""
    graph, result = record(4, gemma=gemma)
    phases = Planner(graph).plan()
    made: list[tuple[int, bool]] = []
    program = SimpleNamespace(add_buffer=lambda *kind: made.append(kind) or len(made) - 1)
    buffers = Buffers(program, phases, result)
    holds: dict[int, tuple[int, int]] = {}
    for index, phase in enumerate(phases):
        buffers.allocate(phase)
        for value in phase.writes():
            holds[buffers[value]] = value.key
        for value in phase.reads():
            assert holds[buffers[value]] == value.key
        buffers.release(phase, index)
    assert holds[buffers[result]] == result.key
    assert len(made) < 16  # four layers share them


@pytest.mark.parametrize("shared", [False, True])
def test_a_sparse_mlp_takes_two_phases(shared: bool) -> None:
    """Norm, router and what the shared expert begins with; then everything else, the residual included."""
    r = Recorder()
    x = r.op("embedding", shape=(HIDDEN,), weight=weight(9), factor=1.0)
    h = r.norm(x)
    y = r.op("moe", h, r.linear(h, 4), shape=(HIDDEN,))
    if shared:
        gated = r.op("gated_activation", r.linear(h, INNER), r.linear(h, INNER), shape=(INNER,), activation="silu")
        other = r.op("gated", r.linear(gated, HIDDEN), r.linear(h, 1), shape=(HIDDEN,))
        y = r.op("add", y, other, shape=(HIDDEN,))
    x = r.op("add", x, y, shape=(HIDDEN,))
    first, second = Planner(r.graph).plan()
    assert len(first.products) == (3 if shared else 1)
    mixture = second.mixture
    assert mixture is not None
    assert (mixture.shared is not None, mixture.gate is not None) == (shared, shared)
    assert mixture.result.key == x.key
    assert mixture.residual is not None


@pytest.mark.parametrize(("head_dim", "joins"), [(16, 0), (24, 1)])
def test_heads_are_joined_by_the_products_that_make_them(head_dim: int, joins: int) -> None:
    """Both write to their places in the joined rows, unless heads are no whole tiles."""
    r = Recorder(head_dim)
    cos, sin = r.graph.add("rotary_angles", (), (head_dim // 2,), (head_dim // 2,), source=0, factor=1.0).outputs
    x = r.op("embedding", shape=(HIDDEN,), weight=weight(9), factor=1.0)
    nope = r.heads(r.linear(x, HEADS * head_dim), HEADS)
    rope = r.op("rotary", r.heads(r.linear(x, HEADS * head_dim), HEADS), cos, sin, shape=(HEADS, head_dim))
    absorbed = r.op("head_linear", nope, shape=(HEADS, 32), weight=weight(32))
    joined = r.op("join_heads", absorbed, rope, shape=(HEADS, 32 + head_dim))
    r.op("attention", joined, shape=(HEADS, 32))
    phases = Planner(r.graph).plan()
    assert sum(node.op == "join_heads" for phase in phases for node in phase.before) == joins
    writers = [phase for phase in phases if joined.key in [value.key for value in phase.writes()]]
    assert len(writers) == (1 if joins else 2)
    assert [p.joined_behind for p in phases[0].products] == [0, 0 if joins else 32]


def test_what_two_read_is_not_taken_into_a_mixture() -> None:
    r = Recorder()
    x = r.op("embedding", shape=(HIDDEN,), weight=weight(9), factor=1.0)
    y = r.op("moe", x, r.linear(x, 4), shape=(HIDDEN,))
    other = r.linear(x, HIDDEN)
    total = r.op("add", y, other, shape=(HIDDEN,))
    r.op("add", total, other, shape=(HIDDEN,))
    phases = Planner(r.graph).plan()
    assert [phase.mixture.residual.key for phase in phases if phase.mixture] == [other.key]
