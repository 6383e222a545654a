"""Matrix products of rows with the weights of their experts: the operators, and how they run on shards.

A number in `ids` says which expert a row wants; rows stand in the order of tokens. A rank that holds some of the
experts multiplies only the rows that want one of them, and returns zeros for the others: its work is that of its own
experts, however the rows fall.

Or each row travels to the rank that holds its expert, and its result comes back: `to_experts` and `from_experts` mark
where that may happen. On unsplit values they change nothing. The table of ids is small; every rank of the axis reads
all of it, and counts from it how many rows it will receive from each other rank.

How many rows a rank has is known at run time alone. Shapes and prices take the fullest rank's, by the `load` that a
person expects (`rule.Load`); what runs does not depend on it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import JointGraph
from autopar.ir.layout import Layout, Routed, local_shape, local_stride, settled
from autopar.ir.own import define

from .expansions import LocalCall, Results
from .families import EACH, FIRST, from_template
from .rule import ROUTED, Call, Load, OpRule, Routing, call_of, fullest
from .template import Dim, assemble
from .traced import collective

MM, MM_WEIGHT = "autopar.expert_mm.default", "autopar.expert_mm_weight.default"
PRODUCTS = frozenset({MM, MM_WEIGHT})
SUM, DOT = "autopar.weighted_sum.default", "autopar.row_dot.default"
TO, FROM, WANTED = "autopar.to_experts.default", "autopar.from_experts.default", "autopar.ids_at_experts.default"


def grouped(ids: torch.Tensor, experts: int, first: int) -> tuple[torch.Tensor, list[int]]:
    """The indices of the rows that want an expert of [first, first + experts), sorted by expert, and the running count
    of them after each expert. Waits for the device."""
    local = ids - first
    other = (local < 0) | (local >= experts)
    expert, order = torch.sort(local.masked_fill(other, experts), stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device=ids.device), right=True).tolist()
    return order[: ends[-1]], ends


@torch.library.custom_op("autopar::expert_mm", mutates_args=())
def expert_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    first: int = 0,
    among: int = 0,
    load: Sequence[float] | None = None,
) -> torch.Tensor:
    """y[s] = x[s] @ weight[ids[s] - first], and 0 where there is no such expert.

    x: [rows, k], weight: [experts, k, n], ids: [rows] -> [rows, n]. The rows want one of so many experts, `among` them
    these (0: there are no others), as the `load` says: its arithmetic is priced by it.
    """
    order, ends = grouped(ids, weight.shape[0], first)
    products = x.new_zeros(x.shape[0], weight.shape[2])
    if ends[-1]:
        products[order] = _products(x[order], weight, ends)
    return products


def _products(rows: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
    if _fits_kernel(rows, *weight.shape[1:]):
        return torch.nn.functional.grouped_mm(rows, weight, offs=rows.new_tensor(ends, dtype=torch.int32))
    products = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start < end:
            torch.mm(rows[start:end], weight[expert], out=products[start:end])
    return products


@torch.library.custom_op("autopar::expert_mm_weight", mutates_args=())
def expert_mm_weight(
    x: torch.Tensor,
    gradient: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    first: int = 0,
    among: int = 0,
    load: Sequence[float] | None = None,
) -> torch.Tensor:
    """The gradient of the weights of experts [first, first + experts): the sum of x[s]^T gradient[s] over
    the rows of each.

    x: [rows, k], gradient: [rows, n], ids: [rows] -> [experts, k, n]; `among` and `load` as in `expert_mm`.
    """
    order, ends = grouped(ids, experts, first)
    gradients = x.new_zeros(experts, x.shape[1], gradient.shape[1])
    if not ends[-1]:
        return gradients
    left, right = x[order].t(), gradient[order]
    if _fits_kernel(right, *gradients.shape[1:]):
        gradients = torch.nn.functional.grouped_mm(left, right, offs=right.new_tensor(ends, dtype=torch.int32))
        gradients[[start == end for start, end in zip([0, *ends], ends, strict=False)]] = (
            0  # it may leave these as they are
        )
        return gradients
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start < end:
            torch.mm(left[:, start:end], right[start:end], out=gradients[expert])
    return gradients


def _fits_kernel(rows: torch.Tensor, k: int, n: int) -> bool:
    """Whether the grouped kernel runs: it wants bfloat16, rows of a multiple of 16 bytes, and no old GPU."""
    fits = rows.dtype == torch.bfloat16 and k % 8 == 0 and n % 8 == 0
    return fits and (not rows.is_cuda or torch.cuda.get_device_capability(rows.device) >= (8, 0))


expert_mm.register_fake(lambda x, weight, *_, **__: x.new_empty(x.shape[0], weight.shape[2]))
expert_mm_weight.register_fake(
    lambda x, gradient, ids, experts, *_, **__: x.new_empty(experts, x.shape[1], gradient.shape[1])
)


def weighted_sum(x: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
    """The weighted sum of each token's rows.

    x: [tokens * size, k], weight: [tokens * size, 1] -> [tokens, k].
    """
    return (x * weight).view(-1, size, x.shape[1]).sum(1)


def row_dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The dot product of each pair of rows: the gradient of their weight.

    x: [rows, k], y: [rows, k] -> [rows, 1].
    """
    return (x * y).sum(1, keepdim=True)


OPERATORS: Mapping[Callable[..., Any], str] = {
    weighted_sum: "(Tensor x, Tensor weight, int size) -> Tensor",
    row_dot: "(Tensor x, Tensor y) -> Tensor",
}

define(OPERATORS)


def _unmoved(x: torch.Tensor, *table: object, load: Sequence[float] | None = None) -> torch.Tensor:
    return x.view_as(x)


for _schema in (
    "to_experts(Tensor(a) x, Tensor ids, int experts, *, float[]? load=None) -> Tensor(a)",
    "from_experts(Tensor(a) x, Tensor ids, int experts, *, float[]? load=None) -> Tensor(a)",
    "ids_at_experts(Tensor(a) ids, int experts, *, float[]? load=None) -> Tensor(a)",
):
    _name, _rest = f"autopar::{_schema}".split("(", 1)
    torch.library.define(_name, f"({_rest}")
    torch.library.impl(_name, "CompositeExplicitAutograd", _unmoved)


@torch.library.custom_op("autopar::routes", mutates_args=())
def routes(
    ids: torch.Tensor, experts: int, ranks: int, stride: int, rank: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where rows go from `rank`, and what comes to it: as shapes assume, so many `rows`. Row i of `ids` belongs to rank
    (i // stride) % ranks, and rank r holds `experts` experts from r * experts on.

    Returns the order in which the rank's own rows leave, by destination; the inverse of that order; how many rows go
    to and come from each rank [2, ranks]; and the indices in `ids` of the rows that come, by origin.
    """
    there, here = ids // experts, torch.arange(len(ids), device=ids.device) // stride % ranks
    every = torch.arange(ranks, device=ids.device)
    leaving = there[here == rank]
    order = torch.argsort(leaving, stable=True)
    coming = torch.nonzero(there == rank).flatten()
    coming = coming[torch.argsort(here[coming], stable=True)]
    put, got = ((column == every[:, None]).sum(1) for column in (leaving, here[coming]))
    return order, torch.argsort(order), torch.stack([put, got]), coming


@routes.register_fake
def _routes_meta(
    ids: torch.Tensor, experts: int, ranks: int, stride: int, rank: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    leave = len(ids) // ranks
    return ids.new_empty(leave), ids.new_empty(leave), ids.new_empty(2, ranks), ids.new_empty(rows)


# ---- rules


def experts_of(call: Call) -> int:
    """How many experts a product has whose rows may want any of them, or an operator that sends rows to them."""
    return int(call.inputs[1].shape[0] if call.node.op == MM else call.argument("experts"))


def _flops(call: Call) -> float:
    """Each row that wants one of these experts is multiplied with one matrix."""
    rows, width = call.inputs[0].shape
    is_gradient, among = call.node.op == MM_WEIGHT, call.argument("among")
    ranks = among // experts_of(call) if among else 1
    flops = 2.0 * rows * width * (call.inputs[1].shape[1] if is_gradient else call.output.numel / rows)
    return flops * fullest(call.argument("load") or (), ranks) / ranks


_own = {"e": Dim(expands=True, contiguous=True)}
_mm = from_template("s k, e k n, s -> s n", _own, linear=EACH, flops=_flops, contraction=True)
_mm_weight = from_template("s k, s n, s -> e k n", _own, linear=EACH, flops=_flops, contraction=True)


def _at_experts(rule: OpRule | None, call: Call) -> OpRule | None:
    """The rule, with rows that may travel to their experts."""
    assert rule is not None
    number = {factor.name: i for i, factor in enumerate(rule.factors)}
    if not {"s", "e"} <= number.keys():
        return rule
    return replace(rule, routing=Routing(number["s"], number["e"], experts_of(call)))


def mm_rule(call: Call) -> OpRule | None:
    """expert_mm."""
    return _at_experts(_mm(call), call)


def mm_weight_rule(call: Call) -> OpRule | None:
    """expert_mm_weight."""
    return _at_experts(_mm_weight(call), call)


dot_rule = from_template("s k, s k -> s 1", linear=EACH)


def sum_rule(call: Call) -> OpRule:
    """weighted_sum: the rows of a token stay together."""
    rows = ("t", call.argument("size"))
    return assemble(call, [[rows, "k"], [rows, None]], [["t", "k"]], linear=EACH)


def moved_rule(call: Call) -> OpRule:
    """to_experts, from_experts, ids_at_experts: nothing happens to the rows, or they travel."""
    names = ["s", *(f"d{i}" for i in range(1, len(call.inputs[0].shape)))]
    inputs = [names, ["s"]][: len(call.inputs)]
    rule = replace(assemble(call, inputs, [names], linear=FIRST), moves_nothing=True, elementwise=True)
    rows = [i for i, factor in enumerate(rule.factors) if factor.name == "s"]
    if not rows:
        return rule
    settled, replicated, returned = {TO: ((0,), (1,), ()), FROM: ((), (1,), (0,)), WANTED: ((), (0,), ())}[call.node.op]
    routing = Routing(rows[0], None, experts_of(call), settled, replicated, returned)
    return replace(rule, routing=routing)


def mm(local: LocalCall) -> Results:
    """Experts split: each rank multiplies the rows of its own experts."""
    x, weight, ids = local.args[:3]
    first = local.offset(local.splits["e"], weight.shape[0])
    return local.result(x, weight, ids, first, **_among(local, weight.shape[0]))


def mm_weight(local: LocalCall) -> Results:
    """Experts split: each rank computes the gradients of its own experts."""
    x, gradient, ids, experts = local.args[:4]
    first = local.offset(local.splits["e"], experts)
    return local.result(x, gradient, ids, experts, first, **_among(local, experts))


def _among(local: LocalCall, here: int) -> dict[str, Any]:
    """Among how many experts the rows choose that are here, and their load, where some of them are elsewhere."""
    among, load = experts_of(local.call) // local.ranks(local.splits.get(ROUTED, ())), local.call.argument("load")
    return {} if among == here else {"among": among} | ({"load": load} if load else {})


def _routes(local: LocalCall, ids: torch.Tensor, layout: Layout) -> tuple[int, int, tuple[torch.Tensor, ...]]:
    """The axis along which rows of this layout travel, how many a rank gets, and the tables of `routes`."""
    (axis,) = (axis for axis, placement in enumerate(layout) if isinstance(placement, Routed))
    ranks, mesh = local.ranks([axis]), local.emitter.mesh
    stride = local_stride(settled(layout), mesh, axis)
    experts = experts_of(local.call) // ranks
    rows, *_ = local_shape(local.call.inputs[0].shape, layout, mesh)
    return axis, rows, torch.ops.autopar.routes(ids, experts, ranks, stride, local.coordinate(axis), rows)


def to_experts(local: LocalCall) -> Results:
    """Each row travels to the rank of its expert."""
    x, ids = local.args[:2]
    axis, rows, (order, _, sizes, _) = _routes(local, ids, local.results[0])
    return exchange(x.index_select(0, order), sizes, rows, axis)


def from_experts(local: LocalCall) -> Results:
    """Each row travels back."""
    x, ids = local.args[:2]
    axis, _, (_, inverse, sizes, _) = _routes(local, ids, local.operands[0])
    back, (rows, *_) = sizes.flip(0), local_shape(local.call.output.shape, local.results[0], local.emitter.mesh)
    return exchange(x.contiguous(), back, rows, axis).index_select(0, inverse)


def ids_at_experts(local: LocalCall) -> Results:
    """The experts of the rows that have come, from the table that every rank has."""
    ids: torch.Tensor = local.args[0]
    _, _, (_, _, _, coming) = _routes(local, ids, local.results[0])
    return ids.index_select(0, coming)


def exchange(value: Tensor, sizes: Tensor, rows: int, axis: int) -> Tensor:
    """Rows exchanged along a mesh axis, of which so many come, as shapes assume; see `program.COLLECTIVES`."""
    exchanged: Tensor = collective("exchange", value, sizes, rows, axis)
    return exchanged


def loaded(graph: JointGraph, load: Load) -> JointGraph:
    """The graph in which rows fall on experts so. Raises ValueError for a model without experts, or with others."""
    if not load:
        return graph
    nodes, counts = [], set[int]()
    for node in graph.nodes:
        if node.op in (MM, MM_WEIGHT, TO, FROM, WANTED):
            call = call_of(node, graph.metas)
            counts.add(experts_of(call))
            node = replace(node, kwargs=(*node.kwargs, ("load", load)))
        nodes.append(node)
    if not counts:
        raise ValueError(
            "imbalance is given, and the model has no experts whose rows can be told apart: leave it out (they run as "
            "the model's own operators)"
        )
    if len(load) > 1 and counts != {len(load)}:
        has = " and ".join(map(str, sorted(counts)))
        raise ValueError(f"imbalance gives the rows of {len(load)} experts, and the model has {has}: give one of each")
    return replace(graph, nodes=tuple(nodes))
