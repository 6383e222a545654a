"""Search over meshes of several axes, on top of the exact solvers.

On one axis the whole space is one problem. On several axes its options multiply, so the space is
searched by *coordinate descent*: all axes but one are fixed, that one is solved exactly (bytes, shapes
and legality conditional on the others), axis after axis until nothing improves; from several starts;
then all joint options that the runs ended with form a *pool*, which is solved exactly as one problem.
Problems that can be eliminated are solved to a proved optimum, wider ones to within a percent (`solve.relax`); the
whole is not, and the gap that is reported is against a lower bound of the whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, cycle, pairwise, product
from typing import Literal

from autopar.ir.layout import Split
from autopar.passes.blocks.partition import blocks
from autopar.passes.grouping.group import Groups, block_groups, group
from autopar.passes.space.choices import KEEP, REGATHER, AxisChoice, SiteChoice
from autopar.passes.space.problem import Allowed, Assignment, Decisions, ProblemBuilder
from autopar.passes.space.propagation import reached
from autopar.passes.space.sites import Site, joined_borders
from autopar.passes.space.space import Space
from autopar.passes.widen import widened
from autopar.solve import EXACT, TooWide, solve
from autopar.solve.budget import BUDGET, SEARCH_BUDGET, Meter, Purse
from autopar.solve.problem import Infeasible, Problem, Score, Solution, evaluate, in_runs

from .account import recomputation
from .beside import beside, together
from .bound import lower_bound_seconds
from .constraints import Pins

JOINT_OPTIONS_MOST = 8
"""A space whose sites have no more joint options than this is solved as one problem."""

POOL_ROUNDS = 3

GAIN = 1e-6
"""Relative improvement below which a descent or a pool counts as standing still."""

HOPELESS = 1.3
"""A descent that is so many times above what matters when every axis was free once is not gone on with."""

PRICE_MOST = 1e5
"""Prices of memory are tried up to this many times (seconds of the cheapest plan / its bytes)."""

PRICE_BISECTIONS = 4

LIMIT_ROUNDS = 5
"""Times that the options are solved under a limit on the sum of bytes, until the peak keeps that on memory."""

RECOMPUTE_PLANS = 3
"""Plans under a limit whose copies are tried to be made again in backward."""

RECOMPUTE_ROUNDS = 4
"""Numbers of copies that are tried for each."""

SURELY = 0.25
"""A plan of which the sum of bytes, with the excess of another one's peak, is over a limit by this part of it is over
the limit: its program need not be written to see that."""

CONFIRMATIONS = 3
"""Answers of which the true peak is looked at, before peaks are no longer estimated."""

LIMIT_SLACK = 0.001
"""Part of a limit that may be left unused."""

LIMIT_MARGIN = 0.005
"""Part of a limit by which estimates are to be further below it after one was wrong."""

APART_OPTIONS = 5000
"""Joint options of a space from which on parts of its search are worth a process of their own."""

DESCENT_SOLVER = "dp"
"""Steps of a descent are many and small; the solver that was asked for solves the pool."""


Axes = tuple[int, ...]
"""An axis, or several that choose alike."""

Peaks = Callable[[Assignment], float]
"""The bytes that an assignment needs at its peak, or an estimate of them."""

SolveAt = Callable[[float, "Solved", Purse], "Solved"]
"""What solves at a price of memory, from another solution, with a purse that pays."""

Level = Literal["operator", "block", "cfp"]
"""What a variable of a problem is: an operator, a block that loses nothing (`passes.widen`), or a ParallelBlock as
the paper has it (`passes.grouping.group.block_groups`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An assignment with its score. `lower_bound` is in seconds and holds for the whole space that
    was searched, or is 0 where none was computed."""

    assignment: Assignment
    score: Score
    lower_bound: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Solved:
    """An assignment with its true score, and a bound on the problem that it was found in."""

    assignment: Assignment
    score: Score
    lower_bound: float
    work: float = 0.0
    """That finding it took."""
    cut_at: float | None = None
    """The work that it had, where more could have found another."""

    def is_of(self, work: float) -> bool:
        """Whether it is what would be found with so much work."""
        return self.work <= work if self.cut_at is None else self.cut_at == work


Question = tuple[tuple[tuple[str, tuple[SiteChoice, ...]], ...], str, float, float | None, bool]
"""The options allowed to each site, the solver, the price of memory, its limit, and whether a bound is asked for: all
that a solve depends on."""


def unique_sites(space: Space) -> dict[str, Site]:
    """Sites by name; border sites that stand in two regions appear once."""
    return {name: site for region in space.regions() for name, site in region.sites.items()}


def axis_choices(space: Space, site: Site, axis: int) -> tuple[AxisChoice, ...]:
    return site.choices[space.mesh[axis]]


def policies(site: Site, bytes_limit: float | None) -> tuple[tuple[str, ...], ...]:
    """Gathering again costs time and saves memory: without a limit it never wins."""
    if site.kind != "parameter":
        return ((),)
    return ((KEEP,),) if bytes_limit is None else ((KEEP,), (REGATHER,))


def joint(
    space: Space, site: Site, per_axis: Iterable[Iterable[AxisChoice]], bytes_limit: float | None
) -> list[SiteChoice]:
    return [(*choice, *policy) for choice in product(*per_axis) for policy in policies(site, bytes_limit)]


class Search:
    """A search over one space. Every solve builds its problem anew, from tables that the builder shares;
    what was solved before (descents from several starts meet) is not solved again.

    At `level` "cfp" the space is narrower, and the lower bound is that of what is left. `bytes_limit`
    bounds the peak of an assignment, or, if no `peaks` are given (true ones, and estimates of them), its sum of bytes.
    Peaks are estimated, and that of the answer is looked at."""

    def __init__(
        self,
        space: Space,
        solver: str,
        bytes_limit: float | None,
        log: Callable[[str], None],
        level: Level = "operator",
        pins: Pins | None = None,
        peaks: tuple[Peaks, Peaks] | None = None,
        work: float = SEARCH_BUDGET.work,
    ) -> None:
        """`work` is divided into the shares of `SearchBudget`."""
        self.work = work
        self.space, self.solver, self.bytes_limit, self.log = space, solver, bytes_limit, log
        self.descent = DESCENT_SOLVER if solver in EXACT else solver
        self.pins = pins or {}
        self.peak: Peaks | None = None
        self.estimate: Peaks | None = None
        if peaks is not None:
            self.peak, self.estimate = peaks
        self.peaks: dict[int, tuple[Solved, float]] = {}
        """As estimated, by the identity of the assignment."""
        self.aim = math.inf if bytes_limit is None else bytes_limit
        """What estimates are to keep, so that the limit is kept."""
        self.cheapest: tuple[Solved, SolveAt] | None = None
        """What was found without a limit, and what solves at a price of memory, from another solution."""
        self.proved = False
        """Whether that is all that the solver proves: the space is one problem."""
        self.several = False
        """Whether the cheapest came of descents from several starts."""
        self.builder = ProblemBuilder(space)
        self.sites = unique_sites(space)
        self.solved: dict[Question, Solved] = {}
        self.level = level
        self.groups: list[Groups] = []
        if level == "cfp":
            found = blocks(space.graph, max(space.mesh), merge=False)
            self.groups = [block_groups(space, region, found) for region in space.regions()]

    def solve(
        self,
        allowed: Allowed,
        solver: str,
        *,
        price: float = 0.0,
        bytes_limit: float | None = None,
        bounded: bool = True,
        purse: Purse,
    ) -> Solved:
        """The exact optimum of seconds + price * bytes over the allowed options. Not `bounded`: without a lower bound.
        The `purse` pays, for what was solved before too, so that answers do not depend on what else was asked.

        What is too wide for elimination under a limit is solved as an integer program, and what is too wide for that,
        operator by operator, as is what there is no work left for.
        """
        options = tuple((name, tuple(choices)) for name, choices in allowed.items())
        question = (options, solver, price, bytes_limit, bounded)
        solved = self.solved.get(question)
        if solved is None or not solved.is_of(purse.left):
            meter = Meter(most=purse.left)
            solved = self._solve(allowed, solver, price, bytes_limit, bounded, meter)
            solved = replace(solved, work=meter.done, cut_at=meter.most if meter.is_cut else None)
            self.solved[question] = solved
        if solved.cut_at is not None:
            self.log(f"no work is left of the {solved.cut_at:.2g} entries of this part of the search")
            purse.spend(math.inf)
        purse.spend(solved.work)
        return solved

    def _solve(
        self,
        allowed: Allowed,
        solver: str,
        price: float,
        bytes_limit: float | None,
        bounded: bool,
        meter: Meter,
    ) -> Solved:
        problem, decoder = self.builder.build(allowed)
        weighed = priced(problem, price) if price else problem
        if self.level == "operator":
            solution = self._solution(weighed, solver, bytes_limit, bounded, meter)
            choice = solution.choice
        else:
            limited = bytes_limit is not None
            if self.level == "block":
                grouped = widened(weighed, limited=limited)
            else:
                grouped = group(weighed, self.groups[0], self.groups[1:], limited=limited)
            if grouped.divided:
                self.log(f"divided, for fewer options: {', '.join(grouped.divided)}")
            solution = self._solution(grouped.problem, solver, bytes_limit, bounded, meter)
            choice = grouped.expand(solution.choice)
        choice = in_runs(problem, choice)
        return Solved(decoder.decode(choice), evaluate(problem, choice), solution.lower_bound)

    def _solution(
        self, problem: Problem, solver: str, bytes_limit: float | None, bounded: bool, meter: Meter
    ) -> Solution:
        try:
            return solve(problem, solver, bytes_limit=bytes_limit, bounded=bounded, meter=meter)
        except TooWide as error:
            self.log(f"{error}; without dominated options:")
        presolved = group(problem, (), [()] * len(problem.repeats), limited=bytes_limit is not None)
        few = presolved.problem.option_count <= BUDGET.beam_options
        last = "beam" if few else "greedy"
        ways = dict.fromkeys((solver, last) if meter.is_cut else (solver, "ilp", last))
        for way, after in pairwise((*ways, "")):
            try:
                solution = solve(presolved.problem, way, bytes_limit=bytes_limit, bounded=bounded, meter=meter)
                break
            except TooWide as error:
                if not after:
                    raise
                self.log(f"{error}; by {after}:")
        return replace(solution, choice=presolved.expand(solution.choice))

    def run(
        self,
        allowed: Allowed | None = None,
        *,
        start: Assignment | None = None,
        bounded: bool = True,
        thorough: bool = True,
        below: float = math.inf,
    ) -> Found:
        """The best assignment that was found, of the whole space or of `allowed`; `bounded` asks for a lower bound.
        Not `thorough`: of one descent, from `start`, which is cut short, or over the memory limit, if that costs
        `below` seconds or more, and over it where its peak is more than was estimated.

        Raises `Infeasible` where nothing keeps the memory limit.
        """
        started = time.perf_counter()
        best = self.explore(allowed, start=start, bounded=bounded, thorough=thorough, below=below)
        if not best.score.objective < below:
            return self._found(best, started)
        with self.bounding(bounded) as bound:
            found = self._found(self._limited(thorough), started)
            found = replace(found, lower_bound=max(found.lower_bound, bound()))
        return replace(found, seconds=time.perf_counter() - started)

    def explore(
        self,
        allowed: Allowed | None = None,
        *,
        start: Assignment | None = None,
        bounded: bool = True,
        thorough: bool = True,
        below: float = math.inf,
    ) -> Solved:
        """The cheapest without the memory limit, with its bound where the space is one problem."""
        if allowed is not None:
            allowed = {name: self._keeping(self.sites[name], choices) for name, choices in allowed.items()}
        elif sum(1 for n in self.space.mesh if n > 1) <= 1 or max(self.joint_options.values()) <= JOINT_OPTIONS_MOST:
            allowed = {n: joint(self.space, self.sites[n], p, self.bytes_limit) for n, p in self._everything().items()}
        self.proved, self.several = allowed is not None, allowed is None and thorough
        if allowed is not None:
            options = allowed
            purse = self._purse(SEARCH_BUDGET.descents + SEARCH_BUDGET.pool)
            best = self.solve(options, self.solver, bounded=bounded, purse=purse)
            self.cheapest = best, lambda price, _, purse: self.solve(options, self.descent, price=price, purse=purse)
        else:
            first = self._whole() if start is None else taken(self.space, start)
            one = self._purse(SEARCH_BUDGET.descents)
            best = self._descend_all() if thorough else self._descend(first, self._axes(), below=below, purse=one)
            self.cheapest = best, self._descend_priced
        return best

    def bounding(self, bounded: bool) -> AbstractContextManager[Callable[[], float]]:
        """Finds, beside this process where that is worth one, seconds that no assignment undercuts: 0 where a solver
        proves them, or they are not asked for."""
        wanted = bounded and not self.proved
        return beside(self._bound if wanted else lambda: 0.0, worthwhile=wanted and self.is_large)

    def _bound(self) -> float:
        bound = lower_bound_seconds(self.space, SEARCH_BUDGET.bound * self.work)
        self.log(f"lower bound {bound * 1e3:.3f} ms")
        return bound

    def within(self, peaks: tuple[Peaks, Peaks] | None, *, sure: bool) -> Found:
        """The best that keeps the limit, if there is one, with such peaks, from the cheapest that was found. Raises
        `Infeasible` as `run`."""
        started = time.perf_counter()
        if peaks is not None and self.bytes_limit is not None:
            (self.peak, self.estimate), self.peaks, self.aim = peaks, {}, self.bytes_limit
        return self._found(self._limited(sure), started)

    def _purse(self, share: float) -> Purse:
        return Purse(left=share * self.work)

    @cached_property
    def joint_options(self) -> dict[str, int]:
        """Of each site, on all axes together."""
        return {name: math.prod(map(len, per_axis)) for name, per_axis in self._everything().items()}

    @property
    def is_large(self) -> bool:
        """Whether parts of the search are worth a process of their own."""
        return sum(self.joint_options.values()) >= APART_OPTIONS

    def _everything(self) -> dict[str, list[tuple[AxisChoice, ...]]]:
        """The choices of each site, axis by axis."""
        axes = range(len(self.space.mesh))
        return {name: [self._offered(site, axis) for axis in axes] for name, site in self.sites.items()}

    def _found(self, best: Solved, started: float) -> Found:
        return Found(
            assignment=best.assignment,
            score=best.score,
            lower_bound=best.lower_bound if self.proved else 0.0,  # not that of a part of the space
            seconds=time.perf_counter() - started,
        )

    def _offered(self, site: Site, axis: int) -> tuple[AxisChoice, ...]:
        """The choices on an axis that constraints leave to a site."""
        pinned = self.pins.get(site.name, {})
        return pinned[axis] if axis in pinned else axis_choices(self.space, site, axis)

    def _keeps(self, site: Site, choice: SiteChoice) -> bool:
        return all(choice[axis] in left for axis, left in self.pins.get(site.name, {}).items())

    def _keeping(self, site: Site, choices: Iterable[SiteChoice]) -> list[SiteChoice]:
        """The choices that keep the constraints on a site."""
        given = list(choices)
        kept = [c for c in given if self._keeps(site, c)]
        if not kept and site.name not in self.pins:
            raise ValueError(
                f"the preset leaves {site.kind} {site.module or site.name} none of its choices: take a solver, or "
                f"another preset"
            )
        if not kept:
            raise ValueError(
                f"no choice of {site.kind} {site.module or site.name} is both in the preset and in the constraints: "
                f"take a solver, or drop one of the constraints"
            )
        return kept

    def _pinned(self, site: Site, choice: SiteChoice) -> SiteChoice:
        """The choice with those parts changed that constraints forbid."""
        if self._keeps(site, choice):
            return choice
        pinned = self.pins[site.name]
        per_axis = [pinned.get(axis, (choice[axis],)) for axis in range(len(self.space.mesh))]
        wider = [dict.fromkeys((*first, *self._offered(site, axis))) for axis, first in enumerate(per_axis)]
        rest = choice[len(self.space.mesh) :]
        for parts in chain(product(*per_axis), product(*wider)):
            if self.space.option(site, (*parts, *rest)) is not None:
                return (*parts, *rest)
        raise ValueError(
            f"the constraints leave {site.kind} {site.module or site.name} no legal choice: drop one of them"
        )

    def _is_over(self, found: Solved) -> bool:
        return self.bytes_limit is not None and self._peak(found) > self.aim

    def _peak(self, found: Solved) -> float:
        """Of an assignment: its program, or one of fewer copies, is written for that."""
        if self.estimate is None:
            return found.score.bytes
        key = id(found.assignment)
        if key not in self.peaks:
            self.peaks[key] = found, self.estimate(found.assignment)
        return self.peaks[key][1]

    def _true_peak(self, found: Solved) -> float:
        return found.score.bytes if self.peak is None else self.peak(found.assignment)

    def _limited(self, sure: bool) -> Solved:
        """The best that keeps the limit, if there is one, as estimated or, if that is to be `sure`, in truth. Where the
        answer is over it by more than was estimated, the next one is to be as much below; at last nothing is
        estimated any more."""
        assert self.cheapest is not None
        cheapest = self.cheapest[0]
        if self.bytes_limit is None:
            return cheapest
        for _ in range(CONFIRMATIONS):
            best = self._within_limit(*self.cheapest) if self._is_over(cheapest) else cheapest
            if not sure or (true := self._true_peak(best)) <= self.bytes_limit:
                return best
            self.log(f"estimated to need {self._peak(best):.0f} bytes, and needs {true:.0f}")
            nearer = min(self.aim, self.bytes_limit - (true - self._peak(best)))
            self.aim = nearer - max(true - self.bytes_limit, LIMIT_MARGIN * self.bytes_limit)
        self.aim, self.estimate, self.peaks = self.bytes_limit, self.peak, {}
        return self._within_limit(*self.cheapest) if self._is_over(cheapest) else cheapest

    def _within_limit(self, cheapest: Solved, solve_at: SolveAt) -> Solved:
        """The best that keeps the limit: solves at rising prices of memory, each from the one before, and a descent
        from the start at the last of them, fill a pool of options, in which the limit is then kept exactly, layers of
        one structure mixing their options.

        A solver limits a sum of bytes. The peak is that sum and an excess (temporaries, less what is not there at
        once), which differs from plan to plan: what it is for one plan says what sum the next may have.

        The lower bound is Lagrange's, over the prices that were tried; where a peak is limited, which is no sum, it is
        that without a limit.
        """
        limit, score = self.aim, cheapest.score
        unit = score.seconds / score.bytes
        purse = self._purse(SEARCH_BUDGET.limit)
        tried: list[tuple[float, Solved]] = [(0.0, cheapest)]
        price, fits, excess = 0.02 * unit, None, self._excess(cheapest)
        while fits is None and price <= PRICE_MOST * unit:
            found = solve_at(price, tried[-1][1], purse)
            tried.append((price, found))
            if found.score.bytes + excess <= (1 + SURELY) * limit:
                fits = None if self._is_over(found) else price
                excess = self._excess(found)
            price *= 5
        kept: list[Solved] = []
        if fits is not None:
            kept.append(tried[-1][1])
            below, above = tried[-2][0], fits
            for _ in range(PRICE_BISECTIONS):
                middle = math.sqrt(below * above) if below else above / 5
                if purse.is_empty:
                    break
                found = solve_at(middle, tried[-1][1], purse)
                tried.append((middle, found))
                over = found.score.bytes + excess > limit
                below, above = (middle, above) if over else (below, middle)
            # what is cheapest without a limit may lie far from what is cheapest within it
            if self.several and not purse.is_empty:
                tried.append((above, self._descend(self._whole(), self._axes(), above, purse=purse)))
            kept += self._mixed([found for _, found in tried], limit, excess, purse)
        again = self._recomputing([found for _, found in tried], kept, limit)
        if not kept and not again:
            kept.append(self._smallest([found for _, found in tried]))
        best = min(kept + again, key=lambda found: found.score.objective)
        bound = cheapest.lower_bound
        if self.peak is None:
            bound = max(found.lower_bound - price * limit for price, found in tried)
        self.log(f"within {limit:.0f} bytes: {best.score.seconds * 1e3:.3f} ms, {self._peak(best):.0f} bytes")
        return replace(best, lower_bound=min(bound, best.score.objective))

    def _smallest(self, tried: Sequence[Solved]) -> Solved:
        """Of all plans that were looked at. Raises `Infeasible` where that, too, is over the limit."""
        assert self.bytes_limit is not None
        looked_at = [found for found, _ in self.peaks.values()]
        smallest = min([*looked_at, *tried], key=self._peak)
        true = self._true_peak(smallest)
        if true > self.bytes_limit:
            error = Infeasible(
                f"no choice fits in {self.bytes_limit:.0f} bytes: the smallest needs {true:.0f} bytes; "
                f"give more memory, more ranks or a smaller batch"
            )
            error.smallest_bytes = true
            raise error
        return smallest

    @property
    def _may_recompute(self) -> bool:
        return self.peak is not None and bool(self.space.repeats)

    def _recomputing(self, candidates: Sequence[Solved], kept: Sequence[Solved], limit: float) -> list[Solved]:
        """The best of these with copies of segments made again in backward: as few as keep the limit, those that save
        the most bytes a second first, and of these the earliest, which are held the longest.

        Better than what is `kept` without, if there is any.
        """
        if not self._may_recompute:
            return []
        best = min((found.score.objective for found in kept), default=math.inf)
        excess = self._excess((*candidates, *kept)[-1])
        unique: list[Solved] = []
        for found in candidates:
            if all(found.assignment != other.assignment for other in unique):
                unique.append(found)
        again = [_Again(self.space, found) for found in unique]
        again.sort(key=lambda way: way.objective(way.needed(limit - excess)))
        made: list[Solved] = []
        smallest = min(again, key=lambda way: way.score(len(way.copies)).bytes)
        for way in dict.fromkeys((*again[:RECOMPUTE_PLANS], smallest)):
            count, most = way.needed(limit - excess), len(way.copies)
            for last in range(RECOMPUTE_ROUNDS):
                if not way.objective(count) < best:
                    break
                found = way.solved(count)
                over = self._is_over(found)
                self.log(f"{count} of {most} copies made again: peak {self._peak(found):.0f}")
                if not over:
                    made.append(found)
                    best = found.score.objective
                nearer = way.needed(limit - self._excess(found))
                nearer = max(nearer, count + 1) if over else min(nearer, count - 1)
                count = most if over and last == RECOMPUTE_ROUNDS - 2 else nearer
                if not 0 < count <= most:
                    break
        return made

    def _excess(self, found: Solved) -> float:
        """What the peak is above the sum of bytes."""
        return self._peak(found) - found.score.bytes

    def _mixed(self, tried: Sequence[Solved], limit: float, excess: float, purse: Purse) -> list[Solved]:
        """The best of the options that were taken, under limits on their sum, of which the peak keeps the limit."""
        pool: dict[str, dict[SiteChoice, None]] = {name: {} for name in self.sites}
        for found in tried:
            for name, choices in taken(self.space, found.assignment).items():
                pool[name].update(dict.fromkeys(choices))
        options = {name: list(choices) for name, choices in pool.items()}
        kept = []
        row, most_kept, least_over = limit - excess, -math.inf, math.inf
        for _ in range(LIMIT_ROUNDS):
            if purse.is_empty:
                break
            try:
                found = self.solve(options, self.solver, bytes_limit=row, purse=purse)
            except Infeasible:
                break
            over = self._is_over(found)
            self.log(f"at most {row:.0f} bytes in sum: peak {self._peak(found):.0f}, {'over' if over else 'within'}")
            if over:
                least_over = row
            else:
                kept.append(found)
                most_kept = row
            row = limit - self._excess(found)
            if not most_kept < row < least_over:  # it went back: between what fits and what does not
                row = (most_kept + least_over) / 2 if most_kept > 0 else 0.95 * least_over
            if row - most_kept <= LIMIT_SLACK * limit or row <= 0 or math.isinf(row):
                break
        return kept

    def _axes(self) -> list[Axes]:
        """Axes of more than one rank, each by itself, the slowest first."""
        return self._slowest_first((axis,) for axis, ranks in enumerate(self.space.mesh) if ranks > 1)

    def _slowest_first(self, groups: Iterable[Axes]) -> list[Axes]:
        links = self.space.redistributor.links
        return sorted(groups, key=lambda axes: min(links[axis].bytes_per_second for axis in axes))

    def _coarser(self) -> list[list[Axes]]:
        """The axes of coarser meshes of several: two neighbours are one axis."""
        wide = [axis for axis, ranks in enumerate(self.space.mesh) if ranks > 1]
        if len(wide) < 3:
            return []
        found: list[list[Axes]] = []
        for at in range(len(wide) - 1):
            found.append([*((a,) for a in wide[:at]), (wide[at], wide[at + 1]), *((a,) for a in wide[at + 2 :])])
        return [self._slowest_first(groups) for groups in found]

    def _descend_priced(self, price: float, start: Solved, purse: Purse) -> Solved:
        return self._descend(taken(self.space, start.assignment), self._axes(), price, purse=purse)

    def _descend_all(self) -> Solved:
        space, axes = self.space, self._axes()
        whole = self._whole()
        found: list[Solved] = []
        pool: dict[str, dict[SiteChoice, None]] = {name: {} for name in self.sites}

        def note(solved: Solved) -> None:
            found.append(solved)
            for name, choices in taken(space, solved.assignment).items():
                pool[name].update(dict.fromkeys(choices))

        coarser = self._coarser()

        def one() -> Purse:
            return self._purse(SEARCH_BUDGET.descents / (3 + len(coarser)))

        descents: dict[str, Callable[[], Solved]] = {
            "whole, slowest axis first": lambda: self._descend(whole, axes, purse=one()),
            "whole, fastest axis first": lambda: self._descend(whole, axes[::-1], purse=one()),
            "batch on every axis": lambda: self._descend(self._batch(), axes, purse=one()),
        }
        for groups in coarser:
            name = " ".join("*".join(space.axes[axis] for axis in group) for group in groups)
            descents[f"mesh {name}"] = partial(self._descend_from_coarser, groups, one())
        for name, solved in zip(descents, together([*descents.values()], worthwhile=self.is_large), strict=True):
            note(solved)
            score = solved.score
            self.log(f"descent from {name}: {score.seconds * 1e3:.3f} ms, {score.bytes / 2**20:.0f} MiB")
        purse = self._purse(SEARCH_BUDGET.pool)
        for _ in range(POOL_ROUNDS):
            previous = min(solved.score.objective for solved in found)
            size = sum(map(len, pool.values()))
            note(self.solve({n: list(choices) for n, choices in pool.items()}, self.solver, bounded=False, purse=purse))
            self.log(f"pool of {size} options: {found[-1].score.seconds * 1e3:.3f} ms")
            if found[-1].score.objective >= previous * (1 - GAIN) or purse.is_empty:
                break
            note(self._descend(taken(space, found[-1].assignment), axes, purse=purse))
        return min(found, key=lambda solved: solved.score.objective)

    def _descend_from_coarser(self, groups: list[Axes], purse: Purse) -> Solved:
        """From where a coarser mesh ends."""
        start = self._descend(self._whole(), groups, purse=purse)
        return self._descend(taken(self.space, start.assignment), self._axes(), purse=purse)

    def _whole(self) -> dict[str, list[SiteChoice]]:
        return {name: [self._pinned(site, self.space.whole(site))] for name, site in self.sites.items()}

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
            chosen[name] = [self._pinned(site, choice)]
        return chosen

    def _descend(
        self,
        start: Mapping[str, Iterable[SiteChoice]],
        order: list[Axes],
        price: float = 0.0,
        below: float = math.inf,
        *,
        purse: Purse,
    ) -> Solved:
        """Axis after axis until nothing improves, or, where that is `HOPELESS` times `below`, once, as when the purse
        is empty."""
        current = {name: list(choices) for name, choices in start.items()}
        best: Solved | None = None
        unchanged = 0

        def objective(solved: Solved) -> float:
            return solved.score.objective + price * solved.score.bytes

        for number, axes in enumerate(cycle(order), 1):
            allowed = {name: self._free(self.sites[name], choices, axes) for name, choices in current.items()}
            solved = self.solve(allowed, self.descent, price=price, bounded=False, purse=purse)
            if best is None or objective(solved) <= objective(best):
                current = taken(self.space, solved.assignment)
            if best is None or objective(solved) < objective(best) * (1 - GAIN):
                best, unchanged = solved, 0
            unchanged += 1
            if unchanged == len(order):
                # every other axis was tried since the last gain, from what is now fixed
                return best
            if number == len(order) and objective(best) > HOPELESS * below:
                return best
            if number >= len(order) and purse.is_empty:
                return best
        raise AssertionError("a mesh has axes")

    def _free(self, site: Site, choices: Iterable[SiteChoice], axes: Axes) -> list[SiteChoice]:
        """The choices with one axis free, or with several that choose alike, as one axis of a coarser mesh."""
        found: dict[SiteChoice, None] = {}
        width = len(self.space.mesh)
        alike = [c for c in self._offered(site, axes[0]) if all(c in self._offered(site, axis) for axis in axes[1:])]
        for choice in choices:
            rest = {axis: choice[axis] for axis in range(width)}
            for option in alike:
                parts = {**rest, **dict.fromkeys(axes, option)}
                for policy in policies(site, self.bytes_limit):
                    found[(*parts.values(), *policy)] = None
            if len(axes) > 1:
                found[choice] = None
        return [c for c in found if self.space.option(site, c) is not None]


class _Again:
    """An assignment of which copies may be made again in backward."""

    def __init__(self, space: Space, found: Solved) -> None:
        self.space, self.found = space, found
        self.copies: list[tuple[float, int, int, float, float]] = []
        """(seconds a byte, repeat, copy, seconds, bytes saved), the cheapest byte first."""
        for number, (region, copies) in enumerate(zip(space.bodies, found.assignment.copies, strict=True)):
            priced: list[tuple[Decisions, tuple[float, float]]] = []
            for k, decisions in enumerate(copies):
                known = next((cost for same, cost in priced if same == decisions), None)
                if known is None:
                    known = recomputation(space, region, decisions)
                    priced.append((decisions, known))
                seconds, size = known
                if size > 0:
                    self.copies.append((seconds / size, number, k, seconds, size))
        self.copies.sort()

    def needed(self, row: float) -> int:
        """How many copies are made again for a sum of bytes of at most `row`; all, where that is not enough."""
        over = self.found.score.bytes - row
        saved = accumulate((size for *_, size in self.copies), initial=0.0)
        return next((count for count, size in enumerate(saved) if size >= over), len(self.copies))

    def objective(self, count: int) -> float:
        return self.score(count).objective

    def score(self, count: int) -> Score:
        score, first = self.found.score, self.copies[:count]
        return Score(
            seconds=score.seconds + sum(seconds for *_, seconds, _ in first),
            bytes=score.bytes - sum(size for *_, size in first),
        )

    def solved(self, count: int) -> Solved:
        chosen = {(number, k) for _, number, k, _, _ in self.copies[:count]}
        assignment = self.found.assignment
        flags = tuple(
            tuple((number, k) in chosen for k in range(len(copies))) for number, copies in enumerate(assignment.copies)
        )
        return replace(self.found, assignment=replace(assignment, recompute=flags), score=self.score(count))


def priced(problem: Problem, price: float) -> Problem:
    """The problem with memory paid for in seconds."""
    return Problem(
        variables=tuple(
            replace(v, seconds=tuple(s + price * b for s, b in zip(v.seconds, v.bytes, strict=True)))
            for v in problem.variables
        ),
        tensors=tuple(
            replace(t, costs={state: (s + price * b, b) for state, (s, b) in t.costs.items()}) for t in problem.tensors
        ),
        repeats=tuple(replace(r, body=priced(r.body, price)) for r in problem.repeats),
    )


def taken(space: Space, assignment: Assignment) -> dict[str, list[SiteChoice]]:
    """Every choice that a site takes somewhere: once for the rest, and over all copies of a body."""
    found: dict[str, dict[SiteChoice, None]] = {}
    for name, choice in assignment.rest.items():
        found.setdefault(name, {})[choice] = None
    for copies in assignment.copies:
        for decisions in copies:
            for name, choice in decisions.items():
                found.setdefault(name, {})[choice] = None
    # what is allowed at one end of a run is allowed at the other
    for joined in dict.fromkeys(joined_borders(space.repeats).values()):
        union = dict.fromkeys(choice for name in joined for choice in found.get(name, ()))
        found.update({name: dict(union) for name in joined})
    return {name: list(choices) for name, choices in found.items()}
