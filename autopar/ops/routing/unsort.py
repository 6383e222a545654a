"""Takes sorts of rows by expert out of the graph, which leaves the rows in the order of tokens."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.graph import PERMUTE, RESHAPE, JointGraph, Node, Ref
from autopar.ops.experts import MM, MM_WEIGHT

from .rewrite import SORTS, UNREAD, RoutingRewrite, RuleOf, put_along_rows, row_factor


@dataclass(frozen=True, slots=True)
class Fact:
    """What a sort says about a value. `kind`:

    order           order of the sort: sorted row i was row order[i]
    tokens          order // size: the token of row i, where every token has `size` rows
    inverse         the place to which the sort moved row i
    ids             the sorted experts
    counts, ends    how many rows each of `size` experts has; up to and with each
    rows            a tensor whose rows, along dim `size`, stand in the order of the sort
    """

    sort: str
    kind: str
    size: int = 0


class SortedRows(RoutingRewrite):
    """The new graph has the same rows in their former order in place of sorted rows. Facts go by names of the old
    graph."""

    def __init__(self, graph: JointGraph, rule_of: RuleOf) -> None:
        super().__init__(graph)
        self.rule_of = rule_of
        self.facts: dict[str, Fact] = {}
        self.ids: dict[str, str] = {}
        """Name of a sort -> what it sorts."""

    def kind(self, value: Any) -> str:
        fact = self.facts.get(value.name) if isinstance(value, Ref) else None
        return fact.kind if fact else ""

    def is_rows(self, value: Any, dim: int = 0) -> bool:
        fact = self.facts.get(value.name)
        return fact is not None and ((fact.kind == "ids" and dim == 0) or (fact.kind == "rows" and fact.size == dim))

    def has_rows(self, name: str) -> bool:
        return self.facts[name].kind in ("rows", "ids")

    def know(self, name: str, sort: str, kind: str, size: int = 0) -> bool:
        self.facts[name] = Fact(sort, kind, size)
        return True

    def count(self, sort: str) -> int:
        return self.shape(self.ids[sort])[0]


def divided(rewrite: SortedRows, node: Node, sort: str) -> bool:
    """The token of each row."""
    size = node.args[1]
    floor = node.op == "aten.floor_divide.default" or dict(node.kwargs).get("rounding_mode") == "floor"
    if rewrite.kind(node.args[0]) != "order" or not isinstance(size, int) or not floor or rewrite.count(sort) % size:
        return False
    return rewrite.know(node.name, sort, "tokens", size)


def counted(rewrite: SortedRows, node: Node, sort: str) -> bool:
    """histc: one bin an expert."""
    call = rewrite.call(node)
    bins = call.argument("bins")
    if rewrite.kind(node.args[0]) != "ids" or (call.argument("min"), call.argument("max")) != (0, bins - 1):
        return False
    return rewrite.know(node.name, sort, "counts", bins)


def summed_up(rewrite: SortedRows, node: Node, sort: str) -> bool:
    if rewrite.kind(node.args[0]) != "counts":
        return False
    return rewrite.know(node.name, sort, "ends", rewrite.facts[node.inputs[0]].size)


def converted(rewrite: SortedRows, node: Node, sort: str) -> bool:
    """To another dtype: ids stay ids, and counts stay counts."""
    fact = rewrite.facts[node.inputs[0]]
    if fact.kind not in ("ids", "counts", "ends"):
        return False
    if fact.kind == "ids":
        rewrite.keep(node)
    rewrite.facts[node.name] = fact
    return True


def indexed(rewrite: SortedRows, node: Node, sort: str) -> bool:
    source, indices = node.args[:2]
    if len(indices) != 1 or source.name == indices[0].name:
        return False
    kind, rows = rewrite.kind(indices[0]), rewrite.shape(source.name)[0]
    if kind == "inverse" and rewrite.is_rows(source):
        rewrite.same[node.name] = rewrite.now(source.name).name
        return True
    if rewrite.kind(source):
        return False
    if kind == "order" and rows == rewrite.count(sort):
        rewrite.same[node.name] = rewrite.now(source.name).name
    elif kind == "tokens" and rows * rewrite.facts[indices[0].name].size == rewrite.count(sort):
        _repeat(rewrite, node, rewrite.now(source.name), rewrite.facts[indices[0].name].size)
    elif kind == "ids":
        rewrite.keep(node)
    else:
        return False
    return rewrite.know(node.name, sort, "rows")


def _repeat(rewrite: SortedRows, node: Node, x: Ref, times: int) -> None:
    """A row for every expert of a token."""
    tokens, *rest = rewrite.shape(x.name)
    one = rewrite.write(RESHAPE, x, (tokens, 1, *rest))
    wide = rewrite.write("aten.expand.default", one, (tokens, times, *rest))
    repeated = rewrite.write("aten.clone.default", wide, memory_format=torch.contiguous_format)
    rewrite.write(RESHAPE, repeated, rewrite.shape(node.name), name=node.name)


def put(rewrite: SortedRows, node: Node, sort: str) -> bool:
    put = put_along_rows(node)
    if put is None or rewrite.shape(put.values)[0] != rewrite.count(sort):
        return False
    kind = rewrite.kind(Ref(put.index))
    if kind == "order" and not put.accumulate and _counts_up(rewrite, put.values):
        return rewrite.shape(put.base) == rewrite.shape(put.values) and rewrite.know(node.name, sort, "inverse")
    if kind == "ids" and put.accumulate and rewrite.is_rows(Ref(put.values)) and not rewrite.kind(Ref(put.base)):
        rewrite.keep(node)  # the sum of each expert: the gradient of its bias
        return True
    if not rewrite.is_zero(put.base) or rewrite.shape(put.base)[1:] != rewrite.shape(put.values)[1:]:
        return False
    rows = rewrite.is_rows(Ref(put.values))
    if kind == "tokens" and rows and put.accumulate:
        size = rewrite.facts[put.index].size
        return rewrite.shape(put.base)[0] * size == rewrite.count(sort) and _add_up(rewrite, node, put.values, size)
    if rewrite.shape(put.base) != rewrite.shape(put.values):
        return False
    if kind == "order" and rows:
        rewrite.same[node.name] = rewrite.now(put.values).name
        return True
    if kind == "inverse" and not rewrite.kind(Ref(put.values)):
        rewrite.same[node.name] = rewrite.now(put.values).name
        return rewrite.know(node.name, sort, "rows")
    return False


def _counts_up(rewrite: SortedRows, name: str) -> bool:
    """Whether a value is 0, 1, 2, ..."""
    index = rewrite.graph.producer.get(name)
    node = None if index is None else rewrite.graph.nodes[index]
    return node is not None and node.op == "aten.arange.default" and node.args == rewrite.shape(name)


def _add_up(rewrite: SortedRows, node: Node, rows: str, size: int) -> bool:
    """The sum of the rows of each token."""
    shape = rewrite.shape(rows)
    value = rewrite.write(RESHAPE, rewrite.now(rows), (shape[0] // size, size, *shape[1:]))
    rewrite.write("aten.sum.dim_IntList", value, (1,), name=node.name)
    return True


def multiplied(rewrite: SortedRows, node: Node, sort: str) -> bool:
    """A grouped product: of rows and weights, or, where the rows are contracted, a gradient of weights."""
    x, y = node.args[:2]
    call = rewrite.call(node)
    if any(call.has(name) and call.argument(name) is not None for name in ("bias", "out_dtype")):
        return False
    if not _groups(rewrite, call.argument("offs"), rewrite.shape(node.name if rewrite.is_rows(x, 1) else y.name)[0]):
        return False
    if rewrite.is_rows(x) and not rewrite.kind(y):
        _by_expert(rewrite, node.name, rewrite.now(x.name), rewrite.now(y.name), sort)
        return rewrite.know(node.name, sort, "rows")
    if rewrite.is_rows(x, 1) and rewrite.is_rows(y):
        _gradient_by_expert(rewrite, node.name, _straight(rewrite, x.name), rewrite.now(y.name), sort)
        return True
    return False


def _straight(rewrite: SortedRows, name: str) -> Ref:
    """A matrix of rows along dim 1 with its dims exchanged."""
    node = rewrite.graph.nodes[rewrite.graph.producer[name]]
    if node.op == PERMUTE and node.args[1] == (1, 0):
        return rewrite.now(node.inputs[0])
    return rewrite.write(PERMUTE, rewrite.now(name), (1, 0))


def multiplied_backward(rewrite: SortedRows, node: Node, sort: str) -> bool:
    """The gradients of a grouped product's rows and weights."""
    x, weight, ends, gradient = node.args
    fine = rewrite.is_rows(x) and rewrite.is_rows(gradient) and not rewrite.kind(weight)
    if not fine or not _groups(rewrite, ends, rewrite.shape(weight.name)[0]):
        return False
    of_rows, of_weight = node.outputs
    if of_rows:
        _by_expert(rewrite, of_rows, rewrite.now(gradient.name), rewrite.turned(rewrite.now(weight.name)), sort)
        rewrite.know(of_rows, sort, "rows")
    if of_weight:
        _gradient_by_expert(rewrite, of_weight, rewrite.now(x.name), rewrite.now(gradient.name), sort)
    return True


def _groups(rewrite: SortedRows, ends: Any, experts: int) -> bool:
    return rewrite.kind(ends) == "ends" and rewrite.facts[ends.name].size == experts


def _by_expert(rewrite: SortedRows, name: str, x: Ref, weight: Ref, sort: str) -> None:
    rewrite.write(MM, x, weight, rewrite.now(rewrite.ids[sort]), name=name)


def _gradient_by_expert(rewrite: SortedRows, name: str, x: Ref, gradient: Ref, sort: str) -> None:
    rewrite.write(MM_WEIGHT, x, gradient, rewrite.now(rewrite.ids[sort]), rewrite.shape(name)[0], name=name)


def reshaped(rewrite: SortedRows, node: Node, sort: str) -> bool:
    """A view that keeps the dim of the rows keeps them apart."""
    if not rewrite.has_rows(node.inputs[0]):
        return False
    before, after = rewrite.shape(node.inputs[0]), rewrite.shape(node.name)
    dim = rewrite.facts[node.inputs[0]].size
    above = torch.Size(before[:dim]).numel()
    places = [d for d in range(len(after)) if after[d] == before[dim] and torch.Size(after[:d]).numel() == above]
    if not places:
        return False
    rewrite.keep(node)
    return rewrite.know(node.name, sort, "rows", places[0])


def permuted(rewrite: SortedRows, node: Node, sort: str) -> bool:
    if not rewrite.has_rows(node.inputs[0]):
        return False
    rewrite.keep(node)
    return rewrite.know(node.name, sort, "rows", node.args[1].index(rewrite.facts[node.inputs[0]].size))


def row_by_row(rewrite: SortedRows, node: Node, sort: str) -> bool:
    """Any operator that treats all rows alike by its rule."""
    call = rewrite.call(node)
    rule = rewrite.rule_of(call)
    if rule is None or not all(rewrite.has_rows(name) for name in node.inputs if name in rewrite.facts):
        return False
    facts = [rewrite.facts.get(name) for name in node.inputs]
    number = row_factor(rule, [None if fact is None else fact.size for fact in facts], rewrite.count(sort))
    if number is None:
        return False
    rewrite.keep(node)
    for name, dims in zip(node.outputs, rule.outputs, strict=True):
        if name and number in dims:
            rewrite.know(name, sort, "rows", dims.index(number))
    return True


USES: dict[str, Callable[[SortedRows, Node, str], bool]] = {
    "aten.floor_divide.default": divided,
    "aten.div.Tensor_mode": divided,
    "aten.histc.default": counted,
    "aten.cumsum.default": summed_up,
    "aten._to_copy.default": converted,
    "aten.index.Tensor": indexed,
    "aten.index_put.default": put,
    "aten._grouped_mm.default": multiplied,
    "transformers.grouped_mm_fallback.default": multiplied,
    "transformers.grouped_mm_fallback_backward.default": multiplied_backward,
    RESHAPE: reshaped,
    PERMUTE: permuted,
}
"""Op -> a use of sorted rows that does not depend on their order. The function takes the rewrite so far, a node that
reads sorted values, and the sort. It appends what replaces the node in the order of tokens and records facts about the
results, or returns False if it cannot prove that the order does not matter."""


class Unproved(Exception):
    """Sorted values have a use of which no function here proves that the order does not matter."""

    def __init__(self, sorts: Collection[str]) -> None:
        self.sorts = sorts


def without_sorts(graph: JointGraph, rule_of: RuleOf) -> JointGraph:
    """The graph without its sorts by expert, except those with an unproved use."""
    stay: frozenset[str] = frozenset()
    while True:
        try:
            return _rewritten(SortedRows(graph, rule_of), stay)
        except Unproved as unproved:
            stay |= frozenset(unproved.sorts)


def _rewritten(rewrite: SortedRows, stay: frozenset[str]) -> JointGraph:
    facts, outputs = rewrite.facts, rewrite.graph.outputs
    for node in rewrite.graph.nodes:
        rewrite.at(node)
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
    """Record the results of a sort of integers."""
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
    """Rewrites a node that reads sorted values; False if that cannot be done."""
    use = USES.get(node.op)
    return (use is not None and use(rewrite, node, sort)) or row_by_row(rewrite, node, sort)
