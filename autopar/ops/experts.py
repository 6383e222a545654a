"""Matrix products of rows with the weights of their experts: the operators, and how they run on shards.

A row says which expert it wants by a number in `ids`; rows stand in the order of tokens. A rank that
holds some experts only multiplies the rows that want one of them, and makes zeros of the others: the
work is that of its own experts, however the rows fall.
"""

from __future__ import annotations

import torch

from .expansions import LocalCall, Results
from .families import EACH, from_template
from .rule import Call, Emitter

MM, MM_WEIGHT = "autopar.expert_mm.default", "autopar.expert_mm_weight.default"


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
        return torch.nn.functional.grouped_mm(left, right, offs=_offsets(right, ends))
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start < end:
            torch.mm(left[:, start:end], right[start:end], out=made[expert])
    return made


def _fits_kernel(rows: torch.Tensor, k: int, n: int) -> bool:
    """The grouped kernel wants bfloat16 on a GPU, and rows of a multiple of 16 bytes."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and k % 8 == 0 and n % 8 == 0


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


# ---- rules


def _flops(call: Call) -> float:
    """Every row is multiplied with one matrix, whatever the number of experts."""
    rows, width = call.inputs[0].shape
    assert call.outputs[0] is not None
    return 2.0 * rows * width * (call.outputs[0].numel / rows if call.node.op == MM else call.inputs[1].shape[1])


mm_rule = from_template(
    "s k, e k n, s -> s n", linear=EACH, expands=("e",), contiguous=("e",), flops=_flops, contraction=True
)
mm_weight_rule = from_template(
    "s k, s n, s -> e k n", linear=EACH, expands=("e",), contiguous=("e",), flops=_flops, contraction=True
)


def mm(emitter: Emitter, local: LocalCall) -> Results:
    """Experts split: each rank multiplies the rows of its own experts."""
    x, weight, ids = local.args[:3]
    first = emitter.offset(local.splits["e"], emitter.meta(weight).shape[0])
    return (local.result(emitter, x, weight, ids, first),)


def mm_weight(emitter: Emitter, local: LocalCall) -> Results:
    """Experts split: each rank makes the gradients of its own experts."""
    x, gradient, ids, experts = local.args[:4]
    return (local.result(emitter, x, gradient, ids, experts, emitter.offset(local.splits["e"], experts)),)
