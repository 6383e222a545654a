"""A graph rewritten node by node: values that equal others, operators in the place of a node, and no dead code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.ir.graph import PERMUTE, RESHAPE, JointGraph, Node, Ref, TensorMeta
from autopar.ir.rewrite import living, numbered, reading, with_own_metas
from autopar.ops.rule import Call, call_of

from .patterns import TURNED, ZEROS


class Rewrite:
    """A new list of nodes for the values of a graph. `same` maps values to others that are equal."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph, self.metas = graph, dict(graph.metas)
        self.same: dict[str, str] = {}
        self.matrices: dict[str, Ref] = {}
        self.nodes: list[Node] = []
        self.node = graph.nodes[0]

    def now(self, name: str) -> Ref:
        """What has the value of this name now."""
        return Ref(self.same.get(name, name))

    def keep(self, node: Node) -> None:
        self.nodes.append(reading(node, self.same))

    def emit(self, op: str, args: tuple[Any, ...], shape: tuple[int, ...], name: str = "", **kwargs: Any) -> Ref:
        """Append an op in the place of the node at hand. Its result has the dtype of its first operand, or
        of the value `name` that it makes."""
        dtype = self.metas[name or args[0].name].dtype
        name = name or numbered(f"{self.node.name}_rows", self.metas)
        self.metas[name] = TensorMeta(tuple(shape), dtype)
        self.nodes.append(replace(self.node, op=op, args=args, kwargs=tuple(kwargs.items()), outputs=(name,)))
        return Ref(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.metas[name].shape

    def turned(self, value: Ref, name: str = "") -> Ref:
        """[e, k, n] -> [e, n, k]"""
        e, k, n = self.shape(value.name)
        return self.emit(PERMUTE, (value, TURNED), (e, n, k), name)

    def matrix(self, name: str, rows: int, width: int) -> Ref:
        """A value that has no other dims but of size 1 as a matrix; the same one whichever view of it is asked."""
        while (index := self.graph.producer.get(name)) is not None:
            node = self.graph.nodes[index]
            if node.op not in (RESHAPE, PERMUTE) or self.shape(node.inputs[0])[0] != rows:
                break
            source = self.shape(node.inputs[0])
            moved = node.op == PERMUTE and [d for d in node.args[1] if source[d] > 1] != [
                d for d, size in enumerate(source) if size > 1
            ]
            if moved or len([size for size in source[1:] if size > 1]) > 1:
                break
            name = node.inputs[0]
        if self.shape(name) == (rows, width):
            return self.now(name)
        if name not in self.matrices:
            self.matrices[name] = self.emit(RESHAPE, (self.now(name), (rows, width)), (rows, width))
        return self.matrices[name]

    def call(self, node: Node) -> Call:
        return call_of(node, self.metas)

    def is_zero(self, name: str) -> bool:
        index = self.graph.producer.get(name)
        return index is not None and self.graph.nodes[index].op in ZEROS

    def done(self) -> JointGraph:
        """The new graph, without what only served what was replaced."""
        outputs = tuple(replace(o, name=self.now(o.name).name) if o.name else o for o in self.graph.outputs)
        nodes = living(self.nodes, (o.name for o in outputs))
        return with_own_metas(replace(self.graph, nodes=nodes, outputs=outputs, metas=self.metas))
