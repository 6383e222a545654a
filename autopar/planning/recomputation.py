"""Which copies of segments to compute again in backward, so that a plan keeps its limit."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from autopar.passes.space.problem import Decisions
from autopar.passes.space.space import Space
from autopar.solve.problem import Score

from .account import recomputation
from .solving import Solved


class Recomputation:
    """An assignment of which copies may be recomputed in backward."""

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
        """How many copies are recomputed for a sum of bytes of at most `row`; all, where that is not enough."""
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
