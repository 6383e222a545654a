"""Adopt: a lowering is taken where the simulated step gets shorter, and nowhere else.

A lowering names places of a program, and for each several ways to write it in parts (`parts.py`). A place is
looked at where the timeline stands still for its collective. Each way is tried on one of the places that are alike (the
same layer, again and again), in a window of instructions around it; the quickest is then written at all of them, and
kept if the step is quicker, too. The ways chosen on a program of few copies of each layer serve one of many: there the
same places are written alike.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.cluster.collectives import collective_seconds
from autopar.cost.streams import timeline
from autopar.cost.timeline import COMPUTE, Timeline, covered
from autopar.ir.graph import Node, TensorMeta
from autopar.ir.layout import Split
from autopar.ir.program import Program
from autopar.ir.rewrite import last_reads, with_own_metas

from .lowering import LEAST_GAIN, Adopted, Rewrite, Target, step
from .parts import in_parts
from .regions import Metas, Refused, spread

AROUND = 30
"""Instructions before and after a place that are simulated with it."""
LEAST_SHARE = 2e-3
"""Of the step's seconds: what the rank stands still for at places that are alike, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A stretch in parts: instructions that may belong to it, by position, and a cut that starts from a value."""

    members: tuple[int, ...]
    seed: str
    cut: Split

    @property
    def span(self) -> tuple[int, int]:
        return self.members[0], self.members[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a lowering may be taken: its first collective, by the name of its result, and the ways to write it."""

    collective: str
    ways: tuple[Way, ...]


Key = Hashable
"""What instructions, or places, that are alike have in common."""


@dataclass(frozen=True, kw_only=True)
class InParts(Rewrite):
    """Places in parts: in so many `parts` wherever that can be, or `at` some: the first collective of a place, the
    number of a way there, and in how many parts, for all places that are alike. Where places lie in each other, that
    which stands first in `at` is written. A subclass says where places are, and which `numbers` of parts are tried at
    each to adopt it."""

    numbers: ClassVar[tuple[int, ...]]
    parts: int = 1
    at: tuple[tuple[str, int, int], ...] = ()

    def __call__(self, program: Program, target: Target | None = None) -> Program:
        return self._alike(program).write(program) if self.at else self.everywhere(program, self.parts)

    @staticmethod
    def places(half: Sequence[Node], metas: Metas, wanted: Container[str] | None = None) -> Iterator[Place]:
        """Those of a half, or of some of its collectives, by the names of their results."""
        raise NotImplementedError

    def _alike(self, program: Program) -> Alike:
        """Raises ValueError for a place that the program does not have."""
        chosen = {name: Chosen(way, parts, -rank) for rank, (name, way, parts) in enumerate(self.at)}
        written: dict[Key, Chosen] = {}
        starts: set[Key] = set()
        for half in program.halves:
            for place in self.places(half, program.metas, chosen):
                best = chosen.pop(place.collective)
                if best.way >= len(place.ways) or best.parts < 2:
                    ways = len(place.ways)
                    raise ValueError(f"{self.name} at {place.collective} has {ways} ways, from 0, and 2 or more parts")
                written[key_of(half, place, program.metas)] = best
                starts.update(_form(i, program.metas) for i in half if i.outputs[0] == place.collective)
        if chosen:
            raise ValueError(f"{self.name}: the program has no place at {', '.join(chosen)}")
        return Alike(self, written, frozenset(starts))

    def everywhere(self, program: Program, parts: int) -> Program:
        """The program with the lowering wherever it can be taken, in so many parts, quicker or not. One part is the
        program as it is."""
        if parts == 1:
            return program

        def widest(writing: _Lowering, key: Key, place: Place, trial: Trial) -> Chosen | None:
            """The way that has most collectives in parts."""
            candidates = []
            for number in range(len(place.ways)):
                written = writing.tried(place, trial, Chosen(number, parts))
                if written is not None:
                    candidates.append(Chosen(number, parts, float(len(written.collectives()))))
            return max(candidates, key=lambda chosen: chosen.gain, default=None)

        return _Lowering(program, self, None, widest).program()

    def why_whole(self, program: Program, parts: int) -> dict[str, str]:
        """Why places cannot be written in so many parts: by collective, what each way failed for. Others are absent."""
        reasons: dict[str, str] = {}
        for half, _ in halves_of(program):
            for place in self.places(half, program.metas, None):
                why = []
                for way in place.ways:
                    first, last = way.span
                    window, metas = half[first : last + 1], dict(program.metas)
                    try:
                        region = spread(window, metas, [m - first for m in way.members], way.seed, way.cut, parts)
                        in_parts(window, metas, region, frozenset(), self.name)
                    except Refused as refused:
                        why.append(str(refused))
                if len(why) == len(place.ways):
                    reasons[place.collective] = "; ".join(dict.fromkeys(why))
        return reasons


@dataclass(frozen=True, slots=True)
class Chosen:
    """The number of a way among those of a place, in how many parts, and what that is worth."""

    way: int
    parts: int
    gain: float = 0.0


@dataclass(frozen=True)
class Alike(Rewrite):
    """Writes places as `ways` say, by what those that are alike have in common, and as `starts` say, the first
    collectives of these places."""

    lowering: InParts
    ways: Mapping[Key, Chosen]
    starts: frozenset[Key]
    name = ""

    def __call__(self, program: Program, target: Target | None = None) -> Program:
        return self.write(program)

    def write(self, program: Program) -> Program:
        choose = lambda writing, key, place, trial: self.ways.get(key)  # noqa: E731
        return _Lowering(program, self.lowering, self._wanted(program), choose).program()

    def _wanted(self, program: Program) -> dict[str, float]:
        return {i.outputs[0]: 1.0 for i in program.nodes if i.collective and _form(i, program.metas) in self.starts}

    def on(self, program: Program) -> InParts:
        first: dict[Key, str] = {}
        for half in program.halves:
            for place in self.lowering.places(half, program.metas, self._wanted(program)):
                first.setdefault(key_of(half, place, program.metas), place.collective)
        chosen = sorted((key for key in first if key in self.ways), key=lambda key: -self.ways[key].gain)
        at = tuple((first[key], self.ways[key].way, self.ways[key].parts) for key in chosen)
        return replace(self.lowering, at=at)


def adopt(lowering: InParts, program: Program, target: Target) -> Adopted | None:
    """The lowering wherever it makes the program's step shorter, in as many parts as are best, if it does anywhere."""
    cluster = target.cluster
    before = timeline(program, cluster, target.cache)
    windows = replace(target.cache, latest=[])
    links = cluster.links(program.mesh)
    kinds = {i.outputs[0]: i for i in program.nodes if i.collective}
    # one collective more takes its latencies at least: what can be hidden is what lies above them
    worth = {
        name: (seconds - least) / before.seconds
        for name, seconds in stood_still(before).items()
        if seconds > (least := collective_seconds(kinds[name].collective or "", 0.0, links[kinds[name].args[-1]]))
    }
    if sum(worth.values()) < LEAST_GAIN:
        return None
    ways: dict[Key, Chosen] = {}
    starts: set[Key] = set()

    def quickest(writing: _Lowering, key: Key, place: Place, trial: Trial) -> Chosen | None:
        chosen = writing.quickest(place, trial, lambda window: timeline(window, cluster, windows).seconds)
        if chosen is not None:
            ways[key] = chosen
            starts.add(_form(kinds[place.collective], program.metas))
        return chosen

    writing = _Lowering(program, lowering, worth, quickest)
    written = writing.program()
    seconds = target.seconds(written) if writing.count else before.seconds
    if seconds >= before.seconds * (1 - LEAST_GAIN):
        return None
    what = f"{writing.count} places, {step(before.seconds, seconds)}"
    alike = Alike(lowering, ways, frozenset(starts))
    return Adopted(given=program, program=written, rewrites=(alike,), target=target, what=what)


def stood_still(step: Timeline) -> dict[str, float]:
    """Seconds for which the rank stands still for each collective, under way meanwhile on the axis waited for."""
    communication = [event for event in step.events if event.stream != COMPUTE]
    return {event.name: seconds for event, seconds in covered(step.stalls, communication) if seconds > 0}


def halves_of(program: Program) -> Iterator[tuple[Sequence[Node], frozenset[str]]]:
    """Each half, with what is read after it."""
    results = [(o.backward, o.name) for o in program.outputs if o.name is not None]
    out = {name for backward, name in results if not backward}
    yield program.forward, frozenset(out | set(program.saved))
    yield program.backward, frozenset(name for backward, name in results if backward)


@dataclass(frozen=True, slots=True)
class Trial:
    """A window of a half, from position `offset`, and what is read after it."""

    window: Sequence[Node]
    offset: int
    kept: frozenset[str]


def _apart(chosen: Sequence[tuple[Place, Chosen]]) -> list[tuple[Place, Chosen]]:
    """Of places that lie in each other the one that gains most, in the order of the program."""
    taken: list[tuple[int, int]] = []
    kept = []
    for place, best in sorted(chosen, key=lambda item: -item[1].gain):
        first, last = place.ways[best.way].span
        at = bisect(taken, (first, last))
        if (at == 0 or taken[at - 1][1] < first) and (at == len(taken) or last < taken[at][0]):
            taken.insert(at, (first, last))
            kept.append((place, best))
    return sorted(kept, key=lambda item: item[0].ways[item[1].way].span)


def _form(instruction: Node, metas: Metas) -> Key:
    """The op, of a collective with its mesh axis, on what."""
    values = (*instruction.inputs, *instruction.outputs)
    what = instruction.form if instruction.collective else instruction.op
    return (what, *[metas[name] for name in values if name])


def key_of(half: Sequence[Node], place: Place, metas: Metas) -> Key:
    """What places that are alike have in common."""
    forms = {m: _form(half[m], metas) for m in {m for way in place.ways for m in way.members}}
    return tuple((way.cut, *[forms[m] for m in way.members]) for way in place.ways)


class _Lowering:
    """`wanted` are the collectives whose places are looked at, with the part of the step that is stood still for each
    (None: all); `choose` says how a place is written."""

    def __init__(
        self,
        program: Program,
        lowering: InParts,
        wanted: Mapping[str, float] | None,
        choose: Callable[[_Lowering, Key, Place, Trial], Chosen | None],
    ) -> None:
        self.given, self.lowering, self.wanted, self.choose = program, lowering, wanted, choose
        self.metas: dict[str, TensorMeta] = dict(program.metas)
        self.count = 0

    def program(self) -> Program:
        forward, backward = (tuple(self._half(half, later)) for half, later in halves_of(self.given))
        return with_own_metas(replace(self.given, forward=forward, backward=backward, metas=self.metas))

    def _half(self, half: Sequence[Node], later: frozenset[str]) -> list[Node]:
        last_read = last_reads(half)

        def trial(first: int, last: int) -> Trial:
            window = half[first : last + 1]
            results = {name for i in window for name in i.outputs if name}
            kept = frozenset(name for name in results if name in later or last_read.get(name, -1) > last)
            return Trial(window, first, kept)

        alike: dict[Key, list[Place]] = {}
        for place in self.lowering.places(half, self.metas, self.wanted):
            alike.setdefault(key_of(half, place, self.metas), []).append(place)
        chosen: list[tuple[Place, Chosen]] = []
        for key, group in alike.items():
            if self.wanted is not None and sum(self.wanted[place.collective] for place in group) < LEAST_SHARE:
                continue
            one = group[len(group) // 2]
            first = max(0, min(way.members[0] for way in one.ways) - AROUND)
            last = min(len(half), max(way.members[-1] for way in one.ways) + AROUND + 1) - 1
            best = self.choose(self, key, one, trial(first, last))
            if best is not None:
                chosen += [(place, best) for place in group]
        written = list(half)
        # from the end, so that positions before stay what they are
        for place, best in reversed(_apart(chosen)):
            first, last = place.ways[best.way].span
            if (in_place := self.write(place, trial(first, last), best, self.metas)) is not None:
                written[first : last + 1] = in_place
                self.count += 1
        return written

    def write(self, place: Place, trial: Trial, chosen: Chosen, metas: dict[str, TensorMeta]) -> list[Node] | None:
        """The window of a trial with a place in parts, or None where that cannot be."""
        way = place.ways[chosen.way]
        members = [m - trial.offset for m in way.members]
        try:
            region = spread(trial.window, metas, members, way.seed, way.cut, chosen.parts)
            return in_parts(trial.window, metas, region, trial.kept, self.lowering.name)
        except Refused:
            return None

    def tried(self, place: Place, trial: Trial, chosen: Chosen) -> Program | None:
        """The window as a program of its own, in parts."""
        metas = dict(self.metas)
        window = self.write(place, trial, chosen, metas)
        return None if window is None else self._alone(window, trial, metas)

    def _alone(self, window: Sequence[Node], trial: Trial, metas: dict[str, TensorMeta]) -> Program:
        saved = tuple(sorted(trial.kept))
        return replace(self.given, forward=tuple(window), backward=(), saved=saved, outputs=(), metas=metas)

    def quickest(self, place: Place, trial: Trial, seconds: Callable[[Program], float]) -> Chosen | None:
        """All ways in the fewest parts that they can, and the best of them in more."""
        parts = self.lowering.numbers

        def priced(chosen: Chosen) -> list[tuple[float, Chosen]]:
            written = self.tried(place, trial, chosen)
            return [] if written is None else [(seconds(written), chosen)]

        candidates: list[tuple[float, Chosen]] = []
        for number in range(len(place.ways)):
            candidates += next(filter(None, (priced(Chosen(number, n)) for n in parts)), [])
        if not candidates:
            return None
        best = min(candidates, key=lambda item: item[0])[1]
        for n in parts:
            if n > best.parts:
                candidates += priced(Chosen(best.way, n))
        least, best = min(candidates, key=lambda item: item[0])
        before = seconds(self._alone(trial.window, trial, self.metas))
        return replace(best, gain=before - least) if least < before * (1 - LEAST_GAIN) else None
