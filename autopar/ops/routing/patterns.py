"""What the rewrites of experts look for in a graph: operators by name, and the shapes that their uses take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.ir.graph import JointGraph, Node
from autopar.ops.rule import Call, OpRule

TURNED = (0, 2, 1)
SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
ZEROS = ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")
UNREAD = (*ZEROS, "aten.empty_like.default", "aten.new_empty.default")
"""They take shape and dtype of what they are given, and no element."""

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
    """The factor of an op that treats rows alike, whatever their order; None if it does not. `rows` says
    which dim of each operand are rows, if any."""
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
    """The node that makes a value, if it is of this op and one node alone reads what it makes."""
    index = graph.producer.get(name)
    alone = len(graph.consumers.get(name, ())) == 1 and name not in {output.name for output in graph.outputs}
    return graph.nodes[index] if index is not None and alone and graph.nodes[index].op == op else None
