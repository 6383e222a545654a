"""The error where no plan keeps a limit, with what the smallest plan needs."""

from __future__ import annotations

from autopar.solve.problem import Infeasible

from .request import Request
from .shortfall import DoesNotFit, Shortfall
from .steps import Steps


def shortfall_of(steps: Steps, error: DoesNotFit, request: Request, limit: float | None) -> Infeasible:
    """The error with what the smallest plan needs, and what would fit."""
    assignment = error.smallest
    assert limit is not None and assignment is not None
    bucket_bytes, of_rank = steps.peak(assignment, limit)
    told = Shortfall(
        space=steps.space,
        program=steps.writer.written(assignment, bucket_bytes),
        device_type=steps.kind_of_device,
        limit=limit,
        by_device=request.memory_limit_bytes is None,
        peak=of_rank,
        memory=steps.memory,
    )
    raised = Infeasible(str(told))
    raised.smallest_bytes = error.smallest_bytes
    return raised
