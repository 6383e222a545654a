"""Takes sorts of rows by expert out of the graph, which leaves the rows in the order of tokens."""

from __future__ import annotations

from collections.abc import Collection

from autopar.ir.graph import JointGraph, Node

from .rewrite import SORTS, UNREAD, RuleOf
from .uses import USES, SortedRows, row_by_row


class Unproved(Exception):
    """A use of sorted values that nothing here proves to be fine."""

    def __init__(self, sorts: Collection[str]) -> None:
        self.sorts = sorts


def without_sorts(graph: JointGraph, rule_of: RuleOf) -> JointGraph:
    """The graph without its sorts by expert, but for those of which a use is not proved."""
    stay: frozenset[str] = frozenset()
    while True:
        try:
            return _rewritten(SortedRows(graph, rule_of), stay)
        except Unproved as unproved:
            stay |= frozenset(unproved.sorts)


def _rewritten(rewrite: SortedRows, stay: frozenset[str]) -> JointGraph:
    facts, outputs = rewrite.facts, rewrite.graph.outputs
    for node in rewrite.graph.nodes:
        rewrite.node = node
        sorts = {facts[name].sort for name in node.inputs if name in facts}
        if sorts and node.op not in UNREAD:
            if len(sorts) > 1 or not _use(rewrite, node, *sorts):
                raise Unproved(sorts)
        else:
            rewrite.keep(node)
            if node.op in SORTS and node.name not in stay:
                _start(rewrite, node)
    if left := {facts[o.name].sort for o in outputs if o.name in facts}:
        raise Unproved(left)
    return rewrite.done()


def _start(rewrite: SortedRows, node: Node) -> None:
    """Record what a sort of whole numbers makes."""
    source = rewrite.metas[node.inputs[0]]
    if len(source.shape) != 1 or source.dtype.is_floating_point:
        return
    rewrite.ids[node.name] = node.inputs[0]
    *values, order = node.outputs
    if order:
        rewrite.know(order, node.name, "order")
    if values and values[0]:
        rewrite.know(values[0], node.name, "ids")
        rewrite.same[values[0]] = rewrite.now(node.inputs[0]).name


def _use(rewrite: SortedRows, node: Node, sort: str) -> bool:
    """Rewrite a node that reads something sorted; False if it cannot be."""
    use = USES.get(node.op)
    return (use is not None and use(rewrite, node, sort)) or row_by_row(rewrite, node, sort)
