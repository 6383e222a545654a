"""Demand: the sites of all copies of repeated segments, renamed from those of the first one; how every root is
produced, the layouts in which it is read, and the routes that lead there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost.redistribute import Redistributor, RouteStep
from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Layout
from autopar.passes.space.choices import REGATHER
from autopar.passes.space.problem import Assignment, Decisions
from autopar.passes.space.sites import Option, Site
from autopar.passes.space.space import Space
from autopar.passes.space.tensors import is_bucketed


@dataclass(frozen=True, slots=True)
class Placed:
    """A site of one copy: its option, and how names of the first copy read in this one."""

    site: Site
    option: Option
    rename: Mapping[str, str]
    order: int
    again: bool = False
    """Whether it is recomputed in backward."""

    def name(self, value: str) -> str:
        return self.rename.get(value, value)


def placed(space: Space, assignment: Assignment) -> Iterator[Placed]:
    """Every site of every copy with its option; borders once, where they are read."""
    producer = space.graph.producer

    def at(site: Site, decisions: Decisions, names: Mapping[str, str], *, again: bool) -> Placed:
        order = producer[names.get(site.name, site.name)] if site.kind == "op" else -1
        return Placed(site, space.decided(site, decisions[site.name]), names, order, again)

    for site in space.rest.sites.values():
        yield at(site, assignment.rest, {}, again=False)
    for number, k, decisions, again in _copies(assignment):
        region, names = space.bodies[number], space.names(number, k)
        for site in region.sites.values():
            # what crosses to a neighbour is made by the neighbour's border site that reads it
            if site.kind != "shared" and (site.kind != "border" or site.reads):
                yield at(site, decisions, names, again=again and site.name in region.again.operators)


def _copies(assignment: Assignment) -> Iterator[tuple[int, int, Decisions, bool]]:
    """(repeat, copy, what it decides, whether it is recomputed)."""
    for number, copies in enumerate(assignment.copies):
        for k, (decisions, again) in enumerate(zip(copies, assignment.again(number), strict=True)):
            yield number, k, decisions, again


def reacquired_roots(space: Space, assignment: Assignment) -> set[str]:
    """Names of the roots that are brought to their layouts again in backward."""
    roots: set[str] = set()
    for number, k, _, again in _copies(assignment):
        if again:
            names = space.names(number, k)
            roots.update(names.get(root, root) for root in space.bodies[number].again.roots)
    return roots


@dataclass(eq=False, kw_only=True)
class Demand:
    """Roots by the names that they have in the program."""

    redistributor: Redistributor
    travels: dict[str, TensorMeta] = field(default_factory=dict)
    """Root -> what travels of it, if that is another dtype."""
    metas: dict[str, TensorMeta] = field(default_factory=dict)
    """Root -> its global shape and dtype."""
    produced: dict[str, tuple[Layout, str]] = field(default_factory=dict)
    """Root -> the layout that it is produced in, and whether backward gathers it again."""
    wanted: dict[str, tuple[set[Layout], set[Layout]]] = field(default_factory=dict)
    """Root -> the layouts that forward reads, and backward."""
    bucketed: dict[str, bool] = field(default_factory=dict)
    """Root -> whether it travels in a bucket, as the problem priced it."""
    made: dict[str, Placed] = field(default_factory=dict)
    """Root -> the operator that makes it wherever it is read."""
    again: dict[str, Placed] = field(default_factory=dict)
    """Root -> the operator that recomputes it in backward."""
    borders: dict[str, Placed] = field(default_factory=dict)
    """Border name -> the site that reads the value behind it."""
    sources: dict[tuple[str, bool], dict[Layout, tuple[Layout, tuple[RouteStep, ...]]]] = field(default_factory=dict)

    @staticmethod
    def of(space: Space, items: Sequence[Placed], reacquired: Collection[str]) -> Demand:
        """`reacquired` are the roots that are brought to their layouts again in backward."""
        demand = Demand(redistributor=space.redistributor)
        travels = space.travels
        readers: dict[str, list[Site]] = {}
        for item in items:
            if item.site.made:
                roots = {item.name(root): root for root in item.site.makes if root}
                demand.made.update(dict.fromkeys(roots, item))
                demand.metas.update({name: space.metas[root] for name, root in roots.items()})
                continue
            demand._produce(space, item, reacquired)
            demand.travels.update({item.name(root): travels[root] for root in item.site.makes if root in travels})
            for read, layout in zip(item.site.reads, item.option.reads, strict=True):
                name = item.name(read.alias.root)
                readers.setdefault(name, []).append(item.site)
                early, late = demand.wanted.setdefault(name, (set(), set()))
                (late if read.backward else early).add(layout)
                if item.again:
                    late.add(layout)
            if item.site.kind == "border" and item.site.reads:
                demand.borders[item.name(item.site.name)] = item
        for item in items:
            if item.site.made:
                continue
            for name in (item.name(root) for root in item.site.makes if root):
                demand.bucketed[name] = is_bucketed(item.site, readers.get(name, ()))
        return demand

    def _produce(self, space: Space, item: Placed, reacquired: Collection[str]) -> None:
        for root, layout in zip(item.site.makes, item.option.makes, strict=True):
            if root:
                name = item.name(root)
                policy = item.option.choice.policy
                if item.again:
                    self.again[name] = item
                if item.again or name in reacquired:
                    policy = REGATHER
                self.produced[name] = (layout, policy)
                self.metas[name] = space.metas[root]

    def source(self, root: str, phase: int, policy: str) -> dict[Layout, tuple[Layout, tuple[RouteStep, ...]]]:
        key = (root, policy == REGATHER and phase == 1)
        if key not in self.sources:
            early, late = self.wanted[root]
            wanted = (late if phase else early) if policy == REGATHER else early | late
            meta, (produced, _) = self.travels.get(root, self.metas[root]), self.produced[root]
            layouts, bucketed = frozenset(wanted), self.bucketed[root]
            acquired = self.redistributor.acquire(meta.shape, meta.dtype, produced, layouts, bucketed)
            if acquired is None:
                raise ValueError(f"{root} is made as {produced} and cannot be had as {sorted(map(str, wanted))}")
            self.sources[key] = {a.layout: (a.source, a.route.steps) for a in acquired}
        return self.sources[key]
