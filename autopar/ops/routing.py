"""Rows of experts, back in the order of tokens.

Implementations of experts sort the rows by expert, multiply them group by group and sort them back, or look
up a copy of the weights for every row. Sorted rows have no place of their own that a rank could hold: where
a row stands depends on all the others. But the operators in between treat every row alike, so that the
order does not matter to them: here the sort is taken out of the graph, and the products become
`expert_mm`, which is told the expert of every row. Rows then split as the tokens do.

Each use of sorted values is proved to be of that kind, by the op's rule or by a pattern below. A sort with
any other use stays as it is, and so does a lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import JointGraph, Node, Ref, TensorMeta, map_references

from .experts import DOT, FROM, MM, MM_WEIGHT, SUM, TO, WANTED
from .families import has
from .rule import Call, OpRule

RESHAPE, PERMUTE = "aten.reshape.default", "aten.permute.default"
_TURNED = (0, 2, 1)
_SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
_ZEROS = ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")
_UNREAD = (*_ZEROS, "aten.empty_like.default", "aten.new_empty.default")
"""They take shape and dtype of what they are given, and no element."""

RuleOf = Callable[[Call], OpRule | None]


def in_token_order(graph: JointGraph, rule_of: RuleOf) -> JointGraph:
    """The graph with sorts of rows by expert, and lookups of weights by expert, replaced by `expert_mm`, with
    a mark wherever rows may set out for their experts, or come back, and with the sums of a token's rows as one
    operator each, which partial sums of rows may go through."""
    if not graph.nodes:  # a model that gives back what it is given
        return graph
    return _summed(_Ways(_unsorted(_looked_up(graph), rule_of), rule_of).run())


class _Rewrite:
    """A new list of nodes for the values of a graph. `same` maps values to others that are equal."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph, self.metas = graph, dict(graph.metas)
        self.same: dict[str, str] = {}
        self.matrices: dict[str, Ref] = {}
        self.nodes: list[Node] = []
        self.node = graph.nodes[0]

    def now(self, name: str) -> Ref:
        return Ref(self.same.get(name, name))

    def keep(self, node: Node) -> None:
        self.nodes.append(
            replace(node, args=map_references(node.args, self.now), kwargs=map_references(node.kwargs, self.now))
        )

    def emit(self, op: str, args: tuple[Any, ...], shape: tuple[int, ...], name: str = "", **kwargs: Any) -> Ref:
        """Append an op in the place of the node at hand. Its result has the dtype of its first operand, or
        of the value `name` that it makes."""
        number = 0
        dtype = self.metas[name or args[0].name].dtype
        while not name or (name in self.metas and name not in self.node.outputs):
            number += 1
            name = f"{self.node.name}_rows_{number}"
        self.metas[name] = TensorMeta(tuple(shape), dtype)
        self.nodes.append(replace(self.node, op=op, args=args, kwargs=tuple(kwargs.items()), outputs=(name,)))
        return Ref(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.metas[name].shape

    def turned(self, value: Ref, name: str = "") -> Ref:
        """[e, k, n] -> [e, n, k]"""
        e, k, n = self.shape(value.name)
        return self.emit(PERMUTE, (value, _TURNED), (e, n, k), name)

    def matrix(self, name: str, rows: int, width: int) -> Ref:
        """A value that has no other dims but of size 1 as a matrix; the same one whichever view of it is asked."""
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
            self.matrices[name] = self.emit(RESHAPE, (self.now(name), (rows, width)), (rows, width))
        return self.matrices[name]

    def call(self, node: Node) -> Call:
        return Call(
            node,
            tuple(self.metas[name] for name in node.inputs),
            tuple(self.metas[name] if name else None for name in node.outputs),
        )

    def is_zero(self, name: str) -> bool:
        index = self.graph.producer.get(name)
        return index is not None and self.graph.nodes[index].op in _ZEROS

    def done(self) -> JointGraph:
        """The new graph, without what only served what was replaced."""
        outputs = tuple(replace(o, name=self.same.get(o.name, o.name)) if o.name else o for o in self.graph.outputs)
        used = {o.name for o in outputs}
        served = {name for node in (*self.graph.nodes, *self.nodes) for name in node.inputs}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            made = tuple(name if name in used or name not in served else "" for name in node.outputs)
            if any(made) or not any(node.outputs):
                kept.append(replace(node, outputs=made))
                used.update(node.inputs)
        kept.reverse()
        values = {i.name for i in self.graph.inputs} | {name for node in kept for name in node.outputs}
        metas = {name: meta for name, meta in self.metas.items() if name in values}
        return replace(self.graph, nodes=tuple(kept), outputs=outputs, metas=metas)


# ---- weights looked up for every row


@dataclass(frozen=True, slots=True)
class _Lookup:
    """weight[ids], or its transpose."""

    weight: str
    ids: str
    turned: bool


def _looked_up(graph: JointGraph) -> JointGraph:
    """The graph with bmm(weight[ids], x) as a product by expert, and the gradient of the lookup too."""
    made = _Rewrite(graph)
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
        elif node.op == PERMUTE and node.args[1] == _TURNED and node.inputs[0] in found:
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


def _product(made: _Rewrite, node: Node, lookups: dict[str, _Lookup]) -> None:
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


def _gradient_of_lookup(made: _Rewrite, node: Node) -> bool:
    """index_put(zeros, ids, bmm(column, row), accumulate) as a gradient by expert."""
    graph = made.graph
    put = _put(node)
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


@dataclass(frozen=True, slots=True)
class _Put:
    base: str
    index: str
    values: str
    accumulate: bool


def _put(node: Node) -> _Put | None:
    """index_put along dim 0."""
    if node.op != "aten.index_put.default" or len(node.args[1]) != 1 or node.args[1][0] is None:
        return None
    accumulate = node.args[3] if len(node.args) > 3 else dict(node.kwargs).get("accumulate", False)
    base, index, values = node.inputs
    return _Put(base, index, values, accumulate)


# ---- rows sorted by expert


@dataclass(frozen=True, slots=True)
class _Fact:
    """What a value is, because of a sort. `kind`:

    order           order of the sort: row i of what is sorted was row order[i]
    tokens          order // size: the token of row i, where every token has `size` rows
    inverse         the place to which the sort moved row i
    ids             the sorted experts
    counts, ends    how many rows each of `size` experts has; up to and with each
    rows            a tensor whose rows, along dim `size`, stand in the order of the sort
    """

    sort: str
    kind: str
    size: int = 0


class _Unproved(Exception):
    """A use of sorted values that nothing here proves to be fine."""

    def __init__(self, sorts: Collection[str]) -> None:
        self.sorts = sorts


def _unsorted(graph: JointGraph, rule_of: RuleOf) -> JointGraph:
    stay: frozenset[str] = frozenset()
    while True:
        walk = _Unsort(graph, rule_of, stay)
        try:
            return walk.run()
        except _Unproved as unproved:
            stay |= frozenset(unproved.sorts)


class _Unsort(_Rewrite):
    """Facts are by the names of the old graph; the new graph has in the place of sorted rows the same rows
    in the order that they had before."""

    def __init__(self, graph: JointGraph, rule_of: RuleOf, stay: frozenset[str]) -> None:
        super().__init__(graph)
        self.rule_of, self.stay = rule_of, stay
        self.facts: dict[str, _Fact] = {}
        self.ids: dict[str, str] = {}
        """Name of a sort -> what it sorts."""

    def run(self) -> JointGraph:
        for node in self.graph.nodes:
            self.node = node
            sorts = {self.facts[name].sort for name in node.inputs if name in self.facts}
            if sorts and node.op not in _UNREAD:
                if len(sorts) > 1 or not self.use(node, *sorts):
                    raise _Unproved(sorts)
            else:
                self.keep(node)
                self.start(node)
        if left := {self.facts[o.name].sort for o in self.graph.outputs if o.name in self.facts}:
            raise _Unproved(left)
        return self.done()

    def start(self, node: Node) -> None:
        if node.op not in _SORTS or node.name in self.stay or len(self.shape(node.inputs[0])) != 1:
            return
        if self.metas[node.inputs[0]].dtype.is_floating_point:
            return
        self.ids[node.name] = node.inputs[0]
        *values, order = node.outputs
        if order:
            self.facts[order] = _Fact(node.name, "order")
        if values and values[0]:
            self.facts[values[0]] = _Fact(node.name, "ids")
            self.same[values[0]] = self.now(node.inputs[0]).name

    def use(self, node: Node, sort: str) -> bool:
        """Rewrite a node that reads something sorted; False if it cannot be."""
        known = _USES.get(node.op)
        return (known is not None and known(self, node, sort)) or self.row_by_row(node, sort)

    def kind(self, value: Any) -> str:
        fact = self.facts.get(value.name) if isinstance(value, Ref) else None
        return fact.kind if fact else ""

    def is_rows(self, value: Any, dim: int = 0) -> bool:
        fact = self.facts.get(value.name)
        return fact is not None and ((fact.kind == "ids" and dim == 0) or (fact.kind == "rows" and fact.size == dim))

    def know(self, name: str, sort: str, kind: str, size: int = 0) -> bool:
        self.facts[name] = _Fact(sort, kind, size)
        return True

    def count(self, sort: str) -> int:
        return self.shape(self.ids[sort])[0]

    # --- the order itself

    def divided(self, node: Node, sort: str) -> bool:
        """The token of each row."""
        size = node.args[1]
        floor = node.op == "aten.floor_divide.default" or dict(node.kwargs).get("rounding_mode") == "floor"
        if self.kind(node.args[0]) != "order" or not isinstance(size, int) or not floor or self.count(sort) % size:
            return False
        return self.know(node.name, sort, "tokens", size)

    def counted(self, node: Node, sort: str) -> bool:
        """histc: one bin an expert."""
        call = self.call(node)
        bins = call.argument("bins")
        if self.kind(node.args[0]) != "ids" or (call.argument("min"), call.argument("max")) != (0, bins - 1):
            return False
        return self.know(node.name, sort, "counts", bins)

    def summed_up(self, node: Node, sort: str) -> bool:
        if self.kind(node.args[0]) != "counts":
            return False
        return self.know(node.name, sort, "ends", self.facts[node.inputs[0]].size)

    def converted(self, node: Node, sort: str) -> bool:
        """To another dtype: ids and counts are what they were."""
        fact = self.facts[node.inputs[0]]
        if fact.kind not in ("ids", "counts", "ends"):
            return False
        if fact.kind == "ids":
            self.keep(node)
        self.facts[node.name] = fact
        return True

    # --- into the order of the sort, and out of it

    def indexed(self, node: Node, sort: str) -> bool:
        source, indices = node.args[:2]
        if len(indices) != 1 or source.name == indices[0].name:
            return False
        kind, rows = self.kind(indices[0]), self.shape(source.name)[0]
        if kind == "inverse" and self.is_rows(source):
            self.same[node.name] = self.now(source.name).name
            return True
        if self.kind(source):
            return False
        if kind == "order" and rows == self.count(sort):
            self.same[node.name] = self.now(source.name).name
        elif kind == "tokens" and rows * self.facts[indices[0].name].size == self.count(sort):
            self.repeat(node, self.now(source.name), self.facts[indices[0].name].size)
        elif kind == "ids":
            self.keep(node)
        else:
            return False
        return self.know(node.name, sort, "rows")

    def repeat(self, node: Node, x: Ref, times: int) -> None:
        """A row for every expert of a token."""
        tokens, *rest = self.shape(x.name)
        one = self.emit(RESHAPE, (x, (tokens, 1, *rest)), (tokens, 1, *rest))
        several = (tokens, times, *rest)
        wide = self.emit("aten.expand.default", (one, several), several)
        whole = self.emit("aten.clone.default", (wide,), several, memory_format=torch.contiguous_format)
        shape = self.shape(node.name)
        self.emit(RESHAPE, (whole, shape), shape, node.name)

    def put(self, node: Node, sort: str) -> bool:
        put = _put(node)
        if put is None or self.shape(put.values)[0] != self.count(sort):
            return False
        kind = self.kind(Ref(put.index))
        if kind == "order" and not put.accumulate and self.counts_up(put.values):
            return self.shape(put.base) == self.shape(put.values) and self.know(node.name, sort, "inverse")
        if kind == "ids" and put.accumulate and self.is_rows(Ref(put.values)) and not self.kind(Ref(put.base)):
            self.keep(node)  # what each expert adds up: the gradient of its bias
            return True
        if not self.is_zero(put.base) or self.shape(put.base)[1:] != self.shape(put.values)[1:]:
            return False
        rows = self.is_rows(Ref(put.values))
        if kind == "tokens" and rows and put.accumulate:
            size = self.facts[put.index].size
            return self.shape(put.base)[0] * size == self.count(sort) and self.add_up(node, put.values, size)
        if self.shape(put.base) != self.shape(put.values):
            return False
        if kind == "order" and rows:
            self.same[node.name] = self.now(put.values).name
            return True
        if kind == "inverse" and not self.kind(Ref(put.values)):
            self.same[node.name] = self.now(put.values).name
            return self.know(node.name, sort, "rows")
        return False

    def counts_up(self, name: str) -> bool:
        """Whether a value is 0, 1, 2, ..."""
        index = self.graph.producer.get(name)
        node = None if index is None else self.graph.nodes[index]
        return node is not None and node.op == "aten.arange.default" and node.args == self.shape(name)

    def add_up(self, node: Node, rows: str, size: int) -> bool:
        """The sum of the rows of each token."""
        shape = self.shape(rows)
        apart = (shape[0] // size, size, *shape[1:])
        value = self.emit(RESHAPE, (self.now(rows), apart), apart)
        self.emit("aten.sum.dim_IntList", (value, (1,)), self.shape(node.name), node.name)
        return True

    # --- what happens to rows in between

    def multiplied(self, node: Node, sort: str) -> bool:
        """A grouped product: of rows and weights, or, where the rows are contracted, a gradient of weights."""
        x, y = node.args[:2]
        call = self.call(node)
        if any(has(call, name) and call.argument(name) is not None for name in ("bias", "out_dtype")):
            return False
        if not self.groups(call.argument("offs"), self.shape(node.name if self.is_rows(x, 1) else y.name)[0]):
            return False
        if self.is_rows(x) and not self.kind(y):
            self.by_expert(node.name, self.now(x.name), self.now(y.name), sort)
            return self.know(node.name, sort, "rows")
        if self.is_rows(x, 1) and self.is_rows(y):
            self.gradient_by_expert(node.name, self.straight(x.name), self.now(y.name), sort)
            return True
        return False

    def straight(self, name: str) -> Ref:
        """A matrix of rows along dim 1 with its dims exchanged."""
        node = self.graph.nodes[self.graph.producer[name]]
        if node.op == PERMUTE and node.args[1] == (1, 0):
            return self.now(node.inputs[0])
        width, rows = self.shape(name)
        return self.emit(PERMUTE, (self.now(name), (1, 0)), (rows, width))

    def multiplied_backward(self, node: Node, sort: str) -> bool:
        """The gradients of a grouped product's rows and weights."""
        x, weight, ends, gradient = node.args
        fine = self.is_rows(x) and self.is_rows(gradient) and not self.kind(weight)
        if not fine or not self.groups(ends, self.shape(weight.name)[0]):
            return False
        of_rows, of_weight = node.outputs
        if of_rows:
            self.by_expert(of_rows, self.now(gradient.name), self.turned(self.now(weight.name)), sort)
            self.know(of_rows, sort, "rows")
        if of_weight:
            self.gradient_by_expert(of_weight, self.now(x.name), self.now(gradient.name), sort)
        return True

    def groups(self, ends: Any, experts: int) -> bool:
        return self.kind(ends) == "ends" and self.facts[ends.name].size == experts

    def by_expert(self, name: str, x: Ref, weight: Ref, sort: str) -> None:
        self.emit(MM, (x, weight, self.now(self.ids[sort])), self.shape(name), name)

    def gradient_by_expert(self, name: str, x: Ref, gradient: Ref, sort: str) -> None:
        shape = self.shape(name)
        self.emit(MM_WEIGHT, (x, gradient, self.now(self.ids[sort]), shape[0]), shape, name)

    def reshaped(self, node: Node, sort: str) -> bool:
        """A view keeps rows apart that keeps their dim."""
        if not self.has_rows(node.inputs[0]):
            return False
        before, after = self.shape(node.inputs[0]), self.shape(node.name)
        dim = self.facts[node.inputs[0]].size
        above = torch.Size(before[:dim]).numel()
        places = [d for d in range(len(after)) if after[d] == before[dim] and torch.Size(after[:d]).numel() == above]
        if not places:
            return False
        self.keep(node)
        return self.know(node.name, sort, "rows", places[0])

    def permuted(self, node: Node, sort: str) -> bool:
        if not self.has_rows(node.inputs[0]):
            return False
        self.keep(node)
        return self.know(node.name, sort, "rows", node.args[1].index(self.facts[node.inputs[0]].size))

    def has_rows(self, name: str) -> bool:
        return self.facts[name].kind in ("rows", "ids")

    def row_by_row(self, node: Node, sort: str) -> bool:
        """Any operator whose rule says that it treats all rows alike."""
        call = self.call(node)
        rule = self.rule_of(call)
        if rule is None or not all(self.has_rows(name) for name in node.inputs if name in self.facts):
            return False
        facts = [self.facts.get(name) for name in node.inputs]
        number = _row_factor(rule, [None if fact is None else fact.size for fact in facts], self.count(sort))
        if number is None:
            return False
        self.keep(node)
        for name, dims in zip(node.outputs, rule.outputs, strict=True):
            if name and number in dims:
                self.know(name, sort, "rows", dims.index(number))
        return True


_USES: dict[str, Callable[[_Unsort, Node, str], bool]] = {
    "aten.floor_divide.default": _Unsort.divided,
    "aten.div.Tensor_mode": _Unsort.divided,
    "aten.histc.default": _Unsort.counted,
    "aten.cumsum.default": _Unsort.summed_up,
    "aten._to_copy.default": _Unsort.converted,
    "aten.index.Tensor": _Unsort.indexed,
    "aten.index_put.default": _Unsort.put,
    "aten._grouped_mm.default": _Unsort.multiplied,
    "transformers.grouped_mm_fallback.default": _Unsort.multiplied,
    "transformers.grouped_mm_fallback_backward.default": _Unsort.multiplied_backward,
    RESHAPE: _Unsort.reshaped,
    PERMUTE: _Unsort.permuted,
}


def _row_factor(rule: OpRule, rows: Sequence[int | None], count: int) -> int | None:
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


# ---- where rows may be with their experts


class _Ways(_Rewrite):
    """Rows set out where they are multiplied by expert, and come back where something else reads them: what
    is done to them one by one in between is done where they are."""

    def __init__(self, graph: JointGraph, rule_of: RuleOf) -> None:
        super().__init__(graph)
        self.rule_of = rule_of
        self.away: dict[str, tuple[str, int]] = {}
        """Rows (along dim 0) with their experts: the name of what they want, and the number of experts."""
        self.sent: dict[tuple[str, str], Ref] = {}
        self.back: dict[str, Ref] = {}

    def run(self) -> JointGraph:
        for node in self.graph.nodes:
            self.node = node
            if node.op in (MM, MM_WEIGHT):
                self.multiplied(node)
            elif not self.goes_along(node):
                args, kwargs = map_references(node.args, self.home), map_references(node.kwargs, self.home)
                self.keep(replace(node, args=args, kwargs=kwargs))
            for output in self.graph.outputs:
                if output.name in node.outputs and output.name in self.away:
                    self.home(output.name)
        self.same.update({name: ref.name for name, ref in self.back.items()})
        return self.done()

    def multiplied(self, node: Node) -> None:
        """A product by expert: rows are there."""
        call = self.call(node)
        ids = call.argument("ids").name
        experts = self.shape(call.argument("weight").name)[0] if node.op == MM else call.argument("experts")
        rows = ("x",) if node.op == MM else ("x", "gradient")
        there = {call.argument(name).name: self.send(call.argument(name).name, ids, experts) for name in rows}
        there[ids] = self.send(ids, ids, experts)
        self.keep(replace(node, args=map_references(node.args, lambda name: there.get(name) or self.home(name))))
        if node.op == MM:
            self.away[node.name] = (ids, experts)

    def send(self, name: str, ids: str, experts: int) -> Ref:
        if self.away.get(name) == (ids, experts):
            return Ref(name)
        if (name, ids) not in self.sent:
            table = () if name == ids else (self.home(ids),)
            op = WANTED if name == ids else TO
            self.sent[name, ids] = self.emit(op, (self.home(name), *table, experts), self.shape(name))
        return self.sent[name, ids]

    def home(self, name: str) -> Ref:
        """Rows that are away, back again."""
        if name not in self.away:
            return Ref(name)
        if name not in self.back:
            ids, experts = self.away[name]
            self.back[name] = self.emit(FROM, (Ref(name), self.home(ids), experts), self.shape(name))
        return self.back[name]

    def goes_along(self, node: Node) -> bool:
        """Whether the op treats rows that are away one by one."""
        away = [self.away.get(name) for name in node.inputs]
        ways = {way for way in away if way is not None}
        if len(ways) != 1:
            return False
        (way,) = ways
        count = self.shape(way[0])[0]
        dims: list[int | None]
        if node.op == RESHAPE:
            before, after = self.shape(node.inputs[0]), self.shape(node.name)
            dims = [0] if after and after[0] == before[0] else []
        else:
            rule = self.rule_of(self.call(node))
            number = None if rule is None else _row_factor(rule, [None if w is None else 0 for w in away], count)
            if rule is None or number is None:
                return False
            dims = [carried.index(number) if number in carried else None for carried in rule.outputs]
        if any(dim != 0 for name, dim in zip(node.outputs, dims, strict=False) if name) or not dims:
            return False
        self.keep(node)
        self.away.update({name: way for name in node.outputs if name})
        return True


# ---- what becomes of rows that are back


def _summed(graph: JointGraph) -> JointGraph:
    """The graph with sum(rows * weights) over the rows of each token, and with the gradient of the weights, as one
    operator each."""
    made = _Rewrite(graph)
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
    view = _only_step(graph, read, RESHAPE)
    product = _only_step(graph, view.inputs[0] if view else read, "aten.mul.Tensor")
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


def _only_step(graph: JointGraph, name: str, op: str) -> Node | None:
    """The node that makes a value, if it is of this op and one node alone reads what it makes."""
    index = graph.producer.get(name)
    alone = len(graph.consumers.get(name, ())) == 1 and name not in {output.name for output in graph.outputs}
    return graph.nodes[index] if index is not None and alone and graph.nodes[index].op == op else None
