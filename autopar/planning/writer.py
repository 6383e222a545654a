"""The writer: writes the programs of assignments, as they run and as they are measured."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, combinations
from typing import Any, Literal, TypeVar

from autopar.cost import liveness
from autopar.cost.bucketed import bucket_bytes as bucket_bytes_of
from autopar.cost.streams import TimelineCache
from autopar.ir.program import Program
from autopar.passes.flow import CODEGEN, LOWERINGS, Flow, lowerings
from autopar.passes.lower.lowering import LIMIT_BYTES, Adopted, Lowering, Rewrite, Target, When
from autopar.passes.lower.shorten import KEPT as ESTIMATED_ON
from autopar.passes.lower.shorten import Short, shortened
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space

KEPT = 2
"""Copies of a layer in a segment program: one that follows the head, one that precedes the tail."""

LOOKED_AT = 5
"""Copies of each run in the program on which parts are chosen, and what hides is seen: with fewer, what is in no layer
weighs more. With three, the step of 8 layers of Llama within 6 GB is 0.8% longer; with five, that of 9 layers of a wide
GPT-2 0.2%."""

LATEST_INSTRUCTIONS = 400_000
"""The most instructions of all cached programs."""

LATEST_CHOICES = 8
"""How many assignments' choices of lowerings are cached."""

LATEST_SHORTS = 16
"""How many assignments are cached with fewer copies."""

HIDING_SHARE = 0.5
"""The most of its ranks' processors that a collective may take for it to be hidden: by more, ranks gain nothing."""

Key = TypeVar("Key")
T = TypeVar("T")

ProgramForm = Literal["plain", "joined", "rough", "unsplit", "lowered"]
"""How far a program is lowered: as codegen writes it; with collectives in buckets, which start early; with gathers no
further ahead of their readers than they must be, or as far as pays; and with collectives in parts where that pays."""

ProgramKey = tuple[int, ProgramForm, int, int, tuple[Lowering, ...]]
"""The most copies in a run of equal ones (0: all), the form, the largest bucket (0: none), what leaves for the host,
and what is registered."""

Made = tuple[Program, tuple[str, ...]]
"""A program, and the rewrites that made it of the plain one, as texts (`passes.flow.rewrites`)."""

Taken = tuple[tuple[Lowering, Adopted], ...]
"""Lowerings that were adopted, in their order."""


class Writer:
    """Writes programs in a space, whose prices decide how values are redistributed and programs lowered. A planner that
    prices the same plans otherwise (by measurements) shares the writer, so that it prices the program that runs."""

    def __init__(self, space: Space, memory: liveness.PlacementCache, flow: Flow) -> None:
        self.space, self.flow = space, flow
        self.operators = TimelineCache(placements=memory)
        """What timelines share about operators on the cluster; `memory` says how results lie on any cluster."""
        self.programs: list[tuple[tuple[ProgramKey, Assignment], Made]] = []
        """The programs written last, the latest first."""
        self.latest: list[tuple[Program, tuple[Rewrite, ...], Program]] = []
        """What targets remember (`passes.lower.lowering`)."""
        self.shorts: list[tuple[tuple[int, Assignment], Short | None]] = []
        """Assignments with fewer copies, the latest first."""
        self.taken: dict[When, list[tuple[tuple[Any, ...], Taken]]] = {"first": [], "where quicker": []}
        """The lowerings adopted for the last assignments, the latest first."""

    def written(
        self,
        assignment: Assignment,
        bucket_bytes: int = LIMIT_BYTES,
        copies: int = 0,
        form: ProgramForm = "lowered",
        offload_bytes: int = 0,
    ) -> Program:
        """The program of an assignment in a form, with its collectives in buckets of at most so many bytes; buckets
        smaller than `LIMIT_BYTES`, which save memory, leave collectives unsplit. At least `offload_bytes` of what is
        kept for backward leave for the host. If `copies` is not 0, each run of
        equal copies has at most so many. Raises ValueError if the assignment contradicts itself."""
        return self._made(assignment, bucket_bytes, copies, form, offload_bytes)[0]

    def rewrites(self, assignment: Assignment, bucket_bytes: int, offload_bytes: int = 0) -> str:
        """What was written of an assignment's plain program, as text (`passes.flow.rewrites`)."""
        return ",".join(self._made(assignment, bucket_bytes, offload_bytes=offload_bytes)[1])

    def short(self, assignment: Assignment, copies: int) -> Short | None:
        """The assignment of at most so many copies of each run of equal ones (0: all); None where none is left out."""
        if not copies:
            return None
        short = _remembered(self.shorts, (copies, assignment), lambda: shortened(self.space, assignment, copies))
        del self.shorts[LATEST_SHORTS:]
        return short

    def _made(
        self,
        assignment: Assignment,
        bucket_bytes: int,
        copies: int = 0,
        form: ProgramForm = "lowered",
        offload_bytes: int = 0,
    ) -> Made:
        copies = self._few(assignment, copies)
        taken = self._quickest(assignment) if form == "lowered" and bucket_bytes >= LIMIT_BYTES else ()
        if form == "lowered" and not taken:
            form = "unsplit"

        def made() -> Made:
            if form == "rough":
                target = replace(self._target(bucket_bytes), trials=False)
                joined = self._after(lowerings("first"), self._plain(assignment, copies), target)[0]
            else:
                joined = self._lowered(taken, self._joined(assignment, bucket_bytes, copies))
            return self._after(lowerings("last"), joined, self._target(bucket_bytes, offload_bytes))[0]

        key: ProgramKey = (copies, form, bucket_bytes, offload_bytes, tuple(LOWERINGS.values()))
        return self._kept(assignment, key, made)

    def is_split(self, assignment: Assignment) -> bool:
        """Whether `written` writes collectives in parts."""
        return bool(self._quickest(assignment))

    def segment_program(self, assignment: Assignment, bucket_bytes: int) -> Program:
        """The program that measures an assignment: few copies of each of its segments."""
        return self.written(assignment, bucket_bytes, KEPT)

    def plain(self, assignment: Assignment, copies: int = 0) -> Program:
        """The program that codegen writes, without lowerings."""
        return self._plain(assignment, copies)[0]

    def _plain(self, assignment: Assignment, copies: int) -> Made:
        def generated() -> Made:
            short = self.short(assignment, copies)
            space, shorter = (self.space, assignment) if short is None else (short.space, short.assignment)
            return self.flow.run(CODEGEN, space, shorter), ()

        return self._kept(assignment, (copies, "plain", 0, 0, ()), generated)

    def _joined(self, assignment: Assignment, bucket_bytes: int, copies: int) -> Made:
        """With the lowerings that come first: collectives are in buckets, and start early."""
        cut: ProgramKey = (copies, "joined", bucket_bytes, 0, lowerings("first"))
        taken = self._first(assignment, bucket_bytes)  # which may cache this very program
        return self._kept(assignment, cut, lambda: self._lowered(taken, self._plain(assignment, copies)))

    def _few(self, assignment: Assignment, copies: int) -> int:
        """How many copies to choose lowerings on, so that the choice costs the same at any depth: so many, or 0 (all)
        for an assignment without that many equal copies."""
        return copies if self.short(assignment, copies) is not None else 0

    def _written_for(self, assignment: Assignment, copies: int) -> Assignment:
        """What a program of so many copies is written for: assignments whose runs differ in length alone share it."""
        short = self.short(assignment, copies)
        return assignment if short is None else short.assignment

    def _target(self, bucket_bytes: int, offload_bytes: int = 0) -> Target:
        redistributor = self.space.redistributor
        return Target(
            cluster=self.space.cluster,
            cache=self.operators,
            axis_bytes=tuple(map(bucket_bytes_of, redistributor.links)),
            limit_bytes=bucket_bytes,
            latest=self.latest,
            offload_bytes=offload_bytes,
            unhidden=tuple(axis for axis, link in enumerate(redistributor.links) if link.compute_share > HIDING_SHARE),
        )

    def _first(self, assignment: Assignment, bucket_bytes: int) -> Taken:
        """The adopted lowerings of those that come first, which say, for example, how early to gather parameters."""
        rows = lowerings("first")

        def adopted() -> Taken:
            few = self._few(assignment, ESTIMATED_ON)
            made, taken = self._after(rows, self._plain(assignment, few), self._target(bucket_bytes))
            self._kept(assignment, (few, "joined", bucket_bytes, 0, rows), lambda: made)
            return tuple((row, replace(adopted, given=made[0], program=None)) for row, adopted in taken)

        return self._latest("first", (bucket_bytes, rows, self._written_for(assignment, ESTIMATED_ON)), adopted)

    def _quickest(self, assignment: Assignment) -> Taken:
        """The combination of lowerings, in their order, with the shortest step; each member shortens it alone."""
        rows = lowerings("where quicker")

        def quickest() -> Taken:
            few, target = self._few(assignment, LOOKED_AT), self._target(LIMIT_BYTES)
            made = self._joined(assignment, LIMIT_BYTES, few)
            ways: dict[tuple[Lowering, ...], tuple[Made, Taken]] = {(): (made, ())}
            for number in range(1, len(rows) + 1):
                for way in combinations(rows, number):
                    if way[:-1] in ways and (number == 1 or (way[-1],) in ways):
                        before, taken = ways[way[:-1]]
                        after, more = self._after(way[-1:], before, target)
                        if more:
                            ways[way] = after, (*taken, *more)
            del ways[()]
            return min(ways.values(), key=lambda way: target.seconds(way[0][0]), default=(made, ()))[1]

        return self._latest("where quicker", (rows, self._written_for(assignment, LOOKED_AT)), quickest)

    def _after(self, rows: Sequence[Lowering], made: Made, target: Target) -> tuple[Made, Taken]:
        """The program after those lowerings that are adopted, one after the other, and these lowerings."""
        taken: list[tuple[Lowering, Adopted]] = []
        for row in rows:
            if (adopted := self.flow.adopt(row, made[0], target)) is not None:
                taken.append((row, adopted))
                made = self._lowered(taken[-1:], made)
        return made, tuple(taken)

    def _lowered(self, taken: Sequence[tuple[Lowering, Adopted]], made: Made) -> Made:
        program, said = made
        for row, adopted in taken:
            said += tuple(str(rewrite.on(program)) or row.name for rewrite in adopted.rewrites)
            program = self.flow.lower(row, adopted, program)
        return program, said

    def _latest(self, when: When, key: tuple[Any, ...], find: Callable[[], Taken]) -> Taken:
        """The cached choice of lowerings, or a new one."""
        taken = _remembered(self.taken[when], key, find)
        del self.taken[when][LATEST_CHOICES:]
        return taken

    def _kept(self, assignment: Assignment, cut: ProgramKey, write: Callable[[], Made]) -> Made:
        """The cached program of an assignment, or a new one."""
        made = _remembered(self.programs, (cut, self._written_for(assignment, cut[0])), write)
        lengths = accumulate(len(p.forward) + len(p.backward) for _, (p, _) in self.programs)
        del self.programs[max(2, sum(length <= LATEST_INSTRUCTIONS for length in lengths)) :]
        return made


def _remembered(entries: list[tuple[Key, T]], key: Key, make: Callable[[], T]) -> T:
    """The value of a key, made if it is missing; its entry moves to the front."""
    place = next((number for number, (other, _) in enumerate(entries) if other == key), None)
    value = make() if place is None else entries.pop(place)[1]
    entries.insert(0, (key, value))
    return value
