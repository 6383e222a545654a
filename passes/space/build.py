"""Building the space: the sites of a graph, region by region, and then the choices of each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.cluster.machine import Cluster
from autopar.cost.optimizers import OPTIMIZERS, Optimizer
from autopar.cost.redistribute import Redistributor
from autopar.ir.graph import JointGraph, Node, TensorMeta, constants_of, is_view
from autopar.ops.rule import Call, OpRule, call_of
from autopar.ops.rules import rule_of
from autopar.passes.segments.segment import Repeated, Segments

from .collapse import Alias, Roots
from .making import made_where_read
from .propagation import Propagation
from .sites import Read, Region, Site, border_name, output_name, output_numbers
from .space import Space


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
    builder = _Builder(graph, roots, metas, segments)
    rest = builder.rest(segments)
    bodies = tuple(builder.body(repeat) for repeat in segments.repeats)
    modules: dict[str, list[str]] = {}
    for index in builder.without_rule:
        modules.setdefault(graph.nodes[index].op, []).append(graph.nodes[index].module)
    space = Space(
        graph=graph,
        mesh=sizes,
        axes=axes,
        cluster=cluster,
        optimizer=optimizer,
        redistributor=Redistributor(sizes, cluster.links(sizes), cluster.device),
        roots=roots,
        metas=metas,
        rest=rest,
        bodies=bodies,
        segments=segments,
        rest_borders=tuple(
            (
                tuple(border_name(border.values[0]) for border in repeat.borders),
                tuple(border_name(border.values[-1]) for border in repeat.borders),
            )
            for repeat in segments.repeats
        ),
        without_rule={op: len(paths) for op, paths in sorted(modules.items())},
        without_rule_in={op: _paths(paths) for op, paths in sorted(modules.items())},
    )
    choices = {ranks: Propagation(space, ranks).choices() for ranks in sorted(set(sizes))}
    return space.with_sites(
        lambda site: replace(site, choices={ranks: here[site.key] for ranks, here in choices.items()})
    )


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
    """Builds the sites, without their choices."""

    def __init__(self, graph: JointGraph, roots: Roots, metas: Mapping[str, TensorMeta], segments: Segments) -> None:
        self.graph, self.roots, self.metas = graph, roots, metas
        self.without_rule: list[int] = []
        """Indices of the nodes that are replicated because their op has no rule."""
        self.rules: dict[Any, OpRule | None] = {}
        self.forms: dict[Any, int] = {}
        self.gradients = {o.target: o.name for o in self.graph.outputs if o.role == "gradient" and o.name is not None}
        self.input_roles = {i.name: i for i in self.graph.inputs}
        self.given = {i.name for i in self.graph.inputs if i.role in ("parameter", "buffer", "input")}
        self.constant = self._constants()
        shared = self._shared_roots(name for repeat in segments.repeats for name in repeat.shared)
        self.made = made_where_read(graph, segments, shared)
        self.read_by_made = {name for index in self.made for name in self._behind(graph.nodes[index])}
        """Roots that they read."""

    def _behind(self, node: Node) -> Iterator[str]:
        return (self.roots.alias(name, -1).root for name in node.inputs)

    def _constants(self) -> frozenset[str]:
        """Values that depend on no input: they are replicated."""
        varying = {i.name for i in self.graph.inputs}
        constant: set[str] = set()
        for node in self.graph.nodes:
            target = varying if any(name in varying for name in node.inputs) else constant
            target.update(o for o in node.outputs if o)
        return frozenset(constant)

    def rest(self, segments: Segments) -> Region:
        owned = {name for repeat in segments.repeats for own in repeat.own for name in own}
        result_values = {name for repeat in segments.repeats for results in repeat.results for name in results}
        shared = frozenset(
            self._shared_roots(
                name for repeat in segments.repeats for k in range(repeat.count) for name in repeat.from_outside(k)
            )
        )
        whole = shared | self.read_by_made
        sites = [self._input(i.name, -1, fixed=i.name in whole) for i in self.graph.inputs if i.name not in owned]
        sites += self._ops(segments.rest, home=-1, replicated=shared)
        sites += self._outer_borders(segments)
        for name, numbers in output_numbers(self.graph).items():
            if name not in result_values:
                sites += [self._output(number, home=-1) for number in numbers]
        return _region("rest", sites)

    def _outer_borders(self, segments: Segments) -> list[Site]:
        """The borders between runs and the rest of the graph, or another run: what one run makes and the next one reads
        is one site. It reads what the rest makes; what a run makes is read in its body."""
        backward: dict[str, bool] = {}
        for repeat in segments.repeats:
            for border in repeat.borders:
                for value in (border.values[0], border.values[-1]):
                    backward[value] = backward.get(value, True) and border.backward
        home, producer = self.roots.home, self.graph.producer
        return [self._border(v, read=producer.get(v) not in home, backward=late) for v, late in backward.items()]

    def body(self, repeat: Repeated) -> Region:
        home = self.roots.home[repeat.copies[0][0]]
        sites = [self._input(name, home) for name in repeat.own[0]]
        for name in self._shared_roots(repeat.from_outside(0)):
            sites.append(Site(name=f"{name}|shared", kind="shared", makes=(name,), meta=self.metas[name]))
        before = len(self.without_rule)
        sites += self._ops(repeat.copies[0], home=home, replicated=frozenset())
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
        return _region(repeat.name, sites, tuple(left), tuple(right))

    def _output(self, number: int, home: int) -> Site:
        output = self.graph.outputs[number]
        assert output.name is not None
        backward = output.backward
        return Site(
            name=output_name(number),
            kind="output",
            reads=(Read(alias=self.roots.alias(output.name, home), backward=backward),),
            backward=backward,
            meta=self.graph.metas[output.name],
            module=f"{output.role} {output.target}",
        )

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
        index = self.graph.producer.get(value)
        home = -1 if index is None else self.roots.home.get(index, -1)
        return self.roots.alias(value, home)

    def _input(self, name: str, home: int, *, fixed: bool = False) -> Site:
        graph_input, meta = self.input_roles[name], self.graph.metas[name]
        reads: tuple[Read, ...] = ()
        if graph_input.role == "parameter" and graph_input.target in self.gradients:
            alias = self.roots.alias(self.gradients[graph_input.target], home)
            reads = (Read(alias=alias, backward=True),)
        return Site(
            name=name,
            kind=graph_input.role,
            reads=reads,
            makes=(name,),
            meta=TensorMeta(meta.shape, graph_input.at_rest or meta.dtype),
            module=graph_input.target,
            backward=graph_input.role == "tangent",
            fixed=fixed,
        )

    def _ops(self, indices: Sequence[int], *, home: int, replicated: frozenset[str]) -> list[Site]:
        sites = []
        metas, alias = self.graph.metas, self.roots.alias
        for index in sorted(indices):
            node = self.graph.nodes[index]
            if is_view(node):
                continue
            call = call_of(node, metas)
            key, rule = _key(call), None
            constant = all(not name or name in self.constant for name in node.outputs)
            made = index in self.made
            if made or ((not constant or not call.inputs) and not replicated.intersection(node.outputs)):
                if key not in self.rules:
                    self.rules[key] = rule_of(call)
                rule = self.rules[key]
                if rule is None and not constant:
                    self.without_rule.append(index)
            reads = tuple(Read(alias=alias(name, home), backward=node.backward) for name in node.inputs)
            site = Site(
                name=node.name,
                kind="op",
                reads=reads,
                makes=node.outputs,
                backward=node.backward,
                module=node.module,
                node=node,
                call=call,
                rule=rule,
                zeros=tuple(read.alias.root in self.given for read in reads),
                fixed=made,
                made=made,
                form=self.forms.setdefault((key, rule is None), len(self.forms)),
            )
            sites.append(site)
        return sites


def _region(name: str, sites: Iterable[Site], left: tuple[str, ...] = (), right: tuple[str, ...] = ()) -> Region:
    return Region(name=name, sites={s.name: replace(s, region=name) for s in sites}, left=left, right=right)


def _key(call: Call) -> Any:
    """What a rule may look at, without names."""
    names: list[str] = []
    constants = constants_of(call.node.args, names), constants_of(call.node.kwargs, names)
    repeats = tuple(names.index(name) for name in names)
    return call.node.op, constants, repeats, call.inputs, call.outputs
