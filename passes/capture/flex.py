"""`flex_attention` while a step is recorded: attention under the mask that its block mask's function makes.

A `BlockMask` hides blocks of scores, and within others what a function of places says. One that `create_block_mask`
makes in forward hides what that function says and nothing else: the function is evaluated for all places, as torch
does, and of what it reads nothing is frozen. `passes.masks` knows what part of such a mask is an argument.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex

from autopar.compat.patching import patched

from .refusals import refuse

SCORED = (
    "flex_attention has a score_mod{line}, of which autopar knows no parts: give scaled_dot_product_attention what is "
    "added to the scores as attn_mask"
)
BLOCKS = (
    "flex_attention is given a BlockMask{line} that forward does not make by create_block_mask: autopar would have to "
    "freeze what it hides. Make it in forward, of tensors that are inputs"
)
STATISTICS = "flex_attention returns statistics of the scores{line} (return_lse or return_aux), which autopar does not"


_MAKERS = "_create_sparse_block_from_block_mask", "_create_empty_block_mask"


def _shown(make: Callable[..., flex.BlockMask]) -> Callable[..., flex.BlockMask]:
    """A function that makes a block mask, and notes with it that it hides what its mask function says alone."""

    def made(*args: Any, **kwargs: Any) -> flex.BlockMask:
        mask = make(*args, **kwargs)
        vars(mask.kv_num_blocks)["shown"] = mask.as_tuple()
        return mask

    return made


def _options(*given: Any) -> None:
    """In place of what chooses a kernel: of query, key, value, `return_lse`, options, `return_aux`."""
    if given[3] or given[5]:
        refuse(STATISTICS)


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, blocks: Any, scale: float, _: Any
) -> tuple[torch.Tensor, ...]:
    """In place of the kernel."""
    number, shows = blocks[2], blocks[-1]
    if score_mod is not flex._identity:
        refuse(SCORED)
    if list(map(id, vars(number).get("shown", ()))) != list(map(id, blocks)):
        refuse(BLOCKS)
    mask = None
    if shows is not flex.noop_mask:
        batch, heads, _ = number.shape
        mask = flex.create_mask(shows, batch, heads, query.shape[2], key.shape[2], query.device)
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return out, *out.new_empty(2, 0)


def flexible() -> contextlib.AbstractContextManager[None]:
    """Within it `flex_attention` is `scaled_dot_product_attention`, and raises CaptureError for what that cannot do."""
    parts = {
        "flex_attention_hop": _attended,
        "setup_compilation_env": contextlib.nullcontext,
        "_apply_kernel_options": _options,
        "_validate_device": lambda *_: None,  # eager has no backward on a CPU
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    made = {name: _shown(getattr(flex, name)) for name in _MAKERS if hasattr(flex, name)}
    # of a version of torch that lacks one, calls are torch's own, and a block mask is refused
    return patched(flex, **{name: part for name, part in parts.items() if hasattr(flex, name)}, **made)
