"""What rewrites of routing share: what they look for, and the graph that they write."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import PERMUTE, RESHAPE, JointGraph, Node, Ref
from autopar.ir.rewriter import Rewriter
from autopar.ops.rule import Call, OpRule, call_of

TURNED = (0, 2, 1)
SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
ZEROS = ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")
UNREAD = (*ZEROS, "aten.empty_like.default", "aten.new_empty.default")
"""Ops that read the shape and dtype of their operand, and no element."""

RuleOf = Callable[[Call], OpRule | None]


@dataclass(frozen=True, slots=True)
class Put:
    """index_put of `values` along dim 0 of `base`."""

    base: str
    index: str
    values: str
    accumulate: bool


def put_along_rows(node: Node) -> Put | None:
    """index_put along dim 0."""
    if node.op != "aten.index_put.default" or len(node.args[1]) != 1 or node.args[1][0] is None:
        return None
    accumulate = node.args[3] if len(node.args) > 3 else dict(node.kwargs).get("accumulate", False)
    base, index, values = node.inputs
    return Put(base, index, values, accumulate)


def row_factor(rule: OpRule, rows: Sequence[int | None], count: int) -> int | None:
    """The factor of the rows of an op that treats them alike in any order; None if it does not. `rows` holds the dim of
    each operand that rows run along, or None."""
    carried = {dims[dim] for dim, dims in zip(rows, rule.inputs, strict=True) if dim is not None}
    if len(carried) != 1 or None in carried:
        return None
    (number,) = carried
    assert number is not None
    for dim, dims in zip(rows, rule.inputs, strict=True):
        # nothing but the rows may run along them: the order of anything else is another one
        if [d for d, factor in enumerate(dims) if factor == number] != ([] if dim is None else [dim]):
            return None
    factor = rule.factors[number]
    return None if factor.size != count or factor.expands or factor.contiguous else number


def only_step(graph: JointGraph, name: str, op: str) -> Node | None:
    """The node that produces a value, if it is of this op and a single node reads its result."""
    index = graph.producer.get(name)
    alone = len(graph.consumers.get(name, ())) == 1 and name not in {output.name for output in graph.outputs}
    return graph.nodes[index] if index is not None and alone and graph.nodes[index].op == op else None


class RoutingRewrite(Rewriter):
    """A graph rewritten for rows of experts."""

    def __init__(self, graph: JointGraph) -> None:
        super().__init__(graph=graph, metas=dict(graph.metas))
        self.matrices: dict[str, Ref] = {}

    def write(self, op: str, *args: Any, name: str = "", **kwargs: Any) -> Ref:
        """Append an op in place of the current node. Its result is the value `name`, or a new one."""
        name = name or self.fresh(f"{self.node.name}_rows")
        return Ref(self.emit(op, args, name, kwargs=tuple(kwargs.items())))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.metas[name].shape

    def turned(self, value: Ref) -> Ref:
        """[e, k, n] -> [e, n, k]"""
        return self.write(PERMUTE, value, TURNED)

    def matrix(self, name: str, rows: int, width: int) -> Ref:
        """A value whose other dims have size 1 as a matrix, the same one for every view of the value."""
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
            self.matrices[name] = self.write(RESHAPE, self.now(name), (rows, width))
        return self.matrices[name]

    def call(self, node: Node) -> Call:
        return call_of(node, self.metas)

    def is_zero(self, name: str) -> bool:
        index = self.graph.producer.get(name)
        return index is not None and self.graph.nodes[index].op in ZEROS
