"""Weights looked up for every row: `weight[ids]`, multiplied with one vector a row, is a product by expert."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import PERMUTE, RESHAPE, JointGraph, Node, Ref, map_references
from autopar.ops.experts import DOT, FROM, MM, MM_WEIGHT, SUM

from .rewrite import TURNED, Rewrite, only_step, put_along_rows


@dataclass(frozen=True, slots=True)
class _Lookup:
    """weight[ids], or its transpose."""

    weight: str
    ids: str
    turned: bool


def with_products_by_expert(graph: JointGraph) -> JointGraph:
    """The graph with bmm(weight[ids], x) as a product by expert, and the gradient of the lookup too."""
    made = Rewrite(graph)
    lookups = _lookups(graph)
    for node in graph.nodes:
        made.node = node
        if node.name in lookups:
            continue
        if node.op == "aten.bmm.default" and any(name in lookups for name in node.inputs):
            _product(made, node, lookups)
        elif not _gradient_of_lookup(made, node):
            made.keep(node)
    return made.done()


def _lookups(graph: JointGraph) -> dict[str, _Lookup]:
    """Lookups of matrices that are only multiplied with one vector a row."""
    found: dict[str, _Lookup] = {}
    for node in graph.nodes:
        if node.op == "aten.index.Tensor" and len(node.args[1]) == 1 and node.args[1][0] is not None:
            weight, ids = node.inputs
            by_number = len(graph.metas[ids].shape) == 1 and graph.metas[ids].dtype == torch.int64
            if by_number and len(graph.metas[weight].shape) == 3:
                found[node.name] = _Lookup(weight, ids, False)
        elif node.op == PERMUTE and node.args[1] == TURNED and node.inputs[0] in found:
            source = found[node.inputs[0]]
            found[node.name] = replace(source, turned=not source.turned)
    results = {output.name for output in graph.outputs}
    while True:
        bad = {name for name in found if name in results or not _only_multiplied(graph, name, found)}
        bad |= {n.name for n in graph.nodes if n.name in found and n.op == PERMUTE and n.inputs[0] in bad}
        if not bad:
            return found
        found = {name: lookup for name, lookup in found.items() if name not in bad}


def _only_multiplied(graph: JointGraph, name: str, found: Collection[str]) -> bool:
    def fine(node: Node) -> bool:
        if node.op != "aten.bmm.default":
            return node.name in found
        left, right = node.inputs
        return left != right and (
            (left == name and right not in found and graph.metas[right].shape[2] == 1)
            or (right == name and left not in found and graph.metas[left].shape[1] == 1)
        )

    return all(fine(graph.nodes[i]) for i in graph.consumers.get(name, ()))


def _product(made: Rewrite, node: Node, lookups: dict[str, _Lookup]) -> None:
    left, right = node.inputs
    lookup = lookups[left if left in lookups else right]
    vector = right if left in lookups else left
    # matrix times column wants the weight turned: row times matrix is what expert_mm does
    turn = lookup.turned != (left in lookups)
    weight = made.now(lookup.weight)
    weight = made.turned(weight) if turn else weight
    rows = made.shape(vector)[0]
    x = made.matrix(vector, rows, made.shape(weight.name)[1])
    y = made.emit(MM, (x, weight, made.now(lookup.ids)), (rows, made.shape(weight.name)[2]))
    shape = made.shape(node.name)
    made.emit(RESHAPE, (y, shape), shape, node.name)


def _gradient_of_lookup(made: Rewrite, node: Node) -> bool:
    """index_put(zeros, ids, bmm(column, row), accumulate) as a gradient by expert."""
    graph = made.graph
    put = put_along_rows(node)
    if put is None or not put.accumulate or not made.is_zero(put.base):
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
    column, row = made.matrix(left, rows, a), made.matrix(right, rows, b)
    made.emit(MM_WEIGHT, (column, row, made.now(put.index), shape[0]), shape, node.name)
    return True


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
