"""Attention as products and a softmax, some heads at a time: where no fused kernel computes what is asked.

Backward computes the weights again from the logsumexp, as flash attention does, so that no scores stay in between.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from .call import Attending, Kernel, Pair, Triple, gradients, results, wide

PASSES = {2: 11, 5: 21}
"""How often a score is written or read, by the products of the call: two are forward, five backward."""

_SCORES = {"cpu": 1 << 19}
"""Scores at a time: on a CPU as many as its caches hold, elsewhere `_SCORES_MOST`."""
_SCORES_MOST = 1 << 26


def scores_at_a_time(device_type: str) -> int:
    return _SCORES.get(device_type, _SCORES_MOST)


def _at_a_time(shape: tuple[int, ...], key_heads: int, device_type: str) -> tuple[int, int]:
    """How many samples, and how many heads of keys, of scores [batch, heads, queries, keys] are computed at a time."""
    batch, heads, queries, keys = shape
    of_key_head = max(1, heads // key_heads * queries * keys)
    most = scores_at_a_time(device_type)
    chosen = min(key_heads, max(1, most // of_key_head))
    samples = max(1, most // (of_key_head * chosen)) if chosen == key_heads else 1
    return min(samples, batch), chosen


def workspace_bytes(
    shape: tuple[int, int, int, int],
    key_heads: int,
    widths: tuple[int, int],
    itemsize: int,
    device_type: str,
    *,
    backward: bool,
) -> int:
    """Bytes that a call with scores [batch, heads, queries, keys] has in memory at once beside operands and results.
    `widths` are those of queries and values."""
    _, heads, queries, keys = shape
    samples, chosen = _at_a_time(shape, key_heads, device_type)
    group, (width, value_width) = heads // key_heads, widths
    of_queries, of_keys = samples * chosen * group * queries, samples * chosen * keys
    both, wider = width + value_width, max(widths)
    elements = of_queries * keys * (2 if backward else 1)  # weights, and in backward those kept, or their gradients
    if group > 1:
        elements += of_keys * group * wider  # keys or values, expanded for a product
    if itemsize < 4:
        elements += (of_queries * (both if backward else width)) + of_keys * both
    if backward:  # queries and gradients by the scale, results of this part and of the one before
        elements += of_queries * (both + width) + of_keys * (both + value_width) + max(of_queries, of_keys) * width
    else:
        elements += of_queries * (width + 2 * value_width)
    return elements * max(4, itemsize)


Part = Callable[[torch.Tensor], torch.Tensor]
"""From a tensor [batch, heads or key heads, ...] to a view of a part: [samples, key heads, heads that share one, ...].
Dims of size 1 stay."""


def _parts(query: torch.Tensor, key: torch.Tensor) -> Iterator[Part]:
    batch, heads, key_heads = query.shape[0], query.shape[1], key.shape[1]
    samples, chosen = _at_a_time((batch, heads, query.shape[2], key.shape[2]), key_heads, query.device.type)

    def part_at(sample: int, head: int) -> Part:
        def part(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 1:
                x = x.narrow(0, sample, min(samples, batch - sample))
            x = x.view(x.shape[0], key_heads, -1, *x.shape[2:]) if x.shape[1] == heads > 1 else x.unsqueeze(2)
            return x.narrow(1, head, min(chosen, key_heads - head)) if x.shape[1] > 1 else x

        return part

    for sample in range(0, batch, samples):
        for head in range(0, key_heads, chosen):
            yield part_at(sample, head)


def _scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """[samples, key heads, group, queries, keys] of queries times the scale, masked."""
    scores = torch.matmul(query, key.transpose(-1, -2))
    if mask is not None:
        scores.add_(mask)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, -math.inf)
    return scores


def _of_rank_four(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))


def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Attending) -> Pair:
    out, logsumexp = results(query, value)
    dtype = wide(query.dtype)
    for part in _parts(query, key):
        q, k, v = (part(x).to(dtype) for x in (query, key, value))
        attended, sums = _forward(q * call.scale, k, v, _masked(call, part))
        part(out).copy_(attended)
        part(logsumexp).copy_(sums)
    return out, logsumexp


def _masked(call: Attending, part: Part) -> Attending:
    """The call with the masks of a part."""
    mask, kept = (None if x is None else part(x) for x in (_of_rank_four(call.mask), call.kept))
    return replace(call, mask=mask, kept=kept)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Attending) -> Pair:
    """Of one part. The scores live no longer than the call."""
    weights = _scores(q, k, call.mask, call.causal)
    highest = weights.amax(-1, keepdim=True)
    highest.masked_fill_(highest == -math.inf, 0.0)
    total = weights.sub_(highest).exp_().sum(-1, keepdim=True)
    total.masked_fill_(total == 0.0, 1.0)  # of a query that sees no key
    if call.kept is not None:
        weights.mul_(call.kept)
    attended = torch.matmul(weights, v).mul_(call.kept_scale / total)
    return attended, highest.add_(total.log_()).squeeze(-1)


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    call: Attending,
) -> Triple:
    of_all = gradients(query, key, value)
    dtype = wide(query.dtype)
    for part in _parts(query, key):
        q, k, v, of_out = (part(x).to(dtype) for x in (query, key, value, gradient))
        total = (of_out * part(out)).sum(-1, keepdim=True)
        statistics = part(logsumexp).unsqueeze(-1), total
        computed = _backward(q * call.scale, k, v, of_out * call.kept_scale, *statistics, _masked(call, part))
        for of_one, of_part in zip(of_all, computed, strict=True):
            part(of_one).copy_(of_part)
    return of_all


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    of_out: torch.Tensor,
    logsumexp: torch.Tensor,
    total: torch.Tensor,
    call: Attending,
) -> Triple:
    """Of one part. `total` is the sum over a row of the weights times their gradients."""
    weights = _scores(q, k, call.mask, call.causal).sub_(logsumexp).exp_()
    used = weights if call.kept is None else weights * call.kept
    of_value = torch.matmul(used.transpose(-1, -2), of_out).sum(2, keepdim=True)
    del used
    of_scores = torch.matmul(of_out, v.transpose(-1, -2))
    if call.kept is not None:
        of_scores.mul_(call.kept)
    of_scores.sub_(total).mul_(weights)
    del weights
    of_query = torch.matmul(of_scores, k).mul_(call.scale)
    return of_query, torch.matmul(of_scores.transpose(-1, -2), q).sum(2, keepdim=True), of_value


COMPOSED = Kernel(forward=forward, backward=backward)
