"""The plan within a limit, and the error where there is none, with what the smallest plan needs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from autopar.solve.problem import Infeasible

from .plan import Plan
from .request import Request
from .searches import Searches
from .shortfall import DoesNotFit, Shortfall
from .steps import EXACT

logger = logging.getLogger("autopar")


def shortfall_of(
    searches: Searches, error: DoesNotFit, request: Request, limit: float | None, *, by_device: bool
) -> Infeasible:
    """The error with what the smallest plan needs, and what would fit."""
    assignment = error.smallest
    assert limit is not None and assignment is not None
    told = Shortfall(
        space=searches.space,
        estimate=searches.evaluate(request)(assignment, EXACT),
        limit=limit,
        by_device=by_device,
        may_offload=not request.offload and searches.space.cluster.device.host_bytes_per_second is not None,
    )
    raised = Infeasible(str(told))
    raised.smallest_bytes = error.smallest_bytes
    return raised


def fitting(
    searches: Searches, request: Request, limit: float | None, attempt: Callable[[Request, float], Plan | None]
) -> Plan:
    """The plan that `attempt` makes within the limit. If the limit is the device's, the plan without one comes first,
    and mostly fits: searches within a limit take longer. It is None if it clearly needs more than so many bytes. Where
    nothing fits but in the headroom, that is used. Raises `Infeasible`, which says what would fit."""
    by_device, usable = request.memory_limit_bytes is None, searches.space.cluster.device.usable_bytes

    def of_device(plan: Plan) -> Plan:
        return replace(plan, memory_limit_bytes=usable, memory_limit_from="device", headroom=request.free_part)

    if by_device:
        plan = attempt(replace(request, memory_limit_bytes=math.inf), math.inf if limit is None else limit)
        if plan is not None and limit is None:
            return replace(plan, memory_limit_from="none")
        if plan is not None and limit is not None and plan.bytes <= limit:
            return of_device(plan)
        logger.info("without a limit the plan does not fit in the %d bytes of the device", limit)
    within = request.stage if limit is None else request.stage.within(limit)
    bounded = replace(request, memory_limit_bytes=math.inf if limit is None else limit, stage=within)
    try:
        plan = attempt(bounded, math.inf)
    except DoesNotFit as error:
        if by_device and usable is not None and request.free_part and error.smallest_bytes <= usable:
            return fitting(searches, replace(request, headroom=0.0), usable, attempt)
        raise shortfall_of(searches, error, bounded, limit, by_device=by_device) from error
    assert plan is not None
    return of_device(plan) if by_device else plan
