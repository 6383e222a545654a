"""The sum of a token's rows, each times its weight, and the gradient of the weights: one operator each, which partial
sums of rows may go through."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from autopar.ir.graph import RESHAPE, JointGraph, Node, Ref, map_references
from autopar.ops.experts import DOT, FROM, SUM

from .rewrite import Rewrite, only_step


def with_weighted_sums(graph: JointGraph) -> JointGraph:
    """The graph with sum(rows * weights) over the rows of each token, and with the gradient of the weights, as one
    operator each."""
    made = Rewrite(graph)
    back = {node.name for node in graph.nodes if node.op == FROM and len(graph.metas[node.name].shape) == 2}
    for node in graph.nodes:
        made.node = node
        product = _product_of(graph, node, back) if node.op == "aten.sum.dim_IntList" and not node.kwargs else None
        if product is None:
            made.keep(node)
        else:
            op, args = product
            made.emit(op, map_references(args, made.now), made.shape(node.name), node.name)
    return made.done()


def _product_of(graph: JointGraph, node: Node, back: Collection[str]) -> tuple[str, tuple[Any, ...]] | None:
    """The operator, and its arguments, of which a sum is the last step."""
    read = node.inputs[0]
    view = only_step(graph, read, RESHAPE)
    product = only_step(graph, view.inputs[0] if view else read, "aten.mul.Tensor")
    if product is None or len(set(product.inputs)) != 2:
        return None
    rows, other = product.inputs if product.inputs[0] in back else product.inputs[::-1]
    if rows not in back:
        return None
    (count, width), across, apart = graph.metas[rows].shape, graph.metas[other].shape, graph.metas[read].shape
    if view is None and across == (count, width) and node.args[1:] in (((1,), True), ((-1,), True)):
        return DOT, (Ref(other), Ref(rows))
    together = view is not None and len(apart) == 3 and apart[0] * apart[1] == count and apart[2] == width
    if together and across == (count, 1) and node.args[1:] == ((1,),):
        return SUM, (Ref(rows), Ref(other), apart[1])
    return None
