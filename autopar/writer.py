"""The writer: the programs that assignments are, as they run and as they are measured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from . import liveness
from .cluster import Cluster
from .passes.bucket import LIMIT_BYTES
from .passes.chunk import chunk
from .passes.codegen import codegen
from .passes.compact import compact
from .passes.prefetch import prefetch
from .passes.problem import Assignment
from .passes.shorten import shortened
from .passes.slice import slice_products
from .passes.strategies import Space
from .phases import Phases
from .program import Program
from .timeline import Known, timeline

KEPT = 2
"""Copies of a layer in a segment program: one that follows the head, one that precedes the tail."""

LATEST_INSTRUCTIONS = 200_000
"""Of the programs that are kept, since most are looked at more than once."""

Form = tuple[str, int]
"""Whether a program is without buckets, whole or of few copies of each segment; and its largest bucket."""
PLAIN: Form = ("plain", 0)


class Writer:
    """Writes programs in a space. Its prices decide by which routes values are redistributed, and how programs are
    lowered; a planner with other prices for the same plans (measured ones) writes with the same writer, so that a plan
    is priced as the program that runs."""

    def __init__(self, space: Space, cluster: Cluster, memory: liveness.Known, phases: Phases) -> None:
        self.space, self.cluster, self.phases = space, cluster, phases
        self.known = Known(made=memory)
        """What timelines on the cluster found out about operators; `memory` is how their results lie, on any."""
        self.programs: list[tuple[Assignment, Form, Program]] = []
        """The last ones that were written, the latest first."""

    def written(self, assignment: Assignment, bucket_bytes: int = LIMIT_BYTES) -> Program:
        """The program of an assignment, with its collectives in buckets. Raises ValueError where the assignment
        contradicts itself."""
        plain = self._kept(assignment, PLAIN, lambda: self.phases.timed("codegen", codegen, self.space, assignment))
        return self._kept(
            assignment, ("whole", bucket_bytes), lambda: self.phases.timed("bucket", self.lowered, plain, bucket_bytes)
        )

    def segment_program(self, assignment: Assignment, bucket_bytes: int) -> Program:
        """The program by which an assignment is measured: of few copies of each of its segments."""
        short = shortened(self.space, assignment, KEPT)
        if short is None:
            return self.written(assignment, bucket_bytes)
        return self._kept(
            assignment,
            ("segments", bucket_bytes),
            lambda: self.lowered(codegen(short.space, short.assignment), bucket_bytes),
        )

    def lowered(self, program: Program, limit_bytes: int) -> Program:
        """In buckets of at most `limit_bytes`. Where smaller ones were taken to save memory nothing runs in parts."""
        cluster, known, sizes = self.cluster, self.known, self.space.redistributor.bucket_bytes
        lowered = prefetch(program, cluster, sizes, limit_bytes=limit_bytes, known=known)
        if limit_bytes >= LIMIT_BYTES:
            sliced = slice_products(lowered, cluster, known)
            chunked = chunk(lowered, cluster, known)
            if sliced is lowered or chunked is lowered:
                lowered = chunked if sliced is lowered else sliced
            else:  # what is in slices is in no chunk
                ways = (sliced, chunked, chunk(sliced, cluster, known))
                lowered = min(ways, key=lambda way: timeline(way, cluster, known).seconds)
        return compact(lowered, known.made)

    def _kept(self, assignment: Assignment, form: Form, write: Callable[[], Program]) -> Program:
        """The program of an assignment, written if it is not there."""
        for number, (other, known, program) in enumerate(self.programs):
            if known == form and other == assignment:
                self.programs.insert(0, self.programs.pop(number))
                return program
        program = write()
        self.programs.insert(0, (assignment, form, program))
        lengths = accumulate(len(p.forward) + len(p.backward) for _, _, p in self.programs)
        del self.programs[max(2, sum(length <= LATEST_INSTRUCTIONS for length in lengths)) :]
        return program
