"""Grouping: a problem of given groups, made of one at operator level.

A group of variables becomes one variable, whose options are the joint options of its members that need no
communication inside (`joint`). The grouped problem is a restriction of the operator-level one: what it chooses is a
choice there with the same score (`Grouped.expand`), and its optimum is at best the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.passes.blocks.block import Blocks, ParallelBlock
from autopar.passes.space.sites import Region
from autopar.passes.space.space import Space
from autopar.solve.problem import Problem

from .grouped import Grouped, assembled
from .joint import OPTIONS_MOST, JointOptions, Limits

Groups = Sequence[Sequence[int]]
"""Members of each group, by the number of the variable."""


def group(
    problem: Problem,
    groups: Groups,
    bodies: Sequence[Groups] = (),
    *,
    limited: bool = False,
    options_most: int = OPTIONS_MOST,
) -> Grouped:
    """The problem with one variable for each group, and for each variable that is in none.

    `bodies[r]` are the groups of the body of repeat r; without them its variables stay apart. Options
    that another one can always replace are left out: one that costs no more, or, if a solver will be
    given a limit of bytes (`limited`), neither more seconds nor more bytes. Where no tensor is a `FreeTensor`
    every layout is allowed inside a group, and nothing is lost. A group is walked in the order of its
    variables, and divided before the member that would give it more than `options_most` options or
    leave it without one.

    Raises ValueError if a variable is in two groups, or in one although it joins a repeat to its neighbours;
    `Infeasible` if a variable has no option that others could join.
    """
    return _grouped(problem, groups, bodies, frozenset(), Limits(limited=limited, options_most=options_most))


def block_groups(space: Space, region: Region, blocks: Blocks) -> list[list[int]]:
    """Groups for the problem of a region, as numbers in `region.sites`: a graph's ParallelBlocks as they are, each
    with its backward operators; the rest stays single. This is the paper's form, and it loses (see `widen`).
    """
    homes: dict[str, list[int]] = {}
    for number, site in enumerate(region.sites.values()):
        home = blocks.home.get(space.graph.producer.get(site.name, -1)) if site.kind == "op" else None
        if isinstance(home, ParallelBlock):
            homes.setdefault(home.name, []).append(number)
    return list(homes.values())


def _grouped(
    problem: Problem, groups: Groups, bodies: Sequence[Groups], joined: frozenset[int], limits: Limits
) -> Grouped:
    joined = joined.union(*((*repeat.left, *repeat.right) for repeat in problem.repeats))
    _check(problem, groups, joined)
    network = JointOptions(problem, limits)
    grouped = {member for members in groups for member in members}
    parts = [network.alone(number) for number in sorted(joined)]
    for number in range(len(problem.variables)):
        if number not in grouped and number not in joined:
            parts += network.parts([number])
    divided = []
    for members in groups:
        components = list(network.parts(sorted(members)))
        parts += components
        if len(components) > 1:
            divided.append(problem.variables[components[0].members[0]].name)
    parts.sort(key=lambda part: part.members[0])
    inner = []
    for number, repeat in enumerate(problem.repeats):
        borders = frozenset((*repeat.body_left, *repeat.body_right))
        inner.append(_grouped(repeat.body, bodies[number] if bodies else (), (), borders, limits))
    return Grouped(
        problem=assembled(problem, parts, inner, joined),
        original=problem,
        groups=tuple(parts),
        bodies=tuple(inner),
        divided=(*divided, *(name for body in inner for name in body.divided)),
    )


def _check(problem: Problem, groups: Groups, joined: frozenset[int]) -> None:
    for member, count in Counter(member for members in groups for member in members).items():
        name = problem.variables[member].name
        if count > 1:
            raise ValueError(f"variable {name} is in {count} groups: a variable can be in one")
        if member in joined:
            raise ValueError(f"variable {name} joins a repeat to its neighbours: leave it out of the groups")
