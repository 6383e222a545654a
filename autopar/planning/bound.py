"""A lower bound for meshes of several axes, where no solver proves an optimum.

A step costs its local work and, axis by axis, its collectives. For one axis at a time, the bound
supposes that all other axes split everything (so that the least bytes move, and local copies are
free) and solves the rest exactly: the axis then pays for its collectives, or for work that it does
not split. The sum over axes, plus the work when everything is split, is below every assignment:

- a site's seconds s(x) under joint option x are at least min s + c * sum over axes of p_a(x_a), where
  p_a(o) is the least that choice o on axis a adds, and c <= 1 is the largest factor for which this
  holds for every x (it is computed, not assumed);
- an acquisition on axis a leads from the produced layout to each wanted layout, so it costs at least
  the dearest of those routes on axis a alone, with the fewest bytes.

The second point needs that an axis's part of a joint layout is the layout that it would choose alone.
Nested splits can leave the dim that they started in (a batch of 8 split by 64 runs into the
sequence); such an option reads and produces `ANY` layout there, which every redistribution reaches for free.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from autopar.cost.redistribute import Redistributor
from autopar.ir.layout import Layout, Split
from autopar.passes.space.build import strategies
from autopar.passes.space.choices import KEEP, AxisChoice, Policy, SiteChoice
from autopar.passes.space.problem import ProblemBuilder
from autopar.passes.space.sites import Option, Site
from autopar.passes.space.space import Space
from autopar.passes.space.tables import Moved
from autopar.solve.dp import priced
from autopar.solve.effort import EFFORT, Effort, Meter
from autopar.solve.pricing import Library
from autopar.solve.problem import Problem, TooWide, Variable
from autopar.solve.relax import periodic_bound

ANY = Split(-1, -1)
"""In the space of one axis: a layout that only the joint option of several axes determines."""


def lower_bound_seconds(space: Space, effort: Effort = EFFORT) -> float:
    """Seconds that no assignment of `space` undercuts, or 0 if this effort proves nothing."""
    axes = [a for a, ranks in enumerate(space.mesh) if ranks > 1]
    alone = {axis: _alone(space, axis) for axis in axes}
    added: dict[int, list[dict[str, list[float]]]] = {axis: [{} for _ in space.regions()] for axis in axes}
    least = 0.0
    for number, region in enumerate(space.regions()):
        count = 1 if number == 0 else len(space.repeats[number - 1].copies)
        for name, site in region.sites.items():
            costs = _site(space, site, alone, number, effort.bound_options)
            if costs is None:
                return 0.0
            base, by_axis = costs
            least += count * base * (1 if site.kind == "parameter" else space.micro_batches)
            for axis, values in by_axis.items():
                added[axis][number][name] = values
    return least + sum(_axis_bound(alone[axis], added[axis], effort, len(axes)) for axis in axes)


class _Alone:
    """The space of one axis, as if the others split everything."""

    def __init__(self, sub: Space) -> None:
        self.space = sub
        self.regions = list(sub.regions())
        self.unknown: dict[tuple[str, SiteChoice], Option] = {}
        """(Key of a site, choice) -> its option, with `ANY` for layouts that depend on other axes."""
        self.splits: dict[str, set[Split]] = {}
        """Root -> the splits that some site makes or reads it in."""
        for region in self.regions:
            for site in region.sites.values():
                for choice in site.choices[sub.mesh[0]]:
                    option = sub.option(site, with_policy(site, [choice]))
                    if option is None:
                        continue
                    roots = [read.alias.root for read in site.reads], site.makes
                    for root, layout in zip((*roots[0], *roots[1]), (*option.reads, *option.makes), strict=True):
                        if isinstance(layout[0], Split):
                            self.splits.setdefault(root, set()).add(layout[0])

    def options(self, site: Site) -> list[SiteChoice]:
        return [with_policy(site, [choice]) for choice in site.choices[self.space.mesh[0]]]


def with_policy(site: Site, axes: Iterable[AxisChoice]) -> SiteChoice:
    return SiteChoice(tuple(axes), KEEP if site.kind == "parameter" else "")


def _alone(space: Space, axis: int) -> _Alone:
    others = math.prod(space.mesh) // space.mesh[axis]
    link = space.redistributor.links[axis]
    sub = strategies(space.graph, {space.axes[axis]: space.mesh[axis]}, space.cluster, space.segments, space.optimizer)
    free = replace(space.cluster.device, memory_bytes_per_second=math.inf)
    redistributor = Redistributor(sub.mesh, (link.widened(others),), free, others=True)
    redistributor.bucket_bytes = (others * space.redistributor.bucket_bytes[axis],)
    calls = {name: getattr(space, name) for name in ("micro_batches", "holds", "reduced_in")}
    return _Alone(replace(sub, redistributor=redistributor, **calls))


def _site(
    space: Space, site: Site, alone: Mapping[int, _Alone], region: int, most: int
) -> tuple[float, dict[int, list[float]]] | None:
    """The least seconds of a site, and per axis the least that each of its choices adds (scaled so that the sum over
    axes never exceeds an option's seconds). None if the site has more than `most` options.

    Marks layouts that do not project on a single axis as `ANY` in that axis's space.
    """
    per_axis = [site.choices[ranks] for ranks in space.mesh]
    if math.prod(map(len, per_axis)) > most:
        return None
    seconds: dict[tuple[AxisChoice, ...], float] = {}
    roots = (*(read.alias.root for read in site.reads), *site.makes)
    unknown: dict[tuple[int, AxisChoice], set[int]] = {}
    apart: dict[tuple[int, AxisChoice], tuple[Layout, ...]] = {}
    """The layouts that a choice on one axis alone reads and produces."""
    for axis, single in alone.items():
        twin = single.regions[region].sites[site.name]
        for part in per_axis[axis]:
            projected = single.space.option(twin, with_policy(twin, [part]))
            apart[axis, part] = ((ANY,),) * len(roots) if projected is None else (*projected.reads, *projected.makes)
    splits = {axis: [single.splits.get(root, set()) for root in roots] for axis, single in alone.items()}
    for choice in product(*per_axis):
        option = space.option(site, with_policy(site, choice))
        if option is None:
            continue
        seconds[choice] = option.seconds
        joint = (*option.reads, *option.makes)
        for axis in alone:
            own = apart[axis, choice[axis]]
            for position in range(len(roots)):
                if not _projects(joint[position][axis], own[position][0], splits[axis][position]):
                    unknown.setdefault((axis, choice[axis]), set()).add(position)
    for (axis, axis_choice), positions in unknown.items():
        twin = alone[axis].regions[region].sites[site.name]
        key = with_policy(twin, [axis_choice])
        marked = tuple((ANY,) if i in positions else layout for i, layout in enumerate(apart[axis, axis_choice]))
        reads, makes = marked[: len(site.reads)], marked[len(site.reads) :]
        alone[axis].unknown[twin.key, key] = Option(choice=key, reads=reads, makes=makes, seconds=0.0, bytes=0.0)
    least = min(seconds.values())
    added = {
        axis: {
            option: min((s for choice, s in seconds.items() if choice[axis] == option), default=math.inf) - least
            for option in per_axis[axis]
        }
        for axis in alone
    }
    scale = 1.0
    for choice, s in seconds.items():
        total = sum(added[axis][choice[axis]] for axis in alone)
        if total > 0:
            scale = min(scale, (s - least) / total)
    return least, {axis: [scale * added[axis][option] for option in per_axis[axis]] for axis in alone}


def _projects(together: object, apart: object, splits: set[Split]) -> bool:
    if not isinstance(together, Split):
        return together == apart
    if together == apart:
        return True
    # nested: in the same dim, and no split that another site would choose alone
    return isinstance(apart, Split) and together.dim == apart.dim and together not in splits


class _BoundBuilder(ProblemBuilder):
    """Problems of one axis with the costs of the bound."""

    def __init__(self, alone: _Alone) -> None:
        super().__init__(alone.space)
        self.unknown = alone.unknown

    def option(self, site: Site, choice: SiteChoice) -> Option | None:
        return self.unknown.get((site.key, choice)) or super().option(site, choice)

    def cost(
        self, moved: Moved, produced: Layout, policy: Policy, wanted: Sequence[tuple[Layout, bool]]
    ) -> tuple[float, float] | None:
        dearest, meta = 0.0, moved.meta
        for layout, _ in wanted:
            if ANY in (*produced, *layout):
                continue
            route = self.space.redistributor.route(meta.shape, meta.dtype, produced, layout, moved.bucketed)
            if route is None:
                return None
            dearest = max(dearest, route.seconds)
        is_held = self.space.holds and moved.is_parameter
        return dearest * (1 if moved.is_gradient or is_held else self.space.micro_batches), 0.0


def _axis_bound(alone: _Alone, added: Sequence[Mapping[str, list[float]]], effort: Effort, axes: int) -> float:
    """The exact optimum of one axis under the bound's costs. `added` has an entry for each region, as regions may share
    names."""
    allowed = {name: alone.options(site) for region in alone.regions for name, site in region.sites.items()}
    problem, decoder = _BoundBuilder(alone).build(allowed)

    def weighed(part: Problem, number: int) -> tuple[Variable, ...]:
        variables = []
        for variable in part.variables:
            site = alone.regions[number].sites[variable.name]
            order = {choice: i for i, choice in enumerate(alone.options(site))}
            times = 1 if site.kind == "parameter" else alone.space.micro_batches
            values = [times * value for value in added[number][variable.name]]
            kept = [order[option.choice] for option in decoder.options[variable.name]]
            seconds = tuple(values[i] if math.isfinite(values[i]) else 1e30 for i in kept)
            variables.append(replace(variable, seconds=seconds, bytes=(0.0,) * len(kept)))
        return tuple(variables)

    repeats = tuple(
        replace(repeat, body=replace(repeat.body, variables=weighed(repeat.body, number)))
        for number, repeat in enumerate(problem.repeats, 1)
    )
    problem = replace(problem, variables=weighed(problem, 0), repeats=repeats)
    meter = Meter(most=effort.bound * effort.work / axes, effort=effort)
    try:
        return max(0.0, priced(problem, Library(meter), 0.0).score.objective)
    except TooWide:  # as the search does
        pass
    try:
        return max(0.0, periodic_bound(problem, (1.0, 0.0), meter))
    except TooWide:
        return 0.0  # no collective costs less
