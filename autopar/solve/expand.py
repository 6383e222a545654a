"""A problem without repeats, or without some of them: their copies written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from networkx.utils import UnionFind

from .problem import Choice, Problem, Repeat, Tensor, Variable


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the variables of a problem, and of the copies of its repeats, are in the expanded one; of a repeat that is
    still one, which of those there it is."""

    variables: tuple[int, ...]
    repeats: tuple[tuple[Layout, ...] | int, ...] = ()

    def choice(self, of: Choice) -> Choice:
        """The choice for the original problem, from one for the expanded one."""
        repeats = tuple(
            of.repeats[copies] if isinstance(copies, int) else tuple(copy.choice(of) for copy in copies)
            for copies in self.repeats
        )
        return Choice(options=tuple(of.options[v] for v in self.variables), repeats=repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    problem: Problem
    layout: Layout


def border_states(problem: Problem, repeat: Repeat) -> int:
    """In how many joint states two copies of a repeat of the problem can meet."""
    return math.prod(len(problem.variables[v].options) for v in repeat.left)


def expand(problem: Problem, stays: Callable[[Problem, Repeat], bool] = lambda part, repeat: False) -> Expanded:
    """Write out every copy of every repeat but those of a part that are to stay. Joined border variables become one,
    which costs what they cost together."""
    if all(stays(problem, repeat) for repeat in problem.repeats):
        as_it_is = Layout(tuple(range(len(problem.variables))), tuple(range(len(problem.repeats))))
        return Expanded(problem=problem, layout=as_it_is)
    fresh: list[Variable] = []
    tensors: list[Tensor] = []
    kept: list[Repeat] = []
    joined: UnionFind[int] = UnionFind()

    def join(border: Sequence[int], other: Sequence[int]) -> None:
        for pair in zip(border, other, strict=True):
            joined.union(*pair)

    def add(part: Problem, prefix: str) -> Layout:
        variables = tuple(range(len(fresh), len(fresh) + len(part.variables)))
        fresh.extend(replace(variable, name=prefix + variable.name) for variable in part.variables)
        for tensor in part.tensors:
            tensors.append(
                replace(
                    tensor,
                    name=prefix + tensor.name,
                    producer=variables[tensor.producer],
                    consumers=tuple(variables[c] for c in tensor.consumers),
                )
            )
        repeats: list[tuple[Layout, ...] | int] = []
        for repeat in part.repeats:
            border = [variables[v] for v in repeat.left]
            if stays(part, repeat):
                repeats.append(len(kept))
                right = tuple(variables[v] for v in repeat.right)
                kept.append(replace(repeat, name=prefix + repeat.name, left=tuple(border), right=right))
                continue
            copies = []
            for k in range(repeat.count):
                copy = add(repeat.body, f"{prefix}{repeat.name}[{k}].")
                join(border, [copy.variables[v] for v in repeat.body_left])
                border = [copy.variables[v] for v in repeat.body_right]
                copies.append(copy)
            join([variables[v] for v in repeat.right], border)
            repeats.append(tuple(copies))
        return Layout(variables, tuple(repeats))

    layout = add(problem, "")
    members: dict[int, list[int]] = {}
    for v in range(len(fresh)):
        members.setdefault(joined[v], []).append(v)
    place = {v: index for index, group in enumerate(members.values()) for v in group}

    def placed(part: Layout) -> Layout:
        repeats = (of if isinstance(of, int) else tuple(map(placed, of)) for of in part.repeats)
        return Layout(tuple(place[v] for v in part.variables), tuple(repeats))

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
            repeats=tuple(
                replace(of, left=tuple(place[v] for v in of.left), right=tuple(place[v] for v in of.right))
                for of in kept
            ),
            branch=None if problem.branch is None else place[layout.variables[problem.branch]],
        ),
        layout=placed(layout),
    )


def expanded_options(problem: Problem) -> int:
    """How many options the expanded problem has, joined ones counted twice."""
    return sum(len(v.options) for v in problem.variables) + sum(
        repeat.count * expanded_options(repeat.body) for repeat in problem.repeats
    )
