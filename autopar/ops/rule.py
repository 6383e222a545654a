"""What an operator's dims mean: factors that are split together, and what a split of one does.

A rule describes an op by factors (Shardy's word; the affine maps of CFP Table 1 in normal form): each dim of each
operand and result carries one factor or none. Splitting a factor splits every dim that carries it, in operands and
results alike; operands that do not carry it are replicated. A result that does not carry a split factor is `Partial` if
the op reduces over it, else replicated. Algorithms know factors; only the table names ops.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import Node, TensorMeta, parameters, takes
from autopar.ir.layout import Shape, Split, is_legal, periods_of

Dims = tuple[int | None, ...]

ROUTED = "(routed)"
"""Stands among the split factors of an op for the axis along which rows go to their experts."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A set of dims that are split together.

    `size` is the largest period that a split may have. It is the dim's size, or less where the op
    needs more than one period: `split` of a [.., 3h] dim in three has a factor of size h, so that a
    split of period h gives each rank its part of all three. A dim's size is a multiple of `size`.

    `reductions` holds, for every output of the op, "" (independent of the factor, or carries it) or the
    reduction ("sum", "max", "min") that the output is partial in when the factor is split.
    `expands` says that the op itself does not run on shards: the table has an expansion, a small local
    program that may hold collectives. `contiguous` says that only a split of period `size`
    (nested ones included) is allowed, because the expansion computes global indices. A shard
    holds at least `least` indices: what its neighbours need of it. `even` says that the number of ranks must
    divide it: the op would read padding, or padding would stand inside of a dim.

    `of` names factors that are split together by this one, which no dim carries: an operand or a result is split where
    it carries the first of them, or else the next. If it is `striped`, its indices may also be dealt out one by one.
    Then no other axis splits one of these alone: operands that carry several of them would not know of it. What is not
    `offered` may be split, and is not considered.
    """

    name: str
    size: int
    reductions: tuple[str, ...]
    expands: bool = False
    contiguous: bool = False
    least: int = 1
    even: bool = False
    of: tuple[int, ...] = ()
    striped: bool = False
    offered: bool = True

    def may_be_cut(self, ranks: int) -> bool:
        """Whether shards of a split over `ranks` in all hold what the op needs. One rank needs no neighbours."""
        return ranks == 1 or -(-self.size // ranks) >= self.least

    def periods(self, ranks: int, mesh: Shape) -> tuple[int, ...]:
        """The periods to consider for a contiguous split over `ranks`, an axis of the mesh."""
        whole = (self.size,) if self.even else periods_of(self.size, ranks, mesh)
        return (*whole, ranks) if self.striped and self.size > ranks else whole

    def may_split(self, period: int, ranks: int) -> bool:
        """Whether a split of this period over an axis of `ranks` is one of this factor."""
        if period % ranks or self.size < 2 or not self.may_be_cut(ranks):
            return False
        if period > self.size:
            return not self.even and is_legal((self.size,), (Split(0, period),), (ranks,))
        return period >= ranks and self.size % period == 0 and (period == self.size or not self.contiguous)


Load = tuple[float, ...]
"""How rows fall on experts: evenly (), or so that the fullest rank has so many times the mean (of one number), or so
many on each expert."""


def fullest(load: Load, ranks: int) -> float:
    """The rows of the fullest of so many ranks, which hold equally many experts in a row, over the mean of all."""
    if len(load) < 2:
        return min(float(ranks), *load) if load else 1.0
    each = -(-len(load) // ranks)
    return max(sum(load[i : i + each]) for i in range(0, len(load), each)) * ranks / sum(load)


@dataclass(frozen=True, slots=True)
class Routing:
    """How an op takes part when rows go to their experts, instead of the experts' weights to the rows.

    `rows` and `experts` are the numbers of factors: dims of rows are routed, dims of experts split among
    the ranks that the rows go to (None: it has none). `count` is the number of experts. `settled` lists
    operands whose rows have not left yet, `replicated` those that every rank needs in full (the experts that
    the rows want), `returned` results whose rows are back.
    """

    rows: int
    experts: int | None
    count: int
    settled: tuple[int, ...] = ()
    replicated: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()

    @property
    def starts(self) -> bool:
        """Whether rows set out here."""
        return bool(self.settled or self.replicated) and not self.returned


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """`inputs[i][d]` is the index in `factors` that dim d of tensor operand i carries, or None for a
    dim that cannot be split (or has size 1 and is broadcast). Operands stand in the order of
    `Node.inputs`. `outputs` likewise.

    A dim that carries a factor with a scale of g (`input_scales`, `output_scales`; none given: 1) is g times
    as long as the factor: g consecutive indices belong to one index of the factor. Query heads of grouped
    attention, of which g share a head of keys, have a scale of g, as have the rows that a convolution of
    stride g reads.

    `linear` lists sets of operands that may be Partial(sum) together, the others being replicated, with
    all outputs then Partial(sum): ((0, 1),) for add, ((0,), (1,)) for mul and mm.

    `flops` counts multiplications and additions of the unsplit op, for contractions and attention; 0
    means that the op is bound by memory. `inside_bytes` counts what its kernel writes and reads of results of its
    own on the way, beside operands and results: the scores of attention without a fused kernel. `contraction` marks
    the tensor contractions of CFP Algorithm 1. `moves_nothing` marks ops that only return a view (slice, expand, ...)
    and take no time. `routing` is for ops that know of experts; others may receive routed rows if they treat rows one
    by one.

    An op that reduces over an unevenly split factor sees padding filled with a value that changes nothing: 0 for
    a sum, the least or greatest number for a maximum or minimum. `padding` holds (operand, factor, value)
    where it is another value, or where an expansion reduces. Padding of integers is 0, lest it be an index
    out of range, unless the op is `elementwise`.
    """

    factors: tuple[Factor, ...]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    linear: tuple[tuple[int, ...], ...] = ()
    flops: float = 0.0
    inside_bytes: float = 0.0
    contraction: bool = False
    moves_nothing: bool = False
    routing: Routing | None = None
    elementwise: bool = False
    padding: tuple[tuple[int, int, float], ...] = ()
    input_scales: tuple[tuple[int, ...], ...] = ()
    output_scales: tuple[tuple[int, ...], ...] = ()

    def input_splits(self, operand: int, factor: int, period: int) -> tuple[Split, ...]:
        """How an operand is cut where a factor is split with this period: one split for each dim that carries it."""
        return self._splits(self.inputs[operand], self.input_scales, operand, factor, period)

    def output_splits(self, output: int, factor: int, period: int) -> tuple[Split, ...]:
        """How a result is cut where a factor is split with this period."""
        return self._splits(self.outputs[output], self.output_scales, output, factor, period)

    def may_split_together(self, factors: set[int]) -> bool:
        """Whether mesh axes may split these factors at once."""
        return not any(factors.intersection(self.factors[number].of) for number in factors)

    def _splits(
        self, dims: Dims, scales: tuple[tuple[int, ...], ...], position: int, factor: int, period: int
    ) -> tuple[Split, ...]:
        factor = next((one for one in self.factors[factor].of if one in dims), factor)
        return tuple(
            Split(dim, period * _scale(scales, position, dim)) for dim, carried in enumerate(dims) if carried == factor
        )

    def input_factor(self, operand: int, split: Split) -> tuple[int, int] | None:
        """The factor, and its period, that a split of an operand is a split of, or None."""
        return _factor(self.inputs[operand], self.input_scales, operand, split)

    def output_factor(self, output: int, split: Split) -> tuple[int, int] | None:
        """The factor, and its period, that a split of a result is a split of, or None."""
        return _factor(self.outputs[output], self.output_scales, output, split)

    def __str__(self) -> str:
        def dims(carried: Dims) -> str:
            return " ".join("!" if f is None else self.factors[f].name for f in carried) or "()"

        return f"{', '.join(map(dims, self.inputs))} -> {', '.join(map(dims, self.outputs))}"


def _scale(scales: tuple[tuple[int, ...], ...], position: int, dim: int) -> int:
    return scales[position][dim] if scales else 1


def _factor(dims: Dims, scales: tuple[tuple[int, ...], ...], position: int, split: Split) -> tuple[int, int] | None:
    carried, scale = dims[split.dim], _scale(scales, position, split.dim)
    return None if carried is None or split.period % scale else (carried, split.period // scale)


def neutral(reduction: str, dtype: torch.dtype) -> float:
    """The number that changes nothing in a reduction."""
    if reduction == "sum":
        return 0
    if dtype.is_floating_point:
        return -math.inf if reduction == "max" else math.inf
    return torch.iinfo(dtype).min if reduction == "max" else torch.iinfo(dtype).max


@dataclass(frozen=True, slots=True)
class Call:
    """All that a rule may look at: a node with the global metas of its tensor operands (in the order of
    `Node.inputs`) and of its outputs (None for an output that nobody uses)."""

    node: Node
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta | None, ...]

    @property
    def output(self) -> TensorMeta:
        """The first output, of an op of which somebody uses it."""
        assert self.outputs[0] is not None, self.node
        return self.outputs[0]

    def has(self, name: str) -> bool:
        """Whether the op's schema has an argument of this name."""
        return takes(self.node.op, name)

    def argument(self, name: str) -> Any:
        """The argument called `name` in the op's schema, or its default. Tensors are `Ref`s."""
        for position, parameter in enumerate(parameters(self.node.op)):
            if parameter.name == name:
                if position < len(self.node.args):
                    return self.node.args[position]
                return dict(self.node.kwargs).get(name, parameter.default)
        raise KeyError(f"{self.node.op} has no argument {name!r}")


def call_of(node: Node, metas: Mapping[str, TensorMeta]) -> Call:
    """A node with its metas. Outputs are None where they have no name, and where its `output_mask` leaves them out."""
    outputs = tuple(metas[name] if name else None for name in node.outputs)
    call = Call(node, tuple(metas[name] for name in node.inputs), outputs)
    if not takes(node.op, "output_mask"):
        return call
    mask = call.argument("output_mask")
    return replace(call, outputs=tuple(meta if kept else None for meta, kept in zip(outputs, mask, strict=True)))
