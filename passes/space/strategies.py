"""Strategies: what may be decided, and what each decision reads, makes and costs.

The space consists of *sites*: every operator that is not a view, every parameter, input and output,
and every border between repeated layers. On each mesh axis a site makes one choice:

- ("R",): work on whole values;
- ("S", factor, period): split one factor of the operator (or one dim of a stored value);
- ("X", factor, period): rows, split as by ("S", factor, period), are with their experts (`layout.Routed`);
- ("P", k): take the operands of the rule's k-th linear set as partial sums and make a partial sum;
- for a border, ("P",): pass a partial sum on.

A choice for every axis is an *option*: it fixes the layout in which each operand is read, the layout
of each result, and the seconds of the local work. A parameter's option ends with "keep" or
"regather": whether what was gathered for forward is kept for backward or gathered again. Data
parallel, FSDP, tensor, sequence and vocabulary parallel plans and their combinations are points of
this space; nothing in it is special to them.

The splits worth considering are found by a fixpoint: every factor of every contraction, every dim of
parameters and inputs seeds a digit, and digits travel along the operators and views that preserve
them (CFP Eq. 2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from autopar.cluster.collectives import collective_seconds
from autopar.cluster.machine import Cluster
from autopar.cost.optimizers import OPTIMIZERS, Optimizer
from autopar.cost.redistribute import Redistributor
from autopar.ir.graph import JointGraph, Node, TensorMeta, is_view
from autopar.ir.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Routed,
    Shape,
    Split,
    describe,
    is_chunked,
    is_legal,
    local_shape,
    nest,
    period_of,
    periods_of,
)
from autopar.ops import localize, rule_of
from autopar.ops.emit import Emission, expands, fillings, local_program, local_shapes
from autopar.ops.rule import ROUTED, Call, Dims, Factor, OpRule
from autopar.passes.dependency.operators import call_of_node
from autopar.passes.segments.segment import Repeated, Segments

from .collapse import Alias, Roots, from_root, to_root

AxisChoice = tuple[Any, ...]
SiteChoice = tuple[Any, ...]
"""One `AxisChoice` per mesh axis; for a parameter followed by "keep" or "regather"."""

WHOLE: AxisChoice = ("R",)
KEEP, REGATHER = "keep", "regather"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a choice means. `reads[i]` is the layout of the *root* of operand i; `makes[j]` of result j."""

    choice: SiteChoice
    reads: tuple[Layout, ...]
    makes: tuple[Layout, ...]
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    alias: Alias
    backward: bool


@dataclass(kw_only=True, eq=False)
class Site:
    """One place of decision. `choices` are the choices on one axis (what is legal depends on the
    axis size and on the other axes). `kind`: op, parameter, buffer, input, tangent, seed, output, border,
    shared. `node` is the graph's node of an op."""

    name: str
    kind: str
    reads: tuple[Read, ...] = ()
    makes: tuple[str, ...] = ()
    backward: bool = False
    module: str = ""
    node: Node | None = None
    call: Call | None = None
    rule: OpRule | None = None
    meta: TensorMeta | None = None
    fixed: bool = False
    """Made whole because every copy of a repeat reads it."""
    zeros: tuple[bool, ...] = ()
    """Of which operands of an op padding is zero: of parameters and inputs, which are given so."""
    form: int = -1
    """The same for ops that do the same to operands of the same metas, and are free to do it in parts or are not."""
    choices: dict[int, tuple[AxisChoice, ...]] = field(default_factory=dict)
    """Axis size -> choices on an axis of that size."""
    options: dict[SiteChoice, Option | None] = field(default_factory=dict)
    held: tuple[SiteChoice, ...] = ()
    """The only choices of a parameter that stays where it is, if it does."""


@dataclass(kw_only=True, eq=False)
class Region:
    """Sites that are solved together: the rest of the graph, or one copy of a repeated segment.

    `left` and `right` are names of border sites (for a body), in the order of the segment's borders.
    """

    name: str
    sites: dict[str, Site]
    left: tuple[str, ...] = ()
    right: tuple[str, ...] = ()


@dataclass(kw_only=True, eq=False)
class Space:
    """All sites of a graph on a mesh: the rest, and for each repeated segment one body.

    In the rest, each repeat appears as its border sites only: `rest_borders[r]` names (left, right).
    """

    graph: JointGraph
    mesh: Shape
    axes: tuple[str, ...]
    cluster: Cluster
    optimizer: Optimizer
    redistributor: Redistributor
    roots: Roots
    metas: Mapping[str, TensorMeta]
    rest: Region
    bodies: tuple[Region, ...]
    segments: Segments
    rest_borders: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    without_rule: Mapping[str, int]
    """Op -> how many nodes have no rule and are replicated."""
    without_rule_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Op -> the modules of those nodes, as paths, those of several layers as one with "*" for the number."""
    layouts: dict[tuple[int, SiteChoice], tuple[tuple[Layout, ...], tuple[Layout, ...]] | None] = field(
        default_factory=dict
    )
    """(form of an op, choice) -> the layouts of operands and results, or None if they are not legal."""
    local_seconds: dict[tuple[int, tuple[bool, ...], SiteChoice], float] = field(default_factory=dict)
    """(form of an op, its operands with zeros as padding, choice) -> seconds of the local work."""

    @property
    def repeats(self) -> tuple[Repeated, ...]:
        return self.segments.repeats

    def regions(self) -> Iterator[Region]:
        yield self.rest
        yield from self.bodies

    def option(self, site: Site, choice: SiteChoice) -> Option | None:
        """What a choice means, or None if it is not legal."""
        if site.held and choice not in site.held:
            return None
        if choice not in site.options:
            site.options[choice] = _OPTION[site.kind](self, site, choice)
        return site.options[choice]

    def whole(self, site: Site) -> SiteChoice:
        """The choice that is always legal: everything replicated, or where it is held."""
        if site.held:
            return site.held[0]
        return (WHOLE,) * len(self.mesh) + ((KEEP,) if site.kind == "parameter" else ())


def hold(space: Space, site: Site, layouts: Collection[Layout]) -> None:
    """Let a parameter take no other layouts at rest than these.

    Raises ValueError for one that is none of its own.
    """
    assert site.meta is not None
    # also those that it would not take of itself, as where every copy of a layer reads it
    every = (WHOLE, *(("S", dim, size) for dim, size in enumerate(site.meta.shape) if size > 1))
    per_axis = [tuple(dict.fromkeys((*every, *site.choices[ranks]))) for ranks in space.mesh]
    found: dict[Layout, list[SiteChoice]] = {layout: [] for layout in layouts}
    for choice in itertools.product(*per_axis):
        for policy in (KEEP, REGATHER):
            option = space.option(site, (*choice, policy))
            if option is not None and option.makes[0] in found:
                found[option.makes[0]].append((*choice, policy))
    if missing := [layout for layout, choices in found.items() if not choices]:
        raise ValueError(f"parameter {site.module} cannot be {describe(missing[0], space.axes)} at rest")
    site.held = tuple(choice for choices in found.values() for choice in choices)
    for ranks in set(space.mesh):
        parts = (c[axis] for c in site.held for axis, n in enumerate(space.mesh) if n == ranks)
        site.choices[ranks] = tuple(dict.fromkeys(parts))


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


def output_name(number: int) -> str:
    return f"output {number}"


def output_numbers(graph: JointGraph) -> dict[str, list[int]]:
    """Value -> its places among the graph's outputs, without the gradients that parameters' sites read."""
    found: dict[str, list[int]] = {}
    for number, output in enumerate(graph.outputs):
        if output.name is not None and not (output.role == "gradient" and output.target in graph.parameters):
            found.setdefault(output.name, []).append(number)
    return found


def strategies(
    graph: JointGraph,
    mesh: Mapping[str, int],
    cluster: Cluster,
    segments: Segments,
    optimizer: Optimizer = OPTIMIZERS["adamw"],
) -> Space:
    """The search space of a graph on a mesh (axis name -> size)."""
    sizes, axes = tuple(mesh.values()), tuple(mesh)
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
    roots = Roots(graph, crossing, home, entering)
    metas = dict(graph.metas)
    metas.update({name: graph.metas[value] for value, name in crossing.items()})
    space = Space(
        graph=graph,
        mesh=sizes,
        axes=axes,
        cluster=cluster,
        optimizer=optimizer,
        redistributor=Redistributor(sizes, cluster.links(sizes), cluster.device),
        roots=roots,
        metas=metas,
        rest=Region(name="rest", sites={}),
        bodies=(),
        segments=segments,
        rest_borders=(),
        without_rule={},
    )
    builder = _Builder(space)
    space.rest = builder.rest(segments)
    space.bodies = tuple(builder.body(repeat) for repeat in segments.repeats)
    space.rest_borders = tuple(
        (
            tuple(f"{border_name(border.values[0])}" for border in repeat.borders),
            tuple(f"{border_name(border.values[-1])}" for border in repeat.borders),
        )
        for repeat in segments.repeats
    )
    modules: dict[str, list[str]] = {}
    for index in builder.without_rule:
        modules.setdefault(graph.nodes[index].op, []).append(graph.nodes[index].module)
    space.without_rule = {op: len(paths) for op, paths in sorted(modules.items())}
    space.without_rule_in = {op: _paths(paths) for op, paths in sorted(modules.items())}
    for ranks in sorted(set(sizes)):
        _Fixpoint(space, ranks).run()
    return space


def _paths(modules: Sequence[str]) -> tuple[str, ...]:
    """Paths of modules, each once; where some differ in numbers alone, one with "*" for these."""
    alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path in modules:
        parts = tuple(path.split("."))
        alike.setdefault(tuple("*" if part.isdecimal() else part for part in parts), []).append(parts)
    return tuple(
        ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*same, strict=True))
        for same in alike.values()
    )


class _Builder:
    """Makes the sites, without their choices."""

    def __init__(self, space: Space) -> None:
        self.space, self.graph = space, space.graph
        self.without_rule: list[int] = []
        """Indices of the nodes that are replicated because their op has no rule."""
        self.rules: dict[Any, OpRule | None] = {}
        self.forms: dict[Any, int] = {}
        self.gradients = {o.target: o.name for o in self.graph.outputs if o.role == "gradient" and o.name is not None}
        self.input_roles = {i.name: i for i in self.graph.inputs}
        self.given = {i.name for i in self.graph.inputs if i.role in ("parameter", "buffer", "input")}
        self.constant = self._constants()

    def _constants(self) -> frozenset[str]:
        """Values that depend on no input: every rank makes them whole."""
        varying = {i.name for i in self.graph.inputs}
        constant: set[str] = set()
        for node in self.graph.nodes:
            target = varying if any(name in varying for name in node.inputs) else constant
            target.update(o for o in node.outputs if o)
        return frozenset(constant)

    def rest(self, segments: Segments) -> Region:
        owned = {name for repeat in segments.repeats for own in repeat.own for name in own}
        result_values = {name for repeat in segments.repeats for results in repeat.results for name in results}
        shared = frozenset(self._shared_roots(name for repeat in segments.repeats for name in repeat.shared))
        sites = [self._input(i.name, -1) for i in self.graph.inputs if i.name not in owned]
        for site in sites:
            site.fixed = site.name in shared
        sites += self._ops(segments.rest, home=-1, whole=shared)
        sites += self._outer_borders(segments)
        for name, numbers in output_numbers(self.graph).items():
            if name not in result_values:
                sites += [self._output(number, home=-1) for number in numbers]
        return Region(name="rest", sites={site.name: site for site in sites})

    def _outer_borders(self, segments: Segments) -> list[Site]:
        """The borders between runs and the rest of the graph, or another run: what one run makes and the next one reads
        is one site. It reads what the rest makes; what a run makes is read in its body."""
        backward: dict[str, bool] = {}
        for repeat in segments.repeats:
            for border in repeat.borders:
                for value in (border.values[0], border.values[-1]):
                    backward[value] = backward.get(value, True) and border.backward
        home, producer = self.space.roots.home, self.graph.producer
        return [self._border(v, read=producer.get(v) not in home, backward=late) for v, late in backward.items()]

    def body(self, repeat: Repeated) -> Region:
        home = self.space.roots.home[repeat.copies[0][0]]
        sites = [self._input(name, home) for name in repeat.own[0]]
        for name in self._shared_roots(repeat.shared):
            sites.append(Site(name=f"{name}|shared", kind="shared", makes=(name,), meta=self.space.metas[name]))
        before = len(self.without_rule)
        sites += self._ops(repeat.copies[0], home=home, whole=frozenset())
        for index in self.without_rule[before:]:
            position = repeat.copies[0].index(index)
            self.without_rule += [copy[position] for copy in repeat.copies[1:]]
        left, right = [], []
        for border in repeat.borders:
            entering, leaving = border.values[0], border.values[1]
            a = self._border(entering, read=border.backward, backward=border.backward)
            b = self._border(leaving, read=not border.backward, backward=border.backward)
            sites += [a, b]
            left.append(a.name)
            right.append(b.name)
        numbers = output_numbers(self.graph)
        sites += [self._output(number, home) for name in repeat.results[0] for number in numbers.get(name, ())]
        return Region(name=repeat.name, sites={site.name: site for site in sites}, left=tuple(left), right=tuple(right))

    def _output(self, number: int, home: int) -> Site:
        output = self.graph.outputs[number]
        assert output.name is not None
        backward = output.role == "gradient"
        return Site(
            name=output_name(number),
            kind="output",
            reads=(Read(alias=self.space.roots.alias(output.name, home), backward=backward),),
            backward=backward,
            meta=self.graph.metas[output.name],
            module=f"{output.role} {output.target}",
        )

    def _shared_roots(self, shared: Iterable[str]) -> tuple[str, ...]:
        """What stands behind shared values, sorted. They are made whole: a copy takes the part that it wants."""
        return tuple(sorted({self.space.roots.alias(name, -1).root for name in shared}))

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
        index = self.graph.producer.get(value)
        home = -1 if index is None else self.space.roots.home.get(index, -1)
        return self.space.roots.alias(value, home)

    def _input(self, name: str, home: int) -> Site:
        graph_input = self.input_roles[name]
        reads: tuple[Read, ...] = ()
        if graph_input.role == "parameter" and graph_input.target in self.gradients:
            alias = self.space.roots.alias(self.gradients[graph_input.target], home)
            reads = (Read(alias=alias, backward=True),)
        return Site(
            name=name,
            kind=graph_input.role,
            reads=reads,
            makes=(name,),
            meta=self.graph.metas[name],
            module=graph_input.target,
            backward=graph_input.role == "tangent",
        )

    def _ops(self, indices: Sequence[int], *, home: int, whole: frozenset[str]) -> list[Site]:
        sites = []
        metas, alias = self.graph.metas, self.space.roots.alias
        for index in sorted(indices):
            node = self.graph.nodes[index]
            if is_view(node):
                continue
            call = call_of_node(node, metas)
            site = Site(
                name=node.name,
                kind="op",
                reads=tuple(Read(alias=alias(name, home), backward=node.backward) for name in node.inputs),
                makes=node.outputs,
                backward=node.backward,
                module=node.module,
                node=node,
                call=call,
            )
            key = _key(call)
            site.zeros = tuple(read.alias.root in self.given for read in site.reads)
            constant = all(not name or name in self.constant for name in node.outputs)
            if (not constant or not call.inputs) and not whole.intersection(node.outputs):
                if key not in self.rules:
                    self.rules[key] = rule_of(call)
                site.rule = self.rules[key]
                if site.rule is None and not constant:
                    self.without_rule.append(index)
            site.form = self.forms.setdefault((key, site.rule is None), len(self.forms))
            sites.append(site)
        return sites


def _key(call: Call) -> Any:
    """What a rule may look at, without names."""
    constants = _signature(call.node.args), _signature(call.node.kwargs)
    names = call.node.inputs
    repeats = tuple(names.index(name) for name in names)
    return call.node.op, constants, repeats, call.inputs, call.outputs


def _signature(value: Any) -> Any:
    """An argument without the names in it. Numbers keep their type: 1, 1.0 and True differ."""
    if isinstance(value, tuple):
        return tuple(_signature(item) for item in value)
    if type(value).__name__ == "Ref":
        return "ref"
    return (type(value).__name__, value)


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a digit travels: the factors of operators (by id of the site), and the splits of roots."""

    factors: Mapping[int, Mapping[tuple[int, int], None]]
    splits: Mapping[str, Mapping[Split, None]]

    def choices(self, site: Site) -> tuple[AxisChoice, ...]:
        """The choices of an operator that split by the digit."""
        return tuple(("S", number, period) for number, period in self.factors.get(id(site), {}))


def reached(space: Space, ranks: int, starts: Sequence[tuple[str, Split]]) -> Reached:
    """Where the given splits of roots lead, along operators and views that preserve them."""
    fixpoint = _Fixpoint(space, ranks)
    for root, split in starts:
        fixpoint.digit(root, split)
    return Reached(fixpoint.seeds, fixpoint.digits)


Travel: TypeAlias = Iterator["Travel"]
"""A way of a digit, which yields the ways that it leads to."""


class _Fixpoint:
    """Which digits each root may be split by on an axis of `ranks`, and so which choices a site has."""

    def __init__(self, space: Space, ranks: int) -> None:
        self.space, self.ranks = space, ranks
        self.digits: dict[str, dict[Split, None]] = {}
        self.sites = [site for region in space.regions() for site in region.sites.values()]
        self.reading: dict[str, list[Site]] = {}
        for site in self.sites:
            for root in {read.alias.root: None for read in site.reads}:
                self.reading.setdefault(root, []).append(site)
        self.seeds: dict[int, dict[tuple[int, int], None]] = {id(site): {} for site in self.sites}
        self.routes: dict[int, dict[tuple[int, int], None]] = {id(site): {} for site in self.sites}
        """As `seeds`: rows that may be with their experts."""
        self.twins = joined_borders(space.repeats)
        self.making = {name: site for site in self.sites for name in site.makes if name and site.kind != "shared"}
        self.borders: dict[str, list[Site]] = {}
        for site in self.sites:
            if site.kind == "border":
                self.borders.setdefault(site.name, []).append(site)

    def run(self) -> None:
        if self.ranks > 1:
            for site in self.sites:
                self._seed(site)
        for site in self.sites:
            site.choices[self.ranks] = tuple(self._choices(site))

    def digit(self, root: str, split: Placement) -> None:
        """A root may be split so: so may all that the split leads to."""
        self._run(self._digit(root, split))

    @staticmethod
    def _run(travel: Travel) -> None:
        """Depth first, without recursion: a digit travels as far as the graph is long."""
        waiting = [travel]
        while waiting:
            further = next(waiting[-1], None)
            if further is None:
                waiting.pop()
            else:
                waiting.append(further)

    def _seed(self, site: Site) -> None:
        rule = site.rule
        if site.kind in ("parameter", "input"):
            assert site.meta is not None
            for dim, size in enumerate(site.meta.shape):
                for period in self._stored_periods(site, size):
                    self.digit(site.name, Split(dim, period))
                    for read in site.reads:
                        # a gradient may be made as its parameter is held
                        layout = to_root(read.alias.steps, (Split(dim, period),), (self.ranks,))
                        if layout is not None:
                            self.digit(read.alias.root, layout[0])
        elif rule is not None and (rule.flops or any(self._is_stored(read.alias.root) for read in site.reads)):
            for number, factor in enumerate(rule.factors):
                for period in factor.periods(self.ranks, self.space.mesh):
                    self._run(self._factor(site, number, period))

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
        if not rule.factors[number].may_split(period, self.ranks) or (number, period) in self.seeds[id(site)]:
            return
        self.seeds[id(site)][number, period] = None
        if rule.routing is not None and rule.routing.starts and number == rule.routing.rows:
            yield self._route(site, number, period)
        for operand, read in enumerate(site.reads):
            for split in rule.input_splits(operand, number, period):
                layout = to_root(read.alias.steps, (split,), (self.ranks,))
                if layout is not None:
                    yield self._digit(read.alias.root, layout[0])
        for output, name in enumerate(site.makes):
            for split in rule.output_splits(output, number, period) if name else ():
                yield self._digit(name, split)

    def _route(self, site: Site, number: int, period: int) -> Travel:
        """The rows of a site may be with their experts: so may those of whatever reads them one by one."""
        assert site.rule is not None
        routing = site.rule.routing
        if (number, period) in self.routes[id(site)] or (routing is not None and routing.count % self.ranks):
            return
        self.routes[id(site)][number, period] = None
        for position, name in enumerate(site.makes):
            if not name or (routing is not None and position in routing.returned):
                continue
            for split in site.rule.output_splits(position, number, period):
                yield self._rows_of(name, Routed(split.dim, split.period))

    def _rows_of(self, root: str, rows: Routed) -> Travel:
        """The rows of a root may be with their experts: so may those of the sites that read it."""
        for site in self.reading.get(root, ()):
            for position, read in enumerate(site.reads):
                layout = from_root(read.alias.steps, (rows,), (self.ranks,)) if read.alias.root == root else None
                if layout is not None and isinstance(layout[0], Routed):
                    yield self._receive(site, position, layout[0])

    def _receive(self, site: Site, position: int, rows: Routed) -> Travel:
        rule = site.rule
        found = rule.input_factor(position, Split(rows.dim, rows.period)) if rule is not None else None
        if rule is None or found is None:
            return
        number, period = found
        routing, factor = rule.routing, rule.factors[number]
        if routing is None:
            fits = not (factor.expands or factor.contiguous) and (period, factor.size % period) == (rows.period, 0)
            fits = fits and self._takes_any_number(site, number)
        else:
            fits = number == routing.rows and position not in (*routing.settled, *routing.whole)
        if fits:
            yield self._route(site, number, rows.period)

    def _takes_any_number(self, site: Site, number: int) -> bool:
        """Whether the op has no argument that says how many rows there are."""
        call, rule, mesh = site.call, site.rule, (self.ranks,)
        assert call is not None and rule is not None
        choice: SiteChoice = (("S", number, rule.factors[number].size),)
        operands = [_carried(i, choice, mesh, rule) for i in range(len(rule.inputs))]
        results = [_made(i, choice, mesh, rule) for i in range(len(rule.outputs))]
        if None in operands or None in results:
            return False
        made = tuple(layout for layout in results if layout)
        shapes = local_shapes(call, tuple(layout for layout in operands if layout), made, mesh)
        return localize(call, *shapes, made, mesh) == (call.node.args, call.node.kwargs)

    def _digit(self, root: str, split: Placement) -> Travel:
        """A root may be split so: so may the sites that make or read it."""
        assert isinstance(split, Split)
        shape = self.space.metas[root].shape
        if not is_legal(shape, (split,), (self.ranks,)) or split in self.digits.setdefault(root, {}):
            return
        self.digits[root][split] = None
        maker = self.making.get(root)
        if maker is not None and maker.rule is not None:
            found = maker.rule.output_factor(maker.makes.index(root), split)
            if found is not None:
                yield self._factor(maker, *found)
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
                    found = site.rule.input_factor(position, there)
                    if found is not None:
                        yield self._factor(site, *found)
        for twin in self.twins.get(root, ()):
            yield self._digit(twin, split)
        for site in self.borders.get(root, ()):
            for read in site.reads:
                layout = to_root(read.alias.steps, (split,), (self.ranks,))
                if layout is not None:
                    yield self._digit(read.alias.root, layout[0])

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
            made = sum(meta.numel for meta in site.call.outputs if meta is not None)
            shrinks = made < min(site.call.inputs[i].numel for i in operands)
            if (passed_on or shrinks) and all(self._may_be_partial(site.reads[o]) for o in operands):
                yield number

    def _may_be_partial(self, read: Read) -> bool:
        maker = self.making.get(read.alias.root)
        return maker is None or maker.kind in ("op", "border")

    def _choices(self, site: Site) -> Iterator[AxisChoice]:
        yield WHOLE
        if self.ranks == 1 or site.fixed:
            return
        if site.rule is not None:
            for number, period in self.seeds[id(site)]:
                yield ("S", number, period)
            for number, period in self.routes[id(site)]:
                yield ("X", number, period)
            for number in self._linear(site):
                yield ("P", number)
        elif site.kind == "border":
            for split in self.digits.get(site.name, ()):
                yield ("S", split.dim, split.period)
            yield ("P",)
        elif site.meta is not None and not site.module.startswith("mutation"):
            # What the user holds is a DTensor: contiguous shards, which can be gathered and checkpointed.
            names = site.makes if site.makes else [site.reads[0].alias.root]
            if site.kind in ("parameter", "input") or self.digits.get(names[0]):
                for dim, size in enumerate(site.meta.shape):
                    for period in (*self._stored_periods(site, size), *self._inner_periods(site, size)):
                        if is_legal((size,), (Split(0, period),), (self.ranks,)):
                            yield ("S", dim, period)


def _stored_layout(space: Space, meta: TensorMeta, choice: SiteChoice) -> Layout | None:
    """The layout of a stored value (parameter, input, border, output) from its choices per axis."""
    placements: list[Placement] = []
    for axis_choice in choice[: len(space.mesh)]:
        if axis_choice[0] == "S":
            placements.append(Split(axis_choice[1], axis_choice[2]))
        else:
            placements.append(PARTIAL if axis_choice[0] == "P" else REPLICATE)
    layout = nest(tuple(placements), space.mesh)
    return layout if is_legal(meta.shape, layout, space.mesh) else None


def _stored_option(space: Space, site: Site, choice: SiteChoice) -> Option | None:
    assert site.meta is not None
    layout = _stored_layout(space, site.meta, choice)
    if layout is None:
        return None
    if site.kind in ("parameter", "output") and not is_chunked(site.meta.shape, layout, space.mesh):
        return None
    reads = []
    for read in site.reads:
        root = to_root(read.alias.steps, layout, space.mesh)
        if root is None or not is_legal(space.metas[read.alias.root].shape, root, space.mesh):
            return None
        reads.append(root)
    seconds = size = 0.0
    if site.kind == "parameter":
        numel, dtype = math.prod(local_shape(site.meta.shape, layout, space.mesh)), site.meta.dtype
        size = float(numel * dtype.itemsize)
        if site.reads:
            size += numel * dtype.itemsize + space.optimizer.bytes(numel, dtype)
            moved = space.optimizer.moved_bytes(numel, dtype)
            seconds = space.cluster.device.optimizer_seconds(space.optimizer.name, moved)
    return Option(choice=choice, reads=tuple(reads), makes=(layout,) * len(site.makes), seconds=seconds, bytes=size)


def _whole_option(space: Space, site: Site, choice: SiteChoice) -> Option | None:
    if any(axis_choice != WHOLE for axis_choice in choice[: len(space.mesh)]):
        return None
    return _stored_option(space, site, choice)


def _op_option(space: Space, site: Site, choice: SiteChoice) -> Option | None:
    call, mesh = site.call, space.mesh
    assert call is not None
    rule = site.rule
    if rule is None:
        if any(axis_choice != WHOLE for axis_choice in choice):
            return None
        whole = (REPLICATE,) * len(mesh)
        seconds = _op_seconds(space, site, None, (), (whole,) * len(call.inputs), (whole,) * len(call.outputs), choice)
        return Option(
            choice=choice,
            reads=(whole,) * len(site.reads),
            makes=(whole,) * len(site.makes),
            seconds=seconds,
            bytes=0.0,
        )
    if (site.form, choice) not in space.layouts:
        space.layouts[site.form, choice] = _op_layouts(call, rule, choice, mesh)
    layouts = space.layouts[site.form, choice]
    if layouts is None:
        return None
    operands, results = layouts
    reads = []
    for read, operand in zip(site.reads, operands, strict=True):
        root = to_root(read.alias.steps, operand, mesh)
        if root is None or not is_legal(space.metas[read.alias.root].shape, root, mesh):
            return None
        # a view of whole dims must also be a view of the local dims
        if from_root(read.alias.steps, root, mesh) != operand:
            return None
        reads.append(root)
    key = site.form, site.zeros, choice
    if key not in space.local_seconds:
        space.local_seconds[key] = _op_seconds(space, site, rule, splits_of(rule, choice), operands, results, choice)
    return Option(choice=choice, reads=tuple(reads), makes=results, seconds=space.local_seconds[key], bytes=0.0)


def _op_layouts(
    call: Call, rule: OpRule, choice: SiteChoice, mesh: Shape
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]] | None:
    """Layouts of an op's operands and results, or None if they are not legal."""
    if sum(axis_choice[0] == "X" for axis_choice in choice) > 1:
        return None  # the experts of rows are found along one axis
    operands = []
    for position in range(len(rule.inputs)):
        layout = _carried(position, choice, mesh, rule)
        if layout is None or not is_legal(call.inputs[position].shape, layout, mesh):
            return None
        operands.append(layout)
    results = []
    for position, meta in enumerate(call.outputs):
        layout = _made(position, choice, mesh, rule)
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
    splits = tuple(Split(0, c[2]) if (c[0], *c[1:2]) == ("S", number) else REPLICATE for c in choice)
    return is_legal((factor.size,), nest(splits, mesh), mesh)


def _ranks(mesh: Shape, choice: SiteChoice, factor: int) -> int:
    """Over how many ranks a factor is split."""
    return math.prod(
        n for n, (kind, *what) in zip(mesh, choice, strict=True) if kind in ("S", "X") and what[0] == factor
    )


def _carried(position: int, choice: SiteChoice, mesh: Shape, rule: OpRule) -> Layout | None:
    """Layout of an operand: split where it carries the factor, partial where the linear set says so."""
    dims = rule.inputs[position]
    placements: list[Placement] = []
    for axis_choice in choice:
        if axis_choice[0] in ("S", "X"):
            splits = _cut(rule.input_splits(position, *axis_choice[1:]), dims, axis_choice, rule)
            if len(splits) > 1:
                return None
            placements.append(splits[0] if splits else REPLICATE)
        elif axis_choice[0] == "P":
            placements.append(PARTIAL if position in rule.linear[axis_choice[1]] else REPLICATE)
        else:
            placements.append(REPLICATE)
    routing = rule.routing
    stay, whole = (position in routing.settled, position in routing.whole) if routing else (False, False)
    return _sent(nest(tuple(placements), mesh), dims, choice, rule, stay=stay, whole=whole)


def _cut(splits: tuple[Split, ...], dims: Dims, axis_choice: AxisChoice, rule: OpRule) -> tuple[Split, ...]:
    """The splits of dims that a choice asks for. Where rows go to their experts, the experts are split."""
    experts = rule.routing.experts if axis_choice[0] == "X" and rule.routing is not None else None
    if experts is None or experts not in dims:
        return splits
    return (Split(dims.index(experts), rule.factors[experts].size),)


def _sent(
    layout: Layout, dims: Dims, choice: SiteChoice, rule: OpRule, *, stay: bool = False, whole: bool = False
) -> Layout | None:
    """The layout with the rows at their experts, on the axis that says so; None where the ranks of that axis
    are not where these experts are."""
    placements = list(layout)
    for axis, (axis_choice, placement) in enumerate(zip(choice, layout, strict=True)):
        if axis_choice[0] != "X" or not isinstance(placement, Split):
            continue
        if dims[placement.dim] != axis_choice[1]:
            experts = dims[placement.dim]
            assert experts is not None
            if placement.period != rule.factors[experts].size:
                return None
        elif whole:
            placements[axis] = REPLICATE
        elif not stay:
            placements[axis] = Routed(placement.dim, placement.period)
    return tuple(placements)


def _made(position: int, choice: SiteChoice, mesh: Shape, rule: OpRule) -> Layout | None:
    """Layout of a result: split where it carries the factor, else partial as the factor says."""
    dims = rule.outputs[position]
    placements: list[Placement] = []
    for axis_choice in choice:
        if axis_choice[0] in ("S", "X"):
            splits = _cut(rule.output_splits(position, *axis_choice[1:]), dims, axis_choice, rule)
            reduction = rule.factors[axis_choice[1]].reductions[position]
            if len(splits) > 1:
                return None
            if splits:
                placements.append(splits[0])
            else:
                placements.append(Partial(reduction) if reduction else REPLICATE)
        else:
            placements.append(PARTIAL if axis_choice[0] == "P" else REPLICATE)
    back = rule.routing is not None and position in rule.routing.returned
    return _sent(nest(tuple(placements), mesh), dims, choice, rule, stay=back)


def operand_layouts(site: Site, option: Option, space: Space) -> tuple[Layout, ...]:
    """Layouts of an operator's operands, as it reads them."""
    layouts = []
    for read, layout in zip(site.reads, option.reads, strict=True):
        here = from_root(read.alias.steps, layout, space.mesh)
        assert here is not None
        layouts.append(here)
    return tuple(layouts)


def splits_of(rule: OpRule, choice: SiteChoice) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names of the split factors with the axes that split them, outermost first."""
    found: dict[str, list[int]] = {}
    for axis, axis_choice in enumerate(choice):
        if axis_choice[0] == "S":
            found.setdefault(rule.factors[axis_choice[1]].name, []).append(axis)
        elif axis_choice[0] == "X" and rule.routing is not None:
            found[ROUTED] = [axis]
            if rule.routing.experts is not None:
                found.setdefault(rule.factors[rule.routing.experts].name, []).append(axis)
    return tuple((name, tuple(axes)) for name, axes in found.items())


def _op_seconds(
    space: Space,
    site: Site,
    rule: OpRule | None,
    splits: tuple[tuple[str, tuple[int, ...]], ...],
    operands: tuple[Layout, ...],
    results: tuple[Layout, ...],
    choice: SiteChoice,
) -> float:
    """Roofline of the local op: arithmetic or memory, whichever is slower; an expansion costs what
    its own program does, collectives included."""
    call = site.call
    assert call is not None
    device = space.cluster.device
    if rule is not None and (expands(rule, splits) or fillings(call, rule, operands, site.zeros)):
        emission = local_program(call, rule, splits, operands, results, space.mesh, site.zeros)
        return emission_seconds(space, emission, call, rule, choice)
    if rule is not None and rule.moves_nothing and device.operators is None:
        return device.seconds_per_op
    inputs, outputs = local_shapes(call, operands, results, space.mesh)
    read = [TensorMeta(shape, m.dtype) for shape, m in zip(inputs, call.inputs, strict=True)]
    made = [
        TensorMeta(shape, m.dtype)
        for shape, m in zip(outputs, call.outputs, strict=True)
        if shape is not None and m is not None
    ]
    if rule is not None and rule.moves_nothing:
        return device.view_seconds(call.node.op, read, made)
    flops = _local_flops(space, rule, choice) if rule is not None else 0.0
    return device.operator_seconds(call.node.op, read, made, flops)


def _local_flops(space: Space, rule: OpRule, choice: SiteChoice) -> float:
    """Arithmetic of one rank, on padding too."""
    flops = rule.flops
    for axis, c in enumerate(choice):
        if c[0] in ("S", "X"):
            flops *= max(1.0, c[2] / rule.factors[c[1]].size) / space.mesh[axis]
    return flops


def emission_seconds(space: Space, emission: Emission, call: Call, rule: OpRule, choice: SiteChoice) -> float:
    """Seconds of an expansion's local program: its ops bound by memory, but for the op itself, which may be
    bound by arithmetic; its collectives by links."""
    device = space.cluster.device
    itself = [instruction for instruction in emission.instructions if instruction.op == call.node.op]
    flops = _local_flops(space, rule, choice) / max(1, len(itself))
    seconds = 0.0
    for instruction in emission.instructions:
        read = [emission.metas[name] for name in instruction.inputs]
        made = [emission.metas[name] for name in instruction.outputs if name]
        if kind := instruction.collective:
            largest = max(meta.bytes for meta in (*read, *made))
            seconds += collective_seconds(kind, largest, space.redistributor.links[instruction.args[-1]])
        elif instruction.op != "collective.wait":
            own = flops if instruction.op == call.node.op else 0.0
            seconds += device.operator_seconds(instruction.op, read, made, own)
    return seconds


_OPTION = {
    "op": _op_option,
    "parameter": _stored_option,
    "input": _stored_option,
    "output": _stored_option,
    "border": _stored_option,
    "buffer": _whole_option,
    "tangent": _whole_option,
    "seed": _whole_option,
    "shared": _whole_option,
}
