"""Demand: how every root is made, the layouts in which it is read, and the routes that lead there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autopar.cost.redistribute import Redistributor, RouteStep
from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Layout
from autopar.passes.space.choices import REGATHER
from autopar.passes.space.problem import is_bucketed
from autopar.passes.space.sites import Site
from autopar.passes.space.space import Space

from .copies import Placed


@dataclass(eq=False, kw_only=True)
class Demand:
    """Roots by the names that they have in the program."""

    redistributor: Redistributor
    metas: dict[str, TensorMeta] = field(default_factory=dict)
    """Root -> its global shape and dtype."""
    produced: dict[str, tuple[Layout, str]] = field(default_factory=dict)
    """Root -> the layout that it is made in, and whether it is had anew in backward."""
    wanted: dict[str, tuple[set[Layout], set[Layout]]] = field(default_factory=dict)
    """Root -> the layouts that forward reads, and backward."""
    bucketed: dict[str, bool] = field(default_factory=dict)
    """Root -> whether it travels in a bucket, as the problem priced it."""
    again: dict[str, Placed] = field(default_factory=dict)
    """Root -> the operator that makes it again in backward."""
    borders: dict[str, Placed] = field(default_factory=dict)
    """Border name -> the site that reads the value behind it."""
    sources: dict[tuple[str, bool], dict[Layout, tuple[Layout, tuple[RouteStep, ...]]]] = field(default_factory=dict)

    @staticmethod
    def of(space: Space, items: Sequence[Placed], reacquired: Collection[str]) -> Demand:
        """`reacquired` are the roots that are brought to their layouts again in backward."""
        demand = Demand(redistributor=space.redistributor)
        readers: dict[str, list[Site]] = {}
        for item in items:
            demand._produce(space, item, reacquired)
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
            meta, (produced, _) = self.metas[root], self.produced[root]
            layouts, bucketed = frozenset(wanted), self.bucketed[root]
            acquired = self.redistributor.acquire(meta.shape, meta.dtype, produced, layouts, bucketed)
            if acquired is None:
                raise ValueError(f"{root} is made as {produced} and cannot be had as {sorted(map(str, wanted))}")
            self.sources[key] = {a.layout: (a.source, a.route.steps) for a in acquired}
        return self.sources[key]
