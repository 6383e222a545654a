"""Attention: what can be split, and what a shard of queries or keys does.

Batch and heads are split as they are; of grouped heads, several of queries go with one of keys. Queries are
split with keys and values replicated (context parallel): under a causal mask each rank takes its own rows of the
mask, which it writes out. Keys and values are split with queries replicated: each rank attends to its keys, and the
parts are weighted by their sums of exponentials.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import TensorMeta
from autopar.ir.layout import padded_shape

from .expansions import LocalCall, Results, all_reduce, global_indices
from .families import Rule
from .rule import Call, OpRule
from .sdpa import composed
from .template import Dim, Linear, Name, Named, assemble, parse, roles, tensor_arguments


def attended(
    text: str,
    *,
    products: int,
    linear: Linear = (),
    over: tuple[str, ...] | None = None,
) -> Rule:
    """Attention by a template, forward or backward. Split keys expand always, since those that are padding are to be
    hidden, and split queries under a causal mask, which would mask a shard as if it came first.

    `products`: the matrix products of [queries, keys, width]; two forward, five backward. `over`: what a split of keys
    leaves of each result, by default a partial sum.
    """
    template = parse(text)

    def rule(call: Call) -> OpRule:
        metas = dict(zip(roles(call), call.inputs, strict=True))
        causal = call.argument("is_causal")
        inputs, outputs = template.bind(call)
        heads, keys = metas["key"].shape[1:3]
        rows = math.prod(metas["query"].shape[:3])
        masked = {i: -math.inf for i, role in enumerate(roles(call)) if role == "attn_mask"}
        assembled = assemble(
            call,
            [_named(names, meta, heads) for names, meta in zip(inputs, call.inputs, strict=True)],
            [_named(names, meta, heads) for names, meta in zip(outputs, call.outputs, strict=True)],
            {"q": Dim(expands=causal, even=False), "k": Dim(expands=True, even=False, reductions=over, padding=masked)},
            template.positions(call, linear),
        )
        return replace(
            assembled,
            flops=2.0 * products * metas["query"].numel * keys,
            inside_bytes=4.0 * composed.PASSES[products] * rows * keys if "dropout_mask" in metas else 0.0,
        )

    return rule


def _named(names: Named, meta: TensorMeta | None, heads: int) -> Named:
    """The names. Several heads of queries go with one of keys."""

    def named(name: Name, size: int) -> Name:
        if name == "h" and heads > 1 and size not in (1, heads):
            return ("h", size // heads)
        return name

    return list(map(named, names, meta.shape if meta else ()))


def _mask(local: LocalCall, causal: bool, given: Tensor | None) -> Tensor | None:
    """What is added to the scores of local queries and keys: 0 where a query may see a key, -inf elsewhere, and in
    padding."""
    metas = dict(zip(roles(local.call), zip(local.call.inputs, local.operands, strict=True), strict=True))
    (query, query_layout), (key, key_layout) = metas["query"], metas["key"]
    keys = key.shape[2]
    padded = padded_shape(key.shape, key_layout)[2] > keys
    if not causal and (not padded or (given is not None and given.shape[-1] > 1)):
        return given
    columns = global_indices(local, key.shape, key_layout, 2)
    hidden = columns >= keys if padded else None
    if causal:
        rows = global_indices(local, query.shape, query_layout, 2)
        later = columns > rows.unsqueeze(1)
        hidden = later if hidden is None else torch.logical_or(later, hidden)
    else:
        assert hidden is not None
        hidden = hidden.reshape(1, 1, 1, -1)
    mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, -math.inf)
    return mask if given is None else given + mask


def _with_mask(local: LocalCall) -> tuple[tuple[Any, ...], Tensor | None, dict[str, Any]]:
    """The tensors of a call in their order, among them the mask that shards need, the mask, and the other arguments."""
    tensors = tensor_arguments(local.call.node.op)
    given = dict(zip(tensors, local.args, strict=False))
    mask = _mask(local, local.call.argument("is_causal"), given.get("attn_mask"))
    given = {**given, "attn_mask": mask}
    return tuple(given.get(name) for name in tensors), mask, {**dict(local.kwargs), "is_causal": False}


def forward(local: LocalCall) -> Results:
    """With queries split under a causal mask, or with keys split: two all-reduces of [batch, heads, queries], of the
    largest logsumexp and of the sum of what stands behind them."""
    tensors, mask, named = _with_mask(local)
    output, logsumexp = local.result(*tensors, **named)
    if "k" not in local.splits:
        return output, logsumexp
    if mask is not None:
        # the op says 0 for queries that see no key
        logsumexp = logsumexp.masked_fill(mask.amax(-1) == -math.inf, -math.inf)
    highest = all_reduce(logsumexp, "max", local.splits["k"])
    if mask is not None:
        nowhere = highest == -math.inf
        highest = highest.masked_fill(nowhere, 0.0)
    powers = torch.exp(logsumexp - highest)
    total = all_reduce(powers, "sum", local.splits["k"])
    if mask is not None:
        total = total.masked_fill(nowhere, 1.0)
    part = output * (powers / total).unsqueeze(-1)
    return part.to(output.dtype), highest + torch.log(total)


def backward(local: LocalCall) -> Results:
    """Its backward. The logsumexp is that of all keys, so that each rank finds its own part of the probabilities."""
    tensors, _, named = _with_mask(local)
    return local.result(*tensors, **named)


def contiguous_rows(x: Tensor) -> Tensor:
    """The tensor, with neighbours along its last dim side by side."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()
