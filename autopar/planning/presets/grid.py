"""Two mesh axes at a time: matrix products whose two axes split two different factors.

On a single axis, or beside an axis of one rank, the same rules are those of one axis. A site's choices come in tiers:
if none of the first tier is legal (a dim is too short, or uneven), the next tier counts.
"""

from collections.abc import Iterable
from itertools import product

from autopar.passes.space.choices import REPLICATED, AxisChoice
from autopar.passes.space.sites import Site

from .axis import linear
from .context import Context

Axes = tuple[int, ...]
Joint = tuple[AxisChoice, ...]
"""A choice for each of some axes."""

Tiers = list[list[Joint]]


def tensor(context: Context, site: Site, axes: Axes, *, scatters_heads: bool) -> Tiers:
    """2D tensor parallelism: every product with a weight splits its rows on one axis and its columns on the other
    (row-first or column-first), and values between products are split on one axis and replicated on the other.
    `scatters_heads`: attention splits its heads on both."""
    if site.kind == "op":
        return _tensor_op(context, site, axes, scatters_heads)
    choices = [site.choices[context.space.mesh[axis]] for axis in axes]
    if site.kind == "border":
        every = _joint([(*_stored(context, site, axis, "feature"), REPLICATED) for axis in axes])
        return [[c for c in every if _splits(c) in _between(axes)], [c for c in every if _splits(c) == 0]]
    if site.kind == "parameter":
        return _parameter(context, site, axes)
    return [_joint(choices)] if site.kind == "output" else [[(REPLICATED,) * len(axes)]]


def _between(axes: Axes) -> tuple[int, ...]:
    """On how many axes values between products are split: on one of two; on a single axis, or on none."""
    return (1,) if len(axes) > 1 else (0, 1)


def _tensor_op(context: Context, site: Site, axes: Axes, scatters_heads: bool) -> Tiers:
    features = [context.features(site, axis) for axis in axes]
    weighty = _weight_factors(context, site)
    on_axes = zip(features, axes, strict=True)
    every = _joint([(*here, *_partial(context, site, axis), REPLICATED) for here, axis in on_axes])
    if weighty is not None:
        return _with_weight(site, [c for c in every if _factors(c) <= weighty], len(axes))
    if not context.is_weighted(site):
        return [[c for c in every if _splits(c) <= 1]]
    heads = set(_joint([context.digits(axis, "heads").choices(site) for axis in axes])) if scatters_heads else set()
    one = [c for c in every if _splits(c) in _between(axes)]
    unsplit = [c for c in every if _splits(c) == 0]
    if site.rule is not None and site.rule.flops:
        return [[c for c in every if c in heads], one, unsplit]
    return [[*one, *(c for c in every if c in heads and _splits(c) > 1)], unsplit]


def _with_weight(site: Site, every: list[Joint], axes: int) -> Tiers:
    """Tiers of a product with a weight, or of one that produces its gradient: two factors of it on two axes."""
    every = [c for c in every if len(_factors(c)) == _splits(c)]
    unsplit = [c for c in every if _splits(c) == 0]
    if site.rule is None or not site.rule.flops:
        return [[c for c in every if _splits(c)], unsplit]
    every = [c for c in every if not any(on_axis.is_partial for on_axis in c)]
    return [[c for c in every if _splits(c) == n] for n in range(axes, 0, -1)] + [unsplit]


def stationary(context: Context, site: Site, axes: Axes) -> Tiers:
    """2D products of matrices that are all split both ways, rows of activations (the batch) on one axis and columns on
    the other. The factors that an operator splits decide which of its three matrices stays, and which are gathered or
    scattered."""
    if site.kind == "op":
        return _stationary_op(context, site, axes)
    choices = [site.choices[context.space.mesh[axis]] for axis in axes]
    if site.kind == "parameter":
        return _parameter(context, site, axes)
    if site.kind == "output":
        return [_joint(choices)]
    batches = [_stored(context, site, axis, "batch") for axis in axes]
    if site.kind != "border":
        return [[c for c in _joint([(*b, REPLICATED) for b in batches]) if _splits(c) <= 1]]
    features = [_stored(context, site, axis, "feature") for axis in axes]
    return _by_both(_joint([(*b, *f, REPLICATED) for b, f in zip(batches, features, strict=True)]), batches)


def _stationary_op(context: Context, site: Site, axes: Axes) -> Tiers:
    batches = [context.digits(axis, "batch").choices(site) for axis in axes]
    if not context.is_weighted(site):
        return [[c for c in _joint([(*b, REPLICATED) for b in batches]) if _splits(c) <= 1]]
    features = [context.features(site, axis) for axis in axes]
    weighty = _weight_factors(context, site)
    if weighty is not None:
        features = [[c for c in here if c.factor in weighty] for here in features]
    per_axis = [
        (*b, *here, *_partial(context, site, axis), REPLICATED)
        for b, here, axis in zip(batches, features, axes, strict=True)
    ]
    every = _joint(per_axis)
    if weighty is not None:
        return _with_weight(site, every, len(axes))
    return _by_both([c for c in every if len(_factors(c)) == _splits(c)], batches)


def _by_both(every: list[Joint], batches: list[list[AxisChoice]] | list[tuple[AxisChoice, ...]]) -> Tiers:
    """By batch on one axis and features on the other; else by one of them; else unsplit."""

    def counts(choice: Joint) -> tuple[int, int]:
        by_batch = sum(c in here for c, here in zip(choice, batches, strict=True))
        return by_batch, _splits(choice) - by_batch

    once = [c for c in every if max(counts(c)) <= 1]
    tiers = [[c for c in once if REPLICATED not in c and _splits(c)], [c for c in once if _splits(c)]]
    return [*tiers, [c for c in once if not _splits(c)]]


def _parameter(context: Context, site: Site, axes: Axes) -> Tiers:
    """A matrix is split on every axis, each by a dim of its own; a vector on one axis at most. Dims are those that
    products split (of a convolution's weight: its channels), at rest in one piece each."""
    assert site.meta is not None
    choices = [site.choices[context.space.mesh[axis]] for axis in axes]
    used = {c.factor for axis in axes for c in context.splits(site.name, axis, "feature")}
    used = used or set(range(len(site.meta.shape)))
    every = _joint([[c for c in here if not c.splits or c.factor in used] for here in choices])
    every = [c for c in every if len(_factors(c)) == _splits(c)]
    if len(site.meta.shape) < 2:
        return [every]
    return [[c for c in every if _splits(c) == n] for n in range(len(axes), -1, -1)]


def _joint(per_axis: Iterable[Iterable[AxisChoice]]) -> list[Joint]:
    return list(product(*per_axis))


def _splits(choice: Joint) -> int:
    """On how many axes something is split."""
    return sum(c.splits for c in choice)


def _factors(choice: Joint) -> set[int]:
    """The factors (of stored values: dims) that are split."""
    return {c.factor for c in choice if c.splits}


def _partial(context: Context, site: Site, axis: int) -> tuple[AxisChoice, ...]:
    return linear(site, context.space.mesh[axis])


def _stored(context: Context, site: Site, axis: int, what: str) -> list[AxisChoice]:
    """The splits of a stored value by a digit that its site offers."""
    offered = site.choices[context.space.mesh[axis]]
    return [c for c in context.splits(site.makes[0], axis, what) if c in offered]


def _weight_factors(context: Context, site: Site) -> set[int] | None:
    """The factors of a weight that an operator reads, or of a weight's gradient that it produces; None if it does
    neither."""
    if site.rule is None:
        return None
    dims = [site.rule.inputs[position] for position in context.weights_of(site)]
    dims += [d for name, d in zip(site.makes, site.rule.outputs, strict=True) if name in context.weight_gradients]
    return {factor for carried in dims for factor in carried if factor is not None} if dims else None
