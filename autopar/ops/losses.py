"""Losses: their rules, and negative log-likelihood with the classes or the tokens split."""

from dataclasses import replace

import torch
from torch import Tensor

from .bounds import checked
from .expansions import NARROW, LocalCall, Results, all_reduce, local_indices, wide
from .families import DIMS, FIRST
from .rule import Call, OpRule
from .template import OWN_PART, Dim, Named, assemble

NONE, MEAN, SUM = 0, 1, 2
"""The values of a loss's argument `reduction`."""

_IGNORED = -1
"""Replaces a target that is ignored, or another rank's class."""


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
    token = Dim(
        expands=reduction == MEAN, even=False, reductions=over_tokens, padding={1: call.argument("ignore_index")}
    )
    dims = {**dict.fromkeys(tokens, token), "c": replace(OWN_PART, reductions=over_classes)}
    return assemble(call, inputs[: len(call.inputs)], [tokens if reduction == NONE else (), ()], dims)


def nll_backward(call: Call) -> OpRule:
    """Backward of `nll`: the total weight comes in, so that only the classes expand."""
    names = _scores(len(call.inputs[1].shape))
    tokens = [name for name in names if name != "c"]
    gradient = tokens if call.argument("reduction") == NONE else []
    weight: list[Named] = [] if call.argument("weight") is None else [["c"]]
    return assemble(call, [gradient, names, tokens, *weight, []], [names], {"c": OWN_PART}, FIRST)


def _scores(rank: int) -> list[str]:
    """Names of the dims of the scores: [c], [n, c] or [n, c, d...]."""
    return ["c"] if rank == 1 else ["n", "c", *DIMS[: rank - 2]]


def nll_on_shards(local: LocalCall) -> Results:
    """nll_loss forward: each rank sums over its tokens and classes. A mean divides by the total weight of
    all ranks' tokens: one all-reduce of two numbers, the sum and its weight. A rank whose labels are all
    ignored adds zero to both."""
    scores, target, weight, reduction, ignored = local.args
    classes = local.splits.get("c", ())
    tokens = local.axes(lambda name: name != "c")
    exact = torch.float32 if scores.dtype in NARROW else scores.dtype
    counted = None
    if weight is None and (classes or scores.dtype in NARROW):
        # each token is in the classes of one rank only, but it counts on all, and exactly
        counted = (target != ignored).sum(dtype=exact)
    if classes:
        dim = 0 if scores.ndim == 1 else 1
        target = checked(target, local.call.inputs[0].shape[dim], ignored=ignored)
        target, ignored = _local_targets(local, target, ignored, scores.shape[dim]), _IGNORED
    total, weights = local.result(scores, target, weight, SUM if reduction == MEAN else reduction, ignored)
    if reduction == NONE and scores.ndim > 1:
        return total, weights
    counted = weights if counted is None else counted
    if reduction != MEAN:
        return total, counted.to(scores.dtype)
    shared = tokens if weight is None else (*tokens, *classes)
    if shared:
        total, counted = all_reduce(torch.stack((wide(total), wide(counted))), "sum", shared)
    return (total / counted).to(scores.dtype), counted.to(scores.dtype)


def _local_targets(local: LocalCall, target: Tensor, ignored: int, classes: int) -> Tensor:
    row, mine = local_indices(local, target, local.splits["c"], classes)
    mine = torch.logical_and(mine, target != ignored)
    return row.masked_fill(mine.logical_not(), _IGNORED)


def nll_backward_on_shards(local: LocalCall) -> Results:
    """nll_loss backward with the classes split: other ranks' classes are ignored."""
    gradient, scores, target, weight, reduction, ignored, total_weight = local.args
    target = _local_targets(local, target, ignored, scores.shape[0 if scores.ndim == 1 else 1])
    return local.result(gradient, scores, target, weight, reduction, _IGNORED, total_weight)
