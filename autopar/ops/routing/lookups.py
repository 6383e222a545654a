"""Weights looked up for every row: `weight[ids]`, multiplied with one vector a row, is a product by expert."""

from collections.abc import Callable

import torch

from autopar.ir.graph import RESHAPE, JointGraph
from autopar.ir.matcher import Rules
from autopar.ops.experts import DOT, FROM, MM, MM_WEIGHT, SUM

from .rewrite import ZERO, RoutingRewrite


def with_products_by_expert(graph: JointGraph) -> JointGraph:
    """The graph with bmm(weight[ids], x) as a product by expert, and the gradient of the lookup too."""
    return _rewritten(graph, PRODUCTS)


def with_weighted_sums(graph: JointGraph) -> JointGraph:
    """The graph with sum(rows * weights) over the rows of each token, and with the gradient of the weights, as one
    operator each."""
    return _rewritten(graph, SUMS)


def _rewritten(graph: JointGraph, rules: Rules[Callable[..., bool]]) -> JointGraph:
    rewrite = RoutingRewrite(graph)
    for node in graph.nodes:
        rewrite.at(node)
        if not rewrite.apply(rules, node):
            rewrite.keep(node)
    return rewrite.done()


def _product(rewrite: RoutingRewrite, weight: str, ids: str, turned: str = "", row: str = "", column: str = "") -> bool:
    rows, *apart = rewrite.shape(row or column)
    by_number = len(rewrite.shape(ids)) == 1 and rewrite.metas[ids].dtype == torch.int64
    if not by_number or len(rewrite.shape(weight)) != 3 or apart[0 if row else 1] != 1:
        return False
    # matrix times column wants the weight turned: row times matrix is what expert_mm does
    matrix = rewrite.now(weight)
    matrix = rewrite.turned(matrix) if bool(turned) != bool(column) else matrix
    x = rewrite.matrix(row or column, rows, rewrite.shape(matrix.name)[1])
    y = rewrite.write(MM, x, matrix, rewrite.now(ids))
    rewrite.write(RESHAPE, y, rewrite.shape(rewrite.node.name), name=rewrite.node.name)
    return True


def _gradient(rewrite: RoutingRewrite, zeros: str, ids: str, column: str, row: str) -> bool:
    rows, a, inner = rewrite.shape(column)
    experts, *matrix = rewrite.shape(zeros)
    b = rewrite.shape(row)[2]
    if inner != 1 or rewrite.shape(ids) != (rows,) or matrix != [a, b]:
        return False
    x, gradient = rewrite.matrix(column, rows, a), rewrite.matrix(row, rows, b)
    rewrite.write(MM_WEIGHT, x, gradient, rewrite.now(ids), experts, name=rewrite.node.name)
    return True


def _dot(rewrite: RoutingRewrite, rows: str, weights: str) -> bool:
    if len(rewrite.shape(rows)) != 2 or rewrite.shape(rows) != rewrite.shape(weights):
        return False
    return bool(rewrite.write(DOT, rewrite.now(weights), rewrite.now(rows), name=rewrite.node.name))


def _sum(rewrite: RoutingRewrite, rows: str, weights: str, apart: tuple[int, ...]) -> bool:
    (count, *width), (tokens, *each) = rewrite.shape(rows), apart
    if rewrite.shape(weights) != (count, 1) or len(each) != 2 or (tokens * each[0], each[1:]) != (count, width):
        return False
    return bool(rewrite.write(SUM, rewrite.now(rows), rewrite.now(weights), each[0], name=rewrite.node.name))


LOOKUP = "aten.index.Tensor(weight, (ids,))"
MATRIX = f"{LOOKUP} | (turned := aten.permute.default({LOOKUP}, (0, 2, 1)))"
PRODUCTS: Rules[Callable[..., bool]] = (
    (f"aten.bmm.default({MATRIX}, column)", _product),
    (f"aten.bmm.default(row, {MATRIX})", _product),
    (f"aten.index_put.default((zeros := {ZERO}), (ids,), aten.bmm.default(column, row), True)", _gradient),
)

WEIGHTED = f"only(aten.mul.Tensor({{(rows := {FROM}(...)), weights}}))"
SUMS: Rules[Callable[..., bool]] = (
    (f"aten.sum.dim_IntList({WEIGHTED}, (1,) | (-1,), True)", _dot),
    (f"aten.sum.dim_IntList(only(aten.reshape.default({WEIGHTED}, apart)), (1,))", _sum),
)
