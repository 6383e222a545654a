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
from typing import Any

from autopar.ir.layout import Layout
from autopar.solve.problem import Choice, Problem, Repeat, Tensor, Variable

from .choices import REGATHER, Policy, SiteChoice
from .items import total
from .sites import Option, Recomputed, Region, Site, joined_sites
from .space import Space
from .tables import PARTS, PHASES, WHOLE, Movement, Wanted, encoded, of_bits, positions_of
from .tensors import RootTensor, root_tensors, tensor_items

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


class ProblemBuilder:
    """Builds problems over one space. Tables are remembered by what they depend on, so that layers of
    one structure, and solves that differ on one axis, share them."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.tables: dict[Any, Tensor] = {}
        """Tensors but for their names and variables."""
        self.joined = joined_sites(space.regions(), space.twins)
        self.again = tuple(body.again for body in space.bodies)

    def build(self, allowed: Allowed, *, recompute: bool = False) -> tuple[Problem, Decoder]:
        """The problem in which each site takes one of its allowed options; to `recompute` copies of segments in
        backward is a choice too, if it is said so.

        Raises ValueError if a site has no legal option left.
        """
        legal = self._legal(allowed)
        again = self.again if recompute else (Recomputed(),) * len(self.again)
        parts = zip(self.space.bodies, self.space.repeats, again, strict=True)
        bodies = [self._region(body, legal, of_body, repeat.count) for body, repeat, of_body in parts]
        variables, tensors, names = self._region(self.space.rest, legal, Recomputed(), 1)
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
        return problem, Decoder(
            rest=names,
            bodies=tuple(body_names for _, _, body_names in bodies),
            switched=tuple(bool(of_body.operators) for of_body in again),
            options={k: list(v) for k, v in legal.items()},
        )

    def _legal(self, allowed: Allowed) -> dict[str, tuple[Option, ...]]:
        """Allowed options that mean something; border sites that are one variable agree on theirs."""
        legal: dict[str, tuple[Option, ...]] = {}
        for name, sites in self.joined.items():
            alternatives = ([self.space.option(site, choice) for site in sites] for choice in allowed[name])
            options = tuple(first for first, *others in alternatives if first is not None and None not in others)
            if not options:
                raise ValueError(f"site {name} ({sites[0].module}): none of {len(allowed[name])} options is legal")
            legal[name] = options
        return legal

    def _region(
        self, region: Region, legal: Mapping[str, tuple[Option, ...]], again: Recomputed, copies: int
    ) -> tuple[tuple[Variable, ...], tuple[Tensor, ...], tuple[str, ...]]:
        """Its variables, tensors, and the names of its sites. If something is done `again` where the region is
        recomputed, a last variable says whether it is."""
        times, sites = self.space.micro_batches, list(region.sites.values())
        options = [self._site_options(site, legal[site.name]) for site in sites]
        variables = [
            Variable(
                name=site.name,
                options=tuple(str(o.choice) for o in of_site),
                seconds=tuple(o.seconds * (1 if site.kind == "parameter" else times) for o in of_site),
                bytes=tuple(o.bytes for o in of_site),
            )
            for site, of_site in zip(sites, options, strict=True)
        ]
        tensors = [t for root in root_tensors(region, options, copies) for t in self._tensors(root, again)]
        switch, computed_twice = again.switched(variables)
        return (*variables, *switch), (*tensors, *computed_twice), tuple(region.sites)

    def _site_options(self, site: Site, options: tuple[Option, ...]) -> tuple[Option, ...]:
        """The options as this very site means them: a border's reads differ between its two sites."""
        if site.kind != "border":
            return options
        own = (self.space.option(site, option.choice) for option in options)
        return tuple(option for option in own if option is not None)

    def _tensors(self, of: RootTensor, again: Recomputed) -> Iterator[Tensor]:
        """The tensors of a root: one, or, of a parameter that several read in either phase, and where the switch, the
        last of the variables, says how it is acquired and reads it too, one for each of `PARTS` that costs something.
        """
        sites, maker = of.sites, of.sites[of.maker]
        is_parameter = maker.kind == "parameter"
        phases = of.readings(again)
        is_switched = of.root in again.roots or any(sites[reader].name in again.operators for reader, _ in of.reading)
        ways = tuple(of.moved(self.space, phases, again=bool(n)) for n in range(1 + is_switched))
        late = sum("backward" in first for first, _ in phases.values())
        is_wide = is_parameter and min(late, len(phases) - late) > 1
        for part in PARTS if is_switched or is_wide else WHOLE:
            movement = Movement(ways, part, of.root in again.roots, maker.kind == "border")
            made = tuple(None if movement.is_free(policy) else (layout, policy) for layout, policy in of.produced)
            if not any(made):
                continue
            tells_phases = is_parameter and (part == "whole" or self.space.holds)
            told = {
                at: (
                    part == "backward" or (tells_phases and part != "forward" and "backward" in first),
                    is_parameter and part in PHASES and part not in first,
                )
                for at, (first, second) in phases.items()
                if part not in PHASES or part in second
            }
            positions = positions_of(told)
            wanted = tuple(
                tuple(tuple(Wanted(o.reads[p], *told[reader, p]) for p in at) for o in of.options[reader])
                for reader, at in positions.items()
            )
            key = (movement, made, wanted)
            if key not in self.tables:
                self.tables[key] = self._table(*key)
            table = self.tables[key]
            if part == "whole" or not table.is_free:
                name = of.root if part == "whole" else f"{of.root} {part}"
                readers = (*positions, len(sites)) if is_switched else tuple(positions)
                yield replace(table, name=name, producer=of.maker, consumers=readers)

    def _table(
        self,
        movement: Movement,
        made: tuple[tuple[Layout, Policy] | None, ...],
        wanted: tuple[tuple[tuple[Wanted, ...], ...], ...],
    ) -> Tensor:
        codes, masks, items, unions = encoded(made, wanted)
        bit = 1 << len(items)
        costs = {}
        for produced, code in dict(zip(made, codes, strict=True)).items():
            for union in unions:
                for number in range(len(movement.ways)):
                    cost = self._acquisition(movement, number, produced, of_bits(items, union))
                    if cost is not None:
                        costs[code, union | bit * number] = cost
        if len(movement.ways) > 1:
            masks = (*masks, (0, bit))
        return Tensor(name="", producer=0, produced=codes, consumers=(), wanted=masks, costs=costs)

    def _acquisition(
        self, movement: Movement, number: int, produced: tuple[Layout, Policy] | None, wanted: Sequence[Wanted]
    ) -> tuple[float, float] | None:
        """Seconds and kept bytes of a part of what is acquired, in one of the ways in which it may be; None if it
        cannot."""
        if produced is None:
            return 0.0, 0.0
        layout, policy = produced
        policy = REGATHER if number and movement.reacquired else policy
        if movement.excludes(policy):
            return 0.0, 0.0
        readers = [(each.layout, each.late) for each in wanted if number or not each.extra]
        crosses = movement.part == "forward" and movement.is_border
        items = tensor_items(self.space, movement.ways[number], layout, policy, readers, crosses=crosses)
        return None if items is None else total(items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Reads a solver's choice of option indices as an assignment."""

    rest: tuple[str, ...]
    bodies: tuple[tuple[str, ...], ...]
    switched: tuple[bool, ...]
    """Of each body, whether its last variable says if it is recomputed."""
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
