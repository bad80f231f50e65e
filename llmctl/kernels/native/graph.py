"""A forward pass as a list of operations: what NativeOps writes down while the decoder runs once without numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any


@dataclass(eq=False)
class Value:
    """One array of the forward pass: for every token (or row of logits) `shape` numbers, made by `node`.

    Reshaping gives another Value of the same node: the numbers do not move.
    """

    node: Node
    index: int
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return prod(self.shape)

    @property
    def key(self) -> tuple[int, int]:
        """The same for every view of the same numbers."""
        return self.node.number, self.index


@dataclass(eq=False)
class Node:
    """One operation. attributes: what is not an array of the batch (weights, factors, pages)."""

    number: int
    op: str
    inputs: tuple[Value, ...]
    attributes: dict[str, Any]
    outputs: list[Value] = field(default_factory=list)
    is_rows: bool = False
    """True when there is one row per row of logits asked for, false when there is one per token."""


class Graph:
    """Operations in the order they were recorded."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, op: str, inputs: tuple[Value, ...], *shapes: tuple[int, ...], is_rows: bool = False, **attributes: Any) -> Node:
        """Record an operation with one output per shape."""
        is_rows = is_rows or any(value.node.is_rows for value in inputs)
        node = Node(len(self.nodes), op, inputs, attributes, is_rows=is_rows)
        node.outputs = [Value(node, index, shape) for index, shape in enumerate(shapes)]
        self.nodes.append(node)
        return node

    def consumers(self) -> dict[tuple[int, int], list[Node]]:
        """Who reads each value."""
        readers: dict[tuple[int, int], list[Node]] = {}
        for node in self.nodes:
            for value in node.inputs:
                readers.setdefault(value.key, []).append(node)
        return readers
