"""Regions: the instructions that a cut of one value reaches, and how each of their operands and results is cut.

A part is a digit of an index, as a rank's share is (`layout`): part s of a value that is cut by `Split(dim, period)`
has the indices i of `dim` with (i mod period) // (period / parts) == s. So rules, views and collectives say where a cut
of one value goes, as they do for shards, and an instruction runs on a part as an operator does on a shard. Where a cut
dim is summed over, the parts add up (`Partial`). Period = size are parts of consecutive indices; a smaller one
takes every so many-th block, which is MeshSlice's blocked slicing (Algorithm 2).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import CONTIGUOUS, VIEWS, WAIT, Node, TensorMeta, is_view
from autopar.ir.layout import PARTIAL, REPLICATE, Partial, Placement, Split
from autopar.ir.program import has_rank
from autopar.ops.emit import expands
from autopar.ops.kinds import ADDING
from autopar.ops.rule import Call, OpRule, call_of
from autopar.ops.rules import rule_of
from autopar.passes.space.collapse import from_root, step_of, to_root

DIM_0 = ("all_gather", "reduce_scatter", "all_to_all")
"""Collectives along dim 0, whose shares are its outermost digit: a cut below it is one of operand and result."""

SAME = ("all_reduce", "shift", "rotate", "broadcast")
"""Collectives of which an element depends on the same element of all ranks."""

Metas = Mapping[str, TensorMeta]


class Refused(ValueError):
    """Why a stretch is left as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Instructions, by position in their half and in its order, that run in `parts` parts; `cuts` says how each of
    their operands and results is cut."""

    members: tuple[int, ...]
    cuts: Mapping[str, Placement]
    parts: int


def spread(half: Sequence[Node], metas: Metas, members: Iterable[int], seed: str, cut: Split, parts: int) -> Region:
    """The region of those of `members` that a cut of the value `seed` reaches, along their operands and results.

    Raises Refused where a member cannot run in parts.
    """
    cuts: dict[str, Placement] = {}
    _add(cuts, metas, seed, cut, parts)
    waiting = sorted(set(members))
    reached: set[int] = set()
    going = True
    while going:
        going = False
        for position in waiting:
            instruction = half[position]
            values = {name for name in (*instruction.inputs, *instruction.outputs) if name}
            if position in reached or not any(isinstance(cuts.get(name), Split) for name in values):
                continue
            for name, placement in through(instruction, metas, cuts, parts).items():
                going |= _add(cuts, metas, name, placement, parts)
            reached.add(position)
            going = True
    for position in reached:
        for name in half[position].inputs:
            if isinstance(cuts[name], Partial):
                raise Refused(f"{half[position].op} reads {name}, which is a sum over parts")
    return Region(members=tuple(sorted(reached)), cuts=cuts, parts=parts)


def _add(cuts: dict[str, Placement], metas: Metas, name: str, placement: Placement, parts: int) -> bool:
    """Whether it is news."""
    if isinstance(placement, Split):
        size = metas[name].shape[placement.dim]
        if placement.period % parts or size % placement.period:
            raise Refused(f"dim {placement.dim} of {name}, {size} long, is not to be cut in {parts} equal parts")
    before = cuts.setdefault(name, placement)
    if before != placement:
        raise Refused(f"{name} would be cut as {before} and as {placement}")
    return before is placement


def through(instruction: Node, metas: Metas, cuts: Mapping[str, Placement], parts: int) -> dict[str, Placement]:
    """How all values of an instruction are cut where one of them is, as `cuts` says. Raises Refused."""
    if instruction.op == WAIT or instruction.collective or instruction.op in (CONTIGUOUS, *VIEWS):
        source, result = instruction.inputs[0], instruction.outputs[0]
        if len(instruction.inputs) > 1:
            raise Refused(f"{instruction.op} has as many rows as happen to come at run time")
        cut = cuts.get(source)
        if isinstance(cut, Split):
            return {source: cut, result: _passed(instruction, metas, cut, parts, True)}
        cut = cuts[result]
        assert isinstance(cut, Split)
        return {result: cut, source: _passed(instruction, metas, cut, parts, False)}
    call = local_call(instruction, metas)
    if None in call.outputs:
        raise Refused(f"{instruction.op} makes some of its results only")
    rule = rule_of(call)
    if rule is None or rule.routing is not None:
        raise Refused(f"{instruction.op} has no rule that says how its dims go together")
    number, period = _digit(instruction, cuts, rule)
    factor = rule.factors[number]
    if not factor.may_split(period, parts) or period > factor.size:
        raise Refused(f"{instruction.op} cannot be cut along {factor.name} with period {period}")
    if expands(rule, ((factor.name, (0,)),)) and adding(instruction.op) is None:
        raise Refused(f"{instruction.op} is another operator on a part of {factor.name}")
    placements: dict[str, Placement] = {}
    for i, name in enumerate(instruction.inputs):
        _one(placements, instruction, name, rule.input_splits(i, number, period), REPLICATE)
    for i, name in enumerate(instruction.outputs):
        if name:
            reduction = factor.reductions[i]
            if reduction not in ("", "sum"):
                raise Refused(f"{instruction.op} takes the {reduction} over {factor.name}")
            splits = rule.output_splits(i, number, period)
            if not splits and not reduction:
                raise Refused(f"{instruction.op} makes {name} of parts, and it is no sum of them")
            _one(placements, instruction, name, splits, PARTIAL)
    return placements


def _digit(instruction: Node, cuts: Mapping[str, Placement], rule: OpRule) -> tuple[int, int]:
    """The factor and the period by which the first value of an instruction that is cut is cut. Raises Refused."""
    for i, name in enumerate(instruction.inputs):
        if isinstance(cut := cuts.get(name), Split):
            if (digit := rule.input_factor(i, cut)) is None:
                raise Refused(f"{instruction.op} needs dim {cut.dim} of {name} unsplit")
            return digit
    for i, name in enumerate(instruction.outputs):
        if isinstance(cut := cuts.get(name), Split):
            if (digit := rule.output_factor(i, cut)) is None:
                raise Refused(f"{instruction.op} makes dim {cut.dim} of {name} unsplit")
            return digit
    raise AssertionError(f"no value of {instruction.op} is cut")


def _one(
    placements: dict[str, Placement], instruction: Node, name: str, splits: tuple[Split, ...], other: Placement
) -> None:
    if len(splits) > 1:
        raise Refused(f"{instruction.op} has one factor on two dims of {name}")
    placement = splits[0] if splits else other
    if placements.setdefault(name, placement) != placement:
        raise Refused(f"{instruction.op} reads {name} twice, cut in two ways")


def _passed(instruction: Node, metas: Metas, cut: Split, parts: int, ahead: bool) -> Split:
    """Where a cut goes through a view or a collective, from operand to result (`ahead`) or back."""
    before, after = metas[instruction.inputs[0]].shape, metas[instruction.outputs[0]].shape
    if is_view(instruction):
        step = step_of(instruction, metas)
        moved = (from_root if ahead else to_root)((step,), (cut,), (parts,))
        if moved is None or not isinstance(moved[0], Split):
            raise Refused(f"a view from {before} to {after} takes the digit {cut} apart")
        return moved[0]
    kind = instruction.collective
    if kind in DIM_0 and cut.dim == 0:
        share = min(before[0], after[0])
        if kind == "all_to_all":  # it does not say over how many ranks
            raise Refused(f"{instruction.op} is cut along dim 0")
        if share % cut.period:
            raise Refused(f"{kind} sends shares of {share} rows, and a cut of period {cut.period} goes through several")
    elif kind is not None and kind not in (*DIM_0, *SAME):
        raise Refused(f"a {kind} does not run in parts")
    return cut


def local_call(instruction: Node, metas: Metas) -> Call:
    if has_rank(instruction):
        raise Refused(f"{instruction.op} depends on the rank")
    return call_of(instruction, metas)


def adding(op: str) -> str | None:
    """The op that adds the same product to another first operand, or None."""
    return op if op in ADDING.values() else ADDING.get(op)


def factors_of(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What such an op multiplies."""
    return args[1:] if op in ADDING.values() else args
