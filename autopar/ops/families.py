"""Rules of op families whose dims depend on the arguments: one small function a family.

Each takes the arguments of the table's line and returns a function from a call to its rule.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from autopar.ir.graph import Ref

from .rule import Call, OpRule
from .template import Dim, Linear, Named, assemble, contraction_flops, parse

Rule = Callable[[Call], OpRule | None]

EACH: Linear = ((0,), (1,))
"""Linear in each of two operands."""
FIRST: Linear = ((0,),)
BOTH: Linear = ((0, 1),)

DIMS = tuple(f"d{i}" for i in range(64))


def from_template(
    text: str,
    dims: Mapping[str, Dim] = MappingProxyType({}),
    *,
    linear: Linear = (),
    flops: Callable[[Call], float] | None = None,
    contraction: bool = False,
) -> Rule:
    """The rule that a template says; `dims` holds what else is said of some of its names."""
    template = parse(text)

    def rule(call: Call) -> OpRule:
        inputs, outputs = template.bind(call)
        count = flops(call) if flops else contraction_flops(inputs, outputs, call) if contraction else 0.0
        assembled = assemble(call, inputs, outputs, dims, template.positions(call, linear))
        return replace(assembled, flops=count, contraction=contraction)

    return rule


def either(condition: Callable[[Call], Any], if_true: Rule, if_false: Rule) -> Rule:
    """One of two rules, by the call's arguments."""
    return lambda call: if_true(call) if condition(call) else if_false(call)


def aligned(call: Call) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Names of the dims of broadcast operands, aligned at the right: of the longest, and of each."""
    rank = max((len(meta.shape) for meta in (*call.inputs, *call.outputs) if meta), default=0)
    return DIMS[:rank], [DIMS[rank - len(meta.shape) : rank] for meta in call.inputs]


def pointwise(linear: Linear | Callable[[Call], Linear] = ()) -> Rule:
    """Broadcasting elementwise ops: dims are aligned at the right. A set of operands that holds a
    number in this call is not linear."""

    def rule(call: Call) -> OpRule:
        names, inputs = aligned(call)
        outputs = [names if meta else () for meta in call.outputs]
        sets = linear(call) if callable(linear) else linear
        return replace(assemble(call, inputs, outputs, linear=_of_tensors(call, sets)), elementwise=True)

    return rule


def _of_tensors(call: Call, linear: Linear) -> Linear:
    """Sets of argument positions as sets of operands, without those that hold a number here."""
    if not linear:
        return ()
    where: dict[int, int] = {}
    for position, value in enumerate(call.node.args):
        if isinstance(value, Ref):
            where[position] = len(where)
    return tuple(tuple(where[i] for i in operands) for operands in linear if all(i in where for i in operands))


def to_dtype(call: Call) -> Linear:
    """A conversion is linear unless it rounds to integers."""
    return FIRST if call.outputs[0] and call.outputs[0].dtype.is_floating_point else ()


def reduce(how: str, *, average: bool = False, linear: Linear = FIRST) -> Rule:
    """Reductions over `dim` (all dims without it). A split of a reduced dim is Partial(`how`); with
    `how` "" the reduced dims are unsplit. The average of a shard has to be divided by the
    number of shards: `average` ops expand."""

    def rule(call: Call) -> OpRule:
        # collectives have no maximum of truth values
        reduction = "" if how in ("max", "min") and call.inputs[0].dtype is torch.bool else how
        names, outputs, over = reduced_dims(call, split=bool(reduction))
        reduced = Dim(expands=average, even=False, reductions=(reduction,) * len(outputs))
        return assemble(call, [names], outputs, dict.fromkeys(over, reduced), linear)

    return rule


def reduced_dims(call: Call, *, split: bool) -> tuple[Named, list[Named], list[str]]:
    """Names of the dims of the operand, and of each output, of a reduction over `dim`; and the reduced factors. Without
    `split` the reduced dims are unsplit."""
    rank = len(call.inputs[0].shape)
    reduced = axes(call, "dim", rank)
    names = [None if d in reduced and not split else name for d, name in enumerate(DIMS[:rank])]
    kept = [None if d in reduced else name for d, name in enumerate(names) if keeps_dims(call) or d not in reduced]
    return names, [kept if meta else () for meta in call.outputs], [DIMS[d] for d in reduced]


def keeps_dims(call: Call) -> bool:
    """Whether reduced dims stay, with size 1."""
    return call.has("keepdim") and bool(call.argument("keepdim"))


def axes(call: Call, name: str, rank: int) -> tuple[int, ...]:
    """The dims in an argument, non-negative; all of them where it is absent, None or empty."""
    value = call.argument(name) if call.has(name) else None
    if value in (None, (), []):
        return tuple(range(rank))
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(sorted(v % rank for v in values)) if rank else ()


def along_dims(
    mixed_dims: Callable[[Call, int], Iterable[int]],
    *,
    linear: Linear | Callable[[Call], Linear] = (),
    name: str = "",
    padding: float | None = None,
) -> Rule:
    """Ops that mix elements along some dims only, all operands and results having the same dims.
    Those dims are unsplit, or, given a `name`, can be split because the op then expands; unevenly, where
    elements of the value `padding` change nothing."""

    def rule(call: Call) -> OpRule:
        rank = len(call.inputs[0].shape)
        mixed = {d % rank for d in mixed_dims(call, rank)} if rank else set()
        names = [(name or None) if i in mixed else DIMS[i] for i in range(rank)]
        filled = {} if padding is None else dict.fromkeys(range(len(call.inputs)), padding)
        return assemble(
            call,
            [names[rank - len(m.shape) :] for m in call.inputs],
            [names if meta else () for meta in call.outputs],
            {name: Dim(expands=True, even=padding is None, padding=filled)},
            linear(call) if callable(linear) else linear,
        )

    return rule


def the_dim(call: Call, rank: int) -> tuple[int, ...]:
    """The dim in the argument `dim`."""
    return (call.argument("dim"),)


def filled(call: Call) -> OpRule:
    """full, zeros, ones: every rank fills its part."""
    return assemble(call, [], [DIMS[: len(call.output.shape)]])
