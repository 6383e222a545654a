"""Propagation: which splits are worth considering at each site.

A fixpoint decides: every factor of every contraction and every dim of parameters and inputs seeds a digit,
and digits travel along the operators and views that preserve them (CFP Eq. 2).
"""

import math
from collections.abc import Iterator
from itertools import starmap
from typing import TypeAlias

from autopar.ir.layout import Split, is_legal, period_of, periods_of

from .choices import PASSES_PARTIAL, REPLICATED, AxisChoice
from .collapse import from_root
from .sites import Read, Site
from .space import Space

Travel: TypeAlias = Iterator["Travel"]
"""A way of a digit, which yields the ways that it leads to."""


class Propagation:
    """Which digits each root may be split by on an axis of `ranks`, and so which choices a site has."""

    def __init__(self, space: Space, ranks: int) -> None:
        self.space, self.ranks = space, ranks
        self.digits: dict[str, dict[Split, None]] = {}
        self.sites = [site for region in space.regions() for site in region.sites.values()]
        self.reading: dict[str, list[Site]] = {}
        for site in self.sites:
            for root in {read.alias.root: None for read in site.reads}:
                self.reading.setdefault(root, []).append(site)
        self.seeds: dict[str, dict[tuple[int, int], None]] = {site.key: {} for site in self.sites}
        self.routes: dict[str, dict[tuple[int, int], None]] = {site.key: {} for site in self.sites}
        """As `seeds`: rows that may be with their experts."""
        self.making = {name: site for site in self.sites for name in site.makes if name and site.kind != "shared"}
        self.borders: dict[str, list[Site]] = {}
        for site in self.sites:
            if site.kind == "border":
                self.borders.setdefault(site.name, []).append(site)

    def choices(self) -> dict[str, tuple[AxisChoice, ...]]:
        """Key of a site -> its choices."""
        if self.ranks > 1:
            self.travel()
        return {site.key: tuple(self._choices(site)) for site in self.sites}

    def travel(self) -> None:
        """Follows all that sites may begin with."""
        for site in self.sites:
            self._seed(site)

    def digit(self, root: str, split: Split) -> None:
        """A root may be split so: so may all that the split leads to."""
        self.run(self._digit(root, split))

    @staticmethod
    def run(travel: Travel) -> None:
        """Depth first, without recursion: a digit travels as far as the graph is long."""
        waiting = [travel]
        while waiting:
            further = next(waiting[-1], None)
            if further is None:
                waiting.pop()
            else:
                waiting.append(further)

    def _seed(self, site: Site) -> None:
        rule = None if site.made else site.rule
        if site.kind in ("parameter", "input"):
            assert site.meta is not None
            for dim, size in enumerate(site.meta.shape):
                for period in self._stored_periods(site, size):
                    self.digit(site.name, Split(dim, period))
                    for read in site.reads:
                        # a gradient may have the layout of its parameter
                        for root, split in read.alias.of_root(Split(dim, period), self.ranks):
                            self.digit(root, split)
        elif rule is not None and (rule.flops or any(self._is_stored(read.alias.root) for read in site.reads)):
            for number, factor in enumerate(rule.factors):
                for period in factor.periods(self.ranks, self.space.mesh) if factor.offered else ():
                    self.run(self._factor(site, number, period))

    def _stored_periods(self, site: Site, size: int) -> tuple[int, ...]:
        """The batch may be split by all axes together, however few rows there are."""
        periods = periods_of(size, self.ranks, self.space.mesh)
        joint = period_of(size, math.prod(self.space.mesh))
        return tuple(dict.fromkeys((*periods, joint))) if site.kind == "input" else periods

    def _inner_periods(self, site: Site, size: int) -> tuple[int, ...]:
        """Where a mesh has three axes or more, two may split a matrix by rows and columns for use while a third splits
        one of these dims further at rest, inside of what they give a rank: what it gathers is then what is used."""
        others = [n for n in self.space.mesh if n > 1]
        if site.kind != "parameter" or len(others) < 3 or site.meta is None or len(site.meta.shape) < 2:
            return ()
        others.remove(self.ranks)
        return tuple(size // n for n in dict.fromkeys(others) if size % (n * self.ranks) == 0)

    def _is_stored(self, root: str) -> bool:
        maker = self.making.get(root)
        return maker is not None and maker.kind == "parameter"

    def _factor(self, site: Site, number: int, period: int) -> Travel:
        """A site may split a factor: so may whatever carries it."""
        rule = site.rule
        assert rule is not None
        if site.made:
            return
        if not rule.factors[number].may_split(period, self.ranks) or (number, period) in self.seeds[site.key]:
            return
        self.seeds[site.key][number, period] = None
        for joint, factor in enumerate(rule.factors):
            if number in factor.of and factor.offered:
                yield self._factor(site, joint, period)
        for operand, read in enumerate(site.reads):
            for split in rule.input_splits(operand, number, period):
                yield from starmap(self._digit, read.alias.of_root(split, self.ranks))
        for output, name in enumerate(site.makes):
            for split in rule.output_splits(output, number, period) if name else ():
                yield self._digit(name, split)

    def _digit(self, root: str, split: Split) -> Travel:
        """A root may be split so: so may the sites that make or read it."""
        shape = self.space.metas[root].shape
        if not is_legal(shape, (split,), (self.ranks,)) or split in self.digits.setdefault(root, {}):
            return
        self.digits[root][split] = None
        maker = self.making.get(root)
        if maker is not None and maker.rule is not None:
            digit = maker.rule.output_factor(maker.makes.index(root), split)
            if digit is not None:
                yield self._factor(maker, *digit)
        for site in self.reading.get(root, ()):
            for position, read in enumerate(site.reads):
                if read.alias.root != root:
                    continue
                layout = from_root(read.alias.steps, (split,), (self.ranks,))
                if layout is None:
                    continue
                there = layout[0]
                assert isinstance(there, Split)
                if site.kind == "border":
                    yield self._digit(site.name, there)
                elif site.rule is not None:
                    digit = site.rule.input_factor(position, there)
                    if digit is not None:
                        yield self._factor(site, *digit)
        for twin in self.space.twins.get(root, ()):
            yield self._digit(twin, split)
        for site in self.borders.get(root, ()):
            for read in site.reads:
                yield from starmap(self._digit, read.alias.of_root(split, self.ranks))

    def _linear(self, site: Site) -> Iterator[int]:
        """Linear sets worth taking: those that pass on every operand as a partial sum, masks and single
        numbers aside (an add of two gradients shares one reduction), and those of which the op makes less. Work that
        is done in full on partial sums only repeats on every rank what reducing first would have shared."""
        assert site.rule is not None and site.call is not None
        if site.rule.flops:
            return
        for number, operands in enumerate(site.rule.linear):
            rest = [meta for i, meta in enumerate(site.call.inputs) if i not in operands]
            passed_on = all(not meta.dtype.is_floating_point or meta.numel == 1 for meta in rest)
            produced = sum(meta.numel for meta in site.call.outputs if meta is not None)
            shrinks = produced < min(site.call.inputs[i].numel for i in operands)
            if (passed_on or shrinks) and all(self._may_be_partial(site.reads[o]) for o in operands):
                yield number

    def _may_be_partial(self, read: Read) -> bool:
        maker = self.making.get(read.alias.root)
        return maker is None or (maker.kind in ("op", "border") and not maker.made)

    def _choices(self, site: Site) -> Iterator[AxisChoice]:
        yield REPLICATED
        if self.ranks == 1 or site.fixed:
            return
        if site.rule is not None:
            for number, period in self.seeds[site.key]:
                yield AxisChoice("S", number, period)
            for number, period in self.routes[site.key]:
                yield AxisChoice("X", number, period)
            for number in self._linear(site):
                yield AxisChoice("P", number)
        elif site.kind == "border":
            for split in self.digits.get(site.name, ()):
                yield AxisChoice("S", split.dim, split.period)
            yield PASSES_PARTIAL
        elif site.meta is not None and not site.module.startswith(("mutation", "update")):
            # What the user holds is a DTensor: contiguous shards, which can be gathered and checkpointed.
            names = site.makes if site.makes else [site.reads[0].alias.root]
            if site.kind in ("parameter", "input") or self.digits.get(names[0]):
                for dim, size in enumerate(site.meta.shape):
                    for period in (*self._stored_periods(site, size), *self._inner_periods(site, size)):
                        if is_legal((size,), (Split(0, period),), (self.ranks,)):
                            yield AxisChoice("S", dim, period)
