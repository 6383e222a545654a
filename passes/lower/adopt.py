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


Key = tuple[Hashable, ...]
"""What places that are alike have in common: what their first collective is, and their ways."""


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
        return Alike(self, self._ways(program))(program) if self.at else self.everywhere(program, self.parts)

    @staticmethod
    def places(half: Sequence[Node], metas: Metas, wanted: Container[str] | None = None) -> Iterator[Place]:
        """Those of a half, or of some of its collectives, by the names of their results."""
        raise NotImplementedError

    def _ways(self, program: Program) -> dict[Key, Chosen]:
        """How places are written that are like those that are named. Raises ValueError for a place that the program
        does not have."""
        chosen = {name: Chosen(way, parts, -rank) for rank, (name, way, parts) in enumerate(self.at)}
        ways: dict[Key, Chosen] = {}
        for _, key, place in _Places(self, program, chosen.keys()).each():
            ways[key] = best = chosen.pop(place.collective)
            if best.way >= len(place.ways) or best.parts < 2:
                number = len(place.ways)
                raise ValueError(f"{self.name} at {place.collective} has {number} ways, from 0, and 2 or more parts")
        if chosen:
            raise ValueError(f"{self.name}: the program has no place at {', '.join(chosen)}")
        return ways

    def everywhere(self, program: Program, parts: int) -> Program:
        """The program with the lowering wherever it can be taken, in so many parts, quicker or not. One part is the
        program as it is."""
        if parts == 1:
            return program
        places = _Places(self, program)

        def widest(place: Place, window: Window) -> Chosen | None:
            """The way that has most collectives in parts."""
            return places.best(place, window, (parts,), lambda alone: -len(alone.collectives()))

        return places.written(places.chosen(widest))

    def why_whole(self, program: Program, parts: int) -> dict[str, str]:
        """Why places cannot be written in so many parts: by collective, what each way failed for. Others are absent."""
        places, reasons = _Places(self, program), dict[str, str]()
        for half, _, place in places.each():
            why = []
            for number, way in enumerate(place.ways):
                try:
                    places.write(place, half.window(*way.span), Chosen(number, parts), dict(program.metas))
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
    """Writes places as `ways` say, by what those that are alike have in common."""

    lowering: InParts
    ways: Mapping[Key, Chosen]
    name = ""

    def __call__(self, program: Program, target: Target | None = None) -> Program:
        return self._places(program).written([self.ways, self.ways])

    def _places(self, program: Program) -> _Places:
        """The places whose first collectives are like those of the ways."""
        starts = {key[0] for key in self.ways}
        begun = {i.name for i in program.nodes if i.collective and _form(i, program.metas) in starts}
        return _Places(self.lowering, program, begun)

    def on(self, program: Program) -> InParts:
        first: dict[Key, str] = {}
        for _, key, place in self._places(program).each():
            first.setdefault(key, place.collective)
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
    places = _Places(lowering, program, worth.keys())

    def seconds_of(window: Program) -> float:
        return timeline(window, cluster, windows).seconds

    def quickest(place: Place, window: Window) -> Chosen | None:
        best = places.best(place, window, lowering.numbers, seconds_of)
        if best is None:
            return None
        least, whole = -best.gain, seconds_of(places.alone(window.nodes, window, places.metas))
        return replace(best, gain=whole - least) if least < whole * (1 - LEAST_GAIN) else None

    ways = places.chosen(quickest, worth)
    written = places.written(ways)
    seconds = target.seconds(written) if places.count else before.seconds
    if seconds >= before.seconds * (1 - LEAST_GAIN):
        return None
    what = f"{places.count} places, {step(before.seconds, seconds)}"
    alike = Alike(lowering, {**ways[0], **ways[1]})
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
class Window:
    """Instructions of a half, from position `offset` on, and what is read after them."""

    nodes: Sequence[Node]
    offset: int
    kept: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Half:
    """The instructions of a half, what is read after it, where each value is read last, and the places that are
    alike."""

    nodes: Sequence[Node]
    later: frozenset[str]
    last_read: Mapping[str, int]
    alike: Mapping[Key, Sequence[Place]]

    def window(self, first: int, last: int) -> Window:
        nodes = self.nodes[first : last + 1]
        results = {name for node in nodes for name in node.outputs if name}
        kept = frozenset(name for name in results if name in self.later or self.last_read.get(name, -1) > last)
        return Window(nodes, first, kept)


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


def _form(instruction: Node, metas: Metas) -> Hashable:
    """The op, of a collective with its mesh axis, on what."""
    values = (*instruction.inputs, *instruction.outputs)
    what = instruction.form if instruction.collective else instruction.op
    return (what, *[metas[name] for name in values if name])


def _key(half: Sequence[Node], place: Place, metas: Metas) -> Key:
    forms = {m: _form(half[m], metas) for m in {m for way in place.ways for m in way.members}}
    start = next(form for m, form in forms.items() if half[m].name == place.collective)
    return (start, *[(way.cut, *[forms[m] for m in way.members]) for way in place.ways])


class _Places:
    """Where a lowering may be taken in a program, at some of its collectives, by the names of their results, or at all;
    and how it is written there. `count` is the number of places that were written."""

    def __init__(self, lowering: InParts, program: Program, wanted: Container[str] | None = None) -> None:
        self.lowering, self.given = lowering, program
        self.metas: dict[str, TensorMeta] = dict(program.metas)
        self.count = 0
        self.halves: list[_Half] = []
        for half, later in halves_of(program):
            alike: dict[Key, list[Place]] = {}
            for place in lowering.places(half, self.metas, wanted):
                alike.setdefault(_key(half, place, self.metas), []).append(place)
            self.halves.append(_Half(half, later, last_reads(half), alike))

    def each(self) -> Iterator[tuple[_Half, Key, Place]]:
        return ((half, key, place) for half in self.halves for key, group in half.alike.items() for place in group)

    def chosen(
        self, choose: Callable[[Place, Window], Chosen | None], worth: Mapping[str, float] | None = None
    ) -> list[dict[Key, Chosen]]:
        """How the places of each half are written: what `choose` says of one of those that are alike, with what stands
        around it. `worth` is the part of the step that is stood still for each collective, where that matters."""
        ways: list[dict[Key, Chosen]] = []
        for half in self.halves:
            ways.append({})
            for key, group in half.alike.items():
                if worth is not None and sum(worth[place.collective] for place in group) < LEAST_SHARE:
                    continue
                one = group[len(group) // 2]
                first = max(0, min(way.members[0] for way in one.ways) - AROUND)
                last = min(len(half.nodes), max(way.members[-1] for way in one.ways) + AROUND + 1) - 1
                if (best := choose(one, half.window(first, last))) is not None:
                    ways[-1][key] = best
        return ways

    def written(self, ways: Sequence[Mapping[Key, Chosen]]) -> Program:
        """The program with the places of each half written so."""
        forward, backward = (tuple(self._half(half, of)) for half, of in zip(self.halves, ways, strict=True))
        return with_own_metas(replace(self.given, forward=forward, backward=backward, metas=self.metas))

    def _half(self, half: _Half, ways: Mapping[Key, Chosen]) -> list[Node]:
        written = list(half.nodes)
        chosen = [(place, ways[key]) for key, group in half.alike.items() if key in ways for place in group]
        # from the end, so that positions before stay what they are
        for place, best in reversed(_apart(chosen)):
            first, last = place.ways[best.way].span
            try:
                written[first : last + 1] = self.write(place, half.window(first, last), best, self.metas)
            except Refused:
                continue
            self.count += 1
        return written

    def write(self, place: Place, window: Window, chosen: Chosen, metas: dict[str, TensorMeta]) -> list[Node]:
        """The window with a place in parts. Raises Refused where that cannot be."""
        way = place.ways[chosen.way]
        members = [m - window.offset for m in way.members]
        region = spread(window.nodes, metas, members, way.seed, way.cut, chosen.parts)
        return in_parts(window.nodes, metas, region, window.kept, self.lowering.name)

    def alone(self, nodes: Sequence[Node], window: Window, metas: dict[str, TensorMeta]) -> Program:
        """The instructions in the place of a window, as a program of their own."""
        saved = tuple(sorted(window.kept))
        return replace(self.given, forward=tuple(nodes), backward=(), saved=saved, outputs=(), metas=metas)

    def best(
        self, place: Place, window: Window, numbers: Sequence[int], cost: Callable[[Program], float]
    ) -> Chosen | None:
        """The cheapest of all ways in the fewest parts that they can, and of the best of them in more. It gains what it
        costs less than nothing."""

        def tried(way: int, parts: int) -> list[Chosen]:
            chosen, metas = Chosen(way, parts), dict(self.metas)
            try:
                written = self.write(place, window, chosen, metas)
            except Refused:
                return []
            return [replace(chosen, gain=-cost(self.alone(written, window, metas)))]

        def gain(chosen: Chosen) -> float:
            return chosen.gain

        candidates: list[Chosen] = []
        for way in range(len(place.ways)):
            candidates += next(filter(None, (tried(way, parts) for parts in numbers)), [])
        if not candidates:
            return None
        best = max(candidates, key=gain)
        for parts in numbers:
            if parts > best.parts:
                candidates += tried(best.way, parts)
        return max(candidates, key=gain)
