"""Recomputation as a choice: the tensors of a copy of a segment that may be recomputed in backward.

A copy that is recomputed reads some tensors in forward and again in backward, and acquires them twice; one that is not
acquires them once. Its problem has a variable, `SWITCH`, that says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from autopar.ir.layout import Layout, Shape, local_meta
from autopar.solve.problem import Tensor, Variable

from .choices import REGATHER, Policy
from .recompute import reacquired, recomputed
from .sites import Region, Site
from .tables import Moved, RootTensor, encoded, of_bits, positions_of

Cost = Callable[[Moved, Layout, Policy, Sequence[tuple[Layout, bool]]], tuple[float, float] | None]
"""`ProblemBuilder.cost`."""

Move = Callable[[str, Site, Sequence[tuple[Site, bool]], int], Moved]
"""`ProblemBuilder.moved`."""

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
        """Nothing, if no operator can be recomputed."""
        operators = recomputed(region)
        return Again(operators, reacquired(region)) if operators else Again()

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


@dataclass(frozen=True, slots=True)
class SwitchedTensors:
    """Tensors whose cost depends on whether the copy is recomputed, from a builder's tables, costs and mesh."""

    tables: dict[Any, Tensor]
    cost: Cost
    moved: Move
    mesh: Shape

    def of(self, tensor: RootTensor, again: Again) -> Iterator[Tensor]:
        """The tensors of a root whose cost depends on whether the copy is recomputed: what is acquired once for all
        readers, or else for those of forward, and for those of backward, each as a tensor that also the switch, the
        last of the variables, reads."""
        sites, reading, produced = tensor.sites, tensor.reading, tensor.produced
        root, site = tensor.root, sites[tensor.maker]
        phases = {(r, p): again.phases(sites[r], site, backward=sites[r].reads[p].backward) for r, p in reading}
        kept, moved_again = (
            self.moved(root, site, [(sites[r], "backward" in phases[r, p][number]) for r, p in reading], tensor.copies)
            for number in (0, 1)
        )
        switched = Switched(kept, moved_again, root in again.roots, site.kind == "border")
        for part in ACQUISITIONS:
            positions = positions_of([at for at in reading if part == "once" or part in phases[at][1]])

            def is_extra(reader: int, position: int, part: Acquisition = part) -> bool:
                """Whether a parameter that is gathered again is read in this phase only if the copy is recomputed."""
                return site.kind == "parameter" and part not in ("once", *phases[reader, position][0])

            wanted = tuple(
                tuple(tuple((o.reads[p], is_extra(reader, p)) for p in at) for o in tensor.options[reader])
                for reader, at in positions.items()
            )
            key = (switched, part, produced, wanted)
            if key not in self.tables:
                self.tables[key] = self._table(*key)
            table = self.tables[key]
            if not table.is_free:
                yield replace(table, name=f"{root} {part}", producer=tensor.maker, consumers=(*positions, len(sites)))

    def _table(
        self,
        switched: Switched,
        part: Acquisition,
        produced: tuple[tuple[Layout, Policy], ...],
        wanted: tuple[tuple[tuple[tuple[Layout, bool], ...], ...], ...],
    ) -> Tensor:
        codes, masks, items, unions = encoded(produced, wanted)
        bit = 1 << len(items)
        costs = {}
        for (layout, policy), code in dict(zip(produced, codes, strict=True)).items():
            for union in unions:
                for is_again in (False, True):
                    cost = self._acquisition(switched, part, is_again, layout, policy, of_bits(items, union))
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
        return cost[0], cost[1] + local_meta(moved.meta, produced, self.mesh).bytes


def twice(variable: Variable, number: int, switch: int) -> Tensor:
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
