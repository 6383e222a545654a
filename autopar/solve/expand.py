"""A problem without repeats: every copy written out, or the middle of each repeat folded into one repeated pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    """A function of each copy. Copies that are one object give one object."""
    results = {key: function(copy) for key, copy in {id(copy): copy for copy in copies}.items()}
    return tuple(results[id(copy)] for copy in copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    problem: Problem
    layout: Layout


ENDS = 2
"""Copies at each end of a folded repeat that choose for themselves."""

PERIOD = 2
"""Copies between them that are repeated: layers may alternate."""


def expand(problem: Problem, *, folded: bool = False) -> Expanded:
    """Write out every copy of every repeat. Joined border variables become one, which costs what they cost together.

    `folded`: the middle of a repeat with many copies becomes `PERIOD` copies that stand for all of it, at the cost of
    all. That leaves fewer choices, and each costs what it does in `problem`.
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
            seconds, size = (tuple(times * cost for cost in costs) for costs in (variable.seconds, variable.bytes))
            fresh.append(replace(variable, name=prefix + variable.name, seconds=seconds, bytes=size))
        for tensor in part.tensors:
            costs = tensor.costs
            if times > 1:
                costs = {state: (times * seconds, times * size) for state, (seconds, size) in costs.items()}
            tensors.append(
                replace(
                    tensor,
                    name=prefix + tensor.name,
                    producer=variables[tensor.producer],
                    consumers=tuple(variables[c] for c in tensor.consumers),
                    costs=costs,
                )
            )
        repeats = []
        for repeat in part.repeats:
            border = [variables[v] for v in repeat.left]
            copies: list[Layout] = []
            periods = (repeat.count - 2 * ENDS) // PERIOD if folded else 0
            while len(copies) < repeat.count:
                at = len(copies)
                length, stands_for = (PERIOD, periods) if periods > 1 and at == ENDS else (1, 1)
                first = border
                few = []
                for k in range(at, at + length):
                    copy = add(repeat.body, f"{prefix}{repeat.name}[{k}].", times * stands_for)
                    join(border, [copy.variables[v] for v in repeat.body_left])
                    border = [copy.variables[v] for v in repeat.body_right]
                    few.append(copy)
                if stands_for > 1:
                    join(first, border)
                copies += few * stands_for
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
                replace(
                    fresh[group[0]],
                    seconds=tuple(map(sum, zip(*(fresh[v].seconds for v in group), strict=True))),
                    bytes=tuple(map(sum, zip(*(fresh[v].bytes for v in group), strict=True))),
                )
                for group in members.values()
            ),
            tensors=tuple(
                replace(
                    tensor,
                    producer=place[tensor.producer],
                    consumers=tuple(place[c] for c in tensor.consumers),
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
