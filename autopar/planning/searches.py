"""The searches of one space: with pins and a limit, at other prices, and within presets."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from autopar.cost.bucketed import HidingRedistributor
from autopar.cost.redistribute import Redistributor
from autopar.passes.blocks.block import Blocks
from autopar.passes.flow import BLOCKS
from autopar.passes.space.problem import Allowed, Assignment, ProblemBuilder
from autopar.passes.space.space import Space
from autopar.solve.effort import Effort
from autopar.solve.problem import Score

from .account import unit_bytes
from .constraints import Pins, pins
from .options import Options
from .presets import PRESETS, Preset, allowed_by
from .request import Request
from .search import Search, SearchResult
from .solving import Solved
from .steps import BUCKETS, Accuracy, Estimate, Steps
from .training import Training


class Searches:
    """Builds searches of a space. `steps` evaluates what they find."""

    def __init__(self, space: Space, steps: Steps, effort: Effort, training: Training) -> None:
        self.space, self.steps, self.effort, self.training = space, steps, effort, training
        self.presets: dict[Preset, Allowed] = {}
        """Preset -> the options that it leaves."""
        self._hiding: dict[float, Space] = {0.0: space}
        self._builders: dict[int, ProblemBuilder] = {}  # the spaces stay, and with them their identities
        self.blocks: Callable[[], Blocks] = cache(partial(steps.writer.flow.run, BLOCKS, space.graph, max(space.mesh)))

    def search(
        self,
        request: Request,
        space: Space | None = None,
        share: float = 1.0,
        pinned: Callable[[Space, Pins], Pins] | None = None,
    ) -> Search:
        """A search of the space, or of one at other prices, with a share of the work of a search. `pinned` adds to what
        the constraints pin."""
        space, given = space or self.space, pins(self.space, request.constraints or {})
        return Search(
            self._builders.setdefault(id(space), ProblemBuilder(space)),
            request.exact_solver,
            Options(space, given if pinned is None else pinned(space, given), request.bytes_limit),
            evaluate=self.evaluate(request),
            effort=self.effort.share(share),
            recompute=self.training.recompute == "auto" and request.within is None,  # libraries leave it to models
            stage=request.stage,
        )

    def evaluate(self, request: Request) -> Callable[[Assignment, Accuracy], Estimate]:
        """The step of an assignment, with the largest buckets that keep the limit, or as libraries run it, which gather
        a whole unit of modules at once."""
        if request.within is None:
            return partial(self.steps.evaluate, limit=request.bytes_limit)
        return lambda assignment, accuracy: self.steps.evaluate(
            assignment, accuracy, None, (max(BUCKETS[-1], unit_bytes(self.space, assignment)),)
        )

    def preset(self, name: str | Preset) -> Allowed:
        """The options that a preset leaves. Raises ValueError if it does not fit the mesh or the model."""
        preset = PRESETS.named(name) if isinstance(name, str) else name
        if preset not in self.presets:
            self.presets[preset] = allowed_by(preset, self.space, self.blocks())
        return self.presets[preset]

    def hiding(self, part: float) -> Space:
        """The space with a part of the traffic in buckets at no price, always the same one."""
        if part not in self._hiding:
            self._hiding[part] = replace(self.space, redistributor=hidden_buckets(self.space.redistributor, part))
        return self._hiding[part]

    def priced(self, result: SearchResult) -> SearchResult:
        """The result at the prices of the space, in which nothing is hidden: of these the solver proved nothing."""
        score = Score(seconds=self.steps.account(result.assignment).seconds, bytes=result.score.bytes)
        return replace(result, score=score, lower_bound=0.0)

    def found(self, solved: Solved) -> SearchResult:
        """As a result at the prices of the space."""
        result = SearchResult(assignment=solved.assignment, score=solved.score, lower_bound=0.0, seconds=0.0)
        return self.priced(result)


def hidden_buckets(given: Redistributor, part: float, routes: Redistributor | None = None) -> Redistributor:
    """Prices a part of the traffic in buckets at nothing. The routes are those of another redistributor, or of `given`:
    programs take these, whatever is hidden."""
    own = given.routes if isinstance(given, HidingRedistributor) else given
    return HidingRedistributor(routes or own, part, given)
