"""A problem and its repeats, eliminated at a batch of prices of memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .effort import ELIMINATED_WORK, VISIT_WORK, Meter
from .elimination import Eliminated, Schedule, eliminate, schedule
from .network import Network, network
from .problem import Choice, Problem, Repeat, TooWide
from .rows import Bools, Floats, Ints

_BLOCK_ENTRIES = 4_000_000


def product(first: Floats, second: Floats) -> tuple[Floats, Ints]:
    """c[k, l, r] = min over m of first[k, l, m] + second[k, m, r], and the lowest m that attains it."""
    prices, rows, inner = first.shape
    columns = second.shape[2]
    result = np.empty((prices, rows, columns))
    middle = np.empty((prices, rows, columns), dtype=np.int64)
    block = max(1, _BLOCK_ENTRIES // max(1, prices * inner * columns))
    turned = second.transpose(0, 2, 1)[:, None]
    for start in range(0, rows, block):
        total = first[:, start : start + block, None, :] + turned
        best = total.argmin(axis=-1)
        middle[:, start : start + block] = best
        result[:, start : start + block] = np.take_along_axis(total, best[..., None], axis=-1)[..., 0]
    return result, middle


def head_of(count: int) -> int:
    """How a chain of `count` copies is split in two: the largest power of two below it."""
    return 1 << ((count - 1).bit_length() - 1)


class Powers:
    """The min-plus powers of one square matrix [price, left, right], each price by itself, by repeated squaring: counts
    share factors, and `products` counts the matrix products so far."""

    def __init__(self, matrix: Floats) -> None:
        self._powers: dict[int, Floats] = {1: matrix}
        self._middles: dict[int, Ints] = {}

    @property
    def products(self) -> int:
        return len(self._middles)

    def matrix(self, count: int) -> Floats:
        """The matrix of `count` copies in a row; count >= 1."""
        if count not in self._powers:
            head = head_of(count)
            self._powers[count], self._middles[count] = product(self.matrix(head), self.matrix(count - head))
        return self._powers[count]

    def path(self, count: int, price: int, left: int, right: int) -> list[int]:
        """The count + 1 border states of the cheapest chain of `count` copies from `left` to `right`."""
        self.matrix(count)
        path = [left]
        pending = [(count, left, right)]
        while pending:
            length, start, end = pending.pop()
            if length == 1:
                path.append(end)
                continue
            head, middle = head_of(length), int(self._middles[length][price, start, end])
            pending += [(length - head, middle, end), (head, start, middle)]
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A problem as a network and the schedule that eliminates everything but `schedule.keep`."""

    problem: Problem
    network: Network
    schedule: Schedule
    repeats: tuple[Joint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """Where a repeat meets its parent: entry [left[i], right[i]] of its matrix is entry i of a table over `nodes`."""

    repeat: Repeat
    nodes: tuple[int, ...]
    shape: tuple[int, ...]
    left: Ints
    right: Ints


class Library:
    """The networks and schedules of problems, cached by problem object: they serve every price. `meter` counts the work
    done with them."""

    def __init__(self, meter: Meter | None = None) -> None:
        self.meter = meter or Meter()
        self._compiled: dict[tuple[int, tuple[int, ...]], Compiled] = {}
        self._networks: dict[tuple[int, tuple[int, ...]], tuple[Problem, Network]] = {}
        self._bare: dict[int, Problem] = {}

    def compiled(self, problem: Problem, keep: Sequence[int]) -> Compiled:
        kept = tuple(sorted(set(keep)))
        key = (id(problem), kept)
        if key not in self._compiled:
            self._compiled[key] = self._compile(problem, kept)
        return self._compiled[key]

    def _compile(self, problem: Problem, keep: tuple[int, ...]) -> Compiled:
        factors = self.network(
            problem, {*keep, *(v for repeat in problem.repeats for v in (*repeat.left, *repeat.right))}
        )
        joints = tuple(_joint(repeat, factors.sizes) for repeat in problem.repeats)
        scopes = (*(table.nodes for table in factors.tables), *(joint.nodes for joint in joints))
        plan = schedule(factors.sizes, scopes, keep, self.meter)
        return Compiled(problem=problem, network=factors, schedule=plan, repeats=joints)

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
        """Entries of the largest table for one price, in the problem and in the bodies of its repeats."""
        own = self.compiled(problem, ()).schedule.largest
        bodies = (self.compiled(r.body, (*r.body_left, *r.body_right)).schedule.largest for r in problem.repeats)
        return max(own, *bodies, *(self.largest(r.body) for r in problem.repeats)) if problem.repeats else own

    def bare(self, problem: Problem) -> Problem:
        """The problem without its repeats, always the same object."""
        if not problem.repeats:
            return problem
        if id(problem) not in self._bare:
            self._bare[id(problem)] = Problem(variables=problem.variables, tensors=problem.tensors)
        return self._bare[id(problem)]


def grid(sizes: Sequence[int]) -> Ints:
    """All joint states [variable, state], the last variable fastest. Any number of variables: an
    ndarray with an axis for each would end at 64."""
    states = np.empty((len(sizes), math.prod(sizes)), dtype=np.int64)
    rest = np.arange(math.prod(sizes), dtype=np.int64)
    for variable in reversed(range(len(sizes))):
        rest, states[variable] = np.divmod(rest, sizes[variable])
    return states


def ravel(states: Sequence[Ints], sizes: Sequence[int]) -> Ints:
    """The inverse of `grid`: the index of joint states."""
    index = np.zeros(states[0].shape if states else (1,), dtype=np.int64)
    for state, size in zip(states, sizes, strict=True):
        index = index * size + state
    return index


def _joint(repeat: Repeat, sizes: Sequence[int]) -> Joint:
    nodes = sorted({*repeat.left, *repeat.right})
    states = dict(zip(nodes, grid([sizes[node] for node in nodes]), strict=True))
    wide = tuple(node for node in nodes if sizes[node] > 1)
    return Joint(
        repeat=repeat,
        nodes=wide,
        shape=tuple(sizes[node] for node in wide),
        left=ravel([states[v] for v in repeat.left], [sizes[v] for v in repeat.left]),
        right=ravel([states[v] for v in repeat.right], [sizes[v] for v in repeat.right]),
    )


def ends_of(problem: Problem, repeat: Repeat, options: Sequence[int]) -> tuple[int, int]:
    """The states of the borders of a repeat, left and right, where its parent chose these options."""
    sizes = [len(problem.variables[v].options) for v in repeat.left]
    left, right = ([np.array([options[v]]) for v in border] for border in (repeat.left, repeat.right))
    return int(ravel(left, sizes)[0]), int(ravel(right, sizes)[0])


def border_pairs(repeat: Repeat, keep: Sequence[int]) -> tuple[dict[int, Ints], Bools]:
    """For all pairs [left state, right state] the state of each kept body variable, and whether they clash."""
    sizes = {v: len(repeat.body.variables[v].options) for v in keep}
    left = grid([sizes[v] for v in repeat.body_left])
    right = grid([sizes[v] for v in repeat.body_right])
    shape = (left.shape[1], right.shape[1])
    clash = np.zeros(shape, dtype=np.bool_)
    assigned: dict[int, Ints] = {}
    for v, states in [
        *((v, state[:, None]) for v, state in zip(repeat.body_left, left, strict=True)),
        *((v, state[None, :]) for v, state in zip(repeat.body_right, right, strict=True)),
    ]:
        if v in assigned:
            clash |= assigned[v] != states
        else:
            assigned[v] = np.broadcast_to(states, shape)
    return assigned, clash


class Pricing:
    """Everything eliminated under one batch of prices: `weights[k]` = (per second, per byte).

    A repeated body is eliminated once whatever the count, and its matrix powers are shared by all
    repeats of that body.
    """

    def __init__(self, library: Library, weights: Floats) -> None:
        self.library = library
        self.weights = weights
        self._eliminated: dict[tuple[int, tuple[int, ...]], Eliminated] = {}
        self._powers: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Powers] = {}
        self._copies: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Choice] = {}

    def eliminated(self, problem: Problem, keep: Sequence[int]) -> Eliminated:
        compiled = self.library.compiled(problem, keep)
        key = (id(problem), compiled.schedule.keep)
        if key not in self._eliminated:
            entries, visits = compiled.schedule.entries, sum(len(step.inputs) for step in compiled.schedule.steps)
            if not self.library.meter.takes(ELIMINATED_WORK * entries * len(self.weights) + VISIT_WORK * visits):
                raise TooWide(f"elimination would make {entries} entries, and the search's budget is spent")
            tables = [table.priced(self.weights) for table in compiled.network.tables]
            for joint in compiled.repeats:
                matrix = self.powers(joint.repeat).matrix(joint.repeat.count)
                tables.append(matrix[:, joint.left, joint.right].reshape(-1, *joint.shape))
            self._eliminated[key] = eliminate(compiled.schedule, tables, len(self.weights))
        return self._eliminated[key]

    def powers(self, repeat: Repeat) -> Powers:
        """The powers of the body's matrix [price, left, right]."""
        key = (id(repeat.body), repeat.body_left, repeat.body_right)
        if key not in self._powers:
            body = self.eliminated(repeat.body, (*repeat.body_left, *repeat.body_right))
            assigned, clash = border_pairs(repeat, body.schedule.keep)
            shape = [len(repeat.body.variables[v].options) for v in body.schedule.keep]
            flat = body.table.reshape(len(self.weights), -1)
            index = ravel([assigned[v] for v in body.schedule.keep], shape)
            matrix = flat[:, np.broadcast_to(index, clash.shape)]
            matrix[:, clash] = np.inf
            self._powers[key] = Powers(matrix)
        return self._powers[key]

    def choice(self, problem: Problem, keep: Sequence[int], kept: Sequence[int], price: int) -> Choice:
        """The cheapest choice at a price, given the options of the kept variables. Equal copies are one object."""
        compiled = self.library.compiled(problem, keep)
        key = (id(problem), compiled.schedule.keep, (price, *kept))
        if key not in self._copies:
            states = self.eliminated(problem, keep).states(
                np.array([price]), np.array(kept, dtype=np.int64).reshape(-1, 1)
            )
            options = tuple(
                int(kept_options[state])
                for kept_options, state in zip(compiled.network.options, states[:, 0], strict=False)
            )
            repeats = tuple(self._chain(problem, repeat, options, price) for repeat in problem.repeats)
            self._copies[key] = Choice(options=options, repeats=repeats)
        return self._copies[key]

    def _chain(self, problem: Problem, repeat: Repeat, options: tuple[int, ...], price: int) -> tuple[Choice, ...]:
        left, right = ends_of(problem, repeat, options)
        path = self.powers(repeat).path(repeat.count, price, left, right)
        return tuple(self.copy(repeat, at, after, price) for at, after in pairwise(path))

    def copy(self, repeat: Repeat, left: int, right: int, price: int) -> Choice:
        keep = tuple(sorted({*repeat.body_left, *repeat.body_right}))
        assigned, _ = border_pairs(repeat, keep)
        return self.choice(repeat.body, keep, [int(assigned[v][left, right]) for v in keep], price)
