"""`scaled_dot_product_attention`, as models call it, as the operator that graphs hold (see `autopar.ops.sdpa`).

Dropout draws which weights are kept as a tensor of its own, whose elements are functions of the seed and of the global
index. A mask of truth values becomes one that is added. Dims before the heads are one batch.
"""

import contextlib
import math
from collections.abc import Sequence

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from autopar.compat.autocast import cast_by_autocast
from autopar.compat.kernels import keeps_result
from autopar.compat.neutral import plain_attention, watched
from autopar.compat.tensors import is_differentiated
from autopar.ir.graph import overload
from autopar.ops.sdpa import ATTENTION

MASKS = (torch.bool, torch.float32)
"""Dtypes of masks beside the queries' own."""


def attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: query [*batch, heads, queries, width], key [*batch, heads,
    keys, width], value [*batch, heads, keys, value width], the mask broadcast to [*batch, heads, queries, keys].

    Operands that do not fit together raise what torch raises.
    """
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal = _of_causal_bias(attn_mask, is_causal, query.device)
    query, key, value, attn_mask = cast_by_autocast(query, key, value, attn_mask)
    if attn_mask is not None and not dropout_p and _reads_two_dims(attn_mask, (query, key, value), enable_gqa):
        raise IndexError(
            f"attn_mask has {attn_mask.dim()} dims, of which torch's fused attention reads the last two: give it those "
            f"of the scores, attn_mask[None]"
        )
    if dropout_p == 1:
        value, dropout_p = value * 0.0, 0.0  # no weight is kept, and torch draws no number
    tensors = query, key, value
    if attn_mask is not None and attn_mask.dtype not in (*MASKS, query.dtype):
        raise RuntimeError(
            f"Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
            f"{attn_mask.dtype} and query.dtype: {query.dtype} instead."
        )
    scores = _scores(tensors, enable_gqa)
    learned = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    in_transform = any(map(is_differentiated, tensors))
    if scores is None or learned or in_transform or not _fits(attn_mask, scores) or not 0 <= dropout_p <= 1:
        # a bias that is trained has a gradient of the size of the scores
        return plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    keeps = keeps_result(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not keeps:
        # matrix products and a softmax keep copies of these: what a model writes later is not what backward reads
        query, key = query.clone(), key.clone()
        copied = value.dtype.itemsize < 4 or value.shape[-3:-2] != scores[-3:-2]
        value = value.clone() if copied else value
        attn_mask = None if attn_mask is None else attn_mask.clone()
    batch = scores[:-3]
    q, k, v = (_of_rank_four(x, batch) for x in (query, key, value))
    if q.shape[1] == 1 < k.shape[1]:
        q = q.expand(-1, k.shape[1], -1, -1)
    kept = None
    if dropout_p:
        # not of a tensor that `vmap` maps, and not in place: either has no form of some randomness
        shape = *q.shape[:3], k.shape[2]
        kept = torch.empty(shape, dtype=torch.bool, device=q.device).bernoulli(1.0 - dropout_p)
    with contextlib.nullcontext() if keeps else watched():
        out, _ = overload(ATTENTION)(
            q, k, v, _mask(attn_mask, query.dtype, batch), kept,
            scale=query.shape[-1] ** -0.5 if scale is None else scale, is_causal=is_causal, dropout_p=dropout_p,
        )  # fmt: skip
    if not keeps:
        out = out.clone()
    result: torch.Tensor = out.reshape(*scores[:-1], value.shape[-1])
    return result


def _of_causal_bias(bias: CausalBias, causal: bool, device: torch.device) -> tuple[torch.Tensor | None, bool]:
    """The mask, and whether attention is causal, that `torch.nn.attention.bias` stands for."""
    if causal:
        raise ValueError("CausalBias should not be used with causal=True")
    queries, keys = bias.seq_len_q, bias.seq_len_kv
    if queries == keys or bias.variant == CausalVariant.UPPER_LEFT:
        return None, True
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries), False


def _reads_two_dims(mask: torch.Tensor, tensors: Sequence[torch.Tensor], grouped: bool) -> bool:
    """Whether torch's fused kernel on a CPU takes such a call, in which the mask has less than the two dims that it
    reads: nothing is broadcast, and the mask has no gradient."""
    if mask.dim() > 1 or mask.requires_grad or any(x.dim() != 4 or not x.numel() for x in tensors):
        return False
    return len({x.shape[0] if grouped else x.shape[:2] for x in tensors}) == 1


def _scores(tensors: Sequence[torch.Tensor], grouped: bool) -> tuple[int, ...] | None:
    """The shape of the scores, [*batch, heads, queries, keys]; None where the operator does not compute such a call."""
    query, key, value = tensors
    if not query.is_floating_point() or any(x.dtype != query.dtype or x.dim() < 2 or not x.numel() for x in tensors):
        return None
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return None
    heads, *of_keys = (x.shape[-3] if x.dim() > 2 else 1 for x in tensors)
    shares = heads % of_keys[0] == 0 if grouped else of_keys[0] in (1, heads) or heads == 1
    if len({*of_keys}) > 1 or not shares:
        return None
    try:
        batch: tuple[int, ...] = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    shape = *batch, max(heads, of_keys[0]), query.shape[-2], key.shape[-2]
    return shape if max(x.dim() for x in tensors) > 2 else shape[1:]


def _of_rank_four(x: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    x = x.unsqueeze(0) if x.dim() == 2 else x
    if len(batch) == 1 and x.shape[:-3] == batch:
        return x
    return x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:])


def _fits(mask: torch.Tensor | None, scores: tuple[int, ...]) -> bool:
    """Whether a mask can be added to the scores."""
    if mask is None:
        return True
    sizes = zip(reversed(mask.shape), reversed(scores), strict=False)
    return 2 <= mask.dim() <= len(scores) and all(size in (1, of) for size, of in sizes)


def _mask(mask: torch.Tensor | None, dtype: torch.dtype, batch: tuple[int, ...]) -> torch.Tensor | None:
    """What is added to the scores, of rank 2 or 4."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        hidden, seen = (torch.scalar_tensor(x, dtype=dtype, device=mask.device) for x in (-math.inf, 0.0))
        mask = torch.where(mask, seen, hidden)
    if mask.dim() == 3:
        return mask.unsqueeze(0)
    return mask if mask.dim() == 2 or len(batch) == 1 else _of_rank_four(mask, batch)
