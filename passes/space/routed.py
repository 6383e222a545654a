"""Routed rows: where rows may lie with their experts."""

from __future__ import annotations

from autopar.ir.layout import Routed, Split
from autopar.ops.emit import local_shapes
from autopar.ops.rules import localize

from .choices import AxisChoice, SiteChoice
from .collapse import from_root
from .operator_layouts import value_layouts
from .propagation import Propagation, Travel
from .sites import Site


class RoutedPropagation(Propagation):
    """Also says which sites may have their rows with their experts: they set out where the rows of an operator that
    knows of experts may be split, and travel along whatever reads rows one by one."""

    def travel(self) -> None:
        super().travel()
        for site in self.sites:
            routing = None if site.rule is None else site.rule.routing
            if routing is not None and routing.starts:
                for number, period in self.seeds[site.key]:
                    if number == routing.rows:
                        self.run(self._route(site, number, period))

    def _route(self, site: Site, number: int, period: int) -> Travel:
        """The rows of a site may be with their experts: so may those of whatever reads them one by one."""
        assert site.rule is not None
        routing = site.rule.routing
        if (number, period) in self.routes[site.key] or (routing is not None and routing.count % self.ranks):
            return
        self.routes[site.key][number, period] = None
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
        digit = rule.input_factor(position, Split(rows.dim, rows.period)) if rule is not None else None
        if rule is None or digit is None:
            return
        number, period = digit
        routing, factor = rule.routing, rule.factors[number]
        if routing is None:
            fits = not (factor.expands or factor.contiguous) and (period, factor.size % period) == (rows.period, 0)
            fits = fits and self._takes_any_number(site, number)
        else:
            fits = number == routing.rows and position not in (*routing.settled, *routing.replicated)
        if fits:
            yield self._route(site, number, rows.period)

    def _takes_any_number(self, site: Site, number: int) -> bool:
        """Whether the op has no argument that says how many rows there are."""
        call, rule, mesh = site.call, site.rule, (self.ranks,)
        assert call is not None and rule is not None
        choice = SiteChoice((AxisChoice("S", number, rule.factors[number].size),))
        operands, results = (value_layouts(rule, choice, mesh, results=late) for late in (False, True))
        if operands is None or results is None:
            return False
        shapes = local_shapes(call, operands, results, mesh)
        return localize(call, *shapes, results, mesh) == (call.node.args, call.node.kwargs)
