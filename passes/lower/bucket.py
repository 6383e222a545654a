"""Bucket: gathers of parameters and reductions of gradients travel together, and early.

One collective a gradient is slow (each pays its latency); this pass joins those of one kind, axis and
dtype into collectives of up to `bucket_bytes`. Values are the same bit for bit: members are laid side
by side in a flat tensor, communicated at once, and taken apart again. What is large enough to hide a
latency travels alone, without the copies that a bucket needs.

There are four kinds of collectives:

- *reductions*, in backward, that only gradients depend on: started as soon as a bucket is full,
  finished at the end, or earlier: where a second mesh axis follows, when the next bucket has been started, and where
  many are under way, since each holds what it reads;
- *gathers* of parameters as they rest, in forward and again in backward: bucketed in the order of
  first use and started ahead of it, with at most `ahead_bytes` in flight that are not yet used; over two mesh
  axes, what was gathered on the first goes on while the bucket before it is computed with;
- small all-reduces in forward (all latency), several parts of a loss, say: those that do not depend on each other
  travel where the last of them stands;
- all others stay where they are, and are waited for just before their first reader.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost.bucketed import ALONE_BYTES
from autopar.ir.program import Program
from autopar.ir.rewrite import with_own_metas

from .bucketing.gathers import gather
from .bucketing.packing import BucketWriter
from .bucketing.reductions import reduce, together
from .lowering import LIMIT_BYTES, Rewrite, Target


@dataclass(frozen=True)
class Bucket(Rewrite):
    """The program with its parameter and gradient collectives in buckets, and each wait just before
    the first reader.

    A bucket on mesh axis `a` holds at most `axis_bytes[a]` (of the larger of what goes in and comes out), and
    `limit_bytes` in any case; a collective of `alone_bytes` or more is in no bucket, but starts and ends as one would.
    Gathers that are started and not yet read have at most `ahead_bytes` (0: `limit_bytes`), or are two.
    On the axes `unhidden` nothing is gained by starting early: a bucket of gradients is as large as may be, and holds
    none that travel faster alone (`UNHIDDEN_ALONE_BYTES`).
    """

    axis_bytes: tuple[int, ...] = ()
    limit_bytes: int = LIMIT_BYTES
    alone_bytes: int = ALONE_BYTES
    ahead_bytes: int = 0
    unhidden: tuple[int, ...] = ()
    name = "bucket"

    def __call__(self, program: Program, target: Target | None = None) -> Program:
        parameters = {i.name for i in program.inputs if i.role == "parameter"}
        results = [o.name for o in program.results if o.name is not None]
        gradients = [o.name for o in program.gradients if o.name is not None]
        axis_bytes = self.axis_bytes or (self.limit_bytes,) * len(program.mesh)
        writer = BucketWriter(
            mesh=program.mesh,
            metas=dict(program.metas),
            bucket_bytes=tuple(min(self.limit_bytes, size) for size in axis_bytes),
            limit_bytes=self.limit_bytes,
            alone_bytes=min(self.alone_bytes, self.limit_bytes),
            ahead_bytes=self.ahead_bytes or self.limit_bytes,
            unhidden=frozenset(self.unhidden),
        )
        joined = together(writer, program.forward, program.uneven)
        forward = gather(writer, joined, parameters, [*results, *program.saved])
        backward = gather(writer, program.backward, parameters, gradients)
        backward = reduce(writer, backward, gradients)
        return with_own_metas(replace(program, forward=tuple(forward), backward=tuple(backward), metas=writer.metas))


def bucket(program: Program, axis_bytes: Sequence[int] = (), **options: Any) -> Program:
    """The program in buckets, with options of `Bucket`."""
    return Bucket(tuple(axis_bytes), **options)(program)
