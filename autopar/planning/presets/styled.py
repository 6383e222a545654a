"""Plans that other libraries can express: on one axis a style for each module, on the others data parallel with the
parameters of modules sharded together.

Other libraries run a model's own Python on local tensors, and communicate around modules alone: before and after
products with split weights, when parameters are gathered, and when their gradients are reduced. So nothing between
modules is a partial sum, or is split otherwise than products leave it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.layout import Split
from autopar.passes.space.choices import KEEP, REGATHER, REPLICATED, Policy
from autopar.passes.space.sites import Site

from .axis import AxisChoices, between, data
from .context import Context


@dataclass(frozen=True, kw_only=True, eq=False)
class Styles:
    """Which dim of each parameter may be split on the tensor axis (`dims`, by name; None: none), the parameters whose
    products are `gathered` afterwards (None: those with classes), and whether what lies between products is split
    `by_sequence`. On the axes `sharded`, and no other, parameters rest in shards of dim 0."""

    dims: Mapping[str, tuple[int | None, ...]]
    gathered: frozenset[str] | None = frozenset()
    by_sequence: bool = False
    sharded: frozenset[str] = frozenset()
    policies: tuple[Policy, ...] = (KEEP, REGATHER)

    def dims_of(self, context: Context, root: str) -> tuple[int | None, ...]:
        """Of the parameter that is a root, or that was cast to it."""
        return self.dims.get(context.parameter_of(root), (None,))

    def splits(self, context: Context, ranks: int) -> Iterator[tuple[str, Split]]:
        """Those of weights."""
        for root, name in context.parameters.items():
            for choice in context.sites[root].choices[ranks]:
                if choice.splits and choice.factor in self.dims.get(name, ()):
                    yield root, Split(choice.factor, choice.period)

    def ungathered(self, context: Context, ranks: int) -> Iterator[tuple[str, Split]]:
        """Those whose products are not gathered."""
        classes = context.digits(context.space.mesh.index(ranks), "class").splits
        for root, split in self.splits(context, ranks):
            if root not in classes if self.gathered is None else context.parameters[root] not in self.gathered:
                yield root, split


def styled(context: Context, site: Site, axis: int, *, styles: Styles) -> AxisChoices:
    """The choices on the tensor axis."""
    ranks = context.space.mesh[axis]
    choices = site.choices[ranks]
    if site.kind == "parameter":
        dims = styles.dims_of(context, site.name)
        shape = site.meta.shape if site.meta else ()
        # in one piece, but for experts, whose products may be packed
        return tuple(
            c
            for c in choices
            if (c.factor in dims and (c.period >= shape[c.factor] or len(shape) > 2) if c.splits else None in dims)
        ) or (REPLICATED,)
    if site.kind == "op":
        weights = [p for p in context.weights_of(site) if styles.dims_of(context, site.reads[p].alias.root) != (None,)]
        if weights and site.rule is not None:
            return tuple(_of_weights(context, site, ranks, weights, styles)) or (REPLICATED,)
        of_weight = any(name in context.weight_gradients for name in site.makes)
        along = context.digits(axis, styles.splits if of_weight else styles.ungathered).choices(site)
        if styles.by_sequence and not along:
            return between(context, site, axis, by_sequence=True)
        may = of_weight or styles.gathered is not None or _is_between(context, site)
        return (*(c for c in along if c in choices and may), REPLICATED)
    return between(context, site, axis, by_sequence=styles.by_sequence)


def _of_weights(context: Context, site: Site, ranks: int, weights: list[int], styles: Styles) -> AxisChoices:
    """The choices of a product that split its weight as the weight's style does."""
    assert site.rule is not None
    allowed = []
    makers = [context.making.get(r.alias.root) for p, r in enumerate(site.reads) if p not in weights]
    # where it is free, rows take what columns leave, and columns what is whole: nothing is cut or gathered between
    is_free = styles.gathered is None and not site.backward and all(m is None or m.kind != "input" for m in makers)
    inside = any(m is not None and _is_between(context, m) for m in makers)
    for choice in site.choices[ranks]:
        if is_free and choice.splits and inside == (choice.factor in site.rule.outputs[0]):
            continue
        splits = [
            split
            for p in weights
            for part in (site.rule.input_splits(p, choice.factor, choice.period) if choice.splits else ())
            for _, split in site.reads[p].alias.of_root(part, ranks)
        ]
        may = {dim for p in weights for dim in styles.dims_of(context, site.reads[p].alias.root)}
        if may.intersection(split.dim for split in splits) or (choice == REPLICATED and None in may):
            allowed.append(choice)
    return tuple(allowed)


def _is_between(context: Context, site: Site) -> bool:
    """Whether an operator may lie between a product that splits columns and one that splits rows: it is in a block of
    operators that need no communication, or is attention."""
    return context.in_block(site) or bool(site.rule is not None and site.rule.flops)


def in_units(context: Context, site: Site, axis: int, *, styles: Styles) -> AxisChoices:
    """The choices on a data axis: parameters rest in shards of dim 0, or whole."""
    if site.kind != "parameter":
        return data(context, site, axis)
    if context.space.axes[axis] not in styles.sharded:
        return (REPLICATED,)
    return tuple(c for c in site.choices[context.space.mesh[axis]] if c.splits and c.factor == 0) or (REPLICATED,)
