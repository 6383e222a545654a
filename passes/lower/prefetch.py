"""Prefetch: how far ahead of their readers the gathers of parameters start (Par4D IV-C).

`bucket.py` starts a gather as early as a bound on the bytes in flight allows, and one gather ahead in any case.
A larger bound hides more and keeps more in memory. This pass tries bounds and takes the smallest one with which the
simulated step is as short as with any. (What backward gathers again, or keeps, is an option of each parameter in the
plan: Par4D IV-D.)
"""

from autopar.cost.streams import timeline
from autopar.ir.dataflow import derived
from autopar.ir.program import GATHERED, Program

from .adopt import stood_still
from .bucket import Bucket
from .lowering import LIMIT_BYTES, Adopted, Rewrite, Target, rewritten
from .overlap import Overlap

AHEAD_BYTES = (LIMIT_BYTES, 4 * LIMIT_BYTES, 16 * LIMIT_BYTES)
"""Bounds on the gathered bytes that are under way and not yet read."""
LATEST = 8
"""Programs that are kept with their first bound."""
SHORTER = 1e-3
"""The part of the step that a larger bound saves at least."""


def prefetch(program: Program, target: Target) -> Adopted:
    """In buckets, collectives started early, and gathers of parameters as early as they pay. With buckets below the
    usual size, taken to save memory, at most one is ahead."""
    if target.limit_bytes < LIMIT_BYTES or not target.trials:
        first = min(target.limit_bytes, LIMIT_BYTES)
        written = _first(program, target, first)
        return Adopted(given=program, program=written, rewrites=_ahead(target, first), target=target)
    bound, lowered = _furthest(program, target)
    what = f"gathers {bound >> 20} MiB ahead"
    return Adopted(given=program, program=lowered, rewrites=_ahead(target, bound), target=target, what=what)


def _furthest(program: Program, target: Target) -> tuple[int, Program]:
    """The smallest bound with which the step is as short as with any, and the program with it."""
    bound = AHEAD_BYTES[0]
    best = _first(program, target, bound)
    of_parameters = _gathers(best)
    if sum(best.metas[name].bytes for name in of_parameters) <= bound:
        return bound, best  # all of them may be under way already
    step = timeline(best, target.cluster, target.cache)
    for ahead in AHEAD_BYTES[1:]:
        waited = stood_still(step)
        if sum(waited.get(name, 0.0) for name in of_parameters) < SHORTER * step.seconds:
            break
        more = rewritten(program, _ahead(target, ahead), target)
        now = timeline(more, target.cluster, target.cache)
        if now.seconds < step.seconds * (1 - SHORTER):
            bound, best, step, of_parameters = ahead, more, now, _gathers(more)
    return bound, best


def _first(program: Program, target: Target, bound: int) -> Program:
    """The program with the first bound, which one that was looked at without trials has already."""
    rewrites = _ahead(target, bound)
    known = (after for before, done, after in target.latest if before is program and done == rewrites)
    written = next(known, None) or rewritten(program, rewrites, target)
    target.latest[:] = [(program, rewrites, written), *target.latest[: LATEST - 1]]
    return written


def _ahead(target: Target, ahead_bytes: int) -> tuple[Rewrite, ...]:
    joined = Bucket(
        axis_bytes=target.axis_bytes if any(size < target.limit_bytes for size in target.axis_bytes) else (),
        limit_bytes=target.limit_bytes,
        ahead_bytes=0 if ahead_bytes == target.limit_bytes else ahead_bytes,
        unhidden=target.unhidden,
    )
    return joined, Overlap()


def _gathers(program: Program) -> set[str]:
    """Results of the gathers of parameters."""
    parameters = [i.name for i in program.inputs if i.role == "parameter"]
    laid_out = derived(program.nodes, parameters, lambda node: bool(node.inputs) and node.collective not in GATHERED)
    return {i.name for i in program.nodes if i.collective in GATHERED and laid_out.issuperset(i.inputs)}
