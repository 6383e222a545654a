"""Prefetch: how far ahead of their readers the gathers of parameters start (Par4D IV-C).

`bucket.py` starts a gather as early as a bound on the bytes in flight allows, and one gather ahead in any case.
A larger bound hides more and keeps more in memory. This pass tries bounds and takes the smallest one with which the
simulated step is as short as with any. (What backward gathers again, or keeps, is an option of each parameter in the
plan: Par4D IV-D.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from autopar.cluster.machine import Cluster
from autopar.cost.streams import TimelineCache, alone_seconds, timeline
from autopar.ir.program import Program

from .adopt import stood_still
from .bucket import LIMIT_BYTES, bucket
from .kinds import GATHERED
from .overlap import overlap

logger = logging.getLogger("autopar")

AHEAD_BYTES = (LIMIT_BYTES, 4 * LIMIT_BYTES, 16 * LIMIT_BYTES)
"""Bounds on the gathered bytes that are under way and not yet read."""
SHORTER = 1e-3
"""The part of the step that a larger bound saves at least."""


def prefetch(
    program: Program,
    cluster: Cluster,
    bucket_bytes: Sequence[int] = (),
    *,
    limit_bytes: int = LIMIT_BYTES,
    ahead_bytes: int | None = None,
    known: TimelineCache | None = None,
) -> Program:
    """The program in buckets, its collectives started early, and gathers of parameters as early as they pay on
    `cluster`, or as `ahead_bytes` bounds them. With a `limit_bytes` below the usual one, taken to save memory, that is
    the bound."""
    known = known or TimelineCache()
    if limit_bytes < LIMIT_BYTES:
        ahead_bytes = limit_bytes
    if ahead_bytes is None:
        return furthest(program, cluster, bucket_bytes, known=known)[1]
    return _written(program, cluster, bucket_bytes, limit_bytes, ahead_bytes, known)


def furthest(
    program: Program, cluster: Cluster, bucket_bytes: Sequence[int] = (), *, known: TimelineCache
) -> tuple[int, Program]:
    """The smallest bound with which the step is as short as with any, and the program with it."""
    bound = AHEAD_BYTES[0]
    best = _written(program, cluster, bucket_bytes, LIMIT_BYTES, bound, known)
    of_parameters = _gathers(best)
    if sum(best.metas[name].bytes for name in of_parameters) <= bound:
        return bound, best  # all of them may be under way already
    told = timeline(best, cluster, known)
    for ahead in AHEAD_BYTES[1:]:
        waited = stood_still(told)
        if sum(waited.get(name, 0.0) for name in of_parameters) < SHORTER * told.seconds:
            break
        more = _written(program, cluster, bucket_bytes, LIMIT_BYTES, ahead, known)
        now = timeline(more, cluster, known)
        if now.seconds < told.seconds * (1 - SHORTER):
            logger.info("prefetch: %d MiB ahead, step of %.3f ms", ahead >> 20, now.seconds * 1e3)
            bound, best, told, of_parameters = ahead, more, now, _gathers(more)
    return bound, best


def _written(
    program: Program,
    cluster: Cluster,
    bucket_bytes: Sequence[int],
    limit_bytes: int,
    ahead_bytes: int,
    known: TimelineCache,
) -> Program:
    joined = bucket(program, bucket_bytes, limit_bytes=limit_bytes, ahead_bytes=ahead_bytes)
    return overlap(joined, alone_seconds(joined, cluster, known))


def _gathers(program: Program) -> set[str]:
    """Results of the gathers of parameters."""
    found: set[str] = set()
    parameters = {i.name for i in program.inputs if i.role == "parameter"}
    for instruction in (*program.forward, *program.backward):
        if instruction.inputs and parameters.issuperset(instruction.inputs):
            if instruction.collective in GATHERED:
                found.update(instruction.outputs)
            else:
                parameters.update(name for name in instruction.outputs if name)
    return found
