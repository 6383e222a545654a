"""Weights looked up for every row: `weight[ids]`, multiplied with one vector a row, is a product by expert."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import PERMUTE, RESHAPE, JointGraph, Node, Ref, map_references
from autopar.ops.experts import DOT, FROM, MM, MM_WEIGHT, SUM

from .rewrite import TURNED, RoutingRewrite, only_step, put_along_rows


@dataclass(frozen=True, slots=True)
class _Lookup:
    """weight[ids], or its transpose."""

    weight: str
    ids: str
    turned: bool


def with_products_by_expert(graph: JointGraph) -> JointGraph:
    """The graph with bmm(weight[ids], x) as a product by expert, and the gradient of the lookup too."""
    rewrite = RoutingRewrite(graph)
    lookups = _lookups(graph)
    for node in graph.nodes:
        rewrite.at(node)
        if node.name in lookups:
            continue
        if node.op == "aten.bmm.default" and any(name in lookups for name in node.inputs):
            _product(rewrite, node, lookups)
        elif not _gradient_of_lookup(rewrite, node):
            rewrite.keep(node)
    return rewrite.done()


def _lookups(graph: JointGraph) -> dict[str, _Lookup]:
    """Lookups of matrices that are only multiplied with one vector a row."""
    lookups: dict[str, _Lookup] = {}
    for node in graph.nodes:
        if node.op == "aten.index.Tensor" and len(node.args[1]) == 1 and node.args[1][0] is not None:
            weight, ids = node.inputs
            by_number = len(graph.metas[ids].shape) == 1 and graph.metas[ids].dtype == torch.int64
            if by_number and len(graph.metas[weight].shape) == 3:
                lookups[node.name] = _Lookup(weight, ids, False)
        elif node.op == PERMUTE and node.args[1] == TURNED and node.inputs[0] in lookups:
            source = lookups[node.inputs[0]]
            lookups[node.name] = replace(source, turned=not source.turned)
    results = {output.name for output in graph.outputs}
    while True:
        bad = {name for name in lookups if name in results or not _only_multiplied(graph, name, lookups)}
        bad |= {n.name for n in graph.nodes if n.name in lookups and n.op == PERMUTE and n.inputs[0] in bad}
        if not bad:
            return lookups
        lookups = {name: lookup for name, lookup in lookups.items() if name not in bad}


def _only_multiplied(graph: JointGraph, name: str, lookups: Collection[str]) -> bool:
    def fine(node: Node) -> bool:
        if node.op != "aten.bmm.default":
            return node.name in lookups
        left, right = node.inputs
        return left != right and (
            (left == name and right not in lookups and graph.metas[right].shape[2] == 1)
            or (right == name and left not in lookups and graph.metas[left].shape[1] == 1)
        )

    return all(fine(graph.nodes[i]) for i in graph.consumers.get(name, ()))


def _product(rewrite: RoutingRewrite, node: Node, lookups: dict[str, _Lookup]) -> None:
    left, right = node.inputs
    lookup = lookups[left if left in lookups else right]
    vector = right if left in lookups else left
    # matrix times column wants the weight turned: row times matrix is what expert_mm does
    turn = lookup.turned != (left in lookups)
    weight = rewrite.now(lookup.weight)
    weight = rewrite.turned(weight) if turn else weight
    rows = rewrite.shape(vector)[0]
    x = rewrite.matrix(vector, rows, rewrite.shape(weight.name)[1])
    y = rewrite.write(MM, x, weight, rewrite.now(lookup.ids))
    rewrite.write(RESHAPE, y, rewrite.shape(node.name), name=node.name)


def _gradient_of_lookup(rewrite: RoutingRewrite, node: Node) -> bool:
    """index_put(zeros, ids, bmm(column, row), accumulate) as a gradient by expert."""
    graph = rewrite.graph
    put = put_along_rows(node)
    if put is None or not put.accumulate or not rewrite.is_zero(put.base):
        return False
    producer = graph.producer.get(put.values)
    if producer is None or graph.nodes[producer].op != "aten.bmm.default" or len(graph.metas[put.index].shape) != 1:
        return False
    left, right = graph.nodes[producer].inputs
    rows, a, inner = graph.metas[left].shape
    b = graph.metas[right].shape[2]
    if inner != 1 or graph.metas[put.index].shape != (rows,) or graph.metas[put.base].shape[1:] != (a, b):
        return False
    shape = graph.metas[put.base].shape
    column, row = rewrite.matrix(left, rows, a), rewrite.matrix(right, rows, b)
    rewrite.write(MM_WEIGHT, column, row, rewrite.now(put.index), shape[0], name=node.name)
    return True


def with_weighted_sums(graph: JointGraph) -> JointGraph:
    """The graph with sum(rows * weights) over the rows of each token, and with the gradient of the weights, as one
    operator each."""
    rewrite = RoutingRewrite(graph)
    back = {node.name for node in graph.nodes if node.op == FROM and len(graph.metas[node.name].shape) == 2}
    for node in graph.nodes:
        rewrite.at(node)
        product = _product_of(graph, node, back) if node.op == "aten.sum.dim_IntList" and not node.kwargs else None
        if product is None:
            rewrite.keep(node)
        else:
            op, args = product
            rewrite.write(op, *map_references(args, rewrite.now), name=node.name)
    return rewrite.done()


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
