"""A problem and its repeats, eliminated at a price of memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from .effort import ELIMINATED_WORK, VISIT_WORK, Meter
from .elimination import ALL_ORDERS, Eliminated, EliminationOrder, eliminate, schedule
from .expand import border_states
from .network import Network, Weights, network
from .problem import Choice, Problem, Repeat, TooWide, restricted
from .rows import Floats, Ints


def product(first: Floats, second: Floats) -> Floats:
    """c[l, r] = min over m of first[l, m] + second[m, r]."""
    rows, inner = first.shape
    result = np.full((rows, second.shape[1]), np.inf)
    total = np.empty_like(result)
    for m in range(inner):
        np.add(first[:, m, None], second[m, None, :], out=total)
        np.minimum(result, total, out=result)
    return result


def head_of(count: int) -> int:
    """How a chain of `count` copies is split in two: the largest power of two below it."""
    return 1 << ((count - 1).bit_length() - 1)


class Powers:
    """The min-plus powers of one square matrix [left, right] by repeated squaring: counts share factors, and `products`
    counts the matrix products so far."""

    def __init__(self, matrix: Floats) -> None:
        self._powers: dict[int, Floats] = {1: matrix}

    @property
    def products(self) -> int:
        return len(self._powers) - 1

    def matrix(self, count: int) -> Floats:
        """The matrix of `count` copies in a row; count >= 1."""
        if count not in self._powers:
            head = head_of(count)
            self._powers[count] = product(self.matrix(head), self.matrix(count - head))
        return self._powers[count]

    def path(self, count: int, left: int, right: int) -> list[int]:
        """The count + 1 border states of the cheapest chain of `count` copies from `left` to `right`."""
        self.matrix(count)
        path = [left]
        pending = [(count, left, right)]
        while pending:
            length, start, end = pending.pop()
            if length == 1:
                path.append(end)
                continue
            head = head_of(length)
            totals = self._powers[head][start] + self._powers[length - head][:, end]
            middle = int(totals.argmin())
            pending += [(length - head, middle, end), (head, start, middle)]
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A problem as a network and the schedule that eliminates everything but `schedule.keep`."""

    network: Network
    schedule: EliminationOrder
    repeats: tuple[Meeting, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where a repeat meets its parent: entry [left[i], right[i]] of its matrix is entry i of a table over `nodes`."""

    repeat: Repeat
    nodes: tuple[int, ...]
    shape: tuple[int, ...]
    left: Ints
    right: Ints


class Library:
    """The networks and schedules of problems, cached by problem object: they serve every price. `meter` counts the work
    done with them, and at most so many `orders` of elimination are tried for each."""

    def __init__(self, meter: Meter | None = None, orders: int = ALL_ORDERS) -> None:
        self.meter, self.orders = meter or Meter(), orders
        self._compiled: dict[tuple[int, tuple[int, ...]], Compiled] = {}
        self._networks: dict[tuple[int, tuple[int, ...]], tuple[Problem, Network]] = {}
        self._branches: dict[int, tuple[Problem, tuple[Problem, ...]]] = {}

    def branches(self, problem: Problem) -> tuple[Problem, ...]:
        """The problem with each option of the variable that it branches on, or by itself."""
        if problem.branch is None:
            return (problem,)
        if id(problem) not in self._branches:
            options = range(len(problem.variables[problem.branch].options))
            self._branches[id(problem)] = problem, tuple(restricted(problem, problem.branch, o) for o in options)
        return self._branches[id(problem)][1]

    def compiled(self, problem: Problem, keep: Sequence[int]) -> Compiled:
        """Of a problem that does not branch."""
        kept = tuple(sorted(set(keep)))
        key = (id(problem), kept)
        if key not in self._compiled:
            self._compiled[key] = self._compile(problem, kept)
        return self._compiled[key]

    def _compile(self, problem: Problem, keep: tuple[int, ...]) -> Compiled:
        for repeat in problem.repeats:
            states = border_states(problem, repeat)
            if states**2 > self.meter.effort.table_entries:
                raise TooWide(f"copies of {repeat.name} meet in {states} states: their matrix is too large")
        factors = self.network(
            problem, {*keep, *(v for repeat in problem.repeats for v in (*repeat.left, *repeat.right))}
        )
        joints = tuple(_joint(repeat, factors.sizes) for repeat in problem.repeats)
        scopes = (*(nodes for nodes, _ in factors.tables), *(joint.nodes for joint in joints))
        plan = schedule(factors.sizes, scopes, keep, self.meter, orders=self.orders)
        return Compiled(network=factors, schedule=plan, repeats=joints)

    def network(self, problem: Problem, borders: Collection[int] = ()) -> Network:
        """The factor graph, which is there also where every order of elimination is too wide."""
        key = (id(problem), tuple(sorted(borders)))
        if key not in self._networks:
            self._networks[key] = (
                problem,
                network(problem, borders, self.meter.effort.tensor_entries),
            )  # the problem stays, and with it its identity
        return self._networks[key][1]

    def largest(self, problem: Problem) -> int:
        """Entries of the largest table, in the problem and in the bodies of its repeats."""
        bodies = [(repeat.body, (*repeat.body_left, *repeat.body_right)) for repeat in problem.repeats]
        own = (
            self.compiled(branch, keep).schedule.largest
            for part, keep in ((problem, ()), *bodies)
            for branch in self.branches(part)
        )
        return max([*own, *(self.largest(repeat.body) for repeat in problem.repeats)])


def grid(sizes: Sequence[int]) -> Ints:
    """All joint states [variable, state], the last variable fastest. Any number of variables: an
    ndarray with an axis for each would end at 64."""
    states = np.empty((len(sizes), math.prod(sizes)), dtype=np.int64)
    rest = np.arange(math.prod(sizes), dtype=np.int64)
    for variable in reversed(range(len(sizes))):
        rest, states[variable] = np.divmod(rest, sizes[variable])
    return states


def ravel(states: Sequence[Ints | int], sizes: Sequence[int]) -> Ints:
    """The inverse of `grid`: the index of joint states."""
    index = np.zeros((), dtype=np.int64)
    for state, size in zip(states, sizes, strict=True):
        index = np.asarray(index * size + state)
    return index


def _joint(repeat: Repeat, sizes: Sequence[int]) -> Meeting:
    nodes = sorted({*repeat.left, *repeat.right})
    states = dict(zip(nodes, grid([sizes[node] for node in nodes]), strict=True))
    wide = tuple(node for node in nodes if sizes[node] > 1)
    return Meeting(
        repeat=repeat,
        nodes=wide,
        shape=tuple(sizes[node] for node in wide),
        left=ravel([states[v] for v in repeat.left], [sizes[v] for v in repeat.left]),
        right=ravel([states[v] for v in repeat.right], [sizes[v] for v in repeat.right]),
    )


@dataclass(frozen=True, kw_only=True)
class Branched:
    """A problem eliminated down to the variables that are kept, branch by branch. `keep` are those but for the variable
    that it branches on, and `place` is where that one stands among all that are kept, if it does."""

    keep: tuple[int, ...]
    parts: tuple[tuple[Network, Eliminated], ...]
    place: int | None

    @property
    def others(self) -> list[int]:
        """Places of `keep` among all that are kept."""
        count = len(self.keep) + (self.place is not None)
        return [number for number in range(count) if number != self.place]

    @cached_property
    def table(self) -> Floats:
        tables = [eliminated.table for _, eliminated in self.parts]
        if self.place is not None:
            return np.stack(tables, axis=self.place)
        return tables[0] if len(tables) == 1 else np.asarray(np.minimum.reduce(tables))

    def chosen(self, kept: Sequence[int]) -> int:
        """The branch that is cheapest, given the options of those kept."""
        if self.place is not None:
            return kept[self.place]
        return int(np.argmin([eliminated.table[tuple(kept)] for _, eliminated in self.parts]))


class Pricing:
    """Everything eliminated at one price of memory: `weights` are what a second and a byte cost.

    A repeated body is eliminated once whatever the count, and its matrix powers are shared by all
    repeats of that body.
    """

    def __init__(self, library: Library, weights: Weights) -> None:
        self.library = library
        self.weights = weights
        self._branched: dict[tuple[int, tuple[int, ...]], Branched] = {}
        self._powers: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Powers] = {}
        self._copies: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Choice] = {}

    def table(self, problem: Problem, keep: Sequence[int]) -> Floats:
        """[*kept variables, in order]: the least cost."""
        return self._parts(problem, keep).table

    def _parts(self, problem: Problem, keep: Sequence[int]) -> Branched:
        kept = tuple(sorted(set(keep)))
        key = (id(problem), kept)
        if key not in self._branched:
            others = tuple(v for v in kept if v != problem.branch)
            parts = tuple(self._eliminate(branch, others) for branch in self.library.branches(problem))
            place = kept.index(problem.branch) if problem.branch in kept else None
            self._branched[key] = Branched(keep=others, parts=parts, place=place)
        return self._branched[key]

    def _eliminate(self, problem: Problem, keep: Sequence[int]) -> tuple[Network, Eliminated]:
        compiled, meter = self.library.compiled(problem, keep), self.library.meter
        entries, visits = compiled.schedule.entries, sum(len(step.inputs) for step in compiled.schedule.steps)
        if not meter.takes(ELIMINATED_WORK * entries + VISIT_WORK * visits):
            raise TooWide(f"elimination would make {entries} entries, and the search's budget is spent")
        for repeat in problem.repeats:
            products = (repeat.count - 1).bit_length()
            sums = products * border_states(problem, repeat) ** 3
            if sums > meter.effort.product_sums:
                raise TooWide(f"{products} products of the matrix of {repeat.name} would take {sums} sums")
        tables = [table.priced(self.weights) for _, table in compiled.network.tables]
        for joint in compiled.repeats:
            matrix = self.powers(joint.repeat).matrix(joint.repeat.count)
            tables.append(matrix[joint.left, joint.right].reshape(joint.shape))
        return compiled.network, eliminate(compiled.schedule, tables)

    def powers(self, repeat: Repeat) -> Powers:
        """The powers of the body's matrix [left, right]."""
        key = (id(repeat.body), repeat.body_left, repeat.body_right)
        if key not in self._powers:
            keep = sorted({*repeat.body_left, *repeat.body_right})
            sizes = {v: len(repeat.body.variables[v].options) for v in keep}
            left, right = (grid([sizes[v] for v in border]) for border in (repeat.body_left, repeat.body_right))
            clash = np.zeros((left.shape[1], right.shape[1]), dtype=np.bool_)
            states: dict[int, Ints] = {}
            for v, state in zip(
                (*repeat.body_left, *repeat.body_right), (*left[:, :, None], *right[:, None, :]), strict=True
            ):
                clash |= states.setdefault(v, state) != state
            index = ravel([states[v] for v in keep], [sizes[v] for v in keep])
            matrix = self.table(repeat.body, keep).reshape(-1)[np.broadcast_to(index, clash.shape)]
            matrix[clash] = np.inf
            self._powers[key] = Powers(matrix)
        return self._powers[key]

    def choice(self, problem: Problem, keep: Sequence[int] = (), kept: Sequence[int] = ()) -> Choice:
        """The cheapest choice, given the options of the kept variables. Equal copies are one object."""
        key = (id(problem), tuple(sorted(set(keep))), tuple(kept))
        if key not in self._copies:
            parts = self._parts(problem, keep)
            number = parts.chosen(kept)
            network, eliminated = parts.parts[number]
            states = eliminated.states(np.array(kept, dtype=np.int64).reshape(-1, 1)[parts.others])
            options = tuple(int(of[state]) for of, state in zip(network.options, states[:, 0], strict=False))
            if problem.branch is not None:
                options = (*options[: problem.branch], number, *options[problem.branch + 1 :])
            repeats = tuple(self._chain(repeat, options) for repeat in problem.repeats)
            self._copies[key] = Choice(options=options, repeats=repeats)
        return self._copies[key]

    def _chain(self, repeat: Repeat, options: Sequence[int]) -> tuple[Choice, ...]:
        """The copies of a repeat whose parent chose these options."""
        sizes = [len(repeat.body.variables[v].options) for v in repeat.body_left]
        left, right = (int(ravel([options[v] for v in border], sizes)) for border in (repeat.left, repeat.right))
        path = self.powers(repeat).path(repeat.count, left, right)
        borders = [tuple(of_border) for of_border in grid(sizes)[:, path].T.tolist()]
        return tuple(self._copy(repeat, ends) for ends in pairwise(borders))

    def _copy(self, repeat: Repeat, borders: Sequence[tuple[int, ...]]) -> Choice:
        joined = zip((*repeat.body_left, *repeat.body_right), (*borders[0], *borders[1]), strict=True)
        kept = dict(sorted(joined))
        return self.choice(repeat.body, tuple(kept), tuple(kept.values()))

    def copy_between(self, repeat: Repeat, borders: Sequence[tuple[int, ...]]) -> Choice | None:
        """The cheapest copy between two borders, given by the options of their variables; None if there is none."""
        sizes = [len(repeat.body.variables[v].options) for v in repeat.body_left]
        left, right = (int(ravel(border, sizes)) for border in borders)
        return None if np.isinf(self.powers(repeat).matrix(1)[left, right]) else self._copy(repeat, borders)


def priced_at(problem: Problem, price: float) -> Problem:
    """The problem with memory paid for: `price` seconds a byte."""
    return Problem(
        branch=problem.branch,
        variables=tuple(
            replace(v, seconds=tuple(s + price * b for s, b in zip(v.seconds, v.bytes, strict=True)))
            for v in problem.variables
        ),
        tensors=tuple(
            replace(t, costs={state: (s + price * b, b) for state, (s, b) in t.costs.items()}) for t in problem.tensors
        ),
        repeats=tuple(replace(r, body=priced_at(r.body, price)) for r in problem.repeats),
    )
