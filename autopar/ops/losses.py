"""Losses: their rules, and negative log-likelihood with the classes or the tokens split."""

import torch

from autopar.ir.emitter import Emitter
from autopar.ir.graph import Ref

from .bounds import checked
from .expansions import NARROW, LocalCall, Results, all_reduce, cast, local_indices, wide
from .families import DIMS, FIRST, aligned
from .rule import Call, OpRule
from .template import Named, assemble

NONE, MEAN, SUM = 0, 1, 2
"""The values of a loss's argument `reduction`."""

_IGNORED = -1
"""Replaces a target that is ignored, or another rank's class."""


def loss(call: Call, *, none: float = 0.0) -> OpRule:
    """mse_loss and the like: pointwise, then reduced. A mean over a shard expands. The loss of `none` and 0 is 0."""
    names, inputs = aligned(call)
    reduction = call.argument("reduction")
    return assemble(
        call, inputs, [names if reduction == NONE else ()], expands=names if reduction == MEAN else (), uneven=names,
        padding={(0, name): none for name in names},
    )  # fmt: skip


def loss_backward(call: Call) -> OpRule:
    """Backward of `loss`: divides by the number of elements of a shard if the loss was a mean."""
    names, inputs = aligned(call)
    expands = names if call.argument("reduction") == MEAN else ()
    return assemble(call, inputs, [names], linear=FIRST, expands=expands, uneven=names)


def nll(call: Call) -> OpRule:
    """nll_loss: "n c *d, n *d, c". The classes expand (each rank picks among its own), and so do the
    tokens under a mean, whose weight is that of all ranks' tokens: such a mean comes out replicated, except
    for a split of unweighted classes, whose ranks all know the count."""
    names = _scores(len(call.inputs[0].shape))
    tokens = [name for name in names if name != "c"]
    reduction, weighted = call.argument("reduction"), call.argument("weight") is not None
    inputs: list[Named] = [names, tokens, ["c"]]
    over_tokens = {NONE: ("", ""), MEAN: ("", ""), SUM: ("sum", "sum")}[reduction]
    over_classes = (("", "") if reduction == MEAN else ("sum", "sum")) if weighted else ("sum", "")
    return assemble(
        call, inputs[: len(call.inputs)], [tokens if reduction == NONE else (), ()],
        expands=("c", *(tokens if reduction == MEAN else ())), contiguous=("c",),
        reductions={"c": over_classes, **dict.fromkeys(tokens, over_tokens)}, uneven=("c", *tokens),
        padding={(1, name): call.argument("ignore_index") for name in tokens},
    )  # fmt: skip


def nll_backward(call: Call) -> OpRule:
    """Backward of `nll`: the total weight comes in, so that only the classes expand."""
    names = _scores(len(call.inputs[1].shape))
    tokens = [name for name in names if name != "c"]
    gradient = tokens if call.argument("reduction") == NONE else []
    weight: list[Named] = [] if call.argument("weight") is None else [["c"]]
    return assemble(
        call, [gradient, names, tokens, *weight, []], [names], linear=FIRST, expands=("c",), contiguous=("c",),
        uneven=("c",),
    )  # fmt: skip


def _scores(rank: int) -> list[str]:
    """Names of the dims of the scores: [c], [n, c] or [n, c, d...]."""
    return ["c"] if rank == 1 else ["n", "c", *DIMS[: rank - 2]]


def nll_on_shards(emitter: Emitter, local: LocalCall) -> Results:
    """nll_loss forward: each rank sums over its tokens and classes. A mean divides by the total weight of
    all ranks' tokens: one all-reduce of two numbers, the sum and its weight. A rank whose labels are all
    ignored adds zero to both."""
    scores, target, weight, reduction, ignored = local.args
    classes = local.splits.get("c", ())
    tokens = local.axes(lambda name: name != "c")
    dtype = emitter.meta(scores).dtype
    exact = torch.float32 if dtype in NARROW else dtype
    counted = None
    if weight is None and (classes or dtype in NARROW):
        # each token is in the classes of one rank only, but it counts on all, and exactly
        counted = emitter.op("aten.sum.default", emitter.op("aten.ne.Scalar", target, ignored), dtype=exact)
    if classes:
        dim = 0 if len(emitter.meta(scores).shape) == 1 else 1
        size = emitter.meta(scores).shape[dim]
        target = checked(emitter, target, local.call.inputs[0].shape[dim], ignored=ignored)
        target, ignored = _local_targets(emitter, target, ignored, classes, size), _IGNORED
    summed = SUM if reduction == MEAN else reduction
    total, weights = emitter.ops(local.call.node.op, scores, target, weight, summed, ignored)
    if reduction == NONE and len(emitter.meta(scores).shape) > 1:
        return total, weights
    counted = weights if counted is None else counted
    if reduction != MEAN:
        return total, cast(emitter, counted, dtype)
    shared = tokens if weight is None else (*tokens, *classes)
    if shared:
        both = emitter.op("aten.stack.default", (wide(emitter, total), wide(emitter, counted)))
        both = all_reduce(emitter, both, "sum", shared)
        total, counted = (emitter.op("aten.select.int", both, 0, i) for i in (0, 1))
    mean = emitter.op("aten.div.Tensor", total, counted)
    return cast(emitter, mean, dtype), cast(emitter, counted, dtype)


def _local_targets(emitter: Emitter, target: Ref, ignored: int, axes: tuple[int, ...], classes: int) -> Ref:
    local, mine = local_indices(emitter, target, axes, classes)
    mine = emitter.op("aten.logical_and.default", mine, emitter.op("aten.ne.Scalar", target, ignored))
    return emitter.op("aten.masked_fill.Scalar", local, emitter.op("aten.logical_not.default", mine), _IGNORED)


def nll_backward_on_shards(emitter: Emitter, local: LocalCall) -> Results:
    """nll_loss backward with the classes split: other ranks' classes are ignored."""
    gradient, scores, target, weight, reduction, ignored, total_weight = local.args
    size = emitter.meta(scores).shape[0 if len(emitter.meta(scores).shape) == 1 else 1]
    target = _local_targets(emitter, target, ignored, local.splits["c"], size)
    return (local.result(emitter, gradient, scores, target, weight, reduction, _IGNORED, total_weight),)
