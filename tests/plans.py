"""Random points of a search space, for tests that claim something of every plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from autopar.passes.problem import Assignment, ProblemBuilder
from autopar.passes.strategies import KEEP, REGATHER, Site, SiteChoice, Space
from autopar.problem import Problem
from autopar.search import unique_sites
from autopar.solve import solve


def random_assignment(
    space: Space,
    seed: int,
    options_per_site: int = 3,
    wanted: Callable[[Site], Sequence[SiteChoice] | None] = lambda site: None,
) -> Assignment:
    """A random feasible assignment: each site may take a few random options (or work on the whole),
    all costs are random, and the solver finds the cheapest of that. `wanted` may leave a site no others
    than the given ones."""
    generator = random.Random(seed)
    builder = ProblemBuilder(space)
    allowed = {}
    borders = {}
    for name, site in unique_sites(space).items():
        per_axis = [site.choices[ranks] for ranks in space.mesh]
        suffixes = ((KEEP,), (REGATHER,)) if site.kind == "parameter" else ((),)
        every = [(*c, *s) for c in product(*per_axis) for s in suffixes]
        generator.shuffle(every)
        chosen = wanted(site)
        kept = [space.whole(site)] if chosen is None else list(chosen)
        for choice in every:
            if len(kept) > options_per_site or chosen is not None:
                break
            if choice not in kept and space.option(site, choice) is not None:
                kept.append(choice)
        if site.kind == "border":
            # the two ends of a run offer the same options
            kept = borders.setdefault(builder.twins[name][0], kept)
        allowed[name] = kept
    problem, decoder = builder.build(allowed)
    return decoder.decode(solve(_scrambled(problem, generator), "dp").choice)


def _scrambled(problem: Problem, generator: random.Random) -> Problem:
    def variable(v, free):  # type: ignore[no-untyped-def]
        seconds = tuple(0.0 if free else generator.random() for _ in v.options)
        return replace(v, seconds=seconds, bytes=(0.0,) * len(v.options))

    ends = {i for r in problem.repeats for i in (*r.left, *r.right)}
    return Problem(
        variables=tuple(variable(v, i in ends) for i, v in enumerate(problem.variables)),
        tensors=tuple(
            replace(t, costs={key: (0.2 * generator.random(), 0.0) for key in t.costs}) for t in problem.tensors
        ),
        repeats=tuple(replace(r, body=_body(r, generator)) for r in problem.repeats),
    )


def _body(repeat, generator: random.Random) -> Problem:  # type: ignore[no-untyped-def]
    body = _scrambled(repeat.body, generator)
    ends = {*repeat.body_left, *repeat.body_right}
    variables = tuple(
        replace(v, seconds=(0.0,) * len(v.options)) if i in ends else v for i, v in enumerate(body.variables)
    )
    return replace(body, variables=variables)
