"""The least of a problem: every node of its factor graph is eliminated, where tables are narrow enough for that."""

import math
from collections.abc import Collection

import numpy as np

from .elimination import eliminate, schedule
from .network import network
from .problem import (
    TIE_BREAK_SECONDS_PER_BYTE,
    Choice,
    Infeasible,
    Problem,
    Solution,
    TooWide,
    evaluate,
    restricted,
)


def least(problem: Problem, start: Choice, free: Collection[int] = ()) -> tuple[Solution, tuple[int, ...]]:
    """The choice with the least seconds, and of these the fewest bytes, of a problem without repeats; and the variables
    that stay in it as they are in `start`: none, or, where tables would be too wide, about as few as make them narrow.
    Those stay that are joined to most others, and those that are to be `free` last.

    Raises `Infeasible` where there is none, and `TooWide` where it is too wide with all of them held.
    """
    order = [v for v in _most_joined(problem) if v not in free] + sorted(free)
    count = 0
    while True:
        held = tuple(order[:count])
        try:
            options = _eliminated(problem, start, held)
            break
        except TooWide:
            if count >= len(order):
                raise
        count = 2 * count or 1
    choice = Choice(options=options)
    score = evaluate(problem, choice)
    return Solution(choice=choice, score=score, lower_bound=0.0 if held else score.objective), held


def _most_joined(problem: Problem) -> list[int]:
    """Variables with several options, by the joint options of those that they share tensors with."""
    near: list[set[int]] = [set() for _ in problem.variables]
    for tensor in problem.tensors:
        joined = {tensor.producer, *tensor.consumers}
        for v in joined:
            near[v] |= joined
    logs = [math.log(len(variable.options)) for variable in problem.variables]
    return sorted((v for v in range(len(logs)) if logs[v]), key=lambda v: -sum(logs[other] for other in near[v]))


def _eliminated(problem: Problem, start: Choice, held: Collection[int]) -> tuple[int, ...]:
    for v in held:
        problem = restricted(problem, v, start.options[v])
    graph = network(problem, ())
    tables = [table.priced((1.0, TIE_BREAK_SECONDS_PER_BYTE)) for _, table in graph.tables]
    plan = schedule(graph.sizes, tuple(nodes for nodes, _ in graph.tables), ())
    eliminated = eliminate(plan, tables)
    if np.isinf(eliminated.table):
        raise Infeasible("no choice of options gives every tensor in the layouts that its readers want")
    states = eliminated.states(np.zeros((0, 1), dtype=np.int64))
    found = [int(options[state[0]]) for options, state in zip(graph.options, states, strict=False)]
    return tuple(start.options[v] if v in held else option for v, option in enumerate(found))
