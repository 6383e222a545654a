"""Root tensors of a region: who makes each and reads it, how it moves, and the items of having it in all layouts that
its readers want."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autopar.cost.redistribute import Acquired
from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Layout, Partial, Routed, local_meta

from .choices import REGATHER, Policy
from .items import ACTIVATIONS, COMPUTE, GRADIENTS, PARAMETERS, ROUTE, Item
from .sites import Option, Recomputed, Region, Site
from .space import Space

Readings = Mapping[tuple[int, int], tuple[tuple[str, ...], tuple[str, ...]]]
"""(number of a reading site, position of the operand) -> the phases in which it reads, without and with
recomputation."""


class MovedKind(NamedTuple):
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
    is_gradient: bool = False
    """Whether only parameters and sums of their gradients read it, so that it is reduced once a step."""
    cast_from: torch.dtype | None = None
    """The dtype in which it is made and read, where `meta` says that it travels in another one."""

    @property
    def computed(self) -> TensorMeta:
        """As it is made and read."""
        return TensorMeta(self.meta.shape, self.cast_from or self.meta.dtype)


def is_bucketed(maker: Site, readers: Iterable[Site]) -> bool:
    """Whether a tensor travels in a bucket: parameters and gradients do."""
    return maker.kind == "parameter" or any(reader.kind == "parameter" for reader in readers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootTensor:
    """A root in a region of `copies` copies: site number `maker` makes it, as one of its results, and those of
    `reading` read it, each as (site, position of the operand)."""

    root: str
    sites: Sequence[Site]
    options: Sequence[tuple[Option, ...]]
    maker: int
    result: int
    reading: Sequence[tuple[int, int]]
    copies: int

    @property
    def produced(self) -> tuple[tuple[Layout, Policy], ...]:
        """By each option of the maker."""
        return tuple((o.makes[self.result], o.choice.policy) for o in self.options[self.maker])

    def readings(self, again: Recomputed) -> Readings:
        sites, maker = self.sites, self.sites[self.maker]
        return {(r, p): again.phases(sites[r], maker, backward=sites[r].reads[p].backward) for r, p in self.reading}

    def moved(self, space: Space, readings: Readings, *, again: bool) -> MovedKind:
        """How it moves in a copy that is recomputed, or in one that is not."""
        maker, meta, is_made = self.sites[self.maker], space.metas[self.root], self.root in space.making.sites
        travels = space.travels.get(self.root, meta)
        return MovedKind(
            meta=travels,
            kept=not maker.backward and any("backward" in phases[again] for phases in readings.values()),
            is_parameter=maker.kind == "parameter",
            bucketed=is_bucketed(maker, (self.sites[reader] for reader, _ in readings)),
            made=self.root if is_made else "",
            copies=self.copies if is_made else 1,
            is_gradient=self.root in space.gradients,
            cast_from=None if travels == meta else meta.dtype,
        )


def root_tensors(region: Region, options: Sequence[tuple[Option, ...]], copies: int) -> Iterator[RootTensor]:
    """The tensors of a region that somebody reads, where its sites have these options."""
    sites = list(region.sites.values())
    readers: dict[str, list[tuple[int, int]]] = {}
    makers: dict[str, tuple[int, int]] = {}
    for number, site in enumerate(sites):
        makers.update((root, (number, position)) for position, root in enumerate(site.makes) if root)
        for position, read in enumerate(() if site.made else site.reads):
            readers.setdefault(read.alias.root, []).append((number, position))
    for root, reading in readers.items():
        maker, result = makers[root]
        yield RootTensor(
            root=root,
            sites=sites,
            options=options,
            maker=maker,
            result=result,
            reading=_in_order(sites, reading),
            copies=copies,
        )


def _in_order(sites: Sequence[Site], reading: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(reader, position), a forward reader next to its backward twin: solvers take readers in this order, and what
    stands together is eliminated together."""
    return sorted(reading, key=lambda at: -1 if (node := sites[at[0]].node) is None else node.sequence)


def tensor_items(
    space: Space,
    moved: MovedKind,
    produced: Layout,
    policy: Policy,
    wanted: Sequence[tuple[Layout, bool]],
    *,
    crosses: bool = False,
) -> list[Item] | None:
    """The items of having a tensor in all layouts wanted: its routes, and what is kept of it for backward. None if it
    cannot be had in one of them.

    `wanted` tells forward and backward readers apart for parameters only (that is what "regather" is about). For
    another forward tensor that backward reads, every layout that is wanted of it counts as kept: a little more than the
    truth where forward alone wants one. A parameter is there as it rests in any case. What is gathered again for
    backward is kept if it `crosses` a border, as it crosses.
    """
    if moved.made:
        return _made_items(space, moved, frozenset(layout for layout, _ in wanted))
    shape, items, phases = moved.meta.shape, list[Item](), list[list[tuple[Acquired, int]]]()
    is_staged = space.in_flight > 1
    rests = is_staged and moved.is_parameter
    for late, phase in enumerate(((False,), (True,)) if policy == REGATHER else ((False, True),)):
        layouts = frozenset(layout for layout, backward in wanted if backward in phase)
        acquired = space.redistributor.acquire(shape, moved.meta.dtype, produced, layouts, moved.bucketed)
        if acquired is None:
            return None
        is_held = policy != REGATHER if is_staged else space.holds and not late
        often = _times(space, moved, acquired, wanted, is_held=is_held)
        phases.append([*zip(acquired, often, strict=True)])
        for each, times in phases[-1]:
            route = each.route
            items.append(Item(ROUTE, route.seconds, times=times, steps=route.steps, bucketed=moved.bucketed))
    items += space.travel_items(moved, phases)
    if (moved.kept or rests) and (policy != REGATHER or crosses):
        kept = {layout for layout, _ in wanted if layout != produced or not moved.is_parameter}
        size = sum(
            local_meta(moved.computed, layout, space.mesh).bytes
            for layout in ((produced,) if policy == REGATHER else kept)
        )
        items.append(Item(PARAMETERS, bytes=size) if rests else Item(ACTIVATIONS, bytes=size * space.in_flight))
    if moved.is_gradient and is_staged:
        items.append(Item(GRADIENTS, bytes=local_meta(moved.computed, produced, space.mesh).bytes))
    return items


def _made_items(space: Space, moved: MovedKind, layouts: frozenset[Layout]) -> list[Item] | None:
    """Of a copy's share of what is made where it is read; None for partial sums."""
    if any(isinstance(placement, Partial | Routed) for layout in layouts for placement in layout):
        return None
    kept = sum(local_meta(moved.meta, layout, space.mesh).bytes for layout in layouts) if moved.kept else 0
    seconds = space.making.seconds(moved.made, layouts) * space.micro_batches
    return [Item(COMPUTE, seconds / moved.copies), Item(ACTIVATIONS, bytes=kept * space.in_flight / moved.copies)]


def _times(
    space: Space, moved: MovedKind, phase: Sequence[Acquired], wanted: Sequence[tuple[Layout, bool]], *, is_held: bool
) -> tuple[int, ...]:
    """How often in a step each layout of a tensor is acquired: in each micro-batch, but for gradients of parameters,
    and, of parameters of which forward's gathers are held, for all that forward reads, and what that comes from."""
    if moved.is_gradient or space.micro_batches == 1:
        return (1,) * len(phase)
    held: set[Layout] = set()
    if is_held and moved.is_parameter:
        held.update(layout for layout, backward in wanted if not backward)
        for item in reversed(phase):
            held.update([item.source] if item.layout in held else [])
    return tuple(1 if item.layout in held else space.micro_batches for item in phase)
