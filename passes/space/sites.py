"""Sites: the places of decision, which are every operator that is not a view, every parameter, input and output, and
every border between repeated layers.

A choice for every mesh axis is an *option* of a site: it fixes the layout in which each operand is read, the layout of
each result, and the seconds of the local work.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.ir.graph import JointGraph, Node, TensorMeta
from autopar.ir.layout import Layout
from autopar.ops.rule import Call, OpRule
from autopar.solve.problem import Tensor, Variable

from .choices import AxisChoice, SiteChoice
from .collapse import Alias


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
    """A value that is read under an alias, in backward or in forward."""

    alias: Alias
    backward: bool


@dataclass(frozen=True, kw_only=True, eq=False)
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
    """Replicated because every copy of a repeat reads it, or because it is made where it is read."""
    in_time: bool = False
    """Split by micro-batches alone, because every copy of a repeat reads it."""
    made: bool = False
    """An operator that runs wherever its results are read (`making`)."""
    zeros: tuple[bool, ...] = ()
    """Of which operands of an op padding is zero: of parameters and inputs, which are given so."""
    form: int = -1
    """The same for ops that do the same to operands of the same metas, and are free to do it in parts or are not."""
    choices: Mapping[int, tuple[AxisChoice, ...]] = field(default_factory=dict)
    """Axis size -> choices on an axis of that size."""
    held: tuple[SiteChoice, ...] = ()
    """The only choices of a parameter that stays where it is, if it does."""
    region: str = ""
    """The name of its region: a border stands in two."""

    @cached_property
    def key(self) -> str:
        """What tells it from all other sites of a space."""
        return f"{self.region}/{self.name}"


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What a copy of a region does again where it is recomputed: its `operators`, and the acquisition of `roots`."""

    operators: frozenset[str] = frozenset()
    roots: frozenset[str] = frozenset()

    def phases(self, site: Site, maker: Site, *, backward: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The phases in which a site reads what another one makes: without, and with recomputation."""
        once = ("backward",) if backward else ("forward",)
        twice = site.name in self.operators and maker.kind != "shared"
        return once, ("forward", "backward") if twice else once

    def switched(self, variables: Sequence[Variable]) -> tuple[Sequence[Variable], Sequence[Tensor]]:
        """The variable that says whether a copy is recomputed, and what its operators, among these variables, cost once
        more; nothing where there is no such choice."""
        return (), ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """Sites that are solved together: the rest of the graph, or one copy of a repeated segment.

    `left` and `right` are names of border sites (for a body), in the order of the segment's borders; `again` is what
    may be done again in backward.
    """

    name: str
    sites: Mapping[str, Site]
    left: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    again: Recomputed = Recomputed()

    @staticmethod
    def of(name: str, sites: Iterable[Site]) -> "Region":
        return Region(name=name, sites={s.name: replace(s, region=name) for s in sites})


def joined_sites(regions: Iterable[Region], twins: Mapping[str, Sequence[str]]) -> dict[str, list[Site]]:
    """Names of sites -> the sites that take the same option, wherever they stand: one of that name first."""
    by_name: dict[str, list[Site]] = {}
    for region in regions:
        for name, site in region.sites.items():
            by_name.setdefault(name, []).append(site)
    others = {name: [other for other in twins.get(name, ()) if other != name] for name in by_name}
    return {name: [*sites, *(s for other in others[name] for s in by_name[other])] for name, sites in by_name.items()}


def output_name(number: int) -> str:
    return f"output {number}"


def output_numbers(graph: JointGraph) -> dict[str, list[int]]:
    """Value -> its places among the graph's outputs, without the gradients that parameters' sites read."""
    numbers: dict[str, list[int]] = {}
    for number, output in enumerate(graph.outputs):
        if output.name is not None and not (output.role == "gradient" and output.target in graph.parameters):
            numbers.setdefault(output.name, []).append(number)
    return numbers
