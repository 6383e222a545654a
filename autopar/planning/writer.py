"""The writer: the programs that assignments are, as they run and as they are measured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Generic, TypeVar

from autopar.cluster.machine import Cluster
from autopar.cost import liveness
from autopar.cost.streams import TimelineCache, timeline
from autopar.ir.program import Program
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.adopt import Adopted, adopt
from autopar.passes.lower.bucket import LIMIT_BYTES
from autopar.passes.lower.chunk import CHUNKING
from autopar.passes.lower.compact import compact
from autopar.passes.lower.prefetch import furthest, prefetch
from autopar.passes.lower.shorten import KEPT as LOOKED_AT
from autopar.passes.lower.shorten import shortened
from autopar.passes.lower.slice import SLICING
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space

from .phases import Phases

KEPT = 2
"""Copies of a layer in a segment program: one that follows the head, one that precedes the tail."""

LATEST_INSTRUCTIONS = 400_000
"""Of the programs that are kept, since most are looked at more than once."""

LATEST_CHOICES = 8
"""Assignments of which is kept what was found out about them."""

T = TypeVar("T")

Form = tuple[int, str, int]
"""Of each run of copies alike at most so many (0: all); how far it is written; its largest bucket (0: none)."""


class _Latest(Generic[T]):
    """What was found out about the last assignments that were looked at, the latest first."""

    def __init__(self) -> None:
        self.found: list[tuple[Assignment, T]] = []

    def of(self, assignment: Assignment, find: Callable[[], T]) -> T:
        for number, (other, found) in enumerate(self.found):
            if other == assignment:
                self.found.insert(0, self.found.pop(number))
                return found
        made = find()
        self.found = [(assignment, made), *self.found[: LATEST_CHOICES - 1]]
        return made


class Writer:
    """Writes programs in a space. Its prices decide by which routes values are redistributed, and how programs are
    lowered; a planner with other prices for the same plans (measured ones) writes with the same writer, so that a plan
    is priced as the program that runs."""

    def __init__(self, space: Space, cluster: Cluster, memory: liveness.PlacementCache, phases: Phases) -> None:
        self.space, self.cluster, self.phases = space, cluster, phases
        self.known = TimelineCache(made=memory)
        """What timelines on the cluster found out about operators; `memory` is how their results lie, on any."""
        self.programs: list[tuple[Assignment, Form, Program]] = []
        """The last ones that were written, the latest first."""
        self.chosen: _Latest[tuple[Adopted, ...]] = _Latest()
        """What runs in parts."""
        self.ahead: _Latest[int] = _Latest()
        """Bytes that gathers of parameters may be ahead of their readers."""

    def written(self, assignment: Assignment, bucket_bytes: int = LIMIT_BYTES, copies: int = 0) -> Program:
        """The program of an assignment, with its collectives in buckets of at most so many bytes. Where smaller ones
        were taken to save memory nothing runs in parts. Not 0 `copies`: of each run of copies alike at most so many.
        Raises ValueError where the assignment contradicts itself."""
        if copies and shortened(self.space, assignment, copies) is None:
            copies = 0

        def lowered() -> Program:
            program = self._joined(assignment, bucket_bytes, copies)
            if bucket_bytes >= LIMIT_BYTES:
                for adopted in self._in_parts(assignment):
                    program = self.phases.timed("parts", adopted.on, program)
            return self.phases.timed("compact", compact, program, self.known.made)

        return self._kept(assignment, (copies, "lowered", bucket_bytes), lowered)

    def whole(self, assignment: Assignment, bucket_bytes: int, copies: int) -> Program:
        """As `written`, but with nothing in parts."""
        joined = self._joined(assignment, bucket_bytes, copies)
        return self.phases.timed("compact", compact, joined, self.known.made)

    def segment_program(self, assignment: Assignment, bucket_bytes: int) -> Program:
        """The program by which an assignment is measured: of few copies of each of its segments."""
        return self.written(assignment, bucket_bytes, KEPT)

    def plain(self, assignment: Assignment, copies: int = 0) -> Program:
        """As it follows from the assignment, with nothing lowered."""

        def made() -> Program:
            short = shortened(self.space, assignment, copies) if copies else None
            space, shorter = (self.space, assignment) if short is None else (short.space, short.assignment)
            return self.phases.timed("codegen", codegen, space, shorter)

        return self._kept(assignment, (copies, "plain", 0), made)

    def _joined(self, assignment: Assignment, bucket_bytes: int, copies: int) -> Program:
        """In buckets, its collectives started early."""
        ahead = self._ahead(assignment) if bucket_bytes >= LIMIT_BYTES else None
        plain, sizes = self.plain(assignment, copies), self.space.redistributor.bucket_bytes

        def joined() -> Program:
            return prefetch(plain, self.cluster, sizes, limit_bytes=bucket_bytes, ahead_bytes=ahead, known=self.known)

        return self._kept(assignment, (copies, "joined", bucket_bytes), lambda: self.phases.timed("bucket", joined))

    def _few(self, assignment: Assignment) -> int:
        """Copies on which is found out what holds for all programs of an assignment, so that it costs the same at any
        depth: as few as stand for the others, or 0, all."""
        return LOOKED_AT if shortened(self.space, assignment, LOOKED_AT) is not None else 0

    def _ahead(self, assignment: Assignment) -> int:
        """How far ahead of their readers gathers of parameters pay."""

        def found() -> int:
            few, sizes = self._few(assignment), self.space.redistributor.bucket_bytes
            plain = self.plain(assignment, few)
            bound, program = self.phases.timed("bucket", furthest, plain, self.cluster, sizes, known=self.known)
            self._kept(assignment, (few, "joined", LIMIT_BYTES), lambda: program)
            return bound

        return self.ahead.of(assignment, found)

    def _in_parts(self, assignment: Assignment) -> tuple[Adopted, ...]:
        """What runs in parts, one after the other."""

        def found() -> tuple[Adopted, ...]:
            program = self._joined(assignment, LIMIT_BYTES, self._few(assignment))
            return self.phases.timed("choose", self._quickest, program)

        return self.chosen.of(assignment, found)

    def _quickest(self, program: Program) -> tuple[Adopted, ...]:
        """Products in slices, stretches in chunks, or both."""
        cluster, known = self.cluster, self.known
        single = [adopt(program, cluster, lowering, known) for lowering in (SLICING, CHUNKING)]
        ways: list[tuple[Adopted, ...]] = [(adopted,) for adopted in single if adopted.ways]
        if len(ways) == len(single):  # what is in slices is in no chunk
            sliced = single[0]
            ways.append((sliced, adopt(sliced.program, cluster, CHUNKING, known)))
        return min(ways, key=lambda way: timeline(way[-1].program, cluster, known).seconds, default=())

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
