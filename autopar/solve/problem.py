"""What a solver is given, and what it gives back.

A `Problem` is a graph of variables and tensors. A variable is an op, a group of ops, a parameter or
a border between layers: it has options, each with its own seconds and bytes. A tensor joins its
producer to its readers: the option of the producer fixes the produced layout, the options of the
readers fix the set of wanted layouts, and the pair (produced, wanted set) fixes what the
redistributions cost. A layout wanted by several readers is thus acquired and priced
once. A `Repeat` is a chain of identical problems, joined by border variables.

The objective is seconds + bytes_price * bytes, where the price is so small that it only breaks ties
(less memory first), subject to bytes <= bytes_limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

TIE_BREAK_SECONDS_PER_BYTE = 1e-16


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One decision. `seconds[o]` and `bytes[o]` are what option o costs by itself, per rank."""

    name: str
    options: tuple[str, ...]
    seconds: tuple[float, ...]
    bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor with one producer and any number of readers.

    `produced[o]` is the layout (any small integer) that option o of `producer` makes. `wanted[c][o]`
    is the bitmask of layouts that option o of `consumers[c]` wants (0: none). `seconds` and `bytes`
    map (produced layout, union of all wanted bitmasks) to a cost; a pair that is absent cannot be
    had. A consumer may be the producer itself only where the variable is a group.
    """

    name: str
    producer: int
    produced: tuple[int, ...]
    consumers: tuple[int, ...]
    wanted: tuple[tuple[int, ...], ...]
    costs: dict[tuple[int, int], tuple[float, float]]
    """(produced layout, wanted set) -> (seconds, bytes)"""

    @property
    def is_free(self) -> bool:
        """Whether it costs nothing, whatever is chosen."""
        unions = unions_of(self.wanted)
        return all(self.costs.get((code, union)) == (0.0, 0.0) for code in set(self.produced) for union in unions)


UNIONS_MOST = 1 << 14
"""Sets of layouts that the readers of one tensor may want together; 2,000 in models that people train. What several
loops of a decomposition read in 7 layouts each takes a minute, and then is too wide for every solver."""


def unions_of(wanted: Sequence[Sequence[int]]) -> set[int]:
    """All that readers may want together, each one of its masks. Raises TooWide for more than `UNIONS_MOST`."""
    unions = {0}
    for masks in wanted:
        unions = {union | mask for union in unions for mask in set(masks)}
        if len(unions) > UNIONS_MOST:
            raise TooWide(f"the readers of a tensor want over {UNIONS_MOST} sets of layouts: give them fewer options")
    return unions


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """`count` copies of `body` in a row. Copy k's `body_right` variables are copy k+1's `body_left`;
    the first copy's left are the parent's `left`, the last copy's right the parent's `right`. Joined
    variables have the same options; they cost nothing by themselves. `count` >= 1."""

    name: str
    body: Problem
    count: int
    left: tuple[int, ...]
    right: tuple[int, ...]
    body_left: tuple[int, ...]
    body_right: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Variables, tensors and repeats. Immutable: a solver is a function from this to a `Solution`."""

    variables: tuple[Variable, ...]
    tensors: tuple[Tensor, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    branch: int | None = None
    """A variable that much depends on: with one of its options, many tensors cost nothing. Solvers may solve the
    problem with each of its options alone."""

    @cached_property
    def option_count(self) -> int:
        return sum(len(v.options) for v in self.variables) + sum(r.body.option_count for r in self.repeats)

    def __str__(self) -> str:
        lines = [f"problem: {len(self.variables)} variables, {self.option_count} options, {len(self.tensors)} tensors"]
        for index, variable in enumerate(self.variables):
            lines.append(f"  [{index}] {variable.name}")
            for label, seconds, size in zip(variable.options, variable.seconds, variable.bytes, strict=True):
                lines.append(f"        {label}: {seconds * 1e6:.3f} us, {size:.0f} B")
        for tensor in self.tensors:
            lines.append(f"  {tensor.name}: {tensor.producer} -> {list(tensor.consumers)}, {len(tensor.costs)} states")
        for repeat in self.repeats:
            lines.append(f"  {repeat.name}: {repeat.count} x ({repeat.left} -> {repeat.right})")
            lines += ["    " + line for line in str(repeat.body).splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One option index for each variable, and for each repeat one `Choice` per copy."""

    options: tuple[int, ...]
    repeats: tuple[tuple[Choice, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    seconds: float
    bytes: float

    @property
    def objective(self) -> float:
        return self.seconds + TIE_BREAK_SECONDS_PER_BYTE * self.bytes

    def __add__(self, other: Score) -> Score:
        return Score(seconds=self.seconds + other.seconds, bytes=self.bytes + other.bytes)


Scored = tuple[Score, Choice]
"""A choice, and what it costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """`lower_bound` bounds the objective of every feasible choice from below, so that
    `gap` = (objective - lower_bound) / objective is 0 for a proved optimum. `price`: the seconds a byte that a limit on
    bytes is worth, of a solver that knows. `solve` adds the solver and its seconds."""

    choice: Choice
    score: Score
    lower_bound: float
    price: float = 0.0
    solver: str = ""
    seconds_to_solve: float = 0.0

    @property
    def gap(self) -> float:
        objective = self.score.objective
        return max(0.0, (objective - self.lower_bound) / objective) if objective else 0.0


class Infeasible(ValueError):
    """No choice is feasible: the memory limit, or a pair of options that cannot be joined. `smallest_bytes` is the
    least memory with which a plan was possible, where a limit is what is wrong."""

    smallest_bytes: float = math.nan


class TooWide(ValueError):
    """A tensor, or every order of elimination that was tried, makes a table that is too large."""


def evaluate(problem: Problem, choice: Choice) -> Score:
    """What a choice costs: the one evaluator, for every solver.

    Raises `Infeasible` where a tensor cannot be had in the layouts wanted of it, and ValueError where
    joined border variables of a repeat disagree.
    """
    seconds = size = 0.0
    for variable, option in zip(problem.variables, choice.options, strict=True):
        seconds += variable.seconds[option]
        size += variable.bytes[option]
    for tensor in problem.tensors:
        cost = tensor.costs.get(state_of(tensor, choice.options))
        if cost is None:
            raise Infeasible(f"tensor {tensor.name} cannot be had in the layouts that its readers chose")
        seconds += cost[0]
        size += cost[1]
    for repeat, copies in zip(problem.repeats, choice.repeats, strict=True):
        border = [choice.options[v] for v in repeat.left]
        if len(copies) != repeat.count:
            raise ValueError(f"{repeat.name} has {repeat.count} copies, the choice {len(copies)}")
        scores: dict[int, Score] = {}
        # Solvers share one object between equal copies: each is scored once.
        for copy in copies:
            if [copy.options[v] for v in repeat.body_left] != border:
                raise ValueError(f"{repeat.name}: neighbours disagree about their border")
            border = [copy.options[v] for v in repeat.body_right]
            if id(copy) not in scores:
                scores[id(copy)] = evaluate(repeat.body, copy)
            score = scores[id(copy)]
            seconds += score.seconds
            size += score.bytes
        if [choice.options[v] for v in repeat.right] != border:
            raise ValueError(f"{repeat.name}: the last copy and what follows it disagree about their border")
    return Score(seconds=seconds, bytes=size)


def in_runs(problem: Problem, choice: Choice) -> Choice:
    """The choice with copies alike in a row where that changes no border, at the same score: solvers mix them in any
    order. What is in fewer runs is read, written and looked at more quickly."""
    ordered = []
    for repeat, copies in zip(problem.repeats, choice.repeats, strict=True):
        rest = list(copies)
        runs: list[Choice] = []
        while rest:
            copy = rest[0]
            left, right = ([copy.options[v] for v in side] for side in (repeat.body_left, repeat.body_right))
            if left == right:  # more of it may follow
                runs += [other for other in rest if other == copy]
                rest = [other for other in rest if other != copy]
            else:
                runs.append(rest.pop(0))
        ordered.append(tuple(runs))
    return replace(choice, repeats=tuple(ordered))


def state_of(tensor: Tensor, options: Sequence[int]) -> tuple[int, int]:
    """(produced layout, wanted set) of a tensor under the options of all variables."""
    wanted = 0
    for consumer, masks in zip(tensor.consumers, tensor.wanted, strict=True):
        wanted |= masks[options[consumer]]
    return tensor.produced[options[tensor.producer]], wanted


def restricted(problem: Problem, variable: int, option: int) -> Problem:
    """The problem with one option of a variable, without the tensors that then cost nothing."""
    only = problem.variables[variable]
    one = replace(only, options=(only.options[option],), seconds=(only.seconds[option],), bytes=(only.bytes[option],))
    tensors = []
    for tensor in problem.tensors:
        wanted = tuple(
            (masks[option],) if consumer == variable else masks
            for consumer, masks in zip(tensor.consumers, tensor.wanted, strict=True)
        )
        produced = (tensor.produced[option],) if tensor.producer == variable else tensor.produced
        if wanted != tensor.wanted or produced != tensor.produced:
            tensor = replace(tensor, wanted=wanted, produced=produced)
            if tensor.is_free:
                continue
        tensors.append(tensor)
    variables = (*problem.variables[:variable], one, *problem.variables[variable + 1 :])
    return Problem(variables=variables, tensors=tuple(tensors), repeats=problem.repeats)


def check(problem: Problem) -> None:
    """Raise ValueError where a repeat cannot be joined to its parent."""
    for repeat in problem.repeats:
        if not len(repeat.left) == len(repeat.right) == len(repeat.body_left) == len(repeat.body_right):
            raise ValueError(f"{repeat.name}: left, right, body_left and body_right must name equally many variables")
        if repeat.count < 1:
            raise ValueError(f"{repeat.name}: count is {repeat.count}, must be at least 1")
        parts = (problem, problem, repeat.body, repeat.body)
        for joined in zip(repeat.left, repeat.right, repeat.body_left, repeat.body_right, strict=True):
            counts = [len(part.variables[v].options) for part, v in zip(parts, joined, strict=True)]
            if len(set(counts)) > 1:
                raise ValueError(f"{repeat.name}: joined border variables have {counts} options, must be the same ones")
        check(repeat.body)
