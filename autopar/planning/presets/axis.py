"""One mesh axis at a time: data parallel and Megatron."""

import math

from autopar.ir.layout import Split
from autopar.passes.space.choices import REPLICATED, AxisChoice
from autopar.passes.space.sites import Site

from .context import Context

AxisChoices = tuple[AxisChoice, ...]


def linear(site: Site, ranks: int) -> AxisChoices:
    """The choices of an operator that read and produce partial sums."""
    return tuple(c for c in site.choices[ranks] if c.is_partial)


def data(context: Context, site: Site, axis: int) -> AxisChoices:
    """Data parallel on one axis, with parameters replicated."""
    ranks = context.space.mesh[axis]
    if site.kind == "op":
        return (*(context.digits(axis, "batch").choices(site) or (REPLICATED,)), *linear(site, ranks))
    if site.kind == "parameter":
        return (REPLICATED,)
    if site.kind == "output":
        return site.choices[ranks]
    kept = tuple(c for c in context.splits(site.makes[0], axis, "batch") if c in site.choices[ranks])
    if site.kind == "border":
        return kept or tuple(c for c in site.choices[ranks] if not c.splits)
    return kept or (REPLICATED,)


def sharded_data(context: Context, site: Site, axis: int) -> AxisChoices:
    """Data parallel on one axis, with parameters sharded at rest: by a dim that all ranks together divide, or else by
    the first one, unevenly."""
    if site.kind != "parameter":
        return data(context, site, axis)
    splits = at_rest(context, site, axis)
    return tuple(c for c in splits if c.factor == splits[0].factor) or (REPLICATED,)


def sharded_matrices(context: Context, site: Site, axis: int) -> AxisChoices:
    """The same, but vectors are replicated, and it is any of the dims that all ranks divide."""
    if site.kind != "parameter":
        return data(context, site, axis)
    assert site.meta is not None
    return (at_rest(context, site, axis) if len(site.meta.shape) > 1 else ()) or (REPLICATED,)


def at_rest(context: Context, site: Site, axis: int) -> AxisChoices:
    """Splits of a parameter, of the dims that all ranks together divide first."""
    assert site.meta is not None
    ways, ranks = math.prod(context.space.mesh), context.space.mesh[axis]
    shape = site.meta.shape
    even = [dim for dim, size in enumerate(shape) if size % ways == 0 and size > 1]
    order = dict.fromkeys((*even, *range(len(shape))))
    return tuple(c for dim in order for c in site.choices[ranks] if c.splits and c.factor == dim)


def megatron(context: Context, site: Site, axis: int, *, by_sequence: bool) -> AxisChoices:
    """Megatron on one axis."""
    ranks = context.space.mesh[axis]
    choices = site.choices[ranks]
    classes = context.digits(axis, "class")
    if site.kind == "op" and site.rule is not None:
        by_class = tuple(c for c in classes.choices(site) if c in choices)
        if by_class:
            return (*by_class, *linear(site, ranks))
        weights = context.parameters_of(site)
        if context.in_block(site) or weights:
            rows = context.rows(site, axis)
            allowed = [c for c in choices if c not in rows and not c.routes]
            if weights and site.rule.flops:
                allowed = [c for c in allowed if c.splits and _splits_weight(site, weights, c.factor)] or [REPLICATED]
            return tuple(allowed)
        return (*between(context, site, axis, by_sequence=by_sequence), *linear(site, ranks))
    if site.kind == "parameter":
        of_class = classes.splits.get(site.name, {})
        by_class = tuple(c for c in choices if c.splits and Split(c.factor, c.period) in of_class)
        if by_class:
            return by_class
        # vectors are replicated, but for the biases of contractions
        assert site.meta is not None
        return choices if len(site.meta.shape) > 1 or context.feeds_contraction(site) else (REPLICATED,)
    return between(context, site, axis, by_sequence=by_sequence)


def between(context: Context, site: Site, axis: int, *, by_sequence: bool) -> AxisChoices:
    """The choices of what stands between products with weights: the sequence is split, or nothing is."""
    choices = site.choices[context.space.mesh[axis]]
    if site.kind == "output":
        return choices
    splits = [*context.digits(axis, "sequence").choices(site)] if site.kind == "op" else []
    if site.kind == "border":
        splits = context.splits(site.name, axis, "sequence")
    return tuple(c for c in splits if by_sequence and c in choices) or (REPLICATED,)


def _splits_weight(site: Site, weights: list[int], factor: int) -> bool:
    """Whether a factor lies in a weight operand."""
    assert site.rule is not None
    return any(factor in site.rule.inputs[position] for position in weights)
