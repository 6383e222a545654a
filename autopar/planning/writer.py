"""The writer: the programs that assignments are, as they run and as they are measured."""

from collections.abc import Callable, Sequence
from itertools import accumulate, combinations
from typing import Any, TypeVar

from autopar.cluster.machine import Cluster
from autopar.cost import liveness
from autopar.cost.streams import TimelineCache
from autopar.ir.program import Program
from autopar.passes import CODEGEN, LOWERINGS, Flow, lowerings
from autopar.passes.lower.bucket import LIMIT_BYTES
from autopar.passes.lower.lowering import Adopted, Lowering, Target, When
from autopar.passes.lower.shorten import KEPT as LOOKED_AT
from autopar.passes.lower.shorten import shortened
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space

KEPT = 2
"""Copies of a layer in a segment program: one that follows the head, one that precedes the tail."""

LATEST_INSTRUCTIONS = 400_000
"""Of the programs that are kept, since most are looked at more than once."""

LATEST_CHOICES = 8
"""Assignments of which is kept what was found out about them."""

Key = TypeVar("Key")
T = TypeVar("T")

Form = tuple[int, str, int, tuple[Lowering, ...]]
"""Of each run of copies alike at most so many (0: all); how far it is written; its largest bucket (0: none); and the
lowerings that there were."""

Taken = tuple[tuple[Lowering, Adopted], ...]
"""Lowerings as they are taken, one after the other."""


class Writer:
    """Writes programs in a space. Its prices decide by which routes values are redistributed, and how programs are
    lowered; a planner with other prices for the same plans (measured ones) writes with the same writer, so that a plan
    is priced as the program that runs."""

    def __init__(self, space: Space, cluster: Cluster, memory: liveness.PlacementCache, flow: Flow) -> None:
        self.space, self.cluster, self.flow = space, cluster, flow
        self.known = TimelineCache(placements=memory)
        """What timelines on the cluster found out about operators; `memory` is how their results lie, on any."""
        self.programs: list[tuple[tuple[Form, Assignment], Program]] = []
        """The last ones that were written, the latest first."""
        self.taken: dict[When, list[tuple[tuple[Any, ...], Taken]]] = {"first": [], "where quicker": []}
        """What was found out about lowerings of the last assignments, the latest first."""

    def written(self, assignment: Assignment, bucket_bytes: int = LIMIT_BYTES, copies: int = 0) -> Program:
        """The program of an assignment, with its collectives in buckets of at most so many bytes. Where smaller ones
        were taken to save memory nothing runs in parts. Not 0 `copies`: of each run of copies alike at most so many.
        Raises ValueError where the assignment contradicts itself."""
        if copies and shortened(self.space, assignment, copies) is None:
            copies = 0

        def lowered() -> Program:
            program = self._joined(assignment, bucket_bytes, copies)
            if bucket_bytes >= LIMIT_BYTES:
                program = self._lowered(self._quickest(assignment), program)
            return self._finished(program, bucket_bytes)

        return self._kept(assignment, (copies, "lowered", bucket_bytes, tuple(LOWERINGS.values())), lowered)

    def whole(self, assignment: Assignment, bucket_bytes: int, copies: int) -> Program:
        """As `written`, but with nothing in parts."""
        return self._finished(self._joined(assignment, bucket_bytes, copies), bucket_bytes)

    def segment_program(self, assignment: Assignment, bucket_bytes: int) -> Program:
        """The program by which an assignment is measured: of few copies of each of its segments."""
        return self.written(assignment, bucket_bytes, KEPT)

    def plain(self, assignment: Assignment, copies: int = 0) -> Program:
        """As it follows from the assignment, with nothing lowered."""

        def made() -> Program:
            short = shortened(self.space, assignment, copies) if copies else None
            space, shorter = (self.space, assignment) if short is None else (short.space, short.assignment)
            return self.flow.run(CODEGEN, space, shorter)

        return self._kept(assignment, (copies, "plain", 0, ()), made)

    def _joined(self, assignment: Assignment, bucket_bytes: int, copies: int) -> Program:
        """With the lowerings that come first: in buckets, its collectives started early."""
        form = (copies, "joined", bucket_bytes, lowerings("first"))
        taken = self._first(assignment, bucket_bytes)  # which may write this very program
        return self._kept(assignment, form, lambda: self._lowered(taken, self.plain(assignment, copies)))

    def _finished(self, program: Program, bucket_bytes: int) -> Program:
        """With the lowerings that come last."""
        return self._after(lowerings("last"), program, self._target(bucket_bytes))[0]

    def _few(self, assignment: Assignment) -> int:
        """Copies on which is found out what holds for all programs of an assignment, so that it costs the same at any
        depth: as few as stand for the others, or 0, all."""
        return LOOKED_AT if shortened(self.space, assignment, LOOKED_AT) is not None else 0

    def _target(self, bucket_bytes: int) -> Target:
        sizes = tuple(self.space.redistributor.bucket_bytes)
        return Target(cluster=self.cluster, cache=self.known, axis_bytes=sizes, limit_bytes=bucket_bytes)

    def _first(self, assignment: Assignment, bucket_bytes: int) -> Taken:
        """The lowerings that come first, as they are taken: how far gathers of parameters are ahead, say."""
        rows = lowerings("first")

        def found() -> Taken:
            few = self._few(assignment)
            program, taken = self._after(rows, self.plain(assignment, few), self._target(bucket_bytes))
            self._kept(assignment, (few, "joined", bucket_bytes, rows), lambda: program)
            return tuple((row, Adopted(given=program, write=adopted.write)) for row, adopted in taken)

        return self._latest("first", (bucket_bytes, rows, assignment), found)

    def _quickest(self, assignment: Assignment) -> Taken:
        """Of the lowerings that each make the step shorter, and of several of them in their order, the quickest."""
        rows = lowerings("where quicker")

        def found() -> Taken:
            program, target = self._joined(assignment, LIMIT_BYTES, self._few(assignment)), self._target(LIMIT_BYTES)
            ways: dict[tuple[Lowering, ...], tuple[Program, Taken]] = {(): (program, ())}
            for number in range(1, len(rows) + 1):
                for way in combinations(rows, number):
                    if way[:-1] in ways and (number == 1 or (way[-1],) in ways):
                        before, taken = ways[way[:-1]]
                        after, more = self._after(way[-1:], before, target)
                        if more:
                            ways[way] = after, (*taken, *more)
            del ways[()]
            return min(ways.values(), key=lambda way: target.seconds(way[0]), default=(program, ()))[1]

        return self._latest("where quicker", (rows, assignment), found)

    def _after(self, rows: Sequence[Lowering], program: Program, target: Target) -> tuple[Program, Taken]:
        """The program with those of some lowerings that are taken, one after the other, and these."""
        taken: list[tuple[Lowering, Adopted]] = []
        for row in rows:
            if (adopted := self.flow.adopt(row, program, target)) is not None:
                taken.append((row, adopted))
                program = self.flow.lower(row, adopted, program)
        return program, tuple(taken)

    def _lowered(self, taken: Taken, program: Program) -> Program:
        for row, adopted in taken:
            program = self.flow.lower(row, adopted, program)
        return program

    def _latest(self, when: When, key: tuple[Any, ...], find: Callable[[], Taken]) -> Taken:
        """What was found out, or is found out now."""
        taken = _remembered(self.taken[when], key, find)
        del self.taken[when][LATEST_CHOICES:]
        return taken

    def _kept(self, assignment: Assignment, form: Form, write: Callable[[], Program]) -> Program:
        """The program of an assignment, written if it is not there."""
        program = _remembered(self.programs, (form, assignment), write)
        lengths = accumulate(len(p.forward) + len(p.backward) for _, p in self.programs)
        del self.programs[max(2, sum(length <= LATEST_INSTRUCTIONS for length in lengths)) :]
        return program


def _remembered(entries: list[tuple[Key, T]], key: Key, make: Callable[[], T]) -> T:
    """The value of a key, made if it is not there; the entry comes first from now on."""
    found = next((number for number, (other, _) in enumerate(entries) if other == key), None)
    value = make() if found is None else entries.pop(found)[1]
    entries.insert(0, (key, value))
    return value
