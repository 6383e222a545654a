"""Grouped problems: the problem whose variables are groups of another's, and the way back.

Tensors that nobody else touches vanish into the options' seconds and bytes; of the others an option keeps what it
makes and what it wants of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solve.problem import Choice, Problem, Repeat, Tensor, Variable, evaluate
from autopar.solve.rows import Floats, Row, tensor_rows, united


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One variable of a grouped problem: its members in the problem that it was made of, and for each
    of its options the option that each member takes."""

    members: tuple[int, ...]
    joint: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A smaller problem, and the way back. `divided` are the names of groups that came out as several
    variables: because one would have had too many options, or none without communication inside."""

    problem: Problem
    original: Problem
    groups: tuple[Group, ...]
    bodies: tuple[Grouped, ...]
    divided: tuple[str, ...]

    def expand(self, choice: Choice) -> Choice:
        """The choice of the original problem that a choice of the grouped one is, with the same score."""
        expanded = self._expanded(choice)
        there, here = evaluate(self.original, expanded), evaluate(self.problem, choice)
        assert math.isclose(there.objective, here.objective, rel_tol=1e-9, abs_tol=1e-18), (there, here)
        return expanded

    def _expanded(self, choice: Choice) -> Choice:
        options = [0] * len(self.original.variables)
        for group, option in zip(self.groups, choice.options, strict=True):
            for member, taken in zip(group.members, group.joint[option], strict=True):
                options[member] = taken
        copies = []
        for body, chosen in zip(self.bodies, choice.repeats, strict=True):
            # equal copies stay one object: the evaluator scores them once
            expanded = {id(copy): body._expanded(copy) for copy in chosen}
            copies.append(tuple(expanded[id(copy)] for copy in chosen))
        return Choice(options=tuple(options), repeats=tuple(copies))


def assembled(problem: Problem, parts: Sequence[Group], bodies: Sequence[Grouped], joined: frozenset[int]) -> Problem:
    """The problem whose variables are the parts of another's, and the bodies of its repeats. Tensors that one part
    alone touches are in its costs; those of the variables in `joined` are not."""
    rows = tensor_rows(problem)
    home = {member: number for number, part in enumerate(parts) for member in part.members}
    inside: dict[int, list[int]] = {}
    tensors = []
    for index, row in enumerate(rows):
        homes = list(dict.fromkeys(home[v] for v in row))
        if len(homes) == 1 and not joined & row.keys():
            inside.setdefault(homes[0], []).append(index)
        else:
            tensors.append(_between(problem.tensors[index], row, home, parts))
    repeats = []
    for repeat, body in zip(problem.repeats, bodies, strict=True):
        there = {member: number for number, part in enumerate(body.groups) for member in part.members}
        repeats.append(
            Repeat(
                name=repeat.name,
                body=body.problem,
                count=repeat.count,
                left=tuple(home[v] for v in repeat.left),
                right=tuple(home[v] for v in repeat.right),
                body_left=tuple(there[v] for v in repeat.body_left),
                body_right=tuple(there[v] for v in repeat.body_right),
            )
        )
    return Problem(
        variables=tuple(_variable(problem, rows, part, inside.get(number, ())) for number, part in enumerate(parts)),
        tensors=tuple(tensors),
        repeats=tuple(repeats),
    )


def _variable(
    problem: Problem, rows: Sequence[Mapping[int, list[Row]]], part: Group, inside: Sequence[int]
) -> Variable:
    """The variable that a group is; `inside` are the tensors that vanish in it."""
    members = [problem.variables[member] for member in part.members]
    seconds = [sum(v.seconds[o] for v, o in zip(members, joint, strict=True)) for joint in part.joint]
    size = [sum(v.bytes[o] for v, o in zip(members, joint, strict=True)) for joint in part.joint]
    for index in inside:
        for number, state in enumerate(_united(rows[index], part)):
            assert state[0] is not None
            cost = problem.tensors[index].costs[state[0], state[1]]
            seconds[number] += cost[0]
            size[number] += cost[1]
    return Variable(
        name=members[0].name if len(members) == 1 else f"{members[0].name} .. {members[-1].name}",
        options=tuple(_label(members, joint) for joint in part.joint),
        seconds=tuple(seconds),
        bytes=tuple(size),
    )


def _between(tensor: Tensor, row: Mapping[int, list[Row]], home: Mapping[int, int], parts: Sequence[Group]) -> Tensor:
    """A tensor as the groups that make it and read it see it."""
    maker = home[tensor.producer]
    readers = dict.fromkeys(home[reader] for reader in tensor.consumers)
    produced = []
    for layout, _ in _united(row, parts[maker]):
        assert layout is not None
        produced.append(layout)
    return replace(
        tensor,
        producer=maker,
        produced=tuple(produced),
        consumers=tuple(readers),
        wanted=tuple(tuple(mask for _, mask in _united(row, parts[reader])) for reader in readers),
    )


def _united(row: Mapping[int, list[Row]], part: Group) -> list[Row]:
    """What each joint option of a group is to a tensor."""
    touching = [(position, row[member]) for position, member in enumerate(part.members) if member in row]
    states = []
    for joint in part.joint:
        state: Row = (None, 0)
        for position, options in touching:
            state = united(state, options[joint[position]])
        states.append(state)
    return states


def _label(members: Sequence[Variable], joint: Sequence[int]) -> str:
    """The options of the members, those that stand together counted."""
    runs: list[tuple[str, int]] = []
    for variable, option in zip(members, joint, strict=True):
        label = variable.options[option]
        if runs and runs[-1][0] == label:
            runs[-1] = (label, runs[-1][1] + 1)
        else:
            runs.append((label, 1))
    return ", ".join(label if count == 1 else f"{count} x {label}" for label, count in runs)


def largest_difference(costs: Floats) -> Floats:
    """[a, b]: the largest costs[a, c] - costs[b, c]; where b cannot be had, nothing is worse than it."""
    with np.errstate(invalid="ignore"):
        differences = costs[:, None, :] - costs[None, :, :]
    differences[np.broadcast_to(np.isinf(costs)[None, :, :], differences.shape)] = -np.inf
    largest = differences.max(axis=2)
    return np.asarray(np.where(np.isneginf(largest), 0.0, largest))
