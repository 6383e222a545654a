"""Making: values that are made from nothing are made where they are read, in the layout in which they are read.

Masks, positions and tables of angles depend on no parameter. A rank computes its part of them from indices, and nothing
is sent. So what makes them is no decision: whoever reads such a value has it in any layout, for the seconds of
the local work that leads there. All copies of a repeat share it, and share its price.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autopar.ir.dataflow import derived
from autopar.ir.graph import GraphInput, JointGraph, is_view, readers
from autopar.ir.layout import REPLICATE, Layout, Split
from autopar.passes.segments.segment import Segments

from .choices import REPLICATED, AxisChoice, SiteChoice
from .items import operand_layouts, operator_items
from .options import operator_option
from .setting import Setting
from .sites import Option, Site
from .space import Making


def made_where_read(graph: JointGraph, segments: Segments, shared: Collection[str]) -> frozenset[int]:
    """The nodes of forward that depend on integers and buffers alone and lead to a constant, or to one of the `shared`
    values of a repeat; with all nodes that lead there. Of a repeat all copies, or none."""
    return _Made(graph, segments).nodes(shared)


class _Made:
    def __init__(self, graph: JointGraph, segments: Segments) -> None:
        self.graph = graph
        positions = (position for repeat in segments.repeats for position in zip(*repeat.copies, strict=True))
        self.alike = {i: position for position in positions for i in position}
        """Node of a copy -> the nodes at its place in all copies."""
        crossing = {value for repeat in segments.repeats for border in repeat.borders for value in border.values}
        at = readers(graph.nodes)
        self.barred = {i for value in crossing for i in at.get(value, ()) if i in self.alike}
        """Nodes that read what crosses from copy to copy."""

    def nodes(self, shared: Collection[str]) -> frozenset[int]:
        possible = self._possible()
        while uneven := {i for i in possible if not possible.issuperset(self.alike.get(i, ()))}:
            self.barred |= uneven
            possible = self._possible()
        constant = self._from(frozenset())
        producer = self.graph.producer
        wanted = constant & possible | {producer[name] for name in shared if name in producer} & possible
        waiting = sorted(wanted)
        while waiting:
            index = waiting.pop()
            sources = {producer[name] for name in self.graph.nodes[index].inputs if name in producer}
            more = sources.union(self.alike.get(index, ())) - wanted
            wanted |= more
            waiting += sorted(more)
        return frozenset(i for i in wanted if not is_view(self.graph.nodes[i]))

    def _possible(self) -> set[int]:
        return self._from({value.name for value in self.graph.inputs if self._is_free(value)})

    def _is_free(self, value: GraphInput) -> bool:
        """Whether every rank has an input in full, or may have it: what a batch holds of integers is small."""
        small = not self.graph.metas[value.name].dtype.is_floating_point
        return value.role == "buffer" or (value.role == "input" and small)

    def _from(self, given: Collection[str]) -> set[int]:
        """The nodes of forward that depend on nothing but these values."""
        forward, barred = self.graph.halves[0], {self.graph.nodes[index].name for index in self.barred}
        there = derived(forward, given, lambda node: node.op.startswith("aten.") and node.name not in barred)
        return {index for index, node in enumerate(forward) if node.name in there}


class MadeWhereRead(Making):
    """How values that are made where they are read are made there."""

    def __init__(self, setting: Setting, sites: Iterable[Site]) -> None:
        self.setting = setting
        self.sites = {root: site for site in sites if site.made for root in site.makes if root}
        self._options: dict[tuple[str, Layout], Option | None] = {}
        self._seconds: dict[tuple[str, frozenset[Layout]], float] = {}

    def option(self, root: str, layout: Layout) -> Option | None:
        """The option of its operator that makes a root in this layout, without communication. None if there is none:
        it is then made in full, and cut."""
        key = root, layout
        if key not in self._options:
            self._options[key] = self._option(self.sites[root], root, layout)
        return self._options[key]

    def _option(self, site: Site, root: str, layout: Layout) -> Option | None:
        position = site.makes.index(root)
        for choice in self._choices(site, position, layout):
            option = operator_option(self.setting, site, choice)
            if option is not None and option.makes[position] == layout and self._stays(site, option):
                return option
        return None

    def _choices(self, site: Site, position: int, layout: Layout) -> list[SiteChoice]:
        """The choices that may lead to a layout. Where several axes split one dim, what one takes may be what is left
        below the other (`layout.nest`)."""
        rule = site.rule
        if rule is None:
            return [] if any(p != REPLICATE for p in layout) else [SiteChoice((REPLICATED,) * len(layout))]
        first: dict[int, Split] = {}
        for placement in layout:
            if isinstance(placement, Split):
                first.setdefault(placement.dim, placement)
        found = []
        for splits in (layout, tuple(first[p.dim] if isinstance(p, Split) else p for p in layout)):
            axes = []
            for placement in splits:
                if placement == REPLICATE:
                    axes.append(REPLICATED)
                elif isinstance(placement, Split) and (digit := rule.output_factor(position, placement)) is not None:
                    factor, period = digit
                    # a part beyond the end of what is joined would lie in the middle of the result
                    if period <= rule.factors[factor].size or not rule.factors[factor].even:
                        axes.append(AxisChoice("S", factor, period))
            if len(axes) == len(layout):
                found.append(SiteChoice(tuple(axes)))
        return found

    def _stays(self, site: Site, option: Option) -> bool:
        """Whether all that an option reads can be had, and makes can be read, without communication."""
        if not all(isinstance(p, Split) or p == REPLICATE for layout in (*option.reads, *option.makes) for p in layout):
            return False
        operands = operand_layouts(self.setting, site, option)
        items = operator_items(self.setting, site, site.rule, operands, option.makes, option.choice)
        return all(item.axis < 0 for item in items)

    def seconds(self, root: str, layouts: Iterable[Layout]) -> float:
        """Seconds of having a root in all these layouts, made from nothing."""
        key = root, frozenset(layouts)
        if key not in self._seconds:
            self._seconds[key] = self._sum(root, key[1])
        return self._seconds[key]

    def _sum(self, root: str, layouts: frozenset[Layout]) -> float:
        total, whole = 0.0, (REPLICATE,) * len(self.setting.mesh)
        made: set[tuple[str, SiteChoice]] = set()
        there: set[tuple[str, Layout]] = set()
        waiting = [(root, layout) for layout in sorted(layouts, key=str)]
        while waiting:
            name, layout = at = waiting.pop()
            if at in there:
                continue
            there.add(at)
            option = self.option(name, layout) if name in self.sites else None
            if option is None:
                total += self.cut_seconds(name, layout)
                waiting += [(name, whole)] if name in self.sites else []
                continue
            site = self.sites[name]
            if (site.key, option.choice) not in made:
                made.add((site.key, option.choice))
                total += option.seconds
                waiting += [(read.alias.root, at) for read, at in zip(site.reads, option.reads, strict=True)]
        return total

    def cut_seconds(self, root: str, layout: Layout) -> float:
        """Seconds of cutting a rank's part out of what is there in full."""
        meta, whole = self.setting.metas[root], (REPLICATE,) * len(layout)
        route = self.setting.redistributor.route(meta.shape, meta.dtype, whole, layout)
        assert route is not None
        return route.seconds
