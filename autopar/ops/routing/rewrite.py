"""What rewrites of routing share: what they look for, and the graph that they write."""

from collections.abc import Callable, Sequence
from typing import Any

from autopar.ir.graph import PERMUTE, RESHAPE, JointGraph, Node, Ref
from autopar.ir.rewriter import Rewriter
from autopar.ops.rule import Call, OpRule, call_of

TURNED = (0, 2, 1)
SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
ZEROS = ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")
UNREAD = (*ZEROS, "aten.empty_like.default", "aten.new_empty.default")
"""Ops that read the shape and dtype of their operand, and no element."""
ZERO = " | ".join(f"{op}(...)" for op in ZEROS)
"""The pattern of a tensor of zeros."""

RuleOf = Callable[[Call], OpRule | None]


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


class RoutingRewrite(Rewriter):
    """A graph rewritten for rows of experts."""

    def __init__(self, graph: JointGraph) -> None:
        super().__init__(graph=graph, metas=dict(graph.metas), such={"weights": graph.metas.__contains__})
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
        while (node := self.matcher.made_by(name)) is not None:
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
