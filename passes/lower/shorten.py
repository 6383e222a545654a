"""Shorten: an assignment of fewer copies, from whose program the memory of the full one is predicted.

Of each run of copies that decide alike, a few are kept (`KEPT`, or what is asked for). The middle one stands for those
that are missing: what it leaves behind in forward and in backward, each of them leaves too.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from autopar.cost.memory import Moment
from autopar.cost.optimizers import Optimizer
from autopar.cost.timeline import COMPUTE, Timeline
from autopar.ir.graph import Node
from autopar.ir.layout import local_meta
from autopar.ir.program import Program
from autopar.passes.segments.segment import Repeated
from autopar.passes.space.layers import LayeredSpace
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space

from .accumulate import LATE, Part

KEPT = 3
"""One in the middle, which stands for those that are missing, between two like it."""

Place = tuple[int, int]
"""(repeat, kept copy), ascending in forward."""

BEFORE, AFTER = (-1, 0), (1 << 60, 0)


@dataclass(frozen=True, slots=True)
class Missing:
    """`count` copies behind a kept one, which are like it, as are `alike` before it and behind them; `own` are its
    parameters and buffers."""

    place: Place
    count: int
    alike: int
    own: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Short:
    """Fewer copies, as a space and an assignment of their own."""

    space: Space
    assignment: Assignment
    missing: tuple[Missing, ...]

    def most(self, runs: Sequence[tuple[Part, Sequence[Moment]]], optimizer: Optimizer) -> float:
        """Bytes at the peak of the full assignment, from the parts that a step runs of the short program, with their
        moments: the first micro-batch, those between, and the last one, which reduces; or the only one. Buckets across
        copies make it differ a little from that of the full program."""
        placed = [list(self._placed(moments)) for _, moments in runs]
        parts = [part for part, _ in runs]
        added = [[0.0] * len(moments) for moments in placed]
        for missing in self.missing:
            static, gradients = _own_bytes(parts[-1].program, missing.own, optimizer)
            grown = [_left(moments, missing.place) for moments in placed]
            first, pending = grown[0][0], grown[-2:][0][1]
            for part, moments, totals, (left, late) in zip(parts, placed, added, grown, strict=True):
                held = max(0.0, first - left)  # what the first kept for those that follow
                end, waits = pending, {*part.waiting}
                if part is parts[-1]:
                    end = gradients
                    waits.update(LATE if len(parts) > 1 else ())  # the last backward is given what waits
                for i, (phase, place, _) in enumerate(moments):
                    if phase == "forward":
                        more = left if place >= missing.place else 0.0
                    elif phase == "backward":
                        more = left if place > missing.place else late
                        more = max(left, late) if place == missing.place else more
                    else:
                        more = end
                    waiting = pending if phase.partition(",")[0] in waits else 0.0
                    totals[i] += missing.count * (static + held + waiting + more)
        return max(
            moment.bytes + more
            for part, moments, totals in zip(parts, placed, added, strict=True)
            for (_, _, moment), more in zip(moments, totals, strict=True)
            if part.times
        )

    def seconds(self, short: Timeline, program: Program) -> float:
        """About the seconds of a step of the full assignment, from the timeline of the short program: each copy that is
        missing takes what those around the one that stands for it take, and in backward no less than they keep any link
        busy: links that fall behind there do so further with each copy, and the step waits for them at its end."""
        places = {
            name: (phase, place)
            for phase, instructions in (("forward", program.forward), ("backward", program.backward))
            for place, instruction in zip(self._passed(phase, instructions), instructions, strict=True)
            for name in instruction.outputs
        }
        started: dict[tuple[str, Place], float] = {}
        busy: dict[tuple[str, Place], dict[str, float]] = {}
        for event in short.events:
            place = places[event.name]
            if event.stream == COMPUTE:
                started.setdefault(place, event.start_seconds)
            else:
                of_copy = busy.setdefault(place, defaultdict(float))
                of_copy[event.stream] += event.seconds
        total, streams = short.seconds, {COMPUTE, *(stream for of_copy in busy.values() for stream in of_copy)}
        for missing in self.missing:
            number, k = missing.place
            around = missing.alike - 1  # where the last of them begins is to be seen, too
            low, high = k - around, k + 1 + around
            for phase, first, last in (("forward", low, high), ("backward", high, low)):
                began, ended = (started.get((phase, (number, at))) for at in (first, last))
                if began is not None and ended is not None:  # a copy may lie in one phase alone
                    between = ended - began
                    if phase == "backward":
                        window = [busy.get((phase, (number, at)), {}) for at in range(low, high)]
                        between = max(between, *(sum(of.get(stream, 0.0) for of in window) for stream in streams))
                    total += missing.count * between / (high - low)
        return total

    def _placed(self, moments: Sequence[Moment]) -> Iterator[tuple[str, Place, Moment]]:
        """Each moment with its phase and the copy that the program is at."""
        for phase, group in groupby(moments, key=lambda moment: moment.phase):
            same = list(group)
            for place, moment in zip(self._passed(phase, [m.instruction for m in same]), same, strict=True):
                yield phase, place, moment

    def _passed(self, phase: str, instructions: Sequence[Node | None]) -> Iterator[Place]:
        """The copy that the program is at, at each of the instructions of a phase. What was moved ahead (collectives
        and their layouts, masks, what is made of nothing) stands before the middle of the copy before its own, and
        tells nothing."""
        homes = [None if node is None else self._home.get((node.serves, node.op)) for node in instructions]
        standing: dict[Place, list[int]] = {}
        for number, home in enumerate(homes):
            if home is not None:
                standing.setdefault(home, []).append(number)
        order = sorted(standing, reverse=phase == "backward")
        middles = [standing[place][len(standing[place]) // 2] for place in order]
        earliest = dict(zip(order, (0, *middles), strict=False))
        passed = BEFORE if phase == "forward" else AFTER
        for number, home in enumerate(homes):
            if home is not None and number >= earliest[home]:
                passed = max(passed, home) if phase == "forward" else min(passed, home)
            yield passed

    @cached_property
    def _home(self) -> dict[tuple[str, str], Place]:
        """The copy that a node is of, by what an instruction says of it."""
        nodes = self.space.graph.nodes
        return {
            (nodes[index].outputs[0], nodes[index].op): (number, k)
            for number, repeat in enumerate(self.space.repeats)
            for k, copy in enumerate(repeat.copies)
            for index in copy
        }


def _left(placed: Sequence[tuple[str, Place, Moment]], place: Place) -> tuple[float, float]:
    """What a copy leaves behind when its forward is over, and of both phases when its backward is. What is on its way
    in forward where a copy begins, such as gathers for the next ones, is not left behind, and differs from one copy to
    the next; in backward that is what travels until the end."""
    first: dict[tuple[str, Place], Moment] = {}
    for phase, at, moment in placed:
        first.setdefault((phase, at), moment)
    number, k = place
    left = late = 0.0
    if ("forward", place) in first:  # a copy may lie in one phase alone
        left = late = first["forward", (number, k + 1)].lasting_bytes - first["forward", place].lasting_bytes
    if ("backward", place) in first:
        late += first["backward", (number, k - 1)].bytes - first["backward", place].bytes
    return left, late


def _own_bytes(program: Program, own: frozenset[str], optimizer: Optimizer) -> tuple[float, float]:
    """Bytes of a copy's parameters with their states, and of their gradients."""
    static = gradients = 0.0
    for i in program.inputs:
        if i.name in own:
            local = local_meta(i.meta, i.layout, program.mesh)
            static += local.bytes
            if i.target in program.trained:
                static += optimizer.bytes(local)
                gradients += local.bytes
    return static, gradients


def shortened(space: Space, assignment: Assignment, most: int = KEPT) -> Short | None:
    """With at most so many copies of each run of copies alike; None where that leaves none out. The first copies of the
    model stand for those that are kept, so that runs of other lengths lead to the same fewer copies."""
    kept: list[list[int]] = []
    missing: list[Missing] = []
    for number, (repeat, copies) in enumerate(zip(space.repeats, assignment.copies, strict=True)):
        ids: list[object] = []
        for copy in zip(copies, assignment.again(number), strict=True):
            ids.append(copy if not ids or ids[-1] != copy else ids[-1])
        here: list[int] = []
        for _, run in groupby(range(repeat.count), key=lambda k: id(ids[k])):
            same = list(run)
            if len(same) > most:
                middle = most // 2
                own = frozenset(repeat.own[len(here) + middle])
                missing.append(Missing((number, len(here) + middle), len(same) - most, most // 2, own))
                same = [*same[: middle + 1], *same[len(same) - (most - middle - 1) :]]
            here += same
        kept.append(here)
    if not missing:
        return None
    return Short(
        space=_with(space, [range(len(here)) for here in kept]),
        assignment=Assignment(
            rest=assignment.rest,
            copies=tuple(tuple(c[k] for k in here) for c, here in zip(assignment.copies, kept, strict=True)),
            recompute=tuple(tuple(assignment.again(n)[k] for k in here) for n, here in enumerate(kept)),
        ),
        missing=tuple(missing),
    )


def _with(space: Space, kept: Sequence[Sequence[int]]) -> Space:
    """The space with some of the copies. Those that are not kept make and read nothing."""
    assert isinstance(space, LayeredSpace)
    graph = space.graph
    gone = {
        name
        for repeat, here in zip(space.repeats, kept, strict=True)
        for k in set(range(repeat.count)).difference(here)
        for name in (*repeat.own[k], *repeat.results[k])
    }
    inputs = tuple(i for i in graph.inputs if i.name not in gone)
    there = {i.target for i in inputs if i.role == "parameter"}
    outputs = tuple(
        replace(o, name=None) if o.name in gone or (o.target in graph.parameters and o.target not in there) else o
        for o in graph.outputs
    )
    repeats = tuple(_of(repeat, here) for repeat, here in zip(space.repeats, kept, strict=True))
    return replace(
        space,
        graph=replace(graph, inputs=inputs, outputs=outputs),
        segments=replace(space.segments, repeats=repeats),
    )


def _of(repeat: Repeated, kept: Sequence[int]) -> Repeated:
    return replace(
        repeat,
        copies=tuple(repeat.copies[k] for k in kept),
        varied=tuple(repeat.varied[k] for k in kept),
        own=tuple(repeat.own[k] for k in kept),
        results=tuple(repeat.results[k] for k in kept),
        borders=tuple(
            replace(border, values=(*(border.values[k] for k in kept), border.values[-1])) for border in repeat.borders
        ),
    )
