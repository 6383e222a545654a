"""Building the space: the sites of a graph, and then the choices of each."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from autopar.cluster.machine import Cluster
from autopar.cost.optimizers import OPTIMIZERS, Optimizer
from autopar.cost.redistribute import Redistributor
from autopar.ir.graph import JointGraph, TensorMeta, constants_of, is_view
from autopar.ops.rule import Call, OpRule, call_of
from autopar.ops.rules import rule_of

from .collapse import Roots
from .propagation import Propagation
from .sites import Read, Region, Site, output_name, output_numbers
from .space import Space

S = TypeVar("S", bound=Space)


def strategies(
    graph: JointGraph, mesh: Mapping[str, int], cluster: Cluster, optimizer: Optimizer = OPTIMIZERS["adamw"]
) -> Space:
    """The search space of a graph on a mesh (axis name -> size), as one piece: no layer is known to repeat."""
    builder = SiteBuilder(graph, Roots(graph))
    sites = [builder.input(i.name) for i in graph.inputs]
    sites += builder.operators(range(len(graph.nodes)))
    sites += [builder.output(number) for numbers in output_numbers(graph).values() for number in numbers]
    return builder.space(Space, mesh, cluster, optimizer, rest=Region.of("rest", sites))


class SiteBuilder:
    """Builds the sites, without their choices, and the space around them."""

    redistributor = Redistributor
    propagation = Propagation

    def __init__(self, graph: JointGraph, roots: Roots) -> None:
        self.graph, self.roots = graph, roots
        self.metas = dict(graph.metas)
        self.without_rule: list[int] = []
        """Indices of the nodes that are replicated because their op has no rule."""
        self.rules: dict[Any, OpRule | None] = {}
        self.forms: dict[Any, int] = {}
        self.gradients = {o.target: o.name for o in self.graph.outputs if o.role == "gradient" and o.name is not None}
        self.input_roles = {i.name: i for i in self.graph.inputs}
        self.given = {i.name for i in self.graph.inputs if i.role in ("parameter", "buffer", "input")}
        self.constant = self._constants()
        self.made: Collection[int] = ()
        """Indices of the nodes whose results are made where they are read."""

    def space(
        self,
        kind: type[S],
        mesh: Mapping[str, int],
        cluster: Cluster,
        optimizer: Optimizer,
        **regions: Any,
    ) -> S:
        """A space of this kind with these regions, whose sites have the choices that splits lead to."""
        sizes = tuple(mesh.values())
        modules: dict[str, list[str]] = {}
        for index in self.without_rule:
            modules.setdefault(self.graph.nodes[index].op, []).append(self.graph.nodes[index].module)
        space = kind(
            graph=self.graph,
            mesh=sizes,
            axes=tuple(mesh),
            cluster=cluster,
            optimizer=optimizer,
            redistributor=self.redistributor(sizes, cluster.links(sizes), cluster.device),
            roots=self.roots,
            metas=self.metas,
            without_rule_in=dict(sorted(modules.items())),
            **regions,
        )
        choices = {ranks: self.propagation(space, ranks).choices() for ranks in sorted(set(sizes))}
        return space.with_sites(
            lambda site: replace(site, choices={ranks: here[site.key] for ranks, here in choices.items()})
        )

    def _constants(self) -> frozenset[str]:
        """Values that depend on no input: they are replicated."""
        varying = {i.name for i in self.graph.inputs}
        constant: set[str] = set()
        for node in self.graph.nodes:
            target = varying if any(name in varying for name in node.inputs) else constant
            target.update(o for o in node.outputs if o)
        return frozenset(constant)

    def output(self, number: int, home: int = -1) -> Site:
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

    def input(self, name: str, home: int = -1, *, fixed: bool = False) -> Site:
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

    def operators(self, indices: Sequence[int], home: int = -1) -> list[Site]:
        """Of these nodes, in the copy `home` of a layer."""
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
            if made or not constant or not call.inputs:
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


def _key(call: Call) -> Any:
    """What a rule may look at, without names."""
    names: list[str] = []
    constants = constants_of(call.node.args, names), constants_of(call.node.kwargs, names)
    repeats = tuple(names.index(name) for name in names)
    return call.node.op, constants, repeats, call.inputs, call.outputs
