"""A problem without repeats: every copy written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from networkx.utils import UnionFind

from .problem import Choice, Problem, Tensor, Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the variables of a problem, and of the copies of its repeats, are in the expanded one."""

    variables: tuple[int, ...]
    repeats: tuple[tuple[Layout, ...], ...] = ()

    def choice(self, options: tuple[int, ...]) -> Choice:
        """The choice for the original problem, from the options of the expanded one."""
        repeats = tuple(tuple(copy.choice(options) for copy in copies) for copies in self.repeats)
        return Choice(options=tuple(options[v] for v in self.variables), repeats=repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    problem: Problem
    layout: Layout


def expand(problem: Problem) -> Expanded:
    """Write out every copy of every repeat. Joined border variables become one, which costs what they cost together."""
    if not problem.repeats:
        return Expanded(problem=problem, layout=Layout(variables=tuple(range(len(problem.variables)))))
    fresh: list[Variable] = []
    tensors: list[Tensor] = []
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
        repeats = []
        for repeat in part.repeats:
            border = [variables[v] for v in repeat.left]
            copies = []
            for k in range(repeat.count):
                copy = add(repeat.body, f"{prefix}{repeat.name}[{k}].")
                join(border, [copy.variables[v] for v in repeat.body_left])
                border = [copy.variables[v] for v in repeat.body_right]
                copies.append(copy)
            join([variables[v] for v in repeat.right], border)
            repeats.append(tuple(copies))
        return Layout(variables=variables, repeats=tuple(repeats))

    layout = add(problem, "")
    members: dict[int, list[int]] = {}
    for v in range(len(fresh)):
        members.setdefault(joined[v], []).append(v)
    place = {v: index for index, group in enumerate(members.values()) for v in group}

    def placed(part: Layout) -> Layout:
        return Layout(
            variables=tuple(place[v] for v in part.variables),
            repeats=tuple(tuple(map(placed, copies)) for copies in part.repeats),
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
