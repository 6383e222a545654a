"""From one layout to another: the cheapest sequence of steps, and what it costs.

The solver prices with these functions and codegen emits from them, so that the objective is about
the program that runs.

A step changes the placement on one mesh axis. Because axes own disjoint digits (see `layout`), a step
on one axis does not care about the others except for the bytes that they leave. Between two layouts
each axis passes through {source, replicated, target}, and one of several that a sum is over through a shard, so that
the others carry less meanwhile (a hierarchical all-reduce: reduce-scatter within nodes, all-reduce across
them, all-gather within); the cheapest order is found by Dijkstra over those few states.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, islice

import torch

from autopar.cluster.collectives import collective_seconds
from autopar.cluster.links import Link
from autopar.cluster.machine import Device
from autopar.ir.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shape,
    Split,
    is_legal,
    is_routed,
    local_shape,
    padded_shape,
)

from .copies import CopyWork, copies


@dataclass(frozen=True, slots=True)
class RouteStep:
    """`kind` is all_reduce, all_gather, reduce_scatter, all_to_all, or slice (local) on `axis`,
    between two layouts that differ on that axis alone. `bytes` is the larger of what a rank puts in
    and gets out, padding included; `copies` are the operators beside it."""

    kind: str
    axis: int
    before: Layout
    after: Layout
    bytes: int
    copies: CopyWork


@dataclass(frozen=True, slots=True)
class Route:
    """Steps from one layout to another, and their seconds."""

    steps: tuple[RouteStep, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Acquired:
    """A wanted layout, its source (the produced layout or one acquired before), and the route from there."""

    layout: Layout
    source: Layout
    route: Route


@cache
def _rank(shape: Shape, layout: Layout, mesh: Shape) -> tuple[int, str]:
    """The largest first; the text decides ties, so that the order is the same in every process."""
    return -math.prod(local_shape(shape, layout, mesh)), " ".join(map(str, layout))


class Redistributor:
    """Prices and plans redistributions on one mesh of one cluster. Its answers depend only on its
    arguments; they are remembered for the life of the object."""

    def __init__(self, mesh: Shape, links: tuple[Link, ...], device: Device) -> None:
        self.mesh, self.links, self.device = mesh, links, device
        self._steps: dict[tuple[Shape, int, int, Layout, Layout], RouteStep | None] = {}
        self._moving: dict[tuple[str, int, int, bool], float] = {}
        self._moved: dict[tuple[Shape, int, int, Layout, Placement, bool], tuple[tuple[float, RouteStep], ...]] = {}
        self._routes: dict[tuple[Shape, torch.dtype, Layout, Layout, bool], Route | None] = {}
        self._acquired: dict[
            tuple[Shape, torch.dtype, Layout, frozenset[Layout], bool], tuple[Acquired, ...] | None
        ] = {}

    def route(
        self, shape: Shape, dtype: torch.dtype, source: Layout, target: Layout, bucketed: bool = False
    ) -> Route | None:
        """The cheapest steps from `source` to `target`, or None if there are none (nothing
        becomes Partial on the way). `bucketed` says whether it is a parameter's gather or a gradient's reduction."""
        key = (shape, dtype, source, target, bucketed)
        if key not in self._routes:
            self._routes[key] = self._route(shape, dtype, source, target, bucketed)
        return self._routes[key]

    def acquire(
        self,
        shape: Shape,
        dtype: torch.dtype,
        produced: Layout,
        wanted: frozenset[Layout],
        bucketed: bool = False,
    ) -> tuple[Acquired, ...] | None:
        """How all wanted layouts are had from the produced one: each, the largest first, from the
        cheapest of what is there by then. A shard of a replica is thus a local slice, and nothing
        goes in circles. None if one of them cannot be had."""
        key = (shape, dtype, produced, wanted, bucketed)
        if key not in self._acquired:
            self._acquired[key] = self._acquire(shape, dtype, produced, wanted, bucketed)
        return self._acquired[key]

    def _acquire(
        self, shape: Shape, dtype: torch.dtype, produced: Layout, wanted: frozenset[Layout], bucketed: bool
    ) -> tuple[Acquired, ...] | None:
        there = [produced]
        acquired: list[Acquired] = []
        rest = [layout for layout in wanted if layout != produced]
        rest.sort(key=lambda layout: _rank(shape, layout, self.mesh))
        for layout in rest:
            best: Acquired | None = None
            for source in there:
                route = self.route(shape, dtype, source, layout, bucketed)
                if route is not None and (best is None or route.seconds < best.route.seconds):
                    best = Acquired(layout, source, route)
            if best is None:
                return None
            acquired.append(best)
            there.append(layout)
        return tuple(acquired)

    def _route(self, shape: Shape, dtype: torch.dtype, source: Layout, target: Layout, bucketed: bool) -> Route | None:
        itemsize = dtype.itemsize
        for here, there in zip(source, target, strict=True):
            if isinstance(there, Partial) and here != there:
                return None
        if is_routed(source) or is_routed(target):
            # only operators bring rows to their experts and back; what is added up elementwise may have any size
            changed = [(a, b) for a, b in zip(source, target, strict=True) if a != b]
            if not all(isinstance(a, Partial) and isinstance(b, Replicate) for a, b in changed):
                return None
        ticket = count()
        queue: list[tuple[float, int, Layout, tuple[RouteStep, ...]]] = [(0.0, next(ticket), source, ())]
        least = {source: 0.0}
        while queue:
            seconds, _, layout, steps = heapq.heappop(queue)
            if layout == target:
                return Route(steps, seconds)
            if seconds > least[layout]:
                continue
            over_several = layout.count(PARTIAL) > 1
            for axis, (here, there) in enumerate(zip(layout, target, strict=True)):
                if here == there:
                    continue
                moves = self._moves(shape, itemsize, axis, layout, there, bucketed)
                if over_several and (here, there) == (PARTIAL, REPLICATE) and not is_routed(layout):
                    shards = islice(self._shards(shape, axis, layout, target), 1)
                    moves = (*moves, *self._priced_steps(shape, itemsize, axis, layout, shards, bucketed))
                for more, step in moves:
                    after, cost = step.after, seconds + more
                    if cost < least.get(after, math.inf):
                        least[after] = cost
                        heapq.heappush(queue, (cost, next(ticket), after, (*steps, step)))
        return None

    def _moves(
        self, shape: Shape, itemsize: int, axis: int, layout: Layout, there: Placement, bucketed: bool
    ) -> tuple[tuple[float, RouteStep], ...]:
        """The steps on an axis to a placement, or to the replica on the way to it, with their seconds."""
        key = (shape, itemsize, axis, layout, there, bucketed)
        if key not in self._moved:
            placements = [p for p in dict.fromkeys((there, REPLICATE)) if p != layout[axis]]
            reached = [(*layout[:axis], placement, *layout[axis + 1 :]) for placement in placements]
            legal = [after for after in reached if is_legal(shape, after, self.mesh)]
            self._moved[key] = self._priced_steps(shape, itemsize, axis, layout, legal, bucketed)
        return self._moved[key]

    def _priced_steps(
        self, shape: Shape, itemsize: int, axis: int, before: Layout, after: Iterable[Layout], bucketed: bool
    ) -> tuple[tuple[float, RouteStep], ...]:
        """The steps that there are to these layouts."""
        steps = [self._step(shape, itemsize, axis, before, there) for there in after]
        return tuple((self.step_seconds(step, bucketed), step) for step in steps if step is not None)

    def _shards(self, shape: Shape, axis: int, layout: Layout, target: Layout) -> Iterator[Layout]:
        """With a dim cut on an axis, below what others cut of it now or in the end, and without padding of its own; the
        first dims need fewer copies."""
        padded = padded_shape(shape, layout)
        for dim, size in enumerate(shape):
            strides = [
                p.period // ranks
                for p, ranks in zip((*layout, *target), 2 * self.mesh, strict=True)
                if isinstance(p, Split) and p.dim == dim
            ]
            after = (*layout[:axis], Split(dim, min(strides, default=size)), *layout[axis + 1 :])
            if is_legal(shape, after, self.mesh) and padded_shape(shape, after) == padded:
                yield after

    def _step(self, shape: Shape, itemsize: int, axis: int, before: Layout, after: Layout) -> RouteStep | None:
        key = (shape, itemsize, axis, before, after)
        if key not in self._steps:
            self._steps[key] = self._new_step(shape, itemsize, axis, before, after)
        return self._steps[key]

    def _new_step(self, shape: Shape, itemsize: int, axis: int, before: Layout, after: Layout) -> RouteStep | None:
        here, there = before[axis], after[axis]
        n = self.mesh[axis]
        given, taken = local_shape(shape, before, self.mesh), local_shape(shape, after, self.mesh)
        put, got = math.prod(given) * itemsize, math.prod(taken) * itemsize
        if isinstance(here, Partial):
            kind = "all_reduce" if isinstance(there, Replicate) else "reduce_scatter"
            if kind == "reduce_scatter" and here.reduction != "sum":
                return None  # by way of the replica: only sums are scattered
            got *= n if kind == "reduce_scatter" else 1
        elif isinstance(here, Replicate):
            kind = "slice"
        elif isinstance(there, Replicate):
            kind = "all_gather"
            put *= n
        else:
            assert isinstance(here, Split) and isinstance(there, Split)
            if here.dim == there.dim:
                if (here.period // n) % there.period and (there.period // n) % here.period:
                    return None  # the two digits overlap or interleave: not an exchange of equal parts
                if max(here.period, there.period) > shape[here.dim]:
                    return None  # by way of the replica: what is padding here is none there
            kind = "all_to_all"
            if here.dim != there.dim:
                put = got = put // given[there.dim] * taken[there.dim] * n
        copied = copies(kind, axis, shape, itemsize, before, after, self.mesh)
        return RouteStep(kind, axis, before, after, max(put, got), copied)

    def link_seconds(self, step: RouteStep, bucketed: bool = False) -> float:
        """Seconds that a step spends on links; 0 for a local one."""
        if step.kind == "slice":
            return 0.0
        key = (step.kind, step.axis, step.bytes, bucketed)
        if key not in self._moving:
            self._moving[key] = self._link_seconds(step, bucketed)
        return self._moving[key]

    def _link_seconds(self, step: RouteStep, bucketed: bool) -> float:
        return collective_seconds(step.kind, step.bytes, self.links[step.axis])

    def step_seconds(self, step: RouteStep, bucketed: bool = False) -> float:
        """Seconds of one step: the collective, and the local copies that put chunks in order."""
        copied = self.device.copying_seconds(step.copies.bytes, float(step.copies.operators))
        return self.link_seconds(step, bucketed) + copied
