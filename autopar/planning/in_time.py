"""In time: a plan whose search ends after the seconds that a person gave."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, Self, TypeVar

from autopar.solve.effort import Effort
from autopar.solve.problem import Infeasible

from .plan import Plan
from .request import Request


class Timed(Protocol):
    """A planner, and the same with another effort."""

    effort: Effort

    def within(self, effort: Effort) -> Self: ...


P = TypeVar("P", bound=Timed)


def in_time(planner: P, request: Request, make: Callable[[P, Request], Plan]) -> Plan:
    """The plan that `make` gives, which says so if its search was cut; so does the error if it found none. Where the
    seconds count already, as for one of several meshes, they go on."""
    seconds, on = request.effort, planner
    if seconds is not None and math.isinf(planner.effort.until):
        on = planner.within(replace(planner.effort, until=time.monotonic() + seconds))
    try:
        plan = make(on, request)
    except Infeasible as error:
        if on is not planner and on.effort.is_over:
            error.args = (f"{error}. The search ended with the effort of {seconds:g} s: give it more",)
        raise
    if seconds is None or plan.provenance is None:
        return plan
    return replace(plan, provenance=replace(plan.provenance, effort_seconds=seconds, is_cut=on.effort.is_over))
