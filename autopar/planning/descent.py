"""Coordinate descent over the axes of a mesh, from several starts, and the pool of what they end with.

A descent fixes all axes but one and solves that one exactly (bytes, shapes and legality depend on the others), axis
after axis until nothing improves. The joint options that the descents end with form a pool, which is solved exactly as
one problem.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import cycle

from autopar.passes.blocks.block import Blocks
from autopar.passes.space.choices import SiteChoice
from autopar.solve.effort import Effort, Purse
from autopar.solve.solvers import SOLVERS, TooWide

from .beside import together
from .options import Axes, Options, coarser_axes, one_by_one, taken
from .progress import Stage
from .solving import Solved, Solves
from .starts import by_blocks

DESCENT_SOLVER = "dp"
"""Steps of a descent are many and small; the solver that was asked for solves the pool."""


class Descent:
    """Descents over one space. `steps` solves their steps, `solver` the pool; each part has a share of `effort`."""

    def __init__(
        self,
        options: Options,
        solves: Solves,
        solver: str,
        *,
        blocks: Callable[[], Blocks],
        effort: Effort,
        log: Callable[[str], None],
    ) -> None:
        self.options, self.solve, self.space, self.log = options, solves, options.space, log
        self.blocks = blocks
        self.solver, self.steps = solver, DESCENT_SOLVER if SOLVERS[solver].exact else solver
        self.effort = effort
        self.ends: list[Solved] = []
        """What the descents from all starts ended with, one of those that cost the same."""

    def purse(self, share: float) -> Purse:
        return Purse(left=share * self.effort.work)

    def axes(self) -> list[Axes]:
        """The axes of more than one rank, one by one, the slowest first."""
        return one_by_one(self.space)

    def starts(self) -> dict[str, Callable[[], Solved]]:
        """Name of a start -> the descent from there. Slow axes are freed first, or fast ones: so they are where blocks
        have split an axis, so that the first ones to be freed see how the others split."""
        axes, coarser = self.axes(), coarser_axes(self.space)
        share = self.effort.descents / (4 + len(coarser))

        def descent(order: list[Axes], split: int | None = None) -> Solved:
            by = self.options.replicated() if split is None else by_blocks(self.options, self.blocks(), split)
            return self.descend(by, order, purse=self.purse(share))

        descents: dict[str, Callable[[], Solved]] = {
            "replicated": partial(descent, axes),
            "blocks": partial(descent, axes[::-1], axes[-1][0]),
            "replicated, fast axes first": partial(descent, axes[::-1]),
            "blocks on the slowest axis": partial(descent, axes[::-1], axes[0][0]),
        }
        for groups in coarser:
            name = " ".join("*".join(self.space.axes[axis] for axis in group) for group in groups)
            descents[f"mesh {name}"] = partial(self._descend_from_coarser, groups, self.purse(share))
        return descents

    def from_all_starts(self, *, side_by_side: bool, stage: Stage) -> Solved:
        space, axes = self.space, self.axes()
        solutions: list[Solved] = []
        pool: dict[str, dict[SiteChoice, None]] = {name: {} for name in self.options.sites}

        def note(solved: Solved) -> None:
            solutions.append(solved)
            for name, choices in taken(space, solved.assignment).items():
                pool[name].update(dict.fromkeys(choices))

        descents = self.starts()
        first, *others = descents.values()
        tasks: list[Callable[[], Solved | None]] = [first, *(partial(self._in_time, descent) for descent in others)]
        for name, solved in zip(descents, together(stage.told(tasks), worthwhile=side_by_side), strict=True):
            if solved is None:
                self.log(f"no time is left for a descent from {name}")
                continue
            note(solved)
            self.log(f"descent from {name}: {solved.score.seconds * 1e3:.3f} ms, {solved.score.bytes / 2**20:.0f} MiB")
        purse = self.purse(self.effort.pool)
        for _ in range(self.effort.pool_rounds):
            if self.effort.is_over:
                break
            previous = min(solved.score.objective for solved in solutions)
            size = sum(map(len, pool.values()))
            options = {name: list(choices) for name, choices in pool.items()}
            try:
                note(self.solve(options, self.solver, bounded=False, last_resort=False, purse=purse))
            except TooWide as error:  # a descent's end is better than what a cheaper way of solving would find
                self.log(f"{error}: the pool of {size} options is not solved")
                break
            self.log(f"pool of {size} options: {solutions[-1].score.seconds * 1e3:.3f} ms")
            if solutions[-1].score.objective >= previous * (1 - self.effort.gain) or purse.is_empty:
                break
            note(self.descend(taken(space, solutions[-1].assignment), axes, purse=purse))
        self.ends = list({solved.score: solved for solved in solutions}.values())
        return min(solutions, key=lambda solved: solved.score.objective)

    def _in_time(self, descent: Callable[[], Solved]) -> Solved | None:
        return None if self.effort.is_over else descent()

    def _descend_from_coarser(self, groups: list[Axes], purse: Purse) -> Solved:
        """From where the descent on a coarser mesh ends."""
        start = self.descend(self.options.replicated(), groups, purse=purse)
        return self.descend(taken(self.space, start.assignment), self.axes(), purse=purse)

    def at_price(self, price: float, start: Solved, purse: Purse) -> Solved:
        return self.descend(taken(self.space, start.assignment, in_middle=True), self.axes(), price, purse=purse)

    def descend(
        self, start: Mapping[str, Iterable[SiteChoice]], order: list[Axes],
        price: float = 0.0, below: float = math.inf, *, purse: Purse,
    ) -> Solved:  # fmt: skip
        """Frees axis after axis until nothing improves, or each axis once if the result is hopelessly above `below` or
        the purse is empty."""
        current = {name: list(choices) for name, choices in start.items()}
        best: Solved | None = None
        unchanged = 0

        def objective(solved: Solved) -> float:
            return solved.score.objective + price * solved.score.bytes

        for number, axes in enumerate(cycle(order), 1):
            solved = self._freed(current, axes, price, best, purse)
            if best is None or objective(solved) <= objective(best):
                current = taken(self.space, solved.assignment)
            if best is None or objective(solved) < objective(best) * (1 - self.effort.gain):
                best, unchanged = solved, 0
            unchanged += 1
            if unchanged == len(order):
                # no other axis has improved it since
                return best
            if number == len(order) and objective(best) > self.effort.hopeless * below:
                return best
            if number >= len(order) and (purse.is_empty or self.effort.is_over):
                return best
        raise AssertionError("a mesh has axes")

    def _freed(
        self, current: dict[str, list[SiteChoice]], axes: Axes, price: float, best: Solved | None, purse: Purse
    ) -> Solved:
        """The solution with one axis free, beside the choices on the others that are taken now; where these differ from
        copy to copy and are too many, beside those of middle copies; and where that is too wide, too, `best`, which is
        better than what a cheaper way of solving would find."""
        middle = current if best is None else taken(self.space, best.assignment, in_middle=True)
        for beside in (current, middle) if middle != current else (current,):
            allowed = {n: self.options.free(self.options.sites[n], choices, axes) for n, choices in beside.items()}
            is_first = best is None
            try:
                return self.solve(allowed, self.steps, price=price, bounded=False, last_resort=is_first, purse=purse)
            except TooWide as error:
                self.log(f"{error}: this axis stays as it is beside {sum(map(len, beside.values()))} choices")
        assert best is not None
        return best
