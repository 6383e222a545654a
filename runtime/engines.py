"""What inference engines hold: how tensors of a model are joined, split over engine ranks, repeated and padded there.

A layout is a text with a row for each tensor of the engine: its name, the dim that is split, and the tensors of the
model that are joined along it, each of which is split before. In names, `*` stands for what has no dot.

    model.layers.*.self_attn.qkv_proj.*  0  model.layers.*.self_attn.q_proj.*/num_attention_heads  ...

| after a name | says |
|---|---|
| `/8`, `/num_attention_heads` | the dim has so many units (heads), none of which is cut; or as the model's config says |
| `/2+` | where there are more engine ranks than units, several hold the same one; `/1+` is whole on each |
| `[0/2]` | the first of two equal parts of the dim |
| `%64` | zeros fill the dim up to a multiple of 64 |
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from autopar.ir.layout import Shape
from autopar.passes.capture.errors import listed

from .boxes import Box

VLLM = """
    model.embed_tokens.weight                0  model.embed_tokens.weight%64
    lm_head.weight                           0  lm_head.weight%64
    model.norm.weight                        0  model.norm.weight/1+
    model.layers.*.*layernorm.weight         0  model.layers.*.*layernorm.weight/1+
    model.layers.*.self_attn.*_norm.weight   0  model.layers.*.self_attn.*_norm.weight/1+
    model.layers.*.self_attn.qkv_proj.*      0  model.layers.*.self_attn.q_proj.*/num_attention_heads \
        model.layers.*.self_attn.k_proj.*/num_key_value_heads+ model.layers.*.self_attn.v_proj.*/num_key_value_heads+
    model.layers.*.self_attn.o_proj.weight   1  model.layers.*.self_attn.o_proj.weight/num_attention_heads
    model.layers.*.self_attn.o_proj.bias     0  model.layers.*.self_attn.o_proj.bias/1+
    model.layers.*.mlp.gate_up_proj.*        0  model.layers.*.mlp.gate_proj.*  model.layers.*.mlp.up_proj.*
    model.layers.*.mlp.down_proj.weight      1  model.layers.*.mlp.down_proj.weight
    model.layers.*.mlp.down_proj.bias        0  model.layers.*.mlp.down_proj.bias/1+
"""
"""vLLM's tensors of Llama and Qwen, as they are once they are loaded. A head that is tied is the embedding there."""

VLLM_EXPERTS = """
    model.layers.*.mlp.gate.weight         0  model.layers.*.mlp.gate.weight/1+
    model.layers.*.mlp.experts.w13_weight  1  model.layers.*.mlp.experts.gate_up_proj[0/2] \
        model.layers.*.mlp.experts.gate_up_proj[1/2]
    model.layers.*.mlp.experts.w2_weight   2  model.layers.*.mlp.experts.down_proj
"""
"""What its Qwen3-MoE has beside: the router, and all experts, each of them split."""

_PART = r"([^\s/%[]+)(?:\[(\d+)/(\d+)\])?(?:/(\w+)(\+?))?(?:%(\d+))?"
_ROW = re.compile(rf"(\S+)\s+(\d+)((?:\s+{_PART})+)")


class EngineShard(NamedTuple):
    """What an engine rank, which lives on rank `home` of the mesh, holds of a tensor."""

    name: str
    rank: int
    home: int
    shape: Shape
    dtype: torch.dtype
    sources: Sequence[tuple[str, Box]]
    """Names of the model's tensors, and the boxes of them that lie in it. Elsewhere it is zero."""


def engine_shards(
    layout: str,
    tensors: Mapping[str, torch.Tensor],
    width: int,
    homes: Sequence[int],
    config: Any = None,
    dtype: torch.dtype | None = None,
) -> Iterator[list[EngineShard]]:
    """Of each tensor of an engine of `width` ranks, in the order of the model's `tensors`, what is held on each of the
    `homes` of engine ranks: after the last of them, those of another copy. Floating point numbers become `dtype`, if
    one is given. Raises ValueError where layout, model and width do not fit."""
    rows = []
    for line in filter(None, map(str.strip, layout.splitlines())):
        if not (row := _ROW.fullmatch(line)):
            raise ValueError(f"{line!r} is no row of a layout: give a name, a dim, and names of the model's tensors")
        rows.append((row[1], int(row[2]), re.findall(_PART, row[3])))
    left = {*tensors}
    for first in tensors:
        for name, dim, parts in rows:
            match = re.fullmatch("([^.]+)".join(map(re.escape, parts[0][0].split("*"))), first)
            if match:
                made, *sources = (_named(each, match) for each in (name, *(part[0] for part in parts)))
                if lacking := [source for source in sources if source not in tensors]:
                    raise ValueError(f"{made} of the layout is made of {listed(lacking)}, which the model lacks")
                left -= {*sources}
                shapes = [tuple(tensors[source].shape) for source in sources]
                splits = [_split(made, dim, *each, width, config) for each in zip(shapes, parts, strict=True)]
                kind = dtype if dtype and tensors[first].is_floating_point() else tensors[first].dtype
                shards = []
                for slot, home in enumerate(homes):
                    held, boxes = 0, []
                    for source, shape, (begins, size, copies, share) in zip(sources, shapes, splits, strict=True):
                        at = slot % width // copies * share
                        if at < size:
                            origin = (0,) * len(shape)
                            box = Box(offsets=origin, sizes=shape, local=_with(origin, dim, held - begins - at))
                            boxes.append((source, box.narrow(dim, begins + at, min(share, size - at))))
                        held += share
                    whole = _with(shapes[0], dim, held)
                    shards.append(EngineShard(made, slot % width, home, whole, kind, boxes))
                yield shards
    if left:
        raise ValueError(f"the layout has no row for {listed(sorted(left))} of the model: add rows made of them")


def _named(pattern: str, match: re.Match[str]) -> str:
    return "".join(a + b for a, b in zip_longest(pattern.split("*"), match.groups(), fillvalue=""))


def _split(
    name: str, dim: int, shape: Shape, part: Sequence[str], width: int, config: Any
) -> tuple[int, int, int, int]:
    """Of a tensor, where the part begins that is split, its size, how many engine ranks hold the same of it, and how
    much each has, zeros included."""
    _, number, of, units, repeats, multiple = part
    size = shape[dim] // int(of or 1) if dim < len(shape) else 0
    padded = math.ceil(size / int(multiple or 1)) * int(multiple or 1)
    count = int(units) if units.isdigit() else getattr(config, units, 0) if units else padded
    copies = max(1, width // count) if repeats and count else 1
    if not count or padded % count or count * copies % width:
        raise ValueError(
            f"{name} of the layout: dim {dim} of {list(shape)} has {count} {units or 'elements'}, which {width} engine "
            f"ranks cannot have equally many of: give another width"
        )
    return int(number or 0) * size, size, copies, padded * copies // width


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
