"""Which kernel torch chooses."""

import torch
from torch.backends.cuda import SDPAParams
from torch.utils._python_dispatch import _disable_current_modes


def attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> str:
    """The fused kernel of attention that torch would choose where gradients will be asked for, by dtype, shape and
    mask, by what the machine has, and by what the user allows (`torch.nn.attention.sdpa_kernel`); "composed" for
    none."""
    with torch.enable_grad():
        asked = query.detach().requires_grad_()
        grouped = query.shape[1] != key.shape[1]
        choice = torch._fused_sdp_choice(asked, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
        if not choice and grouped:
            # the efficient kernel takes a head of keys for each of queries, and is given them so: views tell torch
            keys, values = (x[:, :1].expand(-1, query.shape[1], -1, -1) for x in (key, value))
            given = SDPAParams(asked, keys, values, mask, 0.0, causal, False)
            return "efficient" if torch.backends.cuda.can_use_efficient_attention(given) else "composed"
    return {1: "flash", 2: "efficient", 3: "cudnn"}.get(choice, "composed")


def keeps_result(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> bool:
    """Whether torch's `scaled_dot_product_attention` of such tensors, fakes as well, is a fused kernel, whose backward
    reads the result of forward."""
    with _disable_current_modes():
        if query.is_cuda and not torch.cuda.is_available():
            return not dropout
        q, k, v = map(_alike, (query, key, value))
        added = None if mask is None else _alike(mask)
        return bool(torch._fused_sdp_choice(q, k, v, added, dropout, causal, scale=scale, enable_gqa=grouped))


def _alike(x: torch.Tensor) -> torch.Tensor:
    """A real tensor of the shape, of which one row is in memory."""
    row = torch.empty(x.shape[-1:], dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)
    return row.expand(x.shape)
