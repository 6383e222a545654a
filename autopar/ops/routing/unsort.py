"""Takes sorts of rows by expert out of the graph, which leaves the rows in the order of tokens."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autopar.ir.graph import PERMUTE, RESHAPE, JointGraph, Node, Ref
from autopar.ir.matcher import Rules
from autopar.ops.experts import MM, MM_WEIGHT

from .rewrite import SORTS, UNREAD, ZERO, RoutingRewrite, RuleOf, row_factor


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
        self.facts: dict[Any, Fact] = {}
        self.ids: dict[str, str] = {}
        """Name of a sort -> what it sorts."""
        self.sort = ""
        """The one whose rows the node reads."""
        kinds = ("order", "tokens", "inverse", "ids", "counts", "ends")
        self.such = {
            **{kind: partial(self.is_a, kind) for kind in kinds},
            "rows": self.has_rows,
            "gradient": self.has_rows,
            "columns": partial(self.has_rows, dim=1),
            "sorted": partial(self.has_rows, dim=None),
            **{plain: lambda value: value not in self.facts for plain in ("x", "weight")},
        }

    def is_a(self, kind: str, value: Any) -> bool:
        return value in self.facts and self.facts[value].kind == kind

    def has_rows(self, value: Any, dim: int | None = 0) -> bool:
        """Whether sorted rows run along a dim, or along any."""
        fact = self.facts.get(value)
        return fact is not None and fact.kind in ("rows", "ids") and dim in (None, fact.size)

    def know(self, kind: str, size: int = 0, name: str = "") -> bool:
        self.facts[name or self.node.name] = Fact(self.sort, kind, size)
        return True

    @property
    def count(self) -> int:
        return self.shape(self.ids[self.sort])[0]

    def stand_for(self, name: str) -> bool:
        """The value is what the node makes, in the order of tokens."""
        self.same[self.node.name] = self.now(name).name
        return True

    # --- places

    def divided(self, order: str, size: Any) -> bool:
        """The token of each row."""
        return isinstance(size, int) and not self.count % size and self.know("tokens", size)

    def counted(self, ids: str, bins: int, last: int) -> bool:
        """One bin an expert."""
        return last == bins - 1 and self.know("counts", bins)

    def summed_up(self, counts: str) -> None:
        self.know("ends", self.facts[counts].size)

    def cast(self, ids: str = "", counts: str = "", ends: str = "") -> None:
        if ids:
            self.keep(self.node)
        self.facts[self.node.name] = self.facts[ids or counts or ends]

    def inverted(self, x: str, order: str, end: int) -> bool:
        return self.shape(x) == (self.count,) == (end,) and self.know("inverse")

    # --- rows

    def put_in_order(self, x: str, order: str) -> bool:
        return self.shape(x)[0] == self.count and self.stand_for(x) and self.know("rows")

    def repeated(self, x: str, tokens: str) -> bool:
        """A row for every expert of a token."""
        (count, *rest), times = self.shape(x), self.facts[tokens].size
        if count * times != self.count:
            return False
        one = self.write(RESHAPE, self.now(x), (count, 1, *rest))
        wide = self.write("aten.expand.default", one, (count, times, *rest))
        apart = self.write("aten.clone.default", wide, memory_format=torch.contiguous_format)
        self.write(RESHAPE, apart, self.shape(self.node.name), name=self.node.name)
        return self.know("rows")

    def looked_up(self, x: str, ids: str) -> None:
        self.keep(self.node)
        self.know("rows")

    def put_back(self, rows: str, inverse: str = "", order: str = "", zeros: str = "") -> bool:
        return (not zeros or self.shape(zeros) == self.shape(rows)) and self.stand_for(rows)

    def scattered(self, zeros: str, inverse: str, x: str) -> bool:
        return self.shape(zeros) == self.shape(x) and self.put_in_order(x, inverse)

    def added_up(self, zeros: str, tokens: str, rows: str) -> bool:
        """The sum of the rows of each token."""
        (count, *rest), (sums, *width), size = self.shape(rows), self.shape(zeros), self.facts[tokens].size
        if sums * size != count or width != rest:
            return False
        apart = self.write(RESHAPE, self.now(rows), (sums, size, *rest))
        return bool(self.write("aten.sum.dim_IntList", apart, (1,), name=self.node.name))

    def summed(self, x: str, ids: str, rows: str) -> None:
        """The sum of each expert: the gradient of its bias."""
        self.keep(self.node)

    def reshaped(self, sorted: str) -> bool:
        """A view that keeps the dim of the rows keeps them apart."""
        before, after, dim = self.shape(sorted), self.shape(self.node.name), self.facts[sorted].size
        above = torch.Size(before[:dim]).numel()
        places = [d for d in range(len(after)) if after[d] == before[dim] and torch.Size(after[:d]).numel() == above]
        if not places:
            return False
        self.keep(self.node)
        return self.know("rows", places[0])

    def permuted(self, sorted: str, dims: tuple[int, ...]) -> None:
        self.keep(self.node)
        self.know("rows", dims.index(self.facts[sorted].size))

    def row_by_row(self) -> bool:
        """Any operator that treats all rows alike by its rule."""
        rule = self.rule_of(self.call(self.node))
        facts = [self.facts.get(name) for name in self.node.inputs]
        if rule is None or not all(fact is None or fact.kind in ("rows", "ids") for fact in facts):
            return False
        number = row_factor(rule, [None if fact is None else fact.size for fact in facts], self.count)
        if number is None:
            return False
        self.keep(self.node)
        for name, dims in zip(self.node.outputs, rule.outputs, strict=True):
            if name and number in dims:
                self.know("rows", dims.index(number), name)
        return True

    # --- products

    def groups(self, ends: str, experts: str) -> bool:
        return self.facts[ends].size == self.shape(experts)[0]

    def by_expert(self, name: str, x: str, weight: Ref) -> bool:
        self.write(MM, self.now(x), weight, self.now(self.ids[self.sort]), name=name)
        return self.know("rows", name=name)

    def gradient_by_expert(self, name: str, x: Ref, gradient: str) -> bool:
        ids, experts = self.now(self.ids[self.sort]), self.shape(name)[0]
        return bool(self.write(MM_WEIGHT, x, self.now(gradient), ids, experts, name=name))

    def multiplied(self, rows: str, weight: str, ends: str) -> bool:
        return self.groups(ends, weight) and self.by_expert(self.node.name, rows, self.now(weight))

    def contracted(self, columns: str, rows: str, ends: str, straight: str = "") -> bool:
        """A gradient of weights: the rows are contracted."""
        if not self.groups(ends, self.node.name):
            return False
        x = self.now(straight) if straight else self.write(PERMUTE, self.now(columns), (1, 0))
        return self.gradient_by_expert(self.node.name, x, rows)

    def multiplied_backward(self, rows: str, weight: str, ends: str, gradient: str) -> bool:
        if not self.groups(ends, weight):
            return False
        of_rows, of_weight = self.node.outputs
        if of_rows:
            self.by_expert(of_rows, gradient, self.turned(self.now(weight)))
        if of_weight:
            self.gradient_by_expert(of_weight, self.now(rows), gradient)
        return True


GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
STRAIGHT = "(columns := aten.permute.default(straight, (1, 0)))"

USES: Rules[Callable[..., bool | None]] = (
    ("aten.floor_divide.default(order, size)", SortedRows.divided),
    ("aten.div.Tensor_mode(order, size, rounding_mode='floor')", SortedRows.divided),
    ("aten.histc.default(ids, bins, 0, last)", SortedRows.counted),
    ("aten.cumsum.default(counts, ...)", SortedRows.summed_up),
    ("aten._to_copy.default(ids | counts | ends, ...)", SortedRows.cast),
    ("aten.index.Tensor(rows, (inverse,))", SortedRows.put_back),
    ("aten.index.Tensor(x, (order,))", SortedRows.put_in_order),
    ("aten.index.Tensor(x, (tokens,))", SortedRows.repeated),
    ("aten.index.Tensor(x, (ids,))", SortedRows.looked_up),
    ("aten.index_put.default(x, (order,), aten.arange.default(end, ...))", SortedRows.inverted),
    ("aten.index_put.default(x, (ids,), rows, True)", SortedRows.summed),
    (f"aten.index_put.default((zeros := {ZERO}), (tokens,), rows, True)", SortedRows.added_up),
    (f"aten.index_put.default((zeros := {ZERO}), (order,), rows, _)", SortedRows.put_back),
    (f"aten.index_put.default((zeros := {ZERO}), (inverse,), x, _)", SortedRows.scattered),
    *((f"{op}(rows, weight, ends)", SortedRows.multiplied) for op in GROUPED),
    *(
        (f"{op}((columns := aten.permute.default(straight, (1, 0))), rows, ends)", SortedRows.contracted)
        for op in GROUPED
    ),
    *((f"{op}(columns, rows, ends)", SortedRows.contracted) for op in GROUPED),
    ("transformers.grouped_mm_fallback_backward.default(rows, weight, ends, gradient)", SortedRows.multiplied_backward),
    ("aten.reshape.default(sorted, _)", SortedRows.reshaped),
    ("aten.permute.default(sorted, dims)", SortedRows.permuted),
)
"""Uses of sorted rows that do not depend on their order, and what is written in the order of tokens instead. The names
in a pattern are kinds of facts (`Fact`): `columns` are rows along dim 1, `sorted` along any; `x` and `weight` are not
sorted. A row returns False if it cannot prove that the order does not matter."""


class Unproved(Exception):
    """Sorted values have a use of which nothing here proves that the order does not matter."""

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
            rewrite.sort = min(sorts)
            if len(sorts) > 1 or not (rewrite.apply(USES, node) or rewrite.row_by_row()):
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
    rewrite.sort = node.name
    rewrite.ids[node.name] = node.inputs[0]
    *values, order = node.outputs
    if order:
        rewrite.know("order", name=order)
    if values and values[0]:
        rewrite.know("ids", name=values[0])
        rewrite.same[values[0]] = rewrite.now(node.inputs[0]).name
