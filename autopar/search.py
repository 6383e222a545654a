"""Search over meshes of several axes, on top of the exact solvers.

On one axis the whole space is one problem. On several axes its options multiply, so the space is
searched by *coordinate descent*: all axes but one are fixed, that one is solved exactly (bytes, shapes
and legality conditional on the others), axis after axis until nothing improves; from several starts;
then all joint options that the runs ended with form a *pool*, which is solved exactly as one problem.
Every problem's optimum is proved by its solver; the whole is not, and the gap that is reported is
against a lower bound of the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle, product

from .bound import lower_bound_seconds
from .passes.problem import Allowed, Assignment, ProblemBuilder
from .layout import Split
from .passes.strategies import KEEP, REGATHER, Site, SiteChoice, Space, reached
from .problem import Infeasible, Score, Solution
from .solve import TooWide, solve

JOINT_OPTIONS_MOST = 8
"""A space whose sites have no more joint options than this is solved as one problem."""

POOL_ROUNDS = 3

GAIN = 1e-6
"""Relative improvement below which a descent or a pool counts as standing still."""

DESCENT_SOLVER = "dp"
"""Steps of a descent are many and small; the solver that was asked for solves the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An assignment with its score. `lower_bound` is in seconds and holds for the whole space that
    was searched, or is 0 where none was computed; `solves` counts exact solves."""

    assignment: Assignment
    score: Score
    lower_bound: float
    seconds: float
    solves: int

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.lower_bound / self.score.objective) if self.score.objective else 0.0


def unique_sites(space: Space) -> dict[str, Site]:
    """Sites by name; border sites that stand in two regions appear once."""
    return {name: site for region in space.regions() for name, site in region.sites.items()}


def axis_choices(space: Space, site: Site, axis: int):  # type: ignore[no-untyped-def]
    return site.choices[space.mesh[axis]]


def policies(site: Site, bytes_limit: float | None) -> tuple[tuple[str, ...], ...]:
    """Gathering again costs time and saves memory: without a limit it never wins."""
    if site.kind != "parameter":
        return ((),)
    return ((KEEP,),) if bytes_limit is None else ((KEEP,), (REGATHER,))


def joint(space: Space, site: Site, per_axis: Iterable[Iterable[tuple]], bytes_limit: float | None) -> list[SiteChoice]:  # type: ignore[type-arg]
    return [(*choice, *policy) for choice in product(*per_axis) for policy in policies(site, bytes_limit)]


class Search:
    """A search over one space. Solves are remembered by nothing: every call builds its problem anew,
    from tables that the builder shares."""

    def __init__(self, space: Space, solver: str, bytes_limit: float | None, log: Callable[[str], None]) -> None:
        self.space, self.solver, self.bytes_limit, self.log = space, solver, bytes_limit, log
        self.builder = ProblemBuilder(space)
        self.sites = unique_sites(space)
        self.solves = 0

    def solve(self, allowed: Allowed, solver: str) -> tuple[Assignment, Solution]:
        problem, decoder = self.builder.build(allowed)
        self.solves += 1
        solution = solve(problem, solver, bytes_limit=self.bytes_limit)
        return decoder.decode(solution.choice), solution

    def run(self, allowed: Allowed | None = None) -> Found:
        """The best assignment that was found, of the whole space or of `allowed`.

        Raises `Infeasible` where nothing keeps the memory limit.
        """
        started = time.perf_counter()
        space = self.space
        if allowed is None:
            everything = {
                name: [axis_choices(space, site, axis) for axis in range(len(space.mesh))]
                for name, site in self.sites.items()
            }
            largest = max(_count(per_axis) for per_axis in everything.values())
            if sum(1 for n in space.mesh if n > 1) <= 1 or largest <= JOINT_OPTIONS_MOST:
                allowed = {n: joint(space, self.sites[n], p, self.bytes_limit) for n, p in everything.items()}
        if allowed is not None:
            assignment, solution = self.solve(allowed, self.solver)
            bound, score = solution.lower_bound, solution.score
        else:
            assignment, score = self._descend_all()
            bound = lower_bound_seconds(space)
            self.log(f"lower bound {bound * 1e3:.3f} ms")
        return Found(
            assignment=assignment,
            score=score,
            lower_bound=bound,
            seconds=time.perf_counter() - started,
            solves=self.solves,
        )

    def _descend_all(self) -> tuple[Assignment, Score]:
        space = self.space
        whole = {name: [space.whole(site)] for name, site in self.sites.items()}
        by_speed = sorted(range(len(space.mesh)), key=lambda a: space.redistributor.links[a].bytes_per_second)
        axes = [a for a in by_speed if space.mesh[a] > 1]
        best: tuple[Assignment, Score] | None = None
        pool: dict[str, dict[SiteChoice, None]] = {name: {} for name in self.sites}

        def note(assignment: Assignment, score: Score) -> None:
            nonlocal best
            for name, choices in taken(space, assignment).items():
                pool[name].update(dict.fromkeys(choices))
            if best is None or score.objective < best[1].objective:
                best = assignment, score

        starts = [("whole, slowest axis first", whole, axes), ("whole, fastest axis first", whole, axes[::-1])]
        starts.append(("batch on every axis", self._batch(), axes))
        infeasible: ValueError | None = None
        for label, start, order in starts:
            try:
                assignment, score = self._descend(start, order)
            except (Infeasible, TooWide) as error:
                self.log(f"descent from {label}: {error}")
                infeasible = error
                continue
            self.log(f"descent from {label}: {score.seconds * 1e3:.3f} ms, {score.bytes / 2**20:.0f} MiB")
            note(assignment, score)
        if best is None:
            assert infeasible is not None
            raise infeasible
        for _ in range(POOL_ROUNDS):
            try:
                assignment, solution = self.solve({n: list(choices) for n, choices in pool.items()}, self.solver)
            except TooWide as error:
                self.log(f"pool of {sum(map(len, pool.values()))} options: {error}")
                break
            self.log(f"pool of {sum(map(len, pool.values()))} options: {solution.score.seconds * 1e3:.3f} ms")
            previous = best[1].objective
            note(assignment, solution.score)
            if solution.score.objective >= previous * (1 - GAIN):
                break
            note(*self._descend(taken(space, assignment), axes))
        return best

    def _batch(self) -> dict[str, list[SiteChoice]]:
        """Every site splits by the batch on as many axes as it can, the first ones first."""
        space = self.space
        inputs = [site for site in self.sites.values() if site.kind == "input" and site.meta and site.meta.shape]
        starts = [(site.name, Split(0, site.meta.shape[0])) for site in inputs if site.meta]
        by_batch = {ranks: reached(space, ranks, starts) for ranks in set(space.mesh) if ranks > 1}
        chosen = {}
        for name, site in self.sites.items():
            choice = space.whole(site)
            for axis, ranks in enumerate(space.mesh):
                if ranks > 1 and site.kind in ("op", "border"):
                    splits = by_batch[ranks].splits.get(name, {})
                    along = by_batch[ranks].choices(site) or tuple(("S", s.dim, s.period) for s in splits)
                    for option in along:
                        wider = (*choice[:axis], option, *choice[axis + 1 :])
                        if option in site.choices[ranks] and space.option(site, wider) is not None:
                            choice = wider
                            break
            chosen[name] = [choice]
        return chosen

    def _descend(self, start: Mapping[str, Iterable[SiteChoice]], order: list[int]) -> tuple[Assignment, Score]:
        current = {name: list(choices) for name, choices in start.items()}
        best: tuple[Assignment, Score] | None = None
        unchanged = 0
        for axis in cycle(order):
            allowed = {name: self._free(self.sites[name], choices, axis) for name, choices in current.items()}
            assignment, solution = self.solve(allowed, DESCENT_SOLVER)
            current = taken(self.space, assignment)
            if best is None or solution.score.objective < best[1].objective * (1 - GAIN):
                best, unchanged = (assignment, solution.score), 0
            unchanged += 1
            if unchanged == len(order):
                # every other axis was tried since the last gain, from what is now fixed
                return best
        raise AssertionError("a mesh has axes")

    def _free(self, site: Site, choices: Iterable[SiteChoice], axis: int) -> list[SiteChoice]:
        """The choices with one axis free."""
        found: dict[SiteChoice, None] = {}
        width = len(self.space.mesh)
        for choice in choices:
            for option in axis_choices(self.space, site, axis):
                for policy in policies(site, self.bytes_limit):
                    found[(*choice[:axis], option, *choice[axis + 1 : width], *policy)] = None
        return [c for c in found if self.space.option(site, c) is not None]


def _count(per_axis: list[tuple]) -> int:  # type: ignore[type-arg]
    total = 1
    for choices in per_axis:
        total *= len(choices)
    return total


def taken(space: Space, assignment: Assignment) -> dict[str, list[SiteChoice]]:
    """Every choice that a site takes somewhere: once for the rest, and over all copies of a body."""
    found: dict[str, dict[SiteChoice, None]] = {}
    for name, choice in assignment.rest.items():
        found.setdefault(name, {})[choice] = None
    for copies in assignment.copies:
        for decisions in copies:
            for name, choice in decisions.items():
                found.setdefault(name, {})[choice] = None
    for repeat in space.repeats:  # what is allowed at one end of a run is allowed at the other
        for border in repeat.borders:
            ends = [f"{v}|border" for v in (border.values[0], border.values[1], border.values[-1])]
            union: dict[SiteChoice, None] = {}
            for name in ends:
                union.update(found.get(name, {}))
            for name in ends:
                found[name] = dict(union)
    return {name: list(choices) for name, choices in found.items()}
