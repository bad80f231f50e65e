"""From a recorded graph to the phases of a native program (program.hpp): what is computed together, and where it is kept.

Operations on single rows gather until a product needs their result; then they become the head of its phase. Products that read
the same row share a phase, and each takes along what follows on its outputs as long as nobody else reads them in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmctl.kernels.moe._native import listed, native_routing
from llmctl.kernels.native import _native
from llmctl.kernels.native.graph import Graph, Node, Value

TILE_ROWS = 16
_NORMS = ("rms_norm", "layer_norm")
_ACTIVATIONS = {
    "silu": _native.Activation.Silu,
    "gelu_pytorch_tanh": _native.Activation.GeluTanh,
    "gelu": _native.Activation.Gelu,
    "clamped_swiglu": _native.Activation.ClampedSwiglu,
}


@dataclass
class _Product:
    """A linear node and the operations that follow it in the same segment."""

    linear: Node
    up: Node | None = None
    activation: str | None = None
    scale: float = 1.0
    softcap: float = 0.0
    norm: Node | None = None
    rotary: Node | None = None
    residual: Value | None = None
    store: Node | None = None
    is_value: bool = False
    head_dim: int = 0
    result: Value | None = None
    joined_behind: int = 0
    """Where every head of `result` begins with so many numbers of another product, which are not written here."""

    def reads(self) -> list[Value]:
        """Values other than the shared input."""
        rotary = list(self.rotary.inputs[1:]) if self.rotary else []
        return rotary + ([self.residual] if self.residual else [])


@dataclass
class _Mixture:
    """A moe node and what is added to its output: the product of the expert that all tokens share, times the sigmoid of a gate,
    and the residual."""

    node: Node
    result: Value
    shared: Node | None = None
    gate: Value | None = None
    residual: Value | None = None

    def reads(self) -> list[Value]:
        """Everything it needs from buffers."""
        values = [*self.node.inputs, self.gate, self.residual, self.shared and self.shared.inputs[0]]
        return [value for value in values if value is not None]


@dataclass
class _Phase:
    """One phase to be: row operations, then products on `input` or of its heads; or attention or a mixture of experts alone."""

    before: list[Node] = field(default_factory=list)
    input: Value | None = None
    products: list[_Product] = field(default_factory=list)
    attention: Node | None = None
    mixture: _Mixture | None = None
    head_linear: Node | None = None
    joined: Value | None = None
    """What has the results of `head_linear` as the beginnings of its heads."""
    is_rows: bool = False

    def reads(self) -> list[Value]:
        """Everything the phase needs from buffers."""
        values = [value for node in self.before for value in node.inputs]
        values += [self.input] if self.input else []
        values += [value for product in self.products for value in product.reads()]
        values += [self.attention.inputs[0]] if self.attention else []
        return values + (self.mixture.reads() if self.mixture else [])

    def writes(self) -> list[Value]:
        """Everything it puts into buffers."""
        values = [value for node in self.before for value in node.outputs]
        values += [product.result for product in self.products if product.result]
        values += [self.mixture.result] if self.mixture else []
        values += self.attention.outputs if self.attention else []
        head_output = self.joined or (self.head_linear and self.head_linear.outputs[0])
        return values + ([head_output] if head_output else [])


class Planner:
    """Groups the nodes of one graph into phases."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._readers = graph.consumers()
        self._done: set[int] = set()
        self.phases: list[_Phase] = []
        self._pending: list[Node] = []

    def plan(self) -> list[_Phase]:
        """The phases, in order."""
        for node in self._graph.nodes:
            if node.number in self._done or node.op == "inv_freqs":  # those come with every step's input
                continue
            if self._pending and self._pending[0].is_rows != node.is_rows:
                self._flush()
            if node.op == "linear":
                self._add_products(node)
            elif node.op == "head_linear":
                self.phases.append(_Phase(self._pending, node.inputs[0], head_linear=node, is_rows=node.is_rows))
                self._pending = []
            elif node.op == "attention":
                self._flush()
                self.phases.append(_Phase(attention=node))
            elif node.op == "moe":
                self._flush()
                self.phases.append(_Phase(mixture=self._mixture(node), is_rows=node.is_rows))
            elif not (node.op == "join_heads" and self._join_products(node)):
                self._pending.append(node)
        self._flush()
        return self.phases

    def _flush(self) -> None:
        if self._pending:
            self.phases.append(_Phase(before=self._pending, is_rows=self._pending[0].is_rows))
            self._pending = []

    def _add_products(self, first: Node) -> None:
        """One phase for every product on the same input."""
        source = first.inputs[0]
        linears = [node for node in self._readers[source.key] if node.op == "linear"]
        phase = _Phase(self._pending, source, is_rows=first.is_rows)
        self._pending = []
        known = {value.key for value in phase.writes()} | {v.key for p in self.phases for v in p.writes()}
        for linear in linears:
            if linear.number not in self._done:
                phase.products.append(self._follow(linear, linears, known))
        self.phases.append(phase)

    def _join_products(self, join: Node) -> bool:
        """Whether nobody else reads what is joined, and its products can write to their places: those of every head, and one
        whose outputs are finished head by head."""
        first, second = join.inputs
        if any(self._sole_reader(value) is not join for value in join.inputs):
            return False
        phase = next((phase for phase in self.phases if phase.head_linear is first.node), None)
        products = (product for phase in self.phases for product in phase.products)
        product = next((p for p in products if p.result and p.result.key == second.key), None)
        if not (phase and product) or product.head_dim != second.shape[-1]:
            return False
        phase.joined = product.result = join.outputs[0]
        product.joined_behind = first.shape[-1]
        return True

    def _mixture(self, node: Node) -> _Mixture:
        """The node with everything after it that can be added to its output at once."""
        known = {value.key for phase in self.phases for value in phase.writes()}
        mixture = _Mixture(node, node.outputs[0])
        while (add := self._sole_reader(mixture.result)) and add.op == "add" and mixture.residual is None:
            other = next((value for value in add.inputs if value.key != mixture.result.key), None)
            if other is None or not (self._absorb_shared(mixture, other, known) or self._absorb_known(mixture, other, known)):
                break
            self._done.add(add.number)
            mixture.result = add.outputs[0]
        return mixture

    def _absorb_shared(self, mixture: _Mixture, other: Value, known: set[tuple[int, int]]) -> bool:
        """Whether `other` is the product of an expert that all tokens share, or that times a gate, and comes along."""
        gate = other.node if other.node.op == "gated" else None
        product = gate.inputs[0] if gate else other
        linear, readers = product.node, [self._sole_reader(other), self._sole_reader(product)]
        needed = [*linear.inputs, *(gate.inputs[1:] if gate else ())]
        is_new = mixture.shared is None and linear.op == "linear" and linear.number not in self._done
        if not is_new or None in readers or any(value.key not in known for value in needed):
            return False
        mixture.shared, mixture.gate = linear, gate.inputs[1] if gate else None
        self._done.update(node.number for node in (linear, gate) if node)
        return True

    @staticmethod
    def _absorb_known(mixture: _Mixture, other: Value, known: set[tuple[int, int]]) -> bool:
        if other.key not in known:
            return False
        mixture.residual = other
        return True

    def _follow(self, linear: Node, siblings: list[Node], known: set[tuple[int, int]]) -> _Product:
        """The product of a linear node with everything after it that can be done on its outputs at once."""
        self._done.add(linear.number)
        product, value = _Product(linear), linear.outputs[0]
        while (node := self._sole_reader(value)) and (following := self._absorb(product, node, value, siblings, known)):
            self._done.add(node.number)
            value = following
            if product.store:
                return product
        product.result = value
        return product

    def _sole_reader(self, value: Value) -> Node | None:
        readers = self._readers.get(value.key, [])
        return readers[0] if len(readers) == 1 else None

    def _absorb(
        self, product: _Product, node: Node, value: Value, siblings: list[Node], known: set[tuple[int, int]]
    ) -> Value | None:
        """Take `node`, the only reader of `value`, into the product if it fits there; its output, or None."""
        if node.op == "gated_activation" and value.key == product.linear.outputs[0].key:
            return self._absorb_gate(product, node, siblings) if len(node.inputs) == 2 else self._absorb_activation(product, node)
        if node.op in ("scale", "softcap") and not (product.head_dim or product.residual):
            return self._absorb_elementwise(product, node)
        if node.op == "add" and not product.head_dim and product.residual is None:
            return self._absorb_residual(product, node, value, known)
        if node.op in (*_NORMS, "rotary", "store_kv") and product.residual is None and product.activation is None:
            return self._absorb_heads(product, node, value, known)
        return None

    def _absorb_gate(self, product: _Product, node: Node, siblings: list[Node]) -> Value | None:
        gate, up = (value.node for value in node.inputs)
        other = up if gate is product.linear else gate
        same = gate.attributes["weight"].rows == other.attributes["weight"].rows if other.op == "linear" else False
        if gate is not product.linear or other not in siblings or other.number in self._done or not same:
            return None
        if self._sole_reader(other.outputs[0]) is not node:
            return None
        self._done.add(other.number)
        product.up, product.activation = other, node.attributes["activation"]
        return node.outputs[0]

    @staticmethod
    def _absorb_activation(product: _Product, node: Node) -> Value:
        product.activation = node.attributes["activation"]
        return node.outputs[0]

    @staticmethod
    def _absorb_elementwise(product: _Product, node: Node) -> Value | None:
        if node.op == "softcap" and product.softcap == 0.0:
            product.softcap = node.attributes["factor"]
        elif node.op == "scale" and product.scale == 1.0 and product.softcap == 0.0:
            product.scale = node.attributes["factor"]
        else:
            return None
        return node.outputs[0]

    @staticmethod
    def _absorb_residual(product: _Product, node: Node, value: Value, known: set[tuple[int, int]]) -> Value | None:
        others = [other for other in node.inputs if other.key != value.key]
        if len(others) != 1 or others[0].key not in known:
            return None
        product.residual = others[0]
        return node.outputs[0]

    def _absorb_heads(self, product: _Product, node: Node, value: Value, known: set[tuple[int, int]]) -> Value | None:
        head_dim = node.inputs[0].shape[-1]
        if head_dim % TILE_ROWS or product.head_dim not in (0, head_dim) or value.node.is_rows:
            return None
        if node.op in _NORMS and (product.norm or product.rotary or not _is_of_heads(node)):
            return None
        if node.op == "rotary" and (product.rotary or any(angle.key not in known for angle in node.inputs[1:])):
            return None
        if node.op == "store_kv":
            return self._absorb_store(product, node, value, head_dim, known)
        product.head_dim = head_dim
        if node.op in _NORMS:
            product.norm = node
        else:
            product.rotary = node
        return node.outputs[0]

    def _absorb_store(
        self, product: _Product, node: Node, value: Value, head_dim: int, known: set[tuple[int, int]]
    ) -> Value | None:
        """Keys and values are written by their own products; only if both can be. The first of the two decides. Latent pages
        have no values."""
        if node.number not in self._done and not all(self._can_store(product, side, head_dim, known) for side in node.inputs):
            return None
        product.store, product.is_value, product.head_dim = node, value.key != node.inputs[0].key, head_dim
        return value

    def _can_store(self, product: _Product, value: Value, head_dim: int, known: set[tuple[int, int]]) -> bool:
        """True if nothing stands between a linear node and the value but what its product takes along: a norm of every head,
        then a rotation. Where it is not `product`'s own, it is still to be planned."""
        while value.node.op in (*_NORMS, "rotary") and self._sole_reader(value) is not None:
            source, is_norm = value.node.inputs[0], value.node.op in _NORMS
            if source.node.op == "rotary" or (is_norm and (source.node.op in _NORMS or not _is_of_heads(value.node))):
                return False
            if source.shape[-1] != head_dim or any(angle.key not in known for angle in value.node.inputs[1:]):
                return False
            value = source
        linear = value.node
        planned = linear.number in self._done and linear is not product.linear
        return linear.op == "linear" and not planned and self._sole_reader(value) is not None


def _is_of_heads(norm: Node) -> bool:
    """Whether a product can take the norm along: one over every head, without a bias."""
    return len(norm.inputs[0].shape) > 1 and norm.attributes.get("bias") is None


class Buffers:
    """Where values are kept: a buffer is used again once the last phase that reads its value is over."""

    def __init__(self, program: Any, phases: list[_Phase], result: Value) -> None:
        self._program = program
        self._numbers: dict[tuple[int, int], int] = {}
        self._free: dict[tuple[int, bool], list[int]] = {}
        self._last: dict[tuple[int, int], int] = {}
        for index, phase in enumerate(phases):
            for value in phase.writes() + phase.reads():
                self._last[value.key] = index
        self._last[result.key] = len(phases)

    def allocate(self, phase: _Phase) -> None:
        """Buffers for everything the phase writes and no phase before it has begun to."""
        for value in phase.writes():
            if value.key in self._numbers:
                continue
            kind = (value.width, value.node.is_rows)
            free = self._free.setdefault(kind, [])
            self._numbers[value.key] = free.pop() if free else self._program.add_buffer(*kind)

    def release(self, phase: _Phase, index: int) -> None:
        """Give back what is read for the last time in this phase."""
        for key, value in {v.key: v for v in phase.writes() + phase.reads()}.items():
            if self._last[key] == index:
                self._free.setdefault((value.width, value.node.is_rows), []).append(self._numbers[key])

    def __getitem__(self, value: Value) -> int:
        return self._numbers[value.key]


def build(program: Any, graph: Graph, result: Value) -> int:
    """Put the graph's phases into an empty native program. Returns the number of the buffer that holds `result`."""
    phases = Planner(graph).plan()
    buffers = Buffers(program, phases, result)
    for index, phase in enumerate(phases):
        buffers.allocate(phase)
        if phase.attention:
            _add_attention(program, phase.attention, buffers)
        elif phase.mixture:
            _add_mixture(program, phase.mixture, buffers)
        else:
            before = [_row_op(node, buffers) for node in phase.before]
            segments = [_segment(product, buffers) for product in phase.products]
            segments += _head_segments(phase.head_linear, phase.joined, buffers) if phase.head_linear else []
            source = buffers[phase.input] if phase.input else -1
            program.add_matrix_phase(phase.is_rows, before, source, segments)
        buffers.release(phase, index)
    return buffers[result]


def _add_attention(program: Any, node: Node, buffers: Buffers) -> None:
    a, queries = node.attributes, node.inputs[0]
    source, out = buffers[queries], buffers[node.outputs[0]]
    window, softcap, others = a["window"] or 0, a["softcap"] or 0.0, (a["sinks"], a["anchors"])
    program.add_attention_phase(source, out, a["pages"], a["group"], queries.shape[0], a["scale"], window, softcap, *others)


def _add_mixture(program: Any, mixture: _Mixture, buffers: Buffers) -> None:
    places, a, shared = _native.MoeBuffers(), mixture.node.attributes, mixture.shared
    places.x, places.logits = (buffers[value] for value in mixture.node.inputs)
    places.out = buffers[mixture.result]
    for name, value in (("shared", shared and shared.inputs[0]), ("shared_gate", mixture.gate), ("residual", mixture.residual)):
        if value is not None:
            setattr(places, name, buffers[value])
    experts, down = a["experts"], shared.attributes if shared else {"weight": None, "bias": None}
    matrices = [listed(part) for part in (experts.gate, experts.up, experts.down)]
    biases = [experts.gate_bias, experts.up_bias, experts.down_bias]
    routing, activation = native_routing(a["routing"]), _ACTIVATIONS[a["activation"]]
    program.add_moe_phase(places, matrices, biases, down["weight"], down["bias"], routing, activation, experts.counts)


def _row_op(node: Node, buffers: Buffers) -> Any:
    """The native description of an operation on single rows."""
    op, a = _native.RowOp(getattr(_native.RowKind, _ROW_KINDS[node.op])), node.attributes
    for field_name, value in zip(("a", "b", "c"), node.inputs, strict=False):
        setattr(op, field_name, buffers[value])
    for field_name, value in zip(("out", "out2"), node.outputs, strict=False):
        setattr(op, field_name, buffers[value])
    op.factor = a.get("factor", 1.0)
    op.source = a.get("source", 0)
    if node.op in (*_NORMS, "rotary", "store_kv", "fit_heads", "join_heads"):
        op.width = node.inputs[0].shape[-1]
    if node.op == "growth":
        op.width = a["length"]
    if node.op in _NORMS:
        op.set_weight(a["weight"])
    if a.get("bias") is not None:
        op.set_bias(a["bias"])
    if node.op == "embedding":
        op.set_table(a["weight"])
    if node.op == "gated_activation":
        op.activation = _ACTIVATIONS[a["activation"]]
    if node.op == "store_kv":
        op.set_pages(a["pages"], a["group"])
    if node.op == "take_columns":
        op.set_order(a["order"])
    return op


_ROW_KINDS = {
    "embedding": "Embedding",
    "rotary_angles": "Angles",
    "rms_norm": "RmsNorm",
    "layer_norm": "LayerNorm",
    "rotary": "Rotary",
    "gated_activation": "Gated",
    "gated": "Sigmoid",
    "add": "Add",
    "scale": "Scale",
    "growth": "Growth",
    "softcap": "Softcap",
    "take_rows": "Take",
    "store_kv": "Store",
    "fit_heads": "Fit",
    "join_heads": "Join",
    "take_columns": "Gather",
}


def _segment(product: _Product, buffers: Buffers) -> Any:
    """The native description of a product and what follows it."""
    segment, a = _native.Segment(), product.linear.attributes
    segment.set_matrix(a["weight"])
    if a["bias"] is not None:
        segment.set_bias(a["bias"])
    if product.up:
        segment.set_up(product.up.attributes["weight"], product.up.attributes["bias"])
    if product.activation:
        segment.activation, segment.activated = _ACTIVATIONS[product.activation], product.up is None
    segment.scale, segment.softcap, segment.head_dim = product.scale, product.softcap, product.head_dim
    if product.norm:
        norm = product.norm.attributes
        segment.set_head_norm(norm["weight"], norm["factor"], product.norm.op == "layer_norm")
    if product.rotary:
        segment.cos, segment.sin = (buffers[value] for value in product.rotary.inputs[1:])
    if product.store:
        stored = product.store.attributes
        segment.set_pages(stored["pages"], stored["group"], product.is_value)
    if product.residual:
        segment.residual = buffers[product.residual]
    if product.result:
        segment.out = buffers[product.result]
    if product.joined_behind and product.result:
        segment.out_column, segment.head_stride = product.joined_behind, product.result.shape[-1]
    return segment


def _head_segments(node: Node, joined: Value | None, buffers: Buffers) -> list[Any]:
    """The native descriptions of the products of every head, which `joined` begins with if there is one."""
    weight, out = node.attributes["weight"], joined or node.outputs[0]
    heads, width = out.shape
    segments = [_native.Segment() for _ in range(heads)]
    for head, segment in enumerate(segments):
        segment.set_matrix(weight, head)
        segment.head, segment.out_column, segment.out = head, head * width, buffers[out]
    return segments
