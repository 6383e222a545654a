"""Matrix products of rows with the weights of their experts: the operators, and how they run on shards.

A row says which expert it wants by a number in `ids`; rows stand in the order of tokens. A rank that
holds some experts only multiplies the rows that want one of them, and makes zeros of the others: the
work is that of its own experts, however the rows fall.

Or each row goes to the rank that holds its expert, and what became of it comes back: `to_experts` and
`from_experts` stand where that may happen. On whole values they change nothing. The table of what every row
wants is small; every rank of the axis reads it whole, and knows from it how many rows it will get from
each other one.
"""

from dataclasses import replace

import torch

from autopar.ir.graph import Ref
from autopar.ir.layout import Layout, Routed, local_stride, settled

from .expansions import LocalCall, Results
from .families import EACH, FIRST, from_template
from .rule import Call, Emitter, OpRule, Routing
from .template import assemble

MM, MM_WEIGHT = "autopar.expert_mm.default", "autopar.expert_mm_weight.default"
SUM, DOT = "autopar.weighted_sum.default", "autopar.row_dot.default"
TO, FROM, WANTED = "autopar.to_experts.default", "autopar.from_experts.default", "autopar.ids_at_experts.default"


def grouped(ids: torch.Tensor, experts: int, first: int) -> tuple[torch.Tensor, list[int]]:
    """The numbers of the rows that want an expert of [first, first + experts), expert by expert, and how many
    of them there are up to and with each expert. Waits for the device."""
    local = ids - first
    other = (local < 0) | (local >= experts)
    expert, order = torch.sort(local.masked_fill(other, experts), stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device=ids.device), right=True).tolist()
    return order[: ends[-1]], ends


@torch.library.custom_op("autopar::expert_mm", mutates_args=())
def expert_mm(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    """y[s] = x[s] @ weight[ids[s] - first], and 0 where there is no such expert.

    x: [rows, k], weight: [experts, k, n], ids: [rows] -> [rows, n].
    """
    order, ends = grouped(ids, weight.shape[0], first)
    made = x.new_zeros(x.shape[0], weight.shape[2])
    if ends[-1]:
        made[order] = _products(x[order], weight, ends)
    return made


def _products(rows: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
    if _fits_kernel(rows, *weight.shape[1:]):
        return torch.nn.functional.grouped_mm(rows, weight, offs=_offsets(rows, ends))
    made = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start < end:
            torch.mm(rows[start:end], weight[expert], out=made[start:end])
    return made


@torch.library.custom_op("autopar::expert_mm_weight", mutates_args=())
def expert_mm_weight(
    x: torch.Tensor, gradient: torch.Tensor, ids: torch.Tensor, experts: int, first: int = 0
) -> torch.Tensor:
    """The gradient of the weights of experts [first, first + experts): the sum of x[s]^T gradient[s] over
    the rows of each.

    x: [rows, k], gradient: [rows, n], ids: [rows] -> [experts, k, n].
    """
    order, ends = grouped(ids, experts, first)
    made = x.new_zeros(experts, x.shape[1], gradient.shape[1])
    if not ends[-1]:
        return made
    left, right = x[order].t(), gradient[order]
    if _fits_kernel(right, *made.shape[1:]):
        made = torch.nn.functional.grouped_mm(left, right, offs=_offsets(right, ends))
        made[[start == end for start, end in zip([0, *ends], ends, strict=False)]] = 0  # it may leave these as they are
        return made
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start < end:
            torch.mm(left[:, start:end], right[start:end], out=made[expert])
    return made


def _fits_kernel(rows: torch.Tensor, k: int, n: int) -> bool:
    """The grouped kernel wants bfloat16 in rows of a multiple of 16 bytes, and no old GPU."""
    fits = rows.dtype == torch.bfloat16 and k % 8 == 0 and n % 8 == 0
    return fits and (not rows.is_cuda or torch.cuda.get_device_capability(rows.device) >= (8, 0))


def _offsets(rows: torch.Tensor, ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=rows.device)


@expert_mm.register_fake
def _expert_mm_meta(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@expert_mm_weight.register_fake
def _expert_mm_weight_meta(
    x: torch.Tensor, gradient: torch.Tensor, ids: torch.Tensor, experts: int, first: int = 0
) -> torch.Tensor:
    return x.new_empty(experts, x.shape[1], gradient.shape[1])


def weighted_sum(x: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
    """The sum of each token's rows by their weights.

    x: [tokens * size, k], weight: [tokens * size, 1] -> [tokens, k].
    """
    return (x * weight).view(-1, size, x.shape[1]).sum(1)


def row_dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The product of each two rows: the gradient of their weight.

    x: [rows, k], y: [rows, k] -> [rows, 1].
    """
    return (x * y).sum(1, keepdim=True)


OPERATORS = (weighted_sum, row_dot)

for _function, _schema in (
    (weighted_sum, "(Tensor x, Tensor weight, int size) -> Tensor"),
    (row_dot, "(Tensor x, Tensor y) -> Tensor"),
):
    torch.library.define(f"autopar::{_function.__name__}", _schema)
    torch.library.impl(f"autopar::{_function.__name__}", "CompositeExplicitAutograd", _function)


def _unmoved(x: torch.Tensor, *table: object) -> torch.Tensor:
    return x.view_as(x)


for _schema in (
    "to_experts(Tensor(a) x, Tensor ids, int experts) -> Tensor(a)",
    "from_experts(Tensor(a) x, Tensor ids, int experts) -> Tensor(a)",
    "ids_at_experts(Tensor(a) ids, int experts) -> Tensor(a)",
):
    _name, _rest = f"autopar::{_schema}".split("(", 1)
    torch.library.define(_name, f"({_rest}")
    torch.library.impl(_name, "CompositeExplicitAutograd", _unmoved)


@torch.library.custom_op("autopar::routes", mutates_args=())
def routes(
    ids: torch.Tensor, experts: int, ranks: int, stride: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where rows go from `rank`, and what comes to it. Row i of `ids` belongs to rank (i // stride) % ranks, and
    rank r holds `experts` experts from r * experts on.

    Returns the rank's own rows in the order in which they leave, by rank that they go to; the places
    among them that its rows had before, in the inverse order; how many go to and come from each rank
    [2, ranks]; and the numbers in `ids` of those that come, by rank that they come from.
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
    ids: torch.Tensor, experts: int, ranks: int, stride: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As if rows fell evenly."""
    rows = len(ids) // ranks
    return ids.new_empty(rows), ids.new_empty(rows), ids.new_empty(2, ranks), ids.new_empty(rows)


# ---- rules


def _flops(call: Call) -> float:
    """Every row is multiplied with one matrix, whatever the number of experts."""
    rows, width = call.inputs[0].shape
    assert call.outputs[0] is not None
    return 2.0 * rows * width * (call.outputs[0].numel / rows if call.node.op == MM else call.inputs[1].shape[1])


_mm = from_template(
    "s k, e k n, s -> s n", linear=EACH, expands=("e",), contiguous=("e",), flops=_flops, contraction=True
)
_mm_weight = from_template(
    "s k, s n, s -> e k n", linear=EACH, expands=("e",), contiguous=("e",), flops=_flops, contraction=True
)


def _at_experts(rule: OpRule | None, count: int) -> OpRule | None:
    """Rows may come to the experts that they want."""
    assert rule is not None
    number = {factor.name: i for i, factor in enumerate(rule.factors)}
    if not {"s", "e"} <= number.keys():
        return rule
    return replace(rule, routing=Routing(number["s"], number["e"], count))


def mm_rule(call: Call) -> OpRule | None:
    """expert_mm."""
    return _at_experts(_mm(call), call.inputs[1].shape[0])


def mm_weight_rule(call: Call) -> OpRule | None:
    """expert_mm_weight."""
    return _at_experts(_mm_weight(call), call.argument("experts"))


dot_rule = from_template("s k, s k -> s 1", linear=EACH)


def sum_rule(call: Call) -> OpRule:
    """weighted_sum: the rows of a token stay together."""
    rows = ("t", call.argument("size"))
    return assemble(call, [[rows, "k"], [rows, None]], [["t", "k"]], linear=EACH)


def moved_rule(call: Call) -> OpRule:
    """to_experts, from_experts, ids_at_experts: nothing happens to the rows, or they travel."""
    names = ["s", *(f"d{i}" for i in range(1, len(call.inputs[0].shape)))]
    inputs = [names, ["s"]][: len(call.inputs)]
    rule = assemble(call, inputs, [names], linear=FIRST, moves_nothing=True, elementwise=True)
    rows = [i for i, factor in enumerate(rule.factors) if factor.name == "s"]
    if not rows:
        return rule
    settled, whole, returned = {TO: ((0,), (1,), ()), FROM: ((), (1,), (0,)), WANTED: ((), (0,), ())}[call.node.op]
    routing = Routing(rows[0], None, call.argument("experts"), settled=settled, whole=whole, returned=returned)
    return replace(rule, routing=routing)


def mm(emitter: Emitter, local: LocalCall) -> Results:
    """Experts split: each rank multiplies the rows of its own experts."""
    x, weight, ids = local.args[:3]
    first = emitter.offset(local.splits["e"], emitter.meta(weight).shape[0])
    return (local.result(emitter, x, weight, ids, first),)


def mm_weight(emitter: Emitter, local: LocalCall) -> Results:
    """Experts split: each rank makes the gradients of its own experts."""
    x, gradient, ids, experts = local.args[:4]
    return (local.result(emitter, x, gradient, ids, experts, emitter.offset(local.splits["e"], experts)),)


def _routes(emitter: Emitter, local: LocalCall, ids: Ref, layout: Layout) -> tuple[int, tuple[Ref, ...]]:
    """The axis along which rows of this layout travel, and the tables of `routes`."""
    (axis,) = (axis for axis, placement in enumerate(layout) if isinstance(placement, Routed))
    ranks = emitter.ranks(axis)
    mesh = tuple(emitter.ranks(a) for a in range(len(layout)))
    stride = local_stride(settled(layout), mesh, axis)
    experts = local.call.argument("experts") // ranks
    return axis, emitter.ops("autopar.routes.default", ids, experts, ranks, stride, emitter.coordinate(axis))


def to_experts(emitter: Emitter, local: LocalCall) -> Results:
    """Each row travels to the rank of its expert."""
    x, ids = local.args[:2]
    axis, (order, _, sizes, _) = _routes(emitter, local, ids, local.results[0])
    return (emitter.exchange(emitter.op("aten.index_select.default", x, 0, order), sizes, axis),)


def from_experts(emitter: Emitter, local: LocalCall) -> Results:
    """Each row travels back."""
    x, ids = local.args[:2]
    axis, (_, inverse, sizes, _) = _routes(emitter, local, ids, local.operands[0])
    back = emitter.op("aten.flip.default", sizes, (0,))
    arrived = emitter.exchange(emitter.op("aten.contiguous.default", x), back, axis)
    return (emitter.op("aten.index_select.default", arrived, 0, inverse),)


def ids_at_experts(emitter: Emitter, local: LocalCall) -> Results:
    """The experts that the rows want which have come: read from the table that every rank has."""
    ids = local.args[0]
    _, (_, _, _, coming) = _routes(emitter, local, ids, local.results[0])
    return (emitter.op("aten.index_select.default", ids, 0, coming),)
