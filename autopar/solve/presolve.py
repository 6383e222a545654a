"""Presolve: options of single variables that no optimum needs, left out before a wide problem is solved.

An option is left out where another one of its variable costs no more, whatever all other variables choose: for every
tensor the worst difference between the two is added up (dead-end elimination, Goldstein's criterion). The optimum
stays the same, under every limit of bytes too where `limited` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .problem import TIE_BREAK_SECONDS_PER_BYTE, Choice, Infeasible, Problem, Tensor
from .rows import Bools, Floats, Ints, Row, largest_difference, tensor_rows, undominated, united

COMPARED_MOST = 4096
"""Options of a variable among which those that others can replace are looked for."""


@dataclass(frozen=True, kw_only=True)
class Presolved:
    """A problem with fewer options, and the way back: `kept[v][o]` is what option o of variable v was."""

    problem: Problem
    kept: tuple[tuple[int, ...], ...]
    bodies: tuple[Presolved, ...]

    def expand(self, choice: Choice) -> Choice:
        """The choice of the original problem, with the same score."""
        copies = []
        for body, chosen in zip(self.bodies, choice.repeats, strict=True):
            # equal copies stay one object: the evaluator scores them once
            expanded = {id(copy): body.expand(copy) for copy in chosen}
            copies.append(tuple(expanded[id(copy)] for copy in chosen))
        options = tuple(kept[option] for kept, option in zip(self.kept, choice.options, strict=True))
        return Choice(options=options, repeats=tuple(copies))


def presolved(problem: Problem, *, limited: bool) -> Presolved:
    """The problem without options that others of the same variable can replace: such as cost no more, or, if a solver
    will be given a limit of bytes (`limited`), neither more seconds nor more bytes. Variables that join repeats keep
    all.

    Raises `Infeasible` if a variable has no option that others could join.
    """
    return _presolved(problem, (), limited)


def _presolved(problem: Problem, joined: Iterable[int], limited: bool) -> Presolved:
    joined = frozenset((*joined, *(v for r in problem.repeats for v in (*r.left, *r.right))))
    rows = tensor_rows(problem)
    tensors_of: list[list[int]] = [[] for _ in problem.variables]
    for index, row in enumerate(rows):
        for variable in row:
            tensors_of[variable].append(index)
    kept = tuple(
        tuple(range(len(variable.options)))
        if number in joined
        else tuple(_Comparison(problem, rows, number, tensors_of[number], limited).kept().tolist())
        for number, variable in enumerate(problem.variables)
    )
    bodies = tuple(_presolved(r.body, (*r.body_left, *r.body_right), limited) for r in problem.repeats)
    smaller = Problem(
        branch=problem.branch,
        variables=tuple(
            replace(
                variable,
                options=tuple(variable.options[option] for option in left),
                seconds=tuple(variable.seconds[option] for option in left),
                bytes=tuple(variable.bytes[option] for option in left),
            )
            for variable, left in zip(problem.variables, kept, strict=True)
        ),
        tensors=tuple(_of_kept(tensor, kept) for tensor in problem.tensors),
        repeats=tuple(replace(r, body=body.problem) for r, body in zip(problem.repeats, bodies, strict=True)),
    )
    return Presolved(problem=smaller, kept=kept, bodies=bodies)


def _of_kept(tensor: Tensor, kept: Sequence[Sequence[int]]) -> Tensor:
    return replace(
        tensor,
        produced=tuple(tensor.produced[option] for option in kept[tensor.producer]),
        wanted=tuple(
            tuple(masks[option] for option in kept[reader])
            for reader, masks in zip(tensor.consumers, tensor.wanted, strict=True)
        ),
    )


class _Comparison:
    """The options of one variable, each compared with every other."""

    def __init__(
        self,
        problem: Problem,
        rows: Sequence[Mapping[int, list[Row]]],
        number: int,
        touched: Sequence[int],
        limited: bool,
    ) -> None:
        self.problem, self.rows, self.number, self.touched, self.limited = problem, rows, number, touched, limited

    def kept(self) -> Ints:
        """The options that are left; those that are the same to every tensor stand together."""
        variable = self.problem.variables[self.number]
        own = [self.rows[tensor][self.number] for tensor in self.touched]
        alike: dict[tuple[Row, ...], list[int]] = {}
        for option in undominated(variable.seconds, variable.bytes, own).tolist():
            alike.setdefault(tuple(row[option] for row in own), []).append(option)
        options = np.array([option for same in alike.values() for option in self._least(same)], dtype=np.int64)
        if not 1 < len(options) <= COMPARED_MOST:
            return options
        seconds, size = (np.array(costs)[options] for costs in (variable.seconds, variable.bytes))
        more_seconds, more_bytes = (costs[:, None] - costs[None, :] for costs in (seconds, size))
        dead = np.zeros(len(options), dtype=np.bool_)
        for tensor, row in zip(self.touched, own, strict=True):
            kinds = {kind: k for k, kind in enumerate(dict.fromkeys(row[option] for option in options))}
            at = np.array([kinds[row[option]] for option in options])
            if len(kinds) > 1:
                worst_seconds, worst_bytes, never = self._worst(tensor, list(kinds))
                more_seconds += worst_seconds[np.ix_(at, at)]
                more_bytes += worst_bytes[np.ix_(at, at)]
                dead |= never[at]
        if self.limited:
            covers = (more_seconds <= 0) & (more_bytes <= 0)
        else:
            covers = more_seconds + TIE_BREAK_SECONDS_PER_BYTE * more_bytes <= 0
        earlier = np.tri(len(options), k=-1, dtype=np.bool_).T
        gone = dead | (covers & (~covers.T | earlier) & ~dead[:, None]).any(axis=0)
        if gone.all():
            raise Infeasible(f"no option of {variable.name} gives every tensor as wanted")
        return np.asarray(options[~gone])

    def _least(self, same: Sequence[int]) -> Iterator[int]:
        """Of options that are the same to every tensor the cheapest, or where bytes are limited all."""
        variable = self.problem.variables[self.number]
        if self.limited:
            yield from same
        else:
            yield min(same, key=lambda o: variable.seconds[o] + TIE_BREAK_SECONDS_PER_BYTE * variable.bytes[o])

    def _worst(self, index: int, kinds: Sequence[Row]) -> tuple[Floats, Floats, Bools]:
        """[a, b]: how much more kind a of what the variable is to a tensor can cost than kind b, in seconds and in
        bytes; and the kinds with which the tensor can never be had."""
        contexts: set[Row] = {(None, 0)}
        for variable, options in self.rows[index].items():
            if variable != self.number:
                contexts = {united(context, option) for context in contexts for option in set(options)}
        seconds = np.full((len(kinds), len(contexts)), np.inf)
        size = np.full((len(kinds), len(contexts)), np.inf)
        for a, kind in enumerate(kinds):
            for c, context in enumerate(contexts):
                produced, wanted = united(kind, context)
                assert produced is not None
                cost = self.problem.tensors[index].costs.get((produced, wanted))
                if cost is not None:
                    seconds[a, c], size[a, c] = cost
        return largest_difference(seconds), largest_difference(size), np.asarray(np.isinf(seconds).all(axis=1))
