"""Segments (CFP section 4.1): the runs of repeated layers of a joint graph.

Everything after this step costs per unique segment, so a repeat must be exact: its copies are
isomorphic node by node, forward and backward together, and what crosses between them is listed.
The search only proposes (a greedy cover by period over the fingerprints of all operators, which is
finer than the paper's cover over contractions); `_align` alone decides, and shortens or refuses a run
that does not fit. CFP lets trivial operators differ between equal segments; here they may not,
because one copy's program is stamped for all.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.ir.graph import JointGraph, Node, is_view
from autopar.ops import rule_of
from autopar.passes.dependency.affine import AffineMap, compose, identity
from autopar.passes.dependency.operators import call_of_node, dependency
from autopar.passes.dependency.signatures import signatures

Ints = npt.NDArray[np.int64]
Copies = tuple[tuple[int, ...], ...]

# How many cuts of one period, and how many periods, are tried before giving up.
CUTS_TRIED = 4
RUNS_TRIED = 24
# The cost matrix of a copy has a dimension for each border: with many, a copy is no unit.
BORDERS_MOST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """One tensor that crosses from copy to copy.

    `values` has a name more than there are copies: values[k] crosses between copy k-1 and copy k.
    `backward` False: values[k] is made by copy k-1 (values[0] by the rest of the graph) and read by
    copy k. True: values[k] is made by copy k (values[-1] by the rest) and read by copy k-1.
    """

    values: tuple[str, ...]
    backward: bool

    def __str__(self) -> str:
        return (" <- " if self.backward else " -> ").join(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A run of isomorphic copies of one layer.

    `copies[k][j]` is a node index; the nodes at position j are alike for all k: same op, same
    constants, same metas, and operands that are, at the same argument, made at one position of the
    own copy, or a border, or one of `shared`, or one of `own`.

    `shared` are values from outside that every copy reads alike. `own[k]` are the graph inputs
    (parameters, buffers) that copy k alone reads, `results[k]` its values that are graph outputs, both
    aligned over k. What is a gradient among them is that of one of `own[k]`, and copy k makes all that
    its own parameters get. No other value of a copy is read outside.
    """

    name: str
    copies: Copies
    borders: tuple[Border, ...]
    shared: tuple[str, ...]
    own: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        return len(self.copies)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.count} copies of {len(self.copies[0])} nodes"]
        lines += [f"  border {border}" for border in self.borders]
        lines.append(f"  shared {', '.join(self.shared) or '-'}")
        lines.append(f"  own    {', '.join(self.own[0]) or '-'}, ...")
        lines.append(f"  result {', '.join(self.results[0]) or '-'}, ...")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The repeats, in the order of their first nodes, and the nodes that are in none, ascending."""

    repeats: tuple[Repeated, ...]
    rest: tuple[int, ...]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.repeats), f"rest: {len(self.rest)} nodes"])


def segments(graph: JointGraph) -> Segments:
    """Find the repeated layers of a joint graph (CFP section 4.1). Deterministic."""
    facts = _Facts.of(graph)
    free = [(0, facts.middle)]
    backward_runs = periodic(facts.labels[facts.middle :], facts.middle)
    forward_runs = periodic(facts.labels[: facts.middle], 0)
    repeats: list[Repeated] = []
    for _ in range(RUNS_TRIED):
        forward_runs = [clipped for run in forward_runs for clipped in _clip(run, free, facts)]
        run = _longest(forward_runs)
        if run is None:
            break
        found = _repeat(facts, run, backward_runs)
        if found is None:
            forward_runs.remove(run)
            continue
        repeats.append(found)
        taken = [i for copy in found.copies for i in copy]
        forward = [i for i in taken if i < facts.middle]
        free = _without(free, min(forward), max(forward) + 1)
        backward = [i for i in taken if i >= facts.middle]
        if backward:
            low, high = min(backward), max(backward) + 1
            outside = _without([(facts.middle, len(graph.nodes))], low, high)
            backward_runs = [piece for run in backward_runs for piece in _pieces(run, outside)]
    repeats = _apart(facts, repeats)
    repeats.sort(key=lambda repeated: repeated.copies[0][0])
    inside = {i for repeated in repeats for copy in repeated.copies for i in copy}
    return Segments(repeats=tuple(repeats), rest=tuple(i for i in range(len(graph.nodes)) if i not in inside))


def _apart(facts: _Facts, repeats: Sequence[Repeated]) -> list[Repeated]:
    """The repeats, without copies that make what all copies of another one read, as a decoder's layers read what the
    last layer of an encoder makes: that is made whole, by the rest of the graph."""
    home = {i: (n, k) for n, repeated in enumerate(repeats) for k, copy in enumerate(repeated.copies) for i in copy}
    making: set[tuple[int, int]] = set()
    for name in {name: None for repeated in repeats for name in repeated.shared}:
        index = facts.home.get(name, (None,))[0]
        while index is not None and index not in home and is_view(facts.graph.nodes[index]):
            index = facts.home.get(facts.graph.nodes[index].inputs[0], (None,))[0]
        if index is not None and index in home:
            making.add(home[index])
    apart: list[Repeated] = []
    for n, repeated in enumerate(repeats):
        kept = [copy for k, copy in enumerate(repeated.copies) if (n, k) not in making]
        left = repeated if len(kept) == repeated.count else _shortened(facts, kept)
        if left is not None:
            apart.append(left)
    return apart


def fingerprint(graph: JointGraph, nodes: Sequence[int]) -> str:
    """The fine-grained dependency graph of the forward contractions among `nodes` (CFP section 4.1 and
    Fig. 6), as a short hash: what they are, and by which affine maps each depends on the ones before
    it. Equal for segments with the same parallel space, whatever trivial operators lie between."""
    lines: list[str] = []
    paths: dict[str, dict[tuple[int, AffineMap], None]] = {}
    for i in (i for i in nodes if not graph.nodes[i].backward):
        node, metas = graph.nodes[i], graph.metas
        call = call_of_node(node, metas)
        rule = None if is_view(node) else rule_of(call)
        if rule is not None and rule.contraction:
            lines.append(f"{node.op} {', '.join(map(str, call.inputs))}")
            for operand, name in enumerate(node.inputs):
                lines += sorted(f"{operand} from {source}: {mapping}" for source, mapping in paths.get(name, {}))
            output = node.outputs[0]
            paths[output] = {(len(lines), identity(metas[output].shape)): None}
        elif any(name in paths for name in node.inputs):
            for output, maps in zip(node.outputs, dependency(call, rule), strict=True):
                for name, here in zip(node.inputs, maps, strict=True):
                    for source, mapping in paths.get(name, {}) if here is not None else ():
                        paths.setdefault(output, {})[source, compose(here, mapping)] = None
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


# ---- what is known of each node ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """`labels[i]` is equal for nodes with equal op, constants and metas, whoever their operands are.
    `middle` is the index of the first backward node. `home[value]` is (node, output slot),
    `outputs[value]` the roles of a graph output, `trained[value]` the graph inputs of the parameters
    whose gradient a value is, `gradients` the same the other way round."""

    graph: JointGraph
    middle: int
    labels: Ints
    operands: tuple[tuple[str, ...], ...]
    home: dict[str, tuple[int, int]]
    readers: dict[str, list[int]]
    outputs: dict[str, tuple[str, ...]]
    trained: dict[str, tuple[str, ...]]
    gradients: dict[str, str]

    @staticmethod
    def of(graph: JointGraph) -> _Facts:
        known = signatures(graph)
        roles: dict[str, tuple[str, ...]] = {}
        trained: dict[str, tuple[str, ...]] = {}
        parameters = graph.parameters
        for output in graph.outputs:
            if output.name is None:
                continue
            parameter = parameters.get(output.target) if output.role == "gradient" else None
            role = output.role if parameter is None else "gradient of a parameter"
            roles[output.name] = (*roles.get(output.name, ()), role)
            if parameter is not None:
                trained[output.name] = (*trained.get(output.name, ()), parameter)
        readers: dict[str, list[int]] = {}
        for i, names in enumerate(known.operands):
            for name in names:
                readers.setdefault(name, []).append(i)
        home = {o: (i, slot) for i, node in enumerate(graph.nodes) for slot, o in enumerate(node.outputs) if o}
        return _Facts(
            graph=graph,
            middle=graph.first_backward,
            labels=np.array(known.labels, dtype=np.int64),
            operands=known.operands,
            home=home,
            readers=readers,
            outputs=roles,
            trained=trained,
            gradients={parameter: value for value, of in trained.items() for parameter in of},
        )


# ---- runs: intervals whose labels have a period ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """Labels in [start, stop) repeat with `period`, at least twice."""

    start: int
    stop: int
    period: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def periodic(labels: Ints, offset: int = 0) -> list[_Run]:
    """All maximal runs of all periods."""
    found: list[_Run] = []
    for period in range(1, len(labels) // 2 + 1):
        equal = labels[:-period] == labels[period:]
        if np.count_nonzero(equal) < period:
            continue
        edges = np.flatnonzero(np.diff(equal, prepend=False, append=False))
        for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if high - low >= period:
                found.append(_Run(low + offset, high + period + offset, period))
    return found


def _longest(runs: Sequence[_Run]) -> _Run | None:
    """The run that covers most; a multiple of a period covers a little more at times, so the
    smallest period among those that cover nearly as much."""
    if not runs:
        return None
    most = max(run.length for run in runs)
    long = [run for run in runs if run.length * 10 >= most * 9]
    return min(long, key=lambda run: (run.period, -run.length, run.start))


def _without(intervals: Iterable[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    cut = [piece for start, stop in intervals for piece in ((start, min(stop, low)), (max(start, high), stop))]
    return sorted({(start, stop) for start, stop in cut if start < stop})


def _pieces(run: _Run, intervals: Iterable[tuple[int, int]]) -> Iterator[_Run]:
    for start, stop in intervals:
        piece = _Run(max(run.start, start), min(run.stop, stop), run.period)
        if piece.length >= 2 * run.period:
            yield piece


def _clip(run: _Run, free: Iterable[tuple[int, int]], facts: _Facts) -> Iterator[_Run]:
    """The parts of a run in free intervals, if a period of it reads a graph input: chains of
    pointwise operators repeat too, and are not layers."""
    for piece in _pieces(run, free):
        middle = piece.start + (piece.length // piece.period // 2) * piece.period
        nodes = range(middle, min(middle + piece.period, piece.stop))
        if any(name not in facts.home for i in nodes for name in facts.operands[i]):
            yield piece


# ---- from a run to copies -------------------------------------------------------------------------


def _repeat(facts: _Facts, run: _Run, backward_runs: Sequence[_Run]) -> Repeated | None:
    """Cut a forward run into copies, give each its backward nodes, and verify. Two copies from the
    middle show what crosses; least first: number of borders, their bytes, then the outermost module
    boundary."""
    ranked: list[tuple[tuple[float, ...], list[list[int]]]] = []
    for forward in _cuts(facts, run):
        path = _shared_path(facts.graph.nodes, forward[len(forward) // 2][0])
        for copies in _with_backward(facts, forward, backward_runs):
            first = min(len(copies) // 2, len(copies) - 2)
            probe = _align(facts, copies[first : first + 2])
            # a misfit in the middle may be at home at an end, which `_shortened` drops: tried last
            number, size = (math.inf, 0) if isinstance(probe, int) else (len(probe.borders), _bytes(facts, probe))
            ranked.append(((number, size, path, -len(copies), len(ranked)), copies))
    for _, copies in sorted(ranked):
        found = _shortened(facts, copies)
        if found is not None and len(found.borders) <= BORDERS_MOST:
            return found
    return None


def _bytes(facts: _Facts, found: Repeated) -> int:
    return sum(facts.graph.metas[border.values[1]].bytes for border in found.borders)


def _cuts(facts: _Facts, run: _Run) -> Iterator[list[range]]:
    """Forward intervals of the copies, for the rotations of the period with the least across the cut."""
    crossing = _crossing(facts, run.start, run.stop, facts.middle)
    ranked: list[tuple[tuple[int, ...], int]] = []
    for rotation in range(run.period):
        count = (run.length - rotation) // run.period
        if count >= 2:
            cut = run.start + rotation + run.period * (count // 2)
            number, size = crossing[cut - run.start].tolist()
            ranked.append(((number, size, _shared_path(facts.graph.nodes, cut), -count, rotation), count))
    for (*_, rotation), count in sorted(ranked)[:CUTS_TRIED]:
        start = run.start + rotation
        yield [range(start + k * run.period, start + (k + 1) * run.period) for k in range(count)]


def _crossing(facts: _Facts, start: int, stop: int, end: int) -> Ints:
    """For each cut before node start + c: how many values made in [start, stop) are made before it
    and read at or after it (by nodes before `end`), and their bytes. [stop - start + 1, 2]."""
    steps = np.zeros((stop - start + 2, 2), dtype=np.int64)
    for i in range(start, stop):
        for output in facts.graph.nodes[i].outputs:
            last = max((reader for reader in facts.readers.get(output, ()) if reader < end), default=i)
            if last > i:
                change = (1, facts.graph.metas[output].bytes)
                steps[i + 1 - start] += change
                steps[min(last, stop) + 1 - start] -= change
    return np.cumsum(steps, axis=0)[:-1]


def _shared_path(nodes: Sequence[Node], cut: int) -> int:
    """How many names the module paths on both sides of a cut share: least between layers."""
    before, after = nodes[cut - 1].module.split("."), nodes[cut].module.split(".")
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))


def _with_backward(facts: _Facts, forward: Sequence[range], backward_runs: Sequence[_Run]) -> Iterator[list[list[int]]]:
    """Propose copies: forward intervals, each with the interval of backward nodes that read what it
    saved. Autograd runs backward in reverse order of forward, so copy k owns the k-th last interval."""
    owner = {i: k for k, interval in enumerate(forward) for i in interval}
    votes = list(_votes(facts, owner, _owned_inputs(facts, forward, owner)))
    if not votes:
        yield [list(interval) for interval in forward]
        return
    agreed = {run: _agreement(run, len(forward), votes) for run in backward_runs}
    most = max((agree.max() for agree in agreed.values()), default=0)
    fitting = [run for run in backward_runs if agreed[run].max() * 10 >= most * 9]
    if not fitting:
        return
    run = min(fitting, key=lambda run: (run.period, run.start))
    crossing = _crossing(facts, run.start, run.stop, len(facts.graph.nodes))
    for top in _tops(run, len(forward), agreed[run], crossing)[:CUTS_TRIED]:
        copies = []
        for k, interval in enumerate(forward):
            low, high = top - (k + 1) * run.period, top - k * run.period
            if run.start <= low and high <= run.stop:
                copies.append([*interval, *range(low, high)])
        if len(copies) >= 2:
            yield copies


def _owned_inputs(facts: _Facts, forward: Sequence[range], owner: dict[int, int]) -> dict[str, int]:
    """The graph inputs that one copy alone reads in forward, with the copy."""
    owned: dict[str, int] = {}
    for k, interval in enumerate(forward):
        for i in interval:
            for name in facts.operands[i]:
                if name not in facts.home:
                    owned[name] = k if owned.get(name, k) == k else -1
    return {name: k for name, k in owned.items() if k >= 0}


def _votes(facts: _Facts, owner: dict[int, int], inputs: dict[str, int]) -> Iterator[tuple[int, int]]:
    """(backward node, copy): the node reads a value that copy saved, or a parameter of it. Values
    that forward nodes of other copies read too are borders and say nothing."""
    for i in range(facts.middle, len(facts.operands)):
        for name in facts.operands[i]:
            if name in inputs:
                yield i, inputs[name]
            elif name in facts.home:
                copy = owner.get(facts.home[name][0])
                if copy is not None and all(owner.get(r) == copy for r in facts.readers[name] if r < facts.middle):
                    yield i, copy


def _agreement(run: _Run, count: int, votes: Sequence[tuple[int, int]]) -> Ints:
    """For each end run.start + c of copy 0's backward interval, how many votes it agrees with."""
    agree = np.zeros(run.length + count * run.period + 3, dtype=np.int64)
    voters = np.array([vote for vote in votes if run.start <= vote[0] < run.stop], dtype=np.int64).reshape(-1, 2)
    # end - 1 - node must lie in [copy * period, (copy + 1) * period)
    low = voters[:, 0] + voters[:, 1] * run.period + 1 - run.start
    np.add.at(agree, low, 1)
    np.add.at(agree, np.minimum(low + run.period, len(agree) - 1), -1)
    return np.cumsum(agree)


def _tops(run: _Run, count: int, agree: Ints, crossing: Ints) -> list[int]:
    """Ends of copy 0's backward interval, best first: fewest votes against and fewest tensors across."""
    most = int(agree.max())
    ranked: list[tuple[float, float, int, int]] = []
    for end in np.flatnonzero(agree * 2 >= most).tolist():
        cuts = [end - k * run.period for k in range(count + 1)]
        inside = [k for k in range(count) if cuts[k] <= run.length and cuts[k + 1] >= 0]
        if len(inside) >= 2:
            number, size = crossing[[cuts[k] for k in inside[1:]]].mean(axis=0).tolist()
            against = (most - int(agree[end])) / count
            ranked.append((number + against, size, -len(inside), end + run.start))
    return [top for *_, top in sorted(ranked)]


def _shortened(facts: _Facts, copies: Sequence[Sequence[int]]) -> Repeated | None:
    """The copies, or those that are left after dropping, from either end, what does not fit."""
    while len(copies) >= 2:
        found = _align(facts, copies)
        if isinstance(found, Repeated):
            # copies side by side (the projections q, k, v) are alike too, but are not layers
            return found if any(not border.backward for border in found.borders) else None
        copies = copies[found + 1 :] if found < len(copies) / 2 else copies[:found]
    return None


# ---- the judge -------------------------------------------------------------------------------------


def _align(facts: _Facts, copies: Sequence[Sequence[int]]) -> Repeated | int:
    """Verify copies position by position. Returns the index of a copy that does not fit, if one does."""
    count = len(copies)
    place = {i: (k, j) for k, copy in enumerate(copies) for j, i in enumerate(copy)}
    roles = _Roles(facts, place, count)
    for position in zip(*copies, strict=True):
        expected = facts.labels[position[count // 2]]
        for k, i in enumerate(position):
            if facts.labels[i] != expected:
                return k
        for names in zip(*(facts.operands[i] for i in position), strict=True):
            misfit = roles.add(names)
            if misfit is not None:
                return misfit
    misfit = roles.misfit_outside()
    if misfit is None:
        misfit = roles.misfit_gradients()
    if misfit is not None:
        return misfit
    results = roles.results()
    if isinstance(results, int):
        return results
    return Repeated(
        name=_name(facts.graph, copies),
        copies=tuple(map(tuple, copies)),
        borders=tuple(roles.borders.values()),
        shared=tuple(roles.shared),
        own=tuple(zip(*roles.own, strict=True)) if roles.own else ((),) * count,
        results=results,
    )


class _Roles:
    """What the operands of aligned nodes are to their copies, gathered argument by argument."""

    def __init__(self, facts: _Facts, place: dict[int, tuple[int, int]], count: int) -> None:
        self.facts, self.place, self.count = facts, place, count
        self.judged: dict[tuple[str, ...], int | None] = {}
        self.borders: dict[tuple[int, int, bool], Border] = {}
        self.shared: dict[str, None] = {}
        self.own: dict[tuple[str, ...], None] = {}

    def made(self, name: str) -> tuple[int, int, int] | None:
        """(copy, position, output slot) that makes a value, None if it comes from outside."""
        home = self.facts.home.get(name)
        if home is None or home[0] not in self.place:
            return None
        return (*self.place[home[0]], home[1])

    def add(self, names: tuple[str, ...]) -> int | None:
        """Take note of one argument, names[k] in copy k. Returns a copy that does not fit, if any."""
        if names not in self.judged:
            self.judged[names] = self._judge(names)
        return self.judged[names]

    def _judge(self, names: tuple[str, ...]) -> int | None:
        made = [self.made(name) for name in names]
        if not any(made):
            return self._outside(names)
        kinds = [None if m is None else (m[0] - k, *m[1:]) for k, m in enumerate(made)]
        usual = kinds[self.count // 2] or kinds[0]
        if usual is None or abs(usual[0]) > 1:
            return next((m[0] for m in made if m is not None), None)
        step, position, slot = usual
        entry = {0: None, -1: 0, 1: self.count - 1}[step]
        for k, kind in enumerate(kinds):
            if kind != (None if k == entry else usual):
                return k
        if step == 0:
            return None
        return self._border(names, position, slot, backward=step == 1)

    def _border(self, names: tuple[str, ...], position: int, slot: int, *, backward: bool) -> int | None:
        maker = next(i for i, place in self.place.items() if place == (0 if backward else self.count - 1, position))
        leaving = self.facts.graph.nodes[maker].outputs[slot]
        border = Border(values=(leaving, *names) if backward else (*names, leaving), backward=backward)
        if not leaving or self.borders.setdefault((position, slot, backward), border) != border:
            # the tensor that enters the run differs by reader: the first layer is not like the others
            return self.count - 1 if backward else 0
        return None

    def _outside(self, names: tuple[str, ...]) -> int | None:
        if len(set(names)) == 1:
            self.shared[names[0]] = None
            return None
        for k, name in enumerate(names):
            if name in self.facts.home or name in self.facts.outputs or names.count(name) > 1:
                return k if name != names[self.count // 2] else 0
            if any(self.place.get(reader, (-1,))[0] != k for reader in self.facts.readers[name]):
                return k
        self.own[names] = None
        return None

    def misfit_outside(self) -> int | None:
        """A copy with a value that the rest of the graph reads although it is no end of a border, or
        with a value from outside that has two roles."""
        leaving = self._leaving()
        for i, (k, _) in self.place.items():
            for output in self.facts.graph.nodes[i].outputs:
                if output not in leaving and any(r not in self.place for r in self.facts.readers.get(output, ())):
                    return k
        # a value is one thing to a copy, so that names can be mapped from copy to copy and back
        reads = [*self.own, *(b.values[1:] if b.backward else b.values[:-1] for b in self.borders.values())]
        seen = {(k, name) for name in self.shared for k in range(self.count)}
        for names in reads:
            for k, name in enumerate(names):
                if (k, name) in seen:
                    return k
                seen.add((k, name))
        return None

    def misfit_gradients(self) -> int | None:
        """A copy that does not make the gradients of its own parameters where its peers do, or makes others: copies
        that are cut inside a layer."""
        facts = self.facts
        for names in self.own:
            gradients = [facts.gradients.get(name) for name in names]
            places = [None if g is None else self.made(g) or (-1, -1, -1) for g in gradients]
            usual = places[self.count // 2]
            for k, place in enumerate(places):
                if place != (None if usual is None else (k, *usual[1:])):
                    return k
        owner = {name: k for names in self.own for k, name in enumerate(names)}
        leaving = self._leaving()
        for value, parameters in facts.trained.items():
            made = self.made(value)
            if made is not None and value not in leaving and any(owner.get(p) != made[0] for p in parameters):
                return made[0]
        return None

    def _leaving(self) -> set[str]:
        """What the rest of the graph may read of the copies."""
        return {b.values[0] if b.backward else b.values[-1] for b in self.borders.values()}

    def results(self) -> tuple[tuple[str, ...], ...] | int:
        """The graph outputs that the copies make, aligned, or a copy that has one and its peers do not."""
        found: dict[tuple[int, int], dict[int, str]] = {}
        for name in self.facts.outputs:
            made = self.made(name)
            if made is not None:
                found.setdefault(made[1:], {})[made[0]] = name
        leaving = self._leaving()
        aligned: list[tuple[str, ...]] = []
        for _, names in sorted(found.items()):
            roles = {self.facts.outputs[name] for name in names.values()}
            if len(names) == self.count and len(roles) == 1:
                aligned.append(tuple(names[k] for k in range(self.count)))
            elif any(name not in leaving for name in names.values()):
                have = [k for k, name in sorted(names.items()) if name not in leaving]
                lack = [k for k in range(self.count) if k not in names]
                return have[0] if len(have) <= len(lack) or not lack else lack[0]
        return tuple(zip(*aligned, strict=True)) if aligned else ((),) * self.count


def _name(graph: JointGraph, copies: Sequence[Sequence[int]]) -> str:
    """The module path that all nodes of a copy share, with "*" where the copies differ; where modules
    are unknown, the fingerprint."""
    paths = []
    for copy in copies:
        modules = zip(*(graph.nodes[i].module.split(".") for i in copy if graph.nodes[i].module), strict=False)
        paths.append([names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, modules)])
    aligned = zip(*paths, strict=False)
    path = ".".join(names[0] if len(set(names)) == 1 else "*" for names in aligned)
    return path or f"segment {fingerprint(graph, copies[0])}"
