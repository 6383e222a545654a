"""Attention: what can be split, and what a shard of queries or keys does.

Batch and heads are split as they are; of grouped heads, several of queries go with one of keys. Queries are split with
keys and values replicated (context parallel). Keys and values are split with queries replicated: each rank attends to
its keys, and the parts are weighted by their sums of exponentials. Where queries and keys are one sequence, both are
split together, and keys and values go around in a ring (Liu et al. 2023): a rank attends to one block after the other,
and in backward the gradients of a block travel with it.

Under a causal mask a shard is a causal call that begins at another place. The last shard of a sequence sees the most
keys; where the sequence is dealt out one by one, all see as many (striped attention, Brandon et al. 2023).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Layout, digits_of, padded_shape
from autopar.ir.program import RankIndex

from .expansions import LocalCall, Results, all_reduce, global_indices, wide
from .families import Rule
from .rule import Call, Factor, OpRule
from .sdpa import DOCUMENTS, composed
from .sdpa.bands import joined, offsets_of, seen
from .template import Dim, Linear, Name, Named, assemble, parse, roles, tensor_arguments
from .traced import arrived, started

RING = "s"
"""The factor that splits queries and keys together."""

SCORE = 32.0
"""Scores are mostly smaller: beside numbers whose digits are farther apart they count for nothing."""

LONG = 4
"""A sequence of so many times its heads' features, or more, may go around in a ring. Attention is then a third of a
layer's work (of 12 features squared a token)."""


def attended(
    text: str,
    *,
    products: int,
    linear: Linear = (),
    over: tuple[str, ...] | None = None,
) -> Rule:
    """Attention by a template, forward or backward. Split keys expand always, since those that are padding are to be
    hidden, and split queries under a causal mask, which would mask a shard as if it came first.

    `products`: the matrix products of [queries, keys, width]; two forward, five backward. Their flops are of the keys
    that a causal query sees, by the rank that sees the most. `over`: what a split of keys leaves of each result, by
    default a partial sum.
    """
    template = parse(text)

    def rule(call: Call) -> OpRule:
        metas = dict(zip(roles(call), call.inputs, strict=True))
        causal = call.argument("is_causal")
        inputs, outputs = template.bind(call)
        heads, keys = metas["key"].shape[1:3]
        queries, rows = metas["query"].shape[2], math.prod(metas["query"].shape[:3])
        features = metas["query"].shape[1] * metas["query"].shape[3]
        masked = {i: -math.inf for i, role in enumerate(roles(call)) if role == "attn_mask"}
        assembled = assemble(
            call,
            [_named(names, meta, heads) for names, meta in zip(inputs, call.inputs, strict=True)],
            [_named(names, meta, heads) for names, meta in zip(outputs, call.outputs, strict=True)],
            {"q": Dim(expands=causal, even=False), "k": Dim(expands=True, even=False, reductions=over, padding=masked)},
            template.positions(call, linear),
        )
        offsets = offsets_of(call.argument("offset"))
        share = max(seen(queries, keys, offset) for offset in set(offsets)) if causal else 1.0
        return replace(
            assembled,
            factors=(*assembled.factors, *_ring(assembled.factors, len(outputs), causal, queries >= LONG * features)),
            flops=2.0 * products * metas["query"].numel * keys * share,
            inside_bytes=4.0 * composed.PASSES[products] * rows * keys if "dropout_mask" in metas else 0.0,
        )

    return rule


def _ring(factors: Sequence[Factor], outputs: int, causal: bool, long: bool) -> tuple[Factor, ...]:
    """Queries and keys that are split together, where there are as many."""
    numbers = {factor.name: number for number, factor in enumerate(factors)}
    if not {"q", "k"} <= numbers.keys() or factors[numbers["q"]].size != factors[numbers["k"]].size:
        return ()
    of = numbers["q"], numbers["k"]
    size = factors[of[0]].size
    return (Factor(RING, size, ("",) * outputs, expands=True, of=of, striped=causal, offered=long),)


def _named(names: Named, meta: TensorMeta | None, heads: int) -> Named:
    """The names. Several heads of queries go with one of keys."""

    def named(name: Name, size: int) -> Name:
        if name == "h" and heads > 1 and size not in (1, heads):
            return ("h", size // heads)
        return name

    return list(map(named, names, meta.shape if meta else ()))


Places = Mapping[int, int]
"""Mesh axis -> how many places before this rank the block of keys comes from."""


def _from(local: LocalCall, places: Places, axis: int) -> int:
    """The coordinate, on a mesh axis, of the rank that a block of keys comes from: an int that differs by rank."""
    n, back = local.emitter.mesh[axis], places.get(axis, 0)
    if not back:
        return local.coordinate(axis)
    return cast(int, RankIndex(((axis, 1),), values=tuple((i - back) % n for i in range(n))))


def _offset(local: LocalCall, places: Places) -> int | None:
    """How far behind the first key of a block this rank's first query stands, in steps from one local query or key to
    the next: an int that differs by rank; None where they have no common step."""
    metas, mesh = _roles(local), local.emitter.mesh
    digits, steps = [], []
    for meta, layout in (metas["query"], metas["key"]):
        split = digits_of(layout, 2, mesh.__getitem__)
        size = padded_shape(meta.shape, layout)[2]
        digits.append(split)
        steps.append(_step(split, size, mesh))
    if steps[0] is None or steps[0] != steps[1]:
        return None
    axes = sorted({axis for split in digits for _, axis in split})
    values = []
    for coordinate in itertools.product(*(range(mesh[axis]) for axis in axes)):
        at = dict(zip(axes, coordinate, strict=True))
        first_query = sum(stride * at[axis] for stride, axis in digits[0])
        first_key = sum(stride * ((at[axis] - places.get(axis, 0)) % mesh[axis]) for stride, axis in digits[1])
        values.append((first_query - first_key) // steps[0])
    if len(set(values)) == 1:
        return values[0]
    terms = [(axis, math.prod(mesh[other] for other in axes[i + 1 :])) for i, axis in enumerate(axes)]
    return cast(int, RankIndex(tuple(terms), values=tuple(values)))


def _step(digits: Sequence[tuple[int, int]], size: int, mesh: Sequence[int]) -> int | None:
    """The distance between the neighbours of a dim's elements that a rank holds, if it is the same for all of them."""
    above = size
    for stride, axis in digits:  # outermost first: a run of elements
        if stride * mesh[axis] != above:
            break
        above = stride
    else:
        return 1
    below = 1
    for stride, axis in reversed(digits):  # innermost first: every so manyth
        if stride != below:
            return None
        below = stride * mesh[axis]
    return below


Roles = dict[str, tuple[TensorMeta, Layout]]


def _roles(local: LocalCall) -> Roles:
    """Name of an operand -> its global meta and its layout."""
    return dict(zip(roles(local.call), zip(local.call.inputs, local.operands, strict=True), strict=True))


Block = Mapping[str, Tensor]
"""What goes around of a rank: its keys and values, and what is said of keys whatever the query, by name."""


def _block(local: LocalCall) -> Block:
    mask = _roles(local).get("attn_mask")
    alike = RING in local.splits and mask is not None and mask[0].shape[-2] == 1 < mask[0].shape[-1]
    names = "key", "value", "key_documents", *["attn_mask"] * alike
    return {name: value for name, value in _tensors(local).items() if name in names}


def _tensors(local: LocalCall) -> dict[str, Any]:
    """The operands, by name."""
    given = (*zip(tensor_arguments(local.call.node.op), local.args, strict=False), *local.kwargs)
    return {name: value for name, value in given if name in _roles(local)}


def _masks(local: LocalCall, places: Places, block: Block) -> tuple[Tensor | None, Tensor | None, dict[str, Any]]:
    """For local queries and a block of keys: what is added to the scores (0 where a query may see a key, -inf elsewhere
    and in padding), which weights dropout keeps, and the other arguments."""
    metas, given = _roles(local), _tensors(local)
    (query, query_layout), (key, key_layout) = metas["query"], metas["key"]

    @cache
    def columns() -> Tensor:
        """The global numbers of the block's keys."""
        return global_indices(local, key.shape, key_layout, 2, lambda axis: _from(local, places, axis))

    mask = block["attn_mask"] if "attn_mask" in block else _of_block(local, given.get("attn_mask"), columns)
    kept = _of_block(local, given.get("dropout_mask"), columns)
    causal, keys, named = local.call.argument("is_causal"), key.shape[2], dict(local.kwargs)
    if "key_documents" in block:
        named |= {name: {**given, **block}[name] for name in DOCUMENTS}
    padded = padded_shape(key.shape, key_layout)[2] > keys
    if causal and mask is None and (query.shape[2] <= keys or not padded):
        offset = _offset(local, places)
        if offset is not None:
            return None, kept, {**named, "offset": offset}
    named["is_causal"] = False
    if not causal and (not padded or (mask is not None and mask.shape[-1] > 1)):
        return mask, kept, named
    hidden = columns() >= keys if padded else None
    if causal:
        rows = global_indices(local, query.shape, query_layout, 2)
        later = columns() > rows.unsqueeze(1)
        hidden = later if hidden is None else torch.logical_or(later, hidden)
    else:
        assert hidden is not None
        hidden = hidden.reshape(1, 1, 1, -1)
    added = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, -math.inf)
    return added if mask is None else mask + added, kept, named


def _of_block(local: LocalCall, mask: Tensor | None, columns: Callable[[], Tensor]) -> Tensor | None:
    """The columns of a mask that belong to a block of keys that goes around, by their global numbers."""
    if mask is None or RING not in local.splits or mask.shape[-1] == 1:
        return mask
    key, layout = _roles(local)["key"]
    if padded_shape(key.shape, layout)[2] == key.shape[2]:
        return mask.index_select(mask.ndim - 1, columns())
    beyond = columns() >= key.shape[2]
    block = mask.index_select(mask.ndim - 1, columns().masked_fill(beyond, 0))
    return block if mask.dtype == torch.bool else block.masked_fill(beyond, -math.inf)


Visit = Callable[[Places, Block], Sequence[Tensor]]
"""What is done with a block that comes from so many places before, and what its own rank is to have of it."""


def _around(local: LocalCall, block: Block, visit: Visit, axes: Sequence[int], places: Places) -> Sequence[Tensor]:
    """Visits the blocks of all ranks along mesh axes, as they go around in a ring, inner rings within outer ones.
    Returns the sums of what visits leave for this rank's own block, which go around with it."""
    if not axes:
        return visit(places, block)
    axis, *inner = axes
    left: Sequence[Tensor] = ()
    last = local.emitter.mesh[axis] - 1
    for step in range(last + 1):
        coming = {} if step == last else {name: _sent(value, axis) for name, value in block.items()}
        made = _around(local, block, visit, inner, {**places, axis: step})
        sums = [arrived(x) + one for x, one in zip(left, made, strict=True)] if left else made
        left = [_sent(x, axis) for x in sums]
        block = {name: arrived(value) for name, value in coming.items()}
    return [arrived(x) for x in left]


def _sent(value: Tensor, axis: int) -> Tensor:
    """Sets out to the next rank of a mesh axis."""
    sent: Tensor = started("rotate", value.contiguous(), 1, axis)
    return sent


def forward(local: LocalCall) -> Results:
    """With queries split under a causal mask, or with keys split. Of split keys, two all-reduces of [batch, heads,
    queries], of the largest logsumexp and of the sum of what stands behind them; in a ring, the parts are joined one
    by one."""
    query, documents = local.args[0], "key_documents" in _roles(local)
    made: list[tuple[Tensor, Tensor]] = []
    above: list[Tensor] = []
    alike: list[Tensor] = []
    blind = False

    def visit(places: Places, block: Block) -> Sequence[Tensor]:
        nonlocal blind
        mask, kept, named = _masks(local, places, block)
        output, sums = local.result(query, block["key"], block["value"], mask, kept, **named)
        level = mask.amax(-1) if mask is not None and local.splits.keys() & {"k", RING} else None
        if level is not None:
            # the op says 0 for queries that see no key
            sums = sums.masked_fill(level == -math.inf, -math.inf)
        blind = blind or mask is not None or named["is_causal"] or documents
        if RING in local.splits and "attn_mask" in _roles(local):
            highest = sums.clamp(min=torch.finfo(sums.dtype).min)
            if made:
                highest = torch.maximum(above[0], highest)
                made[:] = [(made[0][0], made[0][1] + (above[0] - highest))]
            above[:] = [highest]
            sums = sums - highest
        if level is not None and mask is not None and "attn_mask" in _roles(local):
            equal = _log_of_equal(mask, level, sums, block["key"].shape[2])
            if above:
                sums = sums + equal
            else:
                alike[:] = [equal]
        made[:] = [joined(made[0], (output, sums)) if made else (output, sums)]
        return ()

    _around(local, _block(local), visit, local.splits.get(RING, ()), {})
    output, sums = made[0]
    if above:
        sums = sums + above[0]
    dtype = local.call.output.dtype
    if "k" not in local.splits:
        if blind and not documents and RING in local.splits:
            sums = sums.masked_fill(sums == -math.inf, 0.0)
        return output.to(dtype), sums
    highest = all_reduce(sums, "max", local.splits["k"])
    if blind:
        nowhere = highest == -math.inf
        highest = highest.masked_fill(nowhere, 0.0)
    powers = torch.exp(sums - highest + alike[0] if alike else sums - highest)
    total = all_reduce(powers, "sum", local.splits["k"])
    if blind:
        total = total.masked_fill(nowhere, 1.0)
    part = output * (powers / total).unsqueeze(-1)
    sums = highest + torch.log(total)
    return part.to(dtype), sums.masked_fill(nowhere, -math.inf) if documents else sums


def _log_of_equal(mask: Tensor, level: Tensor, sums: Tensor, keys: int) -> Tensor:
    """What logsumexps lack where a mask leaves a query nothing but numbers beside which scores have no digits: it sees
    the keys of the largest, its `level`, alike, and their part of the sum is their count, of so many `keys`. 0 for all
    other queries."""
    equal = (mask == level.unsqueeze(-1)).to(sums.dtype).sum(-1) * (keys // mask.shape[-1])
    no_digits = level < -SCORE / torch.finfo(sums.dtype).eps
    return torch.where(no_digits, torch.log(equal), torch.zeros_like(equal))


def backward(local: LocalCall) -> Results:
    """Its backward. The logsumexp is that of all keys, so that each rank finds its own part of the probabilities."""
    gradient, query, *_, out, sums = local.args[:6]
    of_query: list[Tensor] = []

    def visit(places: Places, block: Block) -> Sequence[Tensor]:
        mask, kept, named = _masks(local, places, block)
        operands = query, block["key"], block["value"]
        made, *of_block = local.result(gradient, *operands, out, sums, mask, kept, **named)
        if RING in local.splits:
            made = wide(made)
        of_query[:] = [of_query[0] + made if of_query else made]
        return of_block

    of_key, of_value = _around(local, _block(local), visit, local.splits.get(RING, ()), {})
    return of_query[0].to(local.call.output.dtype), of_key, of_value


def contiguous_rows(x: Tensor) -> Tensor:
    """The tensor, with neighbours along its last dim side by side."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()
