"""What travels in buckets: parameters' gathers and gradients' reductions share collectives, and so their latencies, and
may pass while a rank computes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from autopar.cluster.collectives import candidates, collective_seconds
from autopar.cluster.links import Link
from autopar.cluster.machine import Device
from autopar.ir.layout import Layout, Shape
from autopar.ops.float8 import packed_bytes

from .redistribute import Acquired, Redistributor, Route, RouteStep

LATENCY_PART = 0.05
"""The most that latencies add to the time that a bucket's bytes travel, as a part of it."""

LARGEST_BUCKET_BYTES = 25 * 2**20
"""DDP's buckets."""

ALONE_BYTES = 4 * 2**20
"""A collective of so many bytes travels in no bucket: its latency is a small part of its time."""

SMALLEST_BUCKET_BYTES = 2**18

PACKING = 2
"""Operators of a bucket that put its tensors side by side, and take them apart."""


def bucket_bytes(link: Link) -> int:
    """The size of a bucket: its all-reduce spends a small part of its time on latencies. A larger bucket would hide
    no more of a latency, and start later."""
    if link.ranks == 1:
        return LARGEST_BUCKET_BYTES
    _, fixed, moving = min(candidates("all_reduce", link), key=lambda candidate: (candidate[2], candidate[1]))
    size = fixed / moving / LATENCY_PART if moving else math.inf
    return int(max(SMALLEST_BUCKET_BYTES, min(LARGEST_BUCKET_BYTES, size)))


class BucketingRedistributor(Redistributor):
    """What is `bucketed` travels with others and pays only its part of what does not depend on bytes."""

    def __init__(self, mesh: Shape, links: tuple[Link, ...], device: Device) -> None:
        super().__init__(mesh, links, device)
        self.bucket_bytes = tuple(map(bucket_bytes, links))
        """On each mesh axis."""

    def _link_seconds(self, step: RouteStep, bucketed: bool) -> float:
        share = self._bucket_share(step) if bucketed else 1.0
        return collective_seconds(step.kind, step.bytes, self.links[step.axis], share)

    def _acquire(
        self, shape: Shape, dtype: torch.dtype, produced: Layout, wanted: frozenset[Layout], bucketed: bool
    ) -> tuple[Acquired, ...] | None:
        """Of what travels in float8, scales travel, too."""
        acquired = super()._acquire(shape, dtype, produced, wanted, bucketed)
        if acquired is None or dtype != torch.float8_e4m3fn:
            return acquired
        return tuple(Acquired(a.layout, a.source, self._scaled(a.route, bucketed)) for a in acquired)

    def _scaled(self, route: Route, bucketed: bool) -> Route:
        steps = tuple(replace(s, bytes=packed_bytes(s.bytes, self.mesh[s.axis])) for s in route.steps)
        return self._priced(Route(steps, 0.0), bucketed)

    def _priced(self, route: Route, bucketed: bool) -> Route:
        """A route at this one's prices."""
        return Route(route.steps, math.fsum(self.step_seconds(step, bucketed) for step in route.steps))

    def _bucket_share(self, step: RouteStep) -> float:
        """The part of a bucket that a step's bytes fill."""
        return min(1.0, step.bytes / self.bucket_bytes[step.axis])

    def step_seconds(self, step: RouteStep, bucketed: bool = False) -> float:
        """Also of the copies that put several tensors side by side in a bucket."""
        if not bucketed or step.kind == "slice" or step.bytes >= ALONE_BYTES:
            return super().step_seconds(step, bucketed)
        # laid side by side, and what comes back in parts of ranks is put together tensor by tensor
        size = step.copies.bytes + 2 * step.bytes
        packing = PACKING * self._bucket_share(step) + (step.kind == "all_gather")
        copied = self.device.copying_seconds(size, float(step.copies.operators) + packing)
        return self.link_seconds(step, bucketed) + copied


class HidingRedistributor(BucketingRedistributor):
    """Takes the routes of another redistributor, at prices of its own: of what travels in buckets, the part `hidden` of
    the seconds costs nothing."""

    def __init__(self, routes: Redistributor, hidden: float, prices: Redistributor) -> None:
        super().__init__(prices.mesh, prices.links, prices.device)
        self.routes, self.hidden = routes, hidden

    def _route(self, shape: Shape, dtype: torch.dtype, source: Layout, target: Layout, bucketed: bool) -> Route | None:
        taken = self.routes.route(shape, dtype, source, target, bucketed)
        return None if taken is None else self._priced(taken, bucketed)

    def _acquire(
        self, shape: Shape, dtype: torch.dtype, produced: Layout, wanted: frozenset[Layout], bucketed: bool
    ) -> tuple[Acquired, ...] | None:
        routed = self.routes.acquire(shape, dtype, produced, wanted, bucketed)
        if routed is None:
            return None
        return tuple(Acquired(a.layout, a.source, self._priced(a.route, bucketed)) for a in routed)

    def _link_seconds(self, step: RouteStep, bucketed: bool) -> float:
        seconds = super()._link_seconds(step, bucketed)
        return (1.0 - self.hidden) * seconds if bucketed else seconds
