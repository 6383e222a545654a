"""What inference engines hold: how tensors of a model are joined, split over engine ranks, repeated and padded there.

A layout is a text with a row for each tensor of the engine: its name, the dim that is split, and the tensors of the
model that are joined along it, each of which is split before. In names, `*` stands for what has no dot.

    model.layers.*.self_attn.qkv_proj.*  0  model.layers.*.self_attn.q_proj.*/num_attention_heads  ...

| after a name | says |
|---|---|
| `/8`, `/num_attention_heads` | the dim has so many units (heads), none of which is cut, or as the config says |
| `/2+` | where there are more engine ranks than units, several hold the same one; `/1+` is whole on each |
| `[0/2]` | the first of two equal parts of the dim |
| `%64` | zeros fill the dim up to a multiple of 64 |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autopar.ir.layout import Shape
from autopar.passes.capture.errors import listed

from .boxes import Box, IndexRange, changed

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
_ROW = re.compile(rf"^ *(\S+) +(\d+)((?: +{_PART})+) *$", re.MULTILINE)


class EngineTensor(NamedTuple):
    """A tensor of which each engine rank holds one of this shape."""

    name: str
    shape: Shape
    sources: Sequence[str]
    """The model's tensors that it is made of."""
    ranks: Sequence[Sequence[tuple[str, Box]]]
    """By engine rank: the boxes of sources that lie in it. Elsewhere it is zero."""


def engine_tensors(layout: str, tensors: Mapping[str, torch.Tensor], width: int, config: Any) -> Iterator[EngineTensor]:
    """Those of an engine of `width` ranks, in the order of the model's tensors. Raises ValueError where layout, model
    and width do not fit."""
    if other := _ROW.sub("", layout).strip():
        raise ValueError(f"{other!r} is no row of a layout: give a name, a dim, and names of the model's tensors")
    left = {*tensors}
    for first in tensors:
        for row in _ROW.finditer(layout):
            dim, parts = int(row[2]), re.findall(_PART, row[3])
            match = re.fullmatch(re.escape(parts[0][0]).replace(r"\*", "([^.]+)"), first)
            if not match:
                continue
            stars = [*match.groups(), *[""] * row[0].count("*")]
            name, *sources = (each.replace("*", "{}").format(*stars) for each in (row[1], *(part[0] for part in parts)))
            if lacking := {*sources} - {*tensors}:
                raise ValueError(f"{name} of the layout is made of {listed(sorted(lacking))}, which the model lacks")
            left -= {*sources}
            held, boxes = 0, [list[Any]() for _ in range(width)]
            for source, (_, number, of, units, repeats, multiple) in zip(sources, parts, strict=True):
                shape = tuple(tensors[source].shape)
                size, odd = divmod(sum(shape[dim : dim + 1]), int(of or 1))  # 0 for a dim that is not there
                padded = size + -size % int(multiple or 1)
                count = int(units) if units.isdigit() else getattr(config, units) if units else padded
                copies = max(1, len(repeats) * width // max(1, count))
                elsewhere = changed(shape, dim, 0) != changed(tuple(tensors[sources[0]].shape), dim, 0)
                if not size or odd or padded % count or count * copies % width or elsewhere:
                    raise ValueError(
                        f"{name} of the layout: dim {dim} of {source} {list(shape)}, {count} {units or 'elements'}, "
                        f"cannot be split evenly over {width} engine ranks and joined: give another width or dim"
                    )
                share = padded * copies // width
                for rank, mine in enumerate(boxes):
                    begin = rank // copies * share
                    if begin < size:
                        whole = tuple(IndexRange(0, n, 0) for n in shape)
                        run = IndexRange(int(number or 0) * size + begin, min(share, size - begin), held)
                        mine.append((source, Box(changed(whole, dim, run))))
                held += share
            yield EngineTensor(name, changed(shape, dim, held), sources, boxes)
    if left:
        raise ValueError(f"the layout has no row for {listed(sorted(left))} of the model: add rows made of them")
