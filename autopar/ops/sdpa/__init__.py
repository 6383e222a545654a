"""Scaled dot-product attention as one operator of every device, `autopar::attention`, and its backward.

    output = dropout(softmax(query key^T * scale + mask)) value

What a graph holds says nothing of a device. The kernel is chosen when the operator runs: flash attention on a CPU; on
CUDA flash, cuDNN's or memory-efficient attention, as torch would choose by dtype, shape and mask; and where no fused
kernel computes what is asked (dropout by a mask, float64 on CUDA) products and a softmax, some heads at a time. Between
forward and backward stands the logsumexp alone, so that each may run in any kernel, and on shards of keys.

Shapes: query [batch, heads, queries, width], key [batch, key heads, keys, width], value [batch, key heads, keys,
value width], of one floating dtype; heads are a multiple of key heads. `attn_mask` is added to the scores and broadcast
to [batch, heads, queries, keys]. `is_causal` hides keys behind a query's own place, both counted from the start, where
the first query stands `offset` places behind the first key: shards of a causal call are causal calls.
`dropout_mask`, bool [batch, heads, queries, keys], says which weights are kept; these are divided by 1 - dropout_p.
`query_documents` and `key_documents`, integers of one dtype, [batch or 1, queries] and [batch or 1, keys], number the
documents that lie in a row: a query sees the keys of its own number.
The logsumexp of the scores is [batch, heads, queries], in float32 or, of float64, in float64. A query that sees no key
has an output of 0, and a logsumexp of -inf if it comes before all keys, or by documents.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopar.compat.kernels import attention_kernel
from autopar.compat.tensors import is_fake
from autopar.ir.own import define

from . import bands
from . import call as rooms
from .call import Attending, Kernel, Pair, Triple
from .composed import COMPOSED
from .fused import CUDNN, EFFICIENT, FLASH, FLASH_ON_CPU

ATTENTION, ATTENTION_BACKWARD = "autopar.attention.default", "autopar.attention_backward.default"

DOCUMENTS = "query_documents", "key_documents"

KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {"flash on cpu": FLASH_ON_CPU, "flash": FLASH, "efficient": EFFICIENT, "cudnn": CUDNN, "composed": COMPOSED}
)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    query_documents: torch.Tensor | None = None,
    key_documents: torch.Tensor | None = None,
    **named: Any,
) -> Pair:
    """Output [batch, heads, queries, value width] and logsumexp [batch, heads, queries]; `named` as in `_call`."""
    call, offset = _call(attn_mask, dropout_mask, query_documents, key_documents, **named)
    if call.documents or offset:
        return bands.forward(kernel_of, query, key, value, call, offset)
    return kernel_of(query, key, value, call).forward(query, key, value, call)


def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    query_documents: torch.Tensor | None = None,
    key_documents: torch.Tensor | None = None,
    **named: Any,
) -> Triple:
    """The gradients of query, key and value. Output and logsumexp may be those of more keys than are given here."""
    call, offset = _call(attn_mask, dropout_mask, query_documents, key_documents, **named)
    if call.documents or offset:
        return bands.backward(kernel_of, grad_out, (query, key, value), out, logsumexp, call, offset)
    return kernel_of(query, key, value, call).backward(grad_out, query, key, value, out, logsumexp, call)


def _call(
    mask: torch.Tensor | None,
    kept: torch.Tensor | None,
    of_queries: torch.Tensor | None,
    of_keys: torch.Tensor | None,
    *,
    scale: float,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    offset: int = 0,
) -> tuple[Attending, int]:
    kept_scale = 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)
    numbers = None if of_queries is None or of_keys is None else (of_queries, of_keys)
    call = Attending(mask=mask, kept=kept, causal=is_causal, scale=scale, kept_scale=kept_scale, documents=numbers)
    return call, offset * is_causal


def kernel_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Attending) -> Kernel:
    """The kernel that computes a call on the device of its tensors."""
    sizes = query.shape[-2:], (key.shape[-2], value.shape[-1])
    asked = call.causal, call.mask is not None, call.kept is not None
    expected = expected_kernel(query.device.type, query.dtype, *sizes, *asked)
    if query.is_cuda and call.kept is None and not is_fake(query):
        # torch itself refuses a mask beside a causal one, which the efficient kernel takes
        both = call.causal and call.mask is not None
        chosen = attention_kernel(query, key, value, call.mask, call.causal and not both, call.scale)
        return KERNELS[expected if both and chosen == "cudnn" else chosen]
    return KERNELS[expected]


def expected_kernel(
    device_type: str,
    dtype: torch.dtype,
    queries: tuple[int, ...],
    values: tuple[int, ...],
    causal: bool,
    masked: bool,
    dropped: bool,
) -> str:
    """The name of the kernel for queries [queries, width] and values [keys, width], with a mask, with dropout."""
    if dropped:
        return "composed"
    if device_type != "cuda":
        return "flash on cpu"
    half = dtype in (torch.float16, torch.bfloat16)
    (count, width), (keys, value_width) = queries, values
    if half and not masked and width == value_width <= 256 and (count == keys or not causal):
        return "flash"
    aligned = {2: 8, 4: 4}.get(dtype.itemsize)
    return "efficient" if aligned and width % aligned == value_width % aligned == 0 else "composed"


_ABOUT = (
    "Tensor? attn_mask=None, Tensor? dropout_mask=None, Tensor? query_documents=None, Tensor? key_documents=None, *, "
    "float scale, bool is_causal=False, float dropout_p=0.0, int offset=0"
)

OPERATORS: Mapping[Callable[..., Any], str] = {
    attention: f"(Tensor query, Tensor key, Tensor value, {_ABOUT}) -> (Tensor, Tensor)",
    attention_backward: (
        f"(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, {_ABOUT})"
        " -> (Tensor, Tensor, Tensor)"
    ),
}

define(OPERATORS)


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **named: object) -> Pair:
    return rooms.results(query, value)


def _fake_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **named: object
) -> Triple:
    return rooms.gradients(query, key, value)


torch.library.register_fake("autopar::attention", _fake)
torch.library.register_fake("autopar::attention_backward", _fake_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Pair) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:])
    ctx.named = keyword_only_inputs


def _differentiate(ctx: Any, grad_out: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
    query, key, value, out, logsumexp, *masks = ctx.saved_tensors
    gradients = torch.ops.autopar.attention_backward(grad_out, query, key, value, out, logsumexp, *masks, **ctx.named)
    return (*gradients, *(None for _ in masks))


torch.library.register_autograd("autopar::attention", _differentiate, setup_context=_save)
