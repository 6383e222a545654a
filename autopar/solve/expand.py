"""A problem without repeats: every copy written out, or the middle ones of each repeat as one pair that comes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from networkx.utils import UnionFind

from .problem import Choice, Problem, Tensor, Variable

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the variables of a problem, and of the copies of its repeats, are in the expanded one."""

    variables: tuple[int, ...]
    repeats: tuple[tuple[Layout, ...], ...] = ()

    def choice(self, options: tuple[int, ...]) -> Choice:
        """The choice for the original problem, from the options of the expanded one."""
        repeats = (_once_each(copies, lambda copy: copy.choice(options)) for copies in self.repeats)
        return Choice(options=tuple(options[v] for v in self.variables), repeats=tuple(repeats))


def _once_each(copies: Sequence[Layout], function: Callable[[Layout], T]) -> tuple[T, ...]:
    """A function of each copy; what comes again is one object, before and after."""
    found = {id(copy): copy for copy in copies}
    results = {key: function(copy) for key, copy in found.items()}
    return tuple(results[id(copy)] for copy in copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    problem: Problem
    layout: Layout


ENDS = 2
"""Copies at each end of a folded repeat that choose for themselves."""

PERIOD = 2
"""Copies between them that come again and again: layers may alternate."""


def expand(problem: Problem, *, folded: bool = False) -> Expanded:
    """Write every copy of every repeat out; joined border variables become one, which costs what they cost together.

    `folded`: of a repeat with many copies, those between its ends are a few that come again, and are written out once,
    at what all of them cost. That leaves fewer choices, and each costs what it does in `problem`.
    """
    if not problem.repeats:
        return Expanded(problem=problem, layout=Layout(variables=tuple(range(len(problem.variables)))))
    fresh: list[Variable] = []
    tensors: list[Tensor] = []
    joined: UnionFind[int] = UnionFind()

    def join(border: Sequence[int], other: Sequence[int]) -> None:
        for pair in zip(border, other, strict=True):
            joined.union(*pair)

    def add(part: Problem, prefix: str, times: int) -> Layout:
        variables = tuple(range(len(fresh), len(fresh) + len(part.variables)))
        for variable in part.variables:
            seconds, size = ([times * cost for cost in costs] for costs in (variable.seconds, variable.bytes))
            fresh.append(
                Variable(
                    name=prefix + variable.name, options=variable.options, seconds=tuple(seconds), bytes=tuple(size)
                )
            )
        for tensor in part.tensors:
            costs = tensor.costs
            if times > 1:
                costs = {state: (times * seconds, times * size) for state, (seconds, size) in costs.items()}
            tensors.append(
                Tensor(
                    name=prefix + tensor.name,
                    producer=variables[tensor.producer],
                    produced=tensor.produced,
                    consumers=tuple(variables[c] for c in tensor.consumers),
                    wanted=tensor.wanted,
                    costs=costs,
                )
            )
        repeats = []
        for repeat in part.repeats:
            border = [variables[v] for v in repeat.left]
            copies: list[Layout] = []
            again = (repeat.count - 2 * ENDS) // PERIOD if folded else 0
            while len(copies) < repeat.count:
                at = len(copies)
                comes_again = again > 1 and at == ENDS
                first = border
                few = []
                for k in range(at, at + (PERIOD if comes_again else 1)):
                    copy = add(repeat.body, f"{prefix}{repeat.name}[{k}].", times * (again if comes_again else 1))
                    join(border, [copy.variables[v] for v in repeat.body_left])
                    border = [copy.variables[v] for v in repeat.body_right]
                    few.append(copy)
                if comes_again:
                    join(first, border)
                copies += few * (again if comes_again else 1)
            join([variables[v] for v in repeat.right], border)
            repeats.append(tuple(copies))
        return Layout(variables=variables, repeats=tuple(repeats))

    layout = add(problem, "", 1)
    members: dict[int, list[int]] = {}
    for v in range(len(fresh)):
        members.setdefault(joined[v], []).append(v)
    place = {v: index for index, group in enumerate(members.values()) for v in group}

    def placed(part: Layout) -> Layout:
        return Layout(
            variables=tuple(place[v] for v in part.variables),
            repeats=tuple(_once_each(copies, placed) for copies in part.repeats),
        )

    return Expanded(
        problem=Problem(
            variables=tuple(
                Variable(
                    name=fresh[group[0]].name,
                    options=fresh[group[0]].options,
                    seconds=tuple(map(sum, zip(*(fresh[v].seconds for v in group), strict=True))),
                    bytes=tuple(map(sum, zip(*(fresh[v].bytes for v in group), strict=True))),
                )
                for group in members.values()
            ),
            tensors=tuple(
                Tensor(
                    name=tensor.name,
                    producer=place[tensor.producer],
                    produced=tensor.produced,
                    consumers=tuple(place[c] for c in tensor.consumers),
                    wanted=tensor.wanted,
                    costs=tensor.costs,
                )
                for tensor in tensors
            ),
        ),
        layout=placed(layout),
    )


def expanded_options(problem: Problem) -> int:
    """How many options the expanded problem has, joined ones counted twice."""
    return sum(len(v.options) for v in problem.variables) + sum(
        repeat.count * expanded_options(repeat.body) for repeat in problem.repeats
    )
