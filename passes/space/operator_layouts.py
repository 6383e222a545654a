"""Operator layouts: how an operator's operands and results lie under a choice, by its rule."""

import math

from autopar.ir.layout import REPLICATE, Layout, Partial, Placement, Routed, Shape, Split, is_legal, nest
from autopar.ops.rule import ROUTED, Call, Dims, Factor, Load, OpRule, fullest

from .choices import AxisChoice, SiteChoice


def operator_layouts(
    call: Call, rule: OpRule, choice: SiteChoice, mesh: Shape, load: Load = ()
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]] | None:
    """Layouts of an op's operands and results, or None if they are not legal. Rows fall on experts as `load` says."""
    if sum(on_axis.routes for on_axis in choice.axes) > 1:
        return None  # the experts of rows lie along one axis
    if not rule.may_split_together({on_axis.factor for on_axis in choice.axes if on_axis.splits}):
        return None
    layouts = []
    for metas, results in ((call.inputs, False), (call.outputs, True)):
        of_values = value_layouts(rule, choice, mesh, load, results=results)
        if of_values is None or not all(
            meta is None or is_legal(meta.shape, layout, mesh) for meta, layout in zip(metas, of_values, strict=True)
        ):
            return None
        layouts.append(of_values)
    if not all(factor.may_be_cut(_ranks(mesh, choice, i)) for i, factor in enumerate(rule.factors)):
        return None
    # a dim with a scale may have more indices than its factor
    if (rule.input_scales or rule.output_scales) and not all(
        _is_legal_split(i, factor, choice, mesh) for i, factor in enumerate(rule.factors)
    ):
        return None
    return layouts[0], layouts[1]


def _is_legal_split(number: int, factor: Factor, choice: SiteChoice, mesh: Shape) -> bool:
    """Whether a factor may be split as a choice says, on all axes together."""
    splits = tuple(Split(0, c.period) if c.splits and c.factor == number else REPLICATE for c in choice.axes)
    return is_legal((factor.size,), nest(splits, mesh), mesh)


def _ranks(mesh: Shape, choice: SiteChoice, factor: int) -> int:
    """Over how many ranks a factor is split."""
    return math.prod(n for n, c in zip(mesh, choice.axes, strict=True) if (c.splits or c.routes) and c.factor == factor)


def value_layouts(
    rule: OpRule, choice: SiteChoice, mesh: Shape, load: Load = (), *, results: bool
) -> tuple[Layout, ...] | None:
    """Layouts of all operands, or all results: each is split where it carries the factor, a result else partial as the
    factor says, and a value of the linear set partial. None if one has no layout."""
    layouts = []
    for position, dims in enumerate(rule.outputs if results else rule.inputs):
        placements: list[Placement] = []
        for on_axis in choice.axes:
            number, reduction, splits = on_axis.factor, "", tuple[Split, ...]()
            if on_axis.splits or on_axis.routes:
                carried = rule.output_splits if results else rule.input_splits
                splits = _cut(carried(position, number, on_axis.period), dims, on_axis, rule)
                reduction = rule.factors[number].reductions[position] if results else ""
            elif on_axis.is_partial and (results or position in rule.linear[number]):
                reduction = "sum"
            if len(splits) > 1:
                return None
            placements.append(splits[0] if splits else Partial(reduction) if reduction else REPLICATE)
        layout = _sent(nest(tuple(placements), mesh), position, choice, rule, mesh, load, results=results)
        if layout is None:
            return None
        layouts.append(layout)
    return tuple(layouts)


def _cut(splits: tuple[Split, ...], dims: Dims, on_axis: AxisChoice, rule: OpRule) -> tuple[Split, ...]:
    """The splits of dims that a choice asks for. Where rows go to their experts, the experts are split."""
    experts = rule.routing.experts if on_axis.routes and rule.routing is not None else None
    if experts is None or experts not in dims:
        return splits
    return (Split(dims.index(experts), rule.factors[experts].size),)


def _sent(
    layout: Layout, position: int, choice: SiteChoice, rule: OpRule, mesh: Shape, load: Load, *, results: bool
) -> Layout | None:
    """The layout with the rows at their experts, on the axis that says so, where they fall as `load` says; None where
    the ranks of that axis are not where these experts are."""
    placements, routing = list(layout), rule.routing
    dims = (rule.outputs if results else rule.inputs)[position]
    for axis, (on_axis, placement) in enumerate(zip(choice.axes, layout, strict=True)):
        if not on_axis.routes or not isinstance(placement, Split):
            continue
        if dims[placement.dim] != on_axis.factor:
            experts = dims[placement.dim]
            assert experts is not None
            if placement.period != rule.factors[experts].size:
                return None
        elif routing is not None and not results and position in routing.replicated:
            placements[axis] = REPLICATE
        elif routing is None or position not in (routing.returned if results else routing.settled):
            placements[axis] = Routed(placement.dim, placement.period, fullest(load, mesh[axis]))
    return tuple(placements)


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
