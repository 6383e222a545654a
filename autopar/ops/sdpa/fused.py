"""The fused kernels of attention that torch has on a CPU and on CUDA, each in the shapes and strides that it wants."""

import math

import torch
import torch.nn.functional as F

from autopar.ops.strides import contiguous

from .call import Attending, Kernel, Pair, Triple

aten = torch.ops.aten


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """With zeros behind along the last dim."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _narrow(x: torch.Tensor, width: int) -> torch.Tensor:
    """Without what is behind along the last dim."""
    return x if x.shape[-1] == width else x.narrow(-1, 0, width)


def _cpu_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Attending) -> Pair:
    width = max(query.shape[-1], value.shape[-1])  # the kernel has one width for all three
    given = [_widened(x, width) for x in (query, key, value)]
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        *given, 0.0, call.causal, attn_mask=call.mask, scale=call.scale
    )
    return _narrow(out, value.shape[-1]), contiguous(logsumexp)


def _cpu_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    call: Attending,
) -> Triple:
    width = max(query.shape[-1], value.shape[-1])
    given = [_widened(x, width) for x in (gradient, query, key, value, out)]
    results = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, logsumexp, 0.0, call.causal, attn_mask=call.mask, scale=call.scale
    )
    return _narrowed(results, query, value)


def _narrowed(gradients: Triple, query: torch.Tensor, value: torch.Tensor) -> Triple:
    of_query, of_key, of_value = gradients
    width = query.shape[-1]
    return _narrow(of_query, width), _narrow(of_key, width), _narrow(of_value, value.shape[-1])


# -- fused kernels on CUDA

ALIGNED = 8
"""Flash attention's widths, and cuDNN's, are multiples of this."""
ALIGNED_BIAS = 16
"""A row of a bias begins at a multiple of this many elements."""
ALIGNED_SUMS = 32
"""The efficient kernel's backward reads a logsumexp with so many queries, or a multiple."""


def round_up(size: int, to: int) -> int:
    return -(-size // to) * to


def _flash_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Attending) -> Pair:
    width = round_up(query.shape[-1], ALIGNED)
    given = [_widened(x, width) for x in (query, key, value)]
    out, logsumexp = aten._scaled_dot_product_flash_attention(*given, 0.0, call.causal, scale=call.scale)[:2]
    return _narrow(out, value.shape[-1]), logsumexp


def _flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    call: Attending,
) -> Triple:
    width = round_up(query.shape[-1], ALIGNED)
    given = [_widened(x, width) for x in (gradient, query, key, value, out)]
    # no sequences of several lengths, and no random numbers
    lengths = None, None, query.shape[-2], key.shape[-2]
    results = aten._scaled_dot_product_flash_attention_backward(
        *given, logsumexp, *lengths, 0.0, call.causal, *_no_numbers(query), scale=call.scale
    )
    return _narrowed(results, query, value)


def _no_numbers(query: torch.Tensor) -> Pair:
    """The state of a generator that nobody reads, as the kernels without dropout take it."""
    empty = torch.empty((2,), dtype=torch.uint64, device=query.device)
    return empty, torch.empty((), dtype=torch.uint64, device=query.device)


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask in the dtype and with the rows that the kernels read, expanded to all heads."""
    if mask is None:
        return None
    keys = key.shape[-2]
    shape = *query.shape[:-1], keys
    if mask.shape[-1] == 1:
        mask = mask.expand(*mask.shape[:-1], keys)
    rows = contiguous(_widened(mask.to(query.dtype), round_up(keys, ALIGNED_BIAS)))
    return _narrow(rows, keys).expand(shape)


def _blind(query: torch.Tensor, key: torch.Tensor, call: Attending) -> torch.Tensor | None:
    """Which queries see no key, to broadcast to [batch, heads, queries, 1]; None where all see one. Of these a kernel
    may make NaN."""
    mask = call.mask
    if mask is None:
        return None
    if call.causal:
        later = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=mask.device).triu_(1)
        mask = mask.masked_fill(later, -math.inf)
    return mask.amax(-1, keepdim=True) == -math.inf


def _seen(out: torch.Tensor, logsumexp: torch.Tensor, blind: torch.Tensor | None) -> Pair:
    """An output, and a logsumexp [batch, heads, queries], with 0 where a query sees no key: scores of -inf less a
    finite logsumexp have an exponential of 0, so that no gradient is NaN."""
    if blind is not None:
        out.masked_fill_(blind, 0.0)
        logsumexp.unsqueeze(-1).masked_fill_(blind, 0.0)
    return out, logsumexp


def _of_seeing(of_query: torch.Tensor, blind: torch.Tensor | None) -> torch.Tensor:
    """The gradient of queries, 0 of those that see no key."""
    return of_query if blind is None else of_query.masked_fill_(blind, 0.0)


def _of_all_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values with a head for each of the queries'."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _of_key_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Gradients of keys or values summed over the heads that share them."""
    return x if x.shape[1] == heads else x.view(x.shape[0], heads, -1, *x.shape[2:]).sum(2)


def _efficient_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Attending) -> Pair:
    heads, queries = query.shape[1:3]
    given = query, _of_all_heads(key, heads), _of_all_heads(value, heads)
    bias = _bias(query, key, call.mask)
    out, logsumexp = aten._scaled_dot_product_efficient_attention(
        *given, bias, True, 0.0, call.causal, scale=call.scale
    )[:2]
    return _seen(out, contiguous(_narrow(logsumexp, queries)), _blind(query, key, call))


def _efficient_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    call: Attending,
) -> Triple:
    heads, queries = query.shape[1:3]
    given = gradient, query, _of_all_heads(key, heads), _of_all_heads(value, heads)
    bias = _bias(query, key, call.mask)
    sums = F.pad(logsumexp, (0, round_up(queries, ALIGNED_SUMS) - queries), value=math.inf)
    wanted = [True, True, True, False]
    of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        *given, bias, out, sums, *_no_numbers(query), 0.0, wanted, call.causal, scale=call.scale
    )
    of_query = _of_seeing(of_query, _blind(query, key, call))
    return of_query, _of_key_heads(of_key, key.shape[1]), _of_key_heads(of_value, value.shape[1])


def _cudnn_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Attending) -> Pair:
    bias = _bias(query, key, call.mask)
    out, logsumexp = aten._scaled_dot_product_cudnn_attention(
        query, key, value, bias, True, 0.0, call.causal, False, scale=call.scale
    )[:2]
    return _seen(out, logsumexp.reshape(query.shape[:-1]), _blind(query, key, call))


def _cudnn_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    call: Attending,
) -> Triple:
    bias = _bias(query, key, call.mask)
    lengths = None, None, query.shape[-2], key.shape[-2]
    of_query, of_key, of_value = aten._scaled_dot_product_cudnn_attention_backward(
        gradient, query, key, value, out, logsumexp.unsqueeze(-1), *_no_numbers(query), bias, *lengths, 0.0,
        call.causal, scale=call.scale,
    )  # fmt: skip
    return _of_seeing(of_query, _blind(query, key, call)), of_key, of_value


FLASH_ON_CPU = Kernel(forward=_cpu_forward, backward=_cpu_backward)
FLASH = Kernel(forward=_flash_forward, backward=_flash_backward)
EFFICIENT = Kernel(forward=_efficient_forward, backward=_efficient_backward)
CUDNN = Kernel(forward=_cudnn_forward, backward=_cudnn_backward)
