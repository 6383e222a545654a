"""Operator layouts: how an operator's operands and results lie under a choice, by its rule."""

import math

from autopar.ir.layout import PARTIAL, REPLICATE, Layout, Partial, Placement, Routed, Shape, Split, is_legal, nest
from autopar.ops.rule import ROUTED, Call, Dims, Factor, Load, OpRule, fullest

from .choices import AxisChoice, SiteChoice


def operator_layouts(
    call: Call, rule: OpRule, choice: SiteChoice, mesh: Shape, load: Load = ()
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]] | None:
    """Layouts of an op's operands and results, or None if they are not legal. Rows fall on experts as `load` says."""
    if sum(on_axis.routes for on_axis in choice.axes) > 1:
        return None  # the experts of rows lie along one axis
    operands = []
    for position in range(len(rule.inputs)):
        layout = operand_layout(position, choice, mesh, rule, load)
        if layout is None or not is_legal(call.inputs[position].shape, layout, mesh):
            return None
        operands.append(layout)
    results = []
    for position, meta in enumerate(call.outputs):
        layout = result_layout(position, choice, mesh, rule, load)
        if layout is None or (meta is not None and not is_legal(meta.shape, layout, mesh)):
            return None
        results.append(layout)
    if not all(factor.may_be_cut(_ranks(mesh, choice, i)) for i, factor in enumerate(rule.factors)):
        return None
    # a dim with a scale may have more indices than its factor
    if (rule.input_scales or rule.output_scales) and not all(
        _is_legal_split(i, factor, choice, mesh) for i, factor in enumerate(rule.factors)
    ):
        return None
    return tuple(operands), tuple(results)


def _is_legal_split(number: int, factor: Factor, choice: SiteChoice, mesh: Shape) -> bool:
    """Whether a factor may be split as a choice says, on all axes together."""
    splits = tuple(Split(0, c.period) if c.splits and c.factor == number else REPLICATE for c in choice.axes)
    return is_legal((factor.size,), nest(splits, mesh), mesh)


def _ranks(mesh: Shape, choice: SiteChoice, factor: int) -> int:
    """Over how many ranks a factor is split."""
    return math.prod(n for n, c in zip(mesh, choice.axes, strict=True) if (c.splits or c.routes) and c.factor == factor)


def operand_layout(position: int, choice: SiteChoice, mesh: Shape, rule: OpRule, load: Load = ()) -> Layout | None:
    """Layout of an operand: split where it carries the factor, partial where the linear set says so."""
    dims = rule.inputs[position]
    placements: list[Placement] = []
    for on_axis in choice.axes:
        if on_axis.splits or on_axis.routes:
            splits = _cut(rule.input_splits(position, on_axis.factor, on_axis.period), dims, on_axis, rule)
            if len(splits) > 1:
                return None
            placements.append(splits[0] if splits else REPLICATE)
        elif on_axis.is_partial:
            placements.append(PARTIAL if position in rule.linear[on_axis.factor] else REPLICATE)
        else:
            placements.append(REPLICATE)
    routing = rule.routing
    stay, replicated = (position in routing.settled, position in routing.replicated) if routing else (False, False)
    return _sent(nest(tuple(placements), mesh), dims, choice, rule, mesh, load, stay=stay, replicated=replicated)


def _cut(splits: tuple[Split, ...], dims: Dims, on_axis: AxisChoice, rule: OpRule) -> tuple[Split, ...]:
    """The splits of dims that a choice asks for. Where rows go to their experts, the experts are split."""
    experts = rule.routing.experts if on_axis.routes and rule.routing is not None else None
    if experts is None or experts not in dims:
        return splits
    return (Split(dims.index(experts), rule.factors[experts].size),)


def _sent(
    layout: Layout,
    dims: Dims,
    choice: SiteChoice,
    rule: OpRule,
    mesh: Shape,
    load: Load,
    *,
    stay: bool = False,
    replicated: bool = False,
) -> Layout | None:
    """The layout with the rows at their experts, on the axis that says so, where they fall as `load` says; None where
    the ranks of that axis are not where these experts are."""
    placements = list(layout)
    for axis, (on_axis, placement) in enumerate(zip(choice.axes, layout, strict=True)):
        if not on_axis.routes or not isinstance(placement, Split):
            continue
        if dims[placement.dim] != on_axis.factor:
            experts = dims[placement.dim]
            assert experts is not None
            if placement.period != rule.factors[experts].size:
                return None
        elif replicated:
            placements[axis] = REPLICATE
        elif not stay:
            placements[axis] = Routed(placement.dim, placement.period, fullest(load, mesh[axis]))
    return tuple(placements)


def result_layout(position: int, choice: SiteChoice, mesh: Shape, rule: OpRule, load: Load = ()) -> Layout | None:
    """Layout of a result: split where it carries the factor, else partial as the factor says."""
    dims = rule.outputs[position]
    placements: list[Placement] = []
    for on_axis in choice.axes:
        if on_axis.splits or on_axis.routes:
            splits = _cut(rule.output_splits(position, on_axis.factor, on_axis.period), dims, on_axis, rule)
            reduction = rule.factors[on_axis.factor].reductions[position]
            if len(splits) > 1:
                return None
            if splits:
                placements.append(splits[0])
            else:
                placements.append(Partial(reduction) if reduction else REPLICATE)
        else:
            placements.append(PARTIAL if on_axis.is_partial else REPLICATE)
    back = rule.routing is not None and position in rule.routing.returned
    return _sent(nest(tuple(placements), mesh), dims, choice, rule, mesh, load, stay=back)


def splits_of(rule: OpRule, choice: SiteChoice) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names of the split factors with the axes that split them, outermost first."""
    axes_of: dict[str, list[int]] = {}
    for axis, on_axis in enumerate(choice.axes):
        if on_axis.splits:
            axes_of.setdefault(rule.factors[on_axis.factor].name, []).append(axis)
        elif on_axis.routes and rule.routing is not None:
            axes_of[ROUTED] = [axis]
            if rule.routing.experts is not None:
                axes_of.setdefault(rule.factors[rule.routing.experts].name, []).append(axis)
    return tuple((name, tuple(axes)) for name, axes in axes_of.items())
