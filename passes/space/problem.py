"""Problem: the search space under given options, with seconds and bytes, for a solver.

Each site becomes a variable and each root tensor a `problem.Tensor`. Costs of a tensor come from
`Redistributor.acquire`, the function that codegen emits collectives from. Bytes are what a rank holds
between forward and backward: parameters with gradients and optimizer states, and every forward value
in every layout in which backward reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from autopar.cost.redistribute import Acquired
from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Layout, Partial, Routed, local_meta
from autopar.solve.problem import Choice, Problem, Repeat, Tensor, Variable

from .choices import REGATHER, Policy, SiteChoice
from .recompute import reacquired, recomputed
from .sites import Option, Region, Site, joined_sites
from .space import Space

Allowed = Mapping[str, Sequence[SiteChoice]]
"""Site name -> the options that it may take."""

Decisions = Mapping[str, SiteChoice]
"""Site name -> the option that it took."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A decision for every site: of the rest, and for each repeat of each of its copies. `recompute` says which of
    the copies are recomputed in backward (none given: none)."""

    rest: Decisions
    copies: tuple[tuple[Decisions, ...], ...] = ()
    recompute: tuple[tuple[bool, ...], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        copies = tuple(tuple(frozenset(copy.items()) for copy in here) for here in self.copies)
        return hash((frozenset(self.rest.items()), copies, self.recompute))

    def again(self, repeat: int) -> tuple[bool, ...]:
        """Of each copy of a repeat."""
        return self.recompute[repeat] if self.recompute else (False,) * len(self.copies[repeat])


class Moved(NamedTuple):
    """What the price of having a tensor in several layouts depends on beside these. `kept`: forward makes it, and
    backward reads it."""

    meta: TensorMeta
    kept: bool
    is_parameter: bool
    bucketed: bool
    made: str = ""
    """The name of what is made where it is read."""
    copies: int = 1
    """How many copies of a repeat share it."""


def moved_of(meta: TensorMeta, maker: Site, readers: Sequence[tuple[Site, bool]]) -> Moved:
    """Of the site that makes a tensor, and those that read it, each with whether it does so in backward."""
    kept = not maker.backward and any(late for _, late in readers)
    return Moved(meta, kept, maker.kind == "parameter", is_bucketed(maker, [site for site, _ in readers]))


def is_bucketed(maker: Site, readers: Sequence[Site]) -> bool:
    """Whether a tensor travels in a bucket: parameters and gradients do."""
    return maker.kind == "parameter" or any(reader.kind == "parameter" for reader in readers)


Acquisition = Literal["once", "forward", "backward"]
"""What a tensor is acquired for: all readers, or those of one phase."""

ACQUISITIONS = get_args(Acquisition)

SWITCH = "recompute"
"""The variable of a body that says whether a copy is recomputed in backward."""


@dataclass(frozen=True, slots=True)
class Again:
    """What a copy of a region does again where it is recomputed: its `operators`, and the acquisition of `roots`."""

    operators: frozenset[str] = frozenset()
    roots: frozenset[str] = frozenset()

    @staticmethod
    def of(region: Region) -> Again:
        return Again(recomputed(region), reacquired(region))

    def phases(self, site: Site, maker: Site, *, backward: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The phases in which a site reads what another one makes: without, and with recomputation."""
        once = ("backward",) if backward else ("forward",)
        twice = site.name in self.operators and maker.kind != "shared"
        return once, ("forward", "backward") if twice else once


@dataclass(frozen=True, slots=True)
class Switched:
    """A tensor of a copy that may be recomputed: how it is moved if it is not (`kept`) and if it is (`again`), whether
    it is reacquired then, and whether it crosses a border, so that it is kept as it crosses."""

    kept: Moved
    again: Moved
    reacquired: bool
    is_border: bool


class ProblemBuilder:
    """Builds problems over one space. Tables are remembered by what they depend on, so that layers of
    one structure, and solves that differ on one axis, share them."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.tables: dict[Any, Tensor] = {}
        """Tensors but for their names and variables."""
        self.joined = joined_sites(space.regions(), space.repeats)
        self.again = tuple(Again.of(body) for body in space.bodies)

    def moved(self, root: str, maker: Site, readers: Sequence[tuple[Site, bool]], copies: int) -> Moved:
        """As `moved_of`, in a region of which there are so many copies."""
        moved = moved_of(self.space.metas[root], maker, readers)
        return moved._replace(made=root, copies=copies) if root in self.space.making.sites else moved

    def build(self, allowed: Allowed, *, recompute: bool = False) -> tuple[Problem, _Decoder]:
        """The problem in which each site takes one of its allowed options; to `recompute` copies of segments in
        backward is a choice too, if it is said so.

        Raises ValueError if a site has no legal option left.
        """
        legal = self._legal(allowed)
        again = self.again if recompute else (Again(),) * len(self.again)
        parts = zip(self.space.bodies, self.space.repeats, again, strict=True)
        bodies = [self._region(body, legal, of_body, repeat.count) for body, repeat, of_body in parts]
        variables, tensors, names = self._region(self.space.rest, legal, Again(), 1)
        index = {name: i for i, name in enumerate(names)}
        repeats = []
        for repeat, region, (left, right), (body_variables, body_tensors, body_names) in zip(
            self.space.repeats, self.space.bodies, self.space.rest_borders, bodies, strict=True
        ):
            body_index = {name: i for i, name in enumerate(body_names)}
            repeats.append(
                Repeat(
                    name=repeat.name,
                    body=Problem(
                        variables=body_variables,
                        tensors=body_tensors,
                        branch=len(body_names) if len(body_variables) > len(body_names) else None,
                    ),
                    count=len(repeat.copies),
                    left=tuple(index[name] for name in left),
                    right=tuple(index[name] for name in right),
                    body_left=tuple(body_index[name] for name in region.left),
                    body_right=tuple(body_index[name] for name in region.right),
                )
            )
        problem = Problem(variables=variables, tensors=tensors, repeats=tuple(repeats))
        return problem, _Decoder(
            rest=names,
            bodies=tuple(body_names for _, _, body_names in bodies),
            switched=tuple(bool(of_body.operators) for of_body in again),
            options={k: list(v) for k, v in legal.items()},
        )

    def option(self, site: Site, choice: SiteChoice) -> Option | None:
        """What a choice means, or None if it is not legal."""
        return self.space.option(site, choice)

    def _legal(self, allowed: Allowed) -> dict[str, tuple[Option, ...]]:
        """Allowed options that mean something; border sites that are one variable agree on theirs."""
        legal: dict[str, tuple[Option, ...]] = {}
        for name, sites in self.joined.items():
            alternatives = ([self.option(site, choice) for site in sites] for choice in allowed[name])
            options = tuple(first for first, *others in alternatives if first is not None and None not in others)
            if not options:
                raise ValueError(f"site {name} ({sites[0].module}): none of {len(allowed[name])} options is legal")
            legal[name] = options
        return legal

    def _region(
        self, region: Region, legal: Mapping[str, tuple[Option, ...]], again: Again, copies: int
    ) -> tuple[tuple[Variable, ...], tuple[Tensor, ...], tuple[str, ...]]:
        """Its variables, tensors, and the names of its sites. If something is done `again` where the region is
        recomputed, a last variable, `SWITCH`, says whether it is."""
        variables = []
        readers: dict[str, list[tuple[int, int]]] = {}
        makers: dict[str, tuple[int, int]] = {}
        names = tuple(region.sites)
        region_options: list[tuple[Option, ...]] = []
        for number, site in enumerate(region.sites.values()):
            options = self._site_options(site, legal[site.name])
            region_options.append(options)
            variables.append(
                Variable(
                    name=site.name,
                    options=tuple(str(o.choice) for o in options),
                    seconds=tuple(o.seconds for o in options),
                    bytes=tuple(o.bytes for o in options),
                )
            )
            for position, root in enumerate(site.makes):
                if root:
                    makers[root] = (number, position)
            for position, read in enumerate(site.reads):
                if not site.made:
                    readers.setdefault(read.alias.root, []).append((number, position))
        sites = list(region.sites.values())
        tensors: list[Tensor] = []
        for root, reading in readers.items():
            maker, result = makers[root]
            of_root = root, sites, region_options, maker, result, reading, copies
            if root in again.roots or any(sites[reader].name in again.operators for reader, _ in reading):
                tensors += self._switched(*of_root, again)
            else:
                tensors.append(self._tensor(*of_root))
        if again.operators:
            variables.append(Variable(name=SWITCH, options=("no", "yes"), seconds=(0.0, 0.0), bytes=(0.0, 0.0)))
            numbers = [number for number, site in enumerate(sites) if site.name in again.operators]
            tensors += [_twice(variables[number], number, len(sites)) for number in numbers]
        return tuple(variables), tuple(tensors), names

    def _site_options(self, site: Site, options: tuple[Option, ...]) -> tuple[Option, ...]:
        """The options as this very site means them: a border's reads differ between its two sites."""
        if site.kind != "border":
            return options
        own = (self.option(site, option.choice) for option in options)
        return tuple(option for option in own if option is not None)

    def _tensor(
        self,
        root: str,
        sites: list[Site],
        options: list[tuple[Option, ...]],
        maker: int,
        result: int,
        reading: list[tuple[int, int]],
        copies: int,
    ) -> Tensor:
        site = sites[maker]
        produced = tuple((o.makes[result], o.choice.policy) for o in options[maker])
        reading = _in_order(sites, reading)
        moved = self.moved(root, site, [(sites[r], sites[r].reads[p].backward) for r, p in reading], copies)
        positions = _positions(reading)
        wanted = tuple(
            tuple(
                tuple((o.reads[p], moved.is_parameter and sites[reader].reads[p].backward) for p in at)
                for o in options[reader]
            )
            for reader, at in positions.items()
        )
        key = (moved, produced, wanted)
        if key not in self.tables:
            self.tables[key] = self._table(moved, produced, wanted)
        return replace(self.tables[key], name=root, producer=maker, consumers=tuple(positions))

    def _table(
        self,
        moved: Moved,
        produced: tuple[tuple[Layout, Policy], ...],
        wanted: tuple[tuple[tuple[tuple[Layout, bool], ...], ...], ...],
    ) -> Tensor:
        codes, masks, items, unions = _encoded(produced, wanted)
        costs = {}
        for (layout, policy), code in dict(zip(produced, codes, strict=True)).items():
            for union in unions:
                cost = self.cost(moved, layout, policy, _of_bits(items, union))
                if cost is not None:
                    costs[code, union] = cost
        return Tensor(name="", producer=0, produced=codes, consumers=(), wanted=masks, costs=costs)

    def _switched(
        self,
        root: str,
        sites: list[Site],
        options: list[tuple[Option, ...]],
        maker: int,
        result: int,
        reading: list[tuple[int, int]],
        copies: int,
        again: Again,
    ) -> Iterator[Tensor]:
        """As `_tensor`, where what a tensor costs depends on whether the copy is recomputed: what is acquired once for
        all readers, or else for those of forward, and for those of backward, each as a tensor that also the switch,
        the last of the variables, reads."""
        site = sites[maker]
        produced = tuple((o.makes[result], o.choice.policy) for o in options[maker])
        reading = _in_order(sites, reading)
        phases = {(r, p): again.phases(sites[r], site, backward=sites[r].reads[p].backward) for r, p in reading}
        kept, moved_again = (
            self.moved(root, site, [(sites[r], "backward" in phases[r, p][number]) for r, p in reading], copies)
            for number in (0, 1)
        )
        switched = Switched(kept, moved_again, root in again.roots, site.kind == "border")
        for part in ACQUISITIONS:
            positions = _positions([at for at in reading if part == "once" or part in phases[at][1]])

            def is_extra(reader: int, position: int, part: Acquisition = part) -> bool:
                """Whether a parameter that is gathered again is read in this phase only if the copy is recomputed."""
                return site.kind == "parameter" and part not in ("once", *phases[reader, position][0])

            wanted = tuple(
                tuple(tuple((o.reads[p], is_extra(reader, p)) for p in at) for o in options[reader])
                for reader, at in positions.items()
            )
            key = (switched, part, produced, wanted)
            if key not in self.tables:
                self.tables[key] = self._switched_table(*key)
            table = self.tables[key]
            if not table.is_free:
                yield replace(table, name=f"{root} {part}", producer=maker, consumers=(*positions, len(sites)))

    def _switched_table(
        self,
        switched: Switched,
        part: Acquisition,
        produced: tuple[tuple[Layout, Policy], ...],
        wanted: tuple[tuple[tuple[tuple[Layout, bool], ...], ...], ...],
    ) -> Tensor:
        codes, masks, items, unions = _encoded(produced, wanted)
        bit = 1 << len(items)
        costs = {}
        for (layout, policy), code in dict(zip(produced, codes, strict=True)).items():
            for union in unions:
                for is_again in (False, True):
                    cost = self._acquisition(switched, part, is_again, layout, policy, _of_bits(items, union))
                    if cost is not None:
                        costs[code, union | bit * is_again] = cost
        masks = (*masks, (0, bit))
        return Tensor(name="", producer=0, produced=codes, consumers=(), wanted=masks, costs=costs)

    def _acquisition(
        self,
        switched: Switched,
        part: Acquisition,
        is_again: bool,
        produced: Layout,
        policy: Policy,
        wanted: Sequence[tuple[Layout, bool]],
    ) -> tuple[float, float] | None:
        """As `cost`, of a part of what is acquired."""
        moved = switched.again if is_again else switched.kept
        policy = REGATHER if is_again and switched.reacquired else policy
        if (policy == REGATHER) == (part == "once"):
            return 0.0, 0.0
        readers = [(layout, part == "backward") for layout, is_extra in wanted if is_again or not is_extra]
        cost = self.cost(moved, produced, policy, readers)
        if cost is None or not (part == "forward" and switched.is_border and moved.kept):
            return cost
        return cost[0], cost[1] + local_meta(moved.meta, produced, self.space.mesh).bytes

    def cost(
        self, moved: Moved, produced: Layout, policy: Policy, wanted: Sequence[tuple[Layout, bool]]
    ) -> tuple[float, float] | None:
        """Seconds and kept bytes of having a tensor in all layouts wanted; None if one cannot be had.

        `wanted` tells forward and backward readers apart for parameters only (that is what "regather"
        is about). For another forward tensor that backward reads, every layout that is wanted of it counts as kept: a
        little more than the truth where forward alone wants one.
        """
        if moved.made:
            return self.made(moved, wanted)
        phases = self.acquired(moved, produced, policy, wanted)
        if phases is None:
            return None
        held = self.held_bytes(moved, produced, policy, wanted)
        return sum(sum(item.route.seconds for item in phase) for phase in phases), float(held)

    def made(self, moved: Moved, wanted: Sequence[tuple[Layout, bool]]) -> tuple[float, float] | None:
        """Seconds and kept bytes of a copy's share of what is made where it is read; None for partial sums."""
        layouts = frozenset(layout for layout, _ in wanted)
        if any(isinstance(placement, Partial | Routed) for layout in layouts for placement in layout):
            return None
        held = sum(local_meta(moved.meta, layout, self.space.mesh).bytes for layout in layouts) if moved.kept else 0
        return self.space.making.seconds(moved.made, layouts) / moved.copies, held / moved.copies

    def acquired(
        self, moved: Moved, produced: Layout, policy: Policy, wanted: Sequence[tuple[Layout, bool]]
    ) -> list[tuple[Acquired, ...]] | None:
        """How a tensor is had in all layouts wanted: at once, or, what is gathered again, in forward and in backward.
        None if one of them cannot be had."""
        acquire, shape, dtype = self.space.redistributor.acquire, moved.meta.shape, moved.meta.dtype
        phases = []
        for phase in ((False,), (True,)) if policy == REGATHER else ((False, True),):
            layouts = frozenset(layout for layout, late in wanted if late in phase)
            acquired = acquire(shape, dtype, produced, layouts, moved.bucketed)
            if acquired is None:
                return None
            phases.append(acquired)
        return phases

    def held_bytes(self, moved: Moved, produced: Layout, policy: Policy, wanted: Sequence[tuple[Layout, bool]]) -> int:
        """What is kept for backward of a tensor; a parameter is there as it rests in any case."""
        if not moved.kept or policy == REGATHER:
            return 0
        layouts = {layout for layout, _ in wanted if layout != produced or not moved.is_parameter}
        return sum(local_meta(moved.meta, layout, self.space.mesh).bytes for layout in layouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder:
    """Reads a solver's choice of option indices as an assignment."""

    rest: tuple[str, ...]
    bodies: tuple[tuple[str, ...], ...]
    switched: tuple[bool, ...]
    """Of each body, whether its last variable is `SWITCH`."""
    options: Mapping[str, Sequence[Option]]

    def decode(self, choice: Choice) -> Assignment:
        def read(names: tuple[str, ...], indices: tuple[int, ...]) -> dict[str, SiteChoice]:
            return {name: self.options[name][i].choice for name, i in zip(names, indices, strict=True)}

        def again(switched: bool, copies: tuple[Choice, ...]) -> tuple[bool, ...]:
            return tuple(switched and bool(copy.options[-1]) for copy in copies)

        recompute = tuple(map(again, self.switched, choice.repeats))
        return Assignment(
            rest=read(self.rest, choice.options),
            copies=tuple(
                tuple(read(names, copy.options[: len(names)]) for copy in copies)
                for names, copies in zip(self.bodies, choice.repeats, strict=True)
            ),
            recompute=recompute if any(map(any, recompute)) else (),
        )


def _twice(variable: Variable, number: int, switch: int) -> Tensor:
    """What an operator costs once more where the copy is recomputed, as a tensor between it and the switch."""
    seconds: dict[float, int] = {}
    codes = tuple(seconds.setdefault(of_option, len(seconds)) for of_option in variable.seconds)
    costs = {(code, again): (again * one, 0.0) for one, code in seconds.items() for again in (0, 1)}
    return Tensor(
        name=f"{variable.name} again",
        producer=number,
        produced=codes,
        consumers=(switch,),
        wanted=((0, 1),),
        costs=costs,
    )


Item = TypeVar("Item")


def _in_order(sites: Sequence[Site], reading: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(reader, position), a forward reader next to its backward twin: solvers take readers in this order, and what
    stands together is eliminated together."""
    return sorted(reading, key=lambda at: -1 if (node := sites[at[0]].node) is None else node.sequence)


def _positions(reading: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    positions: dict[int, list[int]] = {}
    for reader, position in reading:
        positions.setdefault(reader, []).append(position)
    return positions


def _encoded(
    produced: Sequence[tuple[Layout, Policy]], wanted: Sequence[Sequence[Sequence[Item]]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], list[Item], set[int]]:
    """What is produced, as numbers; what readers want, as masks; the item of each bit; and all unions of masks."""
    layouts: dict[tuple[Layout, Policy], int] = {}
    items: dict[Item, int] = {}
    codes = tuple(layouts.setdefault(p, len(layouts)) for p in produced)
    masks = tuple(
        tuple(sum({1 << items.setdefault(item, len(items)) for item in each}) for each in per_option)
        for per_option in wanted
    )
    unions = {0}
    for per_option in masks:
        unions = {union | mask for union in unions for mask in set(per_option)}
    return codes, masks, list(items), unions


def _of_bits(items: Sequence[Item], union: int) -> list[Item]:
    return [item for bit, item in enumerate(items) if union >> bit & 1]
