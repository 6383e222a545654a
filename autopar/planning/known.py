"""What a choice knows of the candidates that it compared: their steps, and how exactly each is known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.passes.space.problem import Assignment

from .plan import Plan
from .presets import PRESETS
from .provenance import Candidate
from .steps import Steps


class Known:
    """Candidates by name, as they are looked at."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.known: dict[str, Candidate] = {}

    def tell(self, name: str, seconds: float, precision: str, size: float | None = None) -> None:
        """Of candidates of one name that are estimated, the shortest counts."""
        known = self.known.get(name)
        is_longer = known is not None and known.precision == precision == "estimated" and known.seconds <= seconds
        if math.isfinite(seconds) and not is_longer:
            self.known[name] = Candidate(name=name, seconds=seconds, precision=precision, bytes=size)

    def described(self, plan: Plan, name: str) -> Plan:
        """The plan of a candidate, which is known by its program from now on."""
        assert plan.provenance is not None
        self.tell(name, plan.seconds, "simulated", plan.bytes)
        return replace(plan, provenance=replace(plan.provenance, winner=name))

    def forget(self, name: str) -> None:
        """A candidate without a plan."""
        self.known.pop(name, None)

    def _estimate_best(self, presets: Mapping[str, Assignment]) -> None:
        """Estimates the preset with the shortest step, if only a bound of it is known. It may turn out longer than the
        bound of another, which then is what a plan says of presets: each estimate writes programs."""
        rivals = [self.known[name] for name in presets if name in self.known]
        best = min(rivals, key=lambda candidate: candidate.seconds, default=None)
        if best is not None and best.precision == "at least":
            seconds, _ = self.steps.estimated_seconds(presets[best.name], None)
            peak = self.steps.peaks_of(None).estimate(presets[best.name])
            self.tell(best.name, max(seconds, best.seconds), "estimated", peak)

    def added(self, plan: Plan, assignments: Mapping[str, Assignment]) -> Plan:
        """The plan that was chosen, with the others, the shortest step first. Of presets whose assignments are given,
        the best is estimated."""
        self._estimate_best({name: assignment for name, assignment in assignments.items() if name in PRESETS})
        assert plan.provenance is not None
        others = [candidate for name, candidate in self.known.items() if name != plan.provenance.winner]
        ordered = tuple(sorted(others, key=lambda candidate: candidate.seconds))
        return replace(plan, provenance=replace(plan.provenance, candidates=ordered))
