"""The error where no plan keeps a limit, with what the smallest plan needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.solve.problem import Infeasible

from .request import Request
from .shortfall import DoesNotFit, Shortfall

if TYPE_CHECKING:
    from .planner import Planner


def shortfall_of(planner: Planner, error: DoesNotFit, request: Request) -> Infeasible:
    """The error with what the smallest plan needs, and what would fit."""
    limit, assignment = planner.limit(request), error.smallest
    assert limit is not None and assignment is not None
    bucket_bytes, of_rank = planner.peak(assignment, limit)
    told = Shortfall(
        space=planner.space,
        program=planner.writer.written(assignment, bucket_bytes),
        device_type=planner.kind_of_device,
        limit=limit,
        by_device=request.memory_limit_bytes is None,
        peak=of_rank,
        memory=planner.memory,
    )
    raised = Infeasible(str(told))
    raised.smallest_bytes = error.smallest_bytes
    return raised
