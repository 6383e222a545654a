"""Layers: the space of a graph in which copies of a layer repeat. One copy stands for all, as a region of its own; what
crosses from copy to copy are sites of the kind "border"."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from autopar.cluster.machine import Cluster
from autopar.cluster.staged import StagedCluster
from autopar.cost.bucketed import BucketingRedistributor
from autopar.cost.optimizers import OPTIMIZERS, Optimizer
from autopar.cost.redistribute import Acquired
from autopar.ir.graph import JointGraph, TensorMeta
from autopar.passes.segments.segment import Repeated, Segments

from .build import SiteBuilder
from .collapse import Alias, Roots
from .gradients import gradients_of
from .items import Item
from .making import MadeWhereRead, made_where_read
from .recompute import recomputed
from .routed import RoutedPropagation
from .sites import Read, Region, Site, output_name, output_numbers
from .space import Space
from .tensors import MovedKind
from .travel import is_narrower, items_of


@dataclass(frozen=True, kw_only=True, eq=False)
class LayeredSpace(Space):
    """The space of a graph with repeats, each of which has a body among `bodies`. In the rest, it appears as its border
    sites only."""

    segments: Segments
    gathered_in: torch.dtype | None = None
    """The dtype in which parameters are gathered, if not that in which they are used."""

    @property
    def repeats(self) -> tuple[Repeated, ...]:
        return self.segments.repeats

    @cached_property
    def twins(self) -> Mapping[str, tuple[str, ...]]:
        return joined_borders(self.repeats)

    @cached_property
    def making(self) -> MadeWhereRead:
        return MadeWhereRead(self, (site for region in self.regions() for site in region.sites.values()))

    @cached_property
    def gradients(self) -> frozenset[str]:
        return gradients_of(self.regions()) if self.has_own_reductions else frozenset()

    @cached_property
    def travels(self) -> Mapping[str, TensorMeta]:
        parameters = (root for name in self.graph.parameters.values() for root in (name, border_name(name)))
        dtypes = dict.fromkeys(filter(self.metas.__contains__, parameters), self.gathered_in)
        dtypes = {root: dtype for root, dtype in dtypes.items() if is_narrower(dtype, self.metas[root])}
        dtypes |= dict.fromkeys(self.gradients if self.reduced_in is not None else (), self.reduced_in)
        return {root: TensorMeta(self.metas[root].shape, dtype) for root, dtype in dtypes.items() if dtype is not None}

    def travel_items(self, moved: MovedKind, phases: Sequence[Sequence[tuple[Acquired, int]]]) -> Iterable[Item]:
        return items_of(self, moved, phases)

    def names(self, repeat: int, copy: int) -> Mapping[str, str]:
        return _names(self, self.repeats[repeat], copy)


def _names(space: Space, repeat: Repeated, k: int) -> dict[str, str]:
    nodes, names = space.graph.nodes, dict[str, str]()
    for first, here in zip(repeat.copies[0], repeat.copies[k], strict=True):
        for a, b in zip(nodes[first].outputs, nodes[here].outputs, strict=True):
            if a:
                names[a] = b
    names.update(zip(repeat.own[0], repeat.own[k], strict=True))
    for first_name, name in zip(repeat.varied[0], repeat.varied[k], strict=True):
        names[space.roots.alias(first_name, -1).root] = space.roots.alias(name, -1).root
    numbers = output_numbers(space.graph)
    for first_value, value in zip(repeat.results[0], repeat.results[k], strict=True):
        places = zip(numbers.get(first_value, ()), numbers.get(value, ()), strict=True)
        names.update({output_name(a): output_name(b) for a, b in places})
    for border in repeat.borders:
        names[border_name(border.values[0])] = border_name(border.values[k])
        names[border_name(border.values[1])] = border_name(border.values[k + 1])
        names.setdefault(border.values[0], border.values[k])
        names.setdefault(border.values[1], border.values[k + 1])
    return names


def border_name(value: str) -> str:
    return f"{value}|border"


def joined_borders(repeats: Sequence[Repeated]) -> dict[str, tuple[str, ...]]:
    """Names of border sites -> the names of all that take the same options: the ends of a run and what crosses within
    it, and, where what leaves one run enters the next, those of both."""
    joined: dict[str, tuple[str, ...]] = {}
    for repeat in repeats:
        for border in repeat.borders:
            ends = [border_name(value) for value in (border.values[0], border.values[1], border.values[-1])]
            group = tuple(dict.fromkeys(name for end in ends for name in joined.get(end, (end,))))
            joined.update(dict.fromkeys(group, group))
    return joined


def strategies(
    graph: JointGraph,
    mesh: Mapping[str, int],
    cluster: Cluster,
    segments: Segments,
    optimizer: Optimizer = OPTIMIZERS["adamw"],
) -> LayeredSpace:
    """The search space of a graph on a mesh (axis name -> size)."""
    builder = LayerBuilder(graph, segments, isinstance(cluster, StagedCluster))
    rest = builder.rest()
    bodies = tuple(builder.body(repeat) for repeat in segments.repeats)
    ends = tuple(
        tuple(tuple(border_name(border.values[end]) for border in repeat.borders) for end in (0, -1))
        for repeat in segments.repeats
    )
    return builder.space(
        LayeredSpace, mesh, cluster, optimizer, rest=rest, bodies=bodies, segments=segments, rest_borders=ends
    )


@dataclass(frozen=True, slots=True)
class LayerRoots(Roots):
    """`crossing[v]` renames a value that is read across a border of repeated segments: there it is a root of its own.
    `home[i]` is the segment copy of node i, and `entering[c]` are the values that copy c reads across a border: one
    that the rest of the graph makes may enter one run across its border, and be read by all copies of another."""

    crossing: Mapping[str, str]
    home: Mapping[int, int]
    entering: Mapping[int, Collection[str]]

    def home_of(self, value: str) -> int:
        """The copy that makes a value, -1 if none does."""
        return self.home.get(self.graph.producer.get(value, -1), -1)

    def seen(self, value: str, home: int) -> tuple[str, int]:
        maker = self.home_of(value)
        if maker != home and value in self.crossing and (maker >= 0 or value in self.entering[home]):
            return self.crossing[value], maker
        return value, maker


class LayerBuilder(SiteBuilder):
    """Builds the sites of the rest of a graph, and of one copy of each of its repeats."""

    redistributor = BucketingRedistributor
    propagation = RoutedPropagation

    def __init__(self, graph: JointGraph, segments: Segments, in_time: bool = False) -> None:
        """`in_time`: the first axis of the mesh lies in time."""
        self.segments, self.in_time = segments, in_time
        home: dict[int, int] = {}
        crossing: dict[str, str] = {}
        entering: dict[int, frozenset[str]] = {}
        for number, repeat in enumerate(segments.repeats):
            for k, copy in enumerate(repeat.copies):
                place = (number + 1) * 1_000_000 + k
                home.update(dict.fromkeys(copy, place))
                entering[place] = frozenset(border.values[k + border.backward] for border in repeat.borders)
            for border in repeat.borders:
                crossing.update({value: border_name(value) for value in border.values})
        self.layers = LayerRoots(graph, crossing, home, entering)
        super().__init__(graph, self.layers)
        self.metas |= {name: graph.metas[value] for value, name in crossing.items()}
        shared = self._shared_roots(name for repeat in segments.repeats for name in repeat.shared)
        self.made = made_where_read(graph, segments, shared)

    def rest(self) -> Region:
        segments = self.segments
        owned = {name for repeat in segments.repeats for own in repeat.own for name in own}
        result_values = {name for repeat in segments.repeats for results in repeat.results for name in results}
        shared = frozenset(
            self._shared_roots(
                name for repeat in segments.repeats for k in range(repeat.count) for name in repeat.from_outside(k)
            )
        )
        read_by_made = {self.roots.alias(name, -1).root for i in self.made for name in self.graph.nodes[i].inputs}
        inputs = [i.name for i in self.graph.inputs if i.name not in owned]
        sites = [self.input(name, -1, fixed=name in shared or name in read_by_made) for name in inputs]
        before = len(self.without_rule)
        sites += [self._shared(site, shared) for site in self.operators(segments.rest)]
        self.without_rule[before:] = [
            i for i in self.without_rule[before:] if shared.isdisjoint(self.graph.nodes[i].outputs)
        ]
        sites += self._outer_borders()
        for name, numbers in output_numbers(self.graph).items():
            if name not in result_values:
                sites += [self.output(number) for number in numbers]
        return Region.of("rest", sites)

    def _shared(self, site: Site, shared: frozenset[str]) -> Site:
        """The operator as all copies of a repeat read it: what it makes is split by micro-batches alone."""
        if shared.isdisjoint(site.makes) or site.made:
            return site
        if self.in_time:
            return replace(site, in_time=True)
        return replace(site, rule=None, form=-2 - site.form)

    def _outer_borders(self) -> list[Site]:
        """The borders between runs and the rest of the graph, or another run: what one run makes and the next one reads
        is one site. It reads what the rest makes; what a run makes is read in its body."""
        backward: dict[str, bool] = {}
        for repeat in self.segments.repeats:
            for border in repeat.borders:
                for value in (border.values[0], border.values[-1]):
                    backward[value] = backward.get(value, True) and border.backward
        home, producer = self.layers.home, self.graph.producer
        return [self._border(v, read=producer.get(v) not in home, backward=late) for v, late in backward.items()]

    def body(self, repeat: Repeated) -> Region:
        home = self.layers.home[repeat.copies[0][0]]
        sites = [self.input(name, home) for name in repeat.own[0]]
        for name in self._shared_roots(repeat.from_outside(0)):
            sites.append(
                Site(
                    name=f"{name}|shared",
                    kind="shared",
                    makes=(name,),
                    meta=self.metas[name],
                    in_time=self.in_time,
                    fixed=not self.in_time,
                )
            )
        before = len(self.without_rule)
        sites += self.operators(repeat.copies[0], home)
        for index in self.without_rule[before:]:
            position = repeat.copies[0].index(index)
            self.without_rule += [copy[position] for copy in repeat.copies[1:]]
        left, right, ends = [], [], dict[str, tuple[bool, bool]]()
        for border in repeat.borders:
            for value, read in ((border.values[0], border.backward), (border.values[1], not border.backward)):
                is_read, is_late = ends.get(value, (False, True))  # a value may cross in forward and in backward
                ends[value] = is_read or read, is_late and border.backward
            left.append(border_name(border.values[0]))
            right.append(border_name(border.values[1]))
        sites += [self._border(value, read=read, backward=late) for value, (read, late) in ends.items()]
        numbers = output_numbers(self.graph)
        sites += [self.output(number, home) for name in repeat.results[0] for number in numbers.get(name, ())]
        region = replace(Region.of(repeat.name, sites), left=tuple(left), right=tuple(right))
        return replace(region, again=recomputed(region))

    def _shared_roots(self, shared: Iterable[str]) -> tuple[str, ...]:
        """What stands behind shared values, sorted. They are replicated: a copy takes the part that it wants."""
        return tuple(sorted({self.roots.alias(name, -1).root for name in shared}))

    def _border(self, value: str, *, read: bool, backward: bool) -> Site:
        """A border site makes the crossing tensor; on the side that makes the value it reads it too."""
        name = border_name(value)
        reads: tuple[Read, ...] = ()
        if read:
            reads = (Read(alias=self._producer_alias(value), backward=backward),)
        return Site(
            name=name,
            kind="border",
            reads=reads,
            makes=(name,),
            backward=backward,
            meta=self.graph.metas[value],
            module="border",
        )

    def _producer_alias(self, value: str) -> Alias:
        return self.layers.alias(value, self.layers.home_of(value))
