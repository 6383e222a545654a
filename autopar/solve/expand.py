"""A problem without repeats: every copy written out."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.problem import Choice, Problem, Tensor, Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the variables of a problem, and of the copies of its repeats, are in the expanded one."""

    variables: tuple[int, ...]
    repeats: tuple[tuple[Layout, ...], ...] = ()

    def choice(self, options: tuple[int, ...]) -> Choice:
        """The choice for the original problem, from the options of the expanded one."""
        return Choice(
            options=tuple(options[v] for v in self.variables),
            repeats=tuple(tuple(copy.choice(options) for copy in copies) for copies in self.repeats),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    problem: Problem
    layout: Layout


def expand(problem: Problem) -> Expanded:
    """Write every copy of every repeat out; joined border variables become one, which costs what they cost together."""
    fresh: list[Variable] = []
    tensors: list[Tensor] = []
    joined: list[int] = []

    def root(v: int) -> int:
        while joined[v] != v:
            v = joined[v]
        return v

    def add(part: Problem, prefix: str) -> Layout:
        variables = tuple(range(len(fresh), len(fresh) + len(part.variables)))
        joined.extend(variables)
        for variable in part.variables:
            fresh.append(
                Variable(
                    name=prefix + variable.name,
                    options=variable.options,
                    seconds=variable.seconds,
                    bytes=variable.bytes,
                )
            )
        for tensor in part.tensors:
            tensors.append(
                Tensor(
                    name=prefix + tensor.name,
                    producer=variables[tensor.producer],
                    produced=tensor.produced,
                    consumers=tuple(variables[c] for c in tensor.consumers),
                    wanted=tensor.wanted,
                    costs=tensor.costs,
                )
            )
        repeats = []
        for repeat in part.repeats:
            border = [variables[v] for v in repeat.left]
            copies = []
            for k in range(repeat.count):
                copy = add(repeat.body, f"{prefix}{repeat.name}[{k}].")
                for here, there in zip(border, (copy.variables[v] for v in repeat.body_left), strict=True):
                    joined[root(there)] = root(here)
                border = [copy.variables[v] for v in repeat.body_right]
                copies.append(copy)
            for here, there in zip(border, (variables[v] for v in repeat.right), strict=True):
                joined[root(here)] = root(there)
            repeats.append(tuple(copies))
        return Layout(variables=variables, repeats=tuple(repeats))

    layout = add(problem, "")
    members: dict[int, list[int]] = {}
    for v in range(len(fresh)):
        members.setdefault(root(v), []).append(v)
    place = {v: index for index, group in enumerate(members.values()) for v in group}

    def placed(part: Layout) -> Layout:
        return Layout(
            variables=tuple(place[v] for v in part.variables),
            repeats=tuple(tuple(placed(copy) for copy in copies) for copies in part.repeats),
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
