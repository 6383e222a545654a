"""`flex_attention` and `varlen_attn` while a step is recorded: attention under a mask.

A `BlockMask` hides blocks of scores, and within others what a function of places says. One that `create_block_mask`
makes in forward hides what that function says and nothing else: the function is evaluated for all places, as torch
does, and of what it reads nothing is frozen. `varlen_attn` is told where documents begin, which makes a mask that
compares their numbers. `passes.masks` knows what part of such a mask is an argument.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex

from autopar.compat.attentions import IDENTITY, flex_is, noted, varlen_is

from .refusals import refuse

SCORED = (
    "flex_attention has a score_mod{line}, of which autopar knows no parts: give scaled_dot_product_attention what is "
    "added to the scores as attn_mask"
)
BLOCKS = (
    "flex_attention is given a BlockMask{line} that forward does not make by create_block_mask: autopar would have to "
    "freeze what it hides. Make it in forward, of tensors that are inputs"
)
STATISTICS = "attention returns statistics of the scores{line} (return_lse or return_aux), which autopar does not"
INFERRING = "varlen_attn is given what is for inference alone{line} (no cu_seq_k, seqused_k, block_table, num_splits)"
ALIGNED = (
    "varlen_attn is given a window of keys{line} whose borders are another tensor than those of the queries: give "
    "cu_seq_q for both"
)


def _options(*given: Any) -> None:
    """In place of what chooses a kernel: of query, key, value, `return_lse`, options, `return_aux`."""
    if given[3] or given[5]:
        refuse(STATISTICS)


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, blocks: Any, scale: float, _: Any
) -> tuple[torch.Tensor, ...]:
    """In place of the kernel."""
    number, shows = blocks[2], blocks[-1]
    if score_mod is not IDENTITY:
        refuse(SCORED)
    if list(map(id, noted(number))) != list(map(id, blocks)):
        refuse(BLOCKS)
    mask = None
    if shows is not flex.noop_mask:
        batch, heads, _ = number.shape
        mask = flex.create_mask(shows, batch, heads, query.shape[2], key.shape[2], query.device)
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return out, *out.new_empty(2, 0)


def _packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begins: torch.Tensor, of_keys: torch.Tensor, *more: Any
) -> tuple[torch.Tensor, ...]:
    """In place of the kernel for documents in a row: [tokens, heads, features], and where documents begin and end."""
    _, _, _, scale, (left, right), gqa, *inferring = more
    if of_keys is None or any(x is not None for x in inferring):
        refuse(INFERRING)
    if of_keys is not begins and (left, right) != (-1, -1):
        refuse(ALIGNED)

    def numbers(x: torch.Tensor, begins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(len(x), device=x.device)
        return places, (places[:, None] >= begins).sum(-1)

    (places, queries), (others, keys) = numbers(query, begins), numbers(key, of_keys)
    mask = queries[:, None] == keys
    if right >= 0:
        mask = mask & (others <= places[:, None] + right)
    if left >= 0:
        mask = mask & (others >= places[:, None] - left)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, mask[None, None], scale=scale, enable_gqa=gqa)[0].transpose(0, 1)
    return out, *out.new_empty(2, 0)


@contextlib.contextmanager
def flexible() -> Iterator[None]:
    """Within it both are `scaled_dot_product_attention`, and raise CaptureError for what that cannot do."""
    with flex_is(_attended, _options), varlen_is(_packed, lambda: refuse(STATISTICS)):
        yield
