"""A trial: what one strategy reaches on one mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autopar.files.kinds import Count, Size
from autopar.planning.plan import Plan
from autopar.planning.texts import short_bytes
from autopar.solve.problem import Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`winner` is the candidate that a search chose (`Provenance.winner`). A step computes `items` of the kind `unit`,
    and reaches the part `utilization` (MFU) of the devices' peak. Without a plan, `error` says why, and `needed_bytes`
    is the smallest peak that was reached, where memory is the reason."""

    devices: Count
    mesh: Mapping[str, Size] = field(default_factory=dict)
    strategy: str = ""
    winner: str = ""
    seconds: float = math.inf
    bytes: float = 0.0
    limit_bytes: float | None = None
    items: Count = 0
    unit: str = "samples"
    utilization: float | None = None
    error: str = ""
    needed_bytes: float | None = None

    @staticmethod
    def of(plan: Plan, strategy: str) -> Trial:
        origin = plan.provenance
        return Trial(
            devices=plan.ranks,
            mesh=plan.mesh,
            strategy=strategy,
            winner="" if origin is None else origin.winner,
            seconds=plan.seconds,
            bytes=plan.bytes,
            limit_bytes=plan.memory_limit_bytes,
            items=0 if origin is None else origin.items,
            unit="samples" if origin is None else origin.unit,
            utilization=plan.utilization,
        )

    @staticmethod
    def failed(mesh: Mapping[str, int], strategy: str, error: ValueError, limit: float | None) -> Trial:
        needed = getattr(error, "smallest_bytes", math.inf) if isinstance(error, Infeasible) else math.inf
        return Trial(
            devices=math.prod(mesh.values()),
            mesh=mesh,
            strategy=strategy,
            limit_bytes=limit,
            error=str(error),
            needed_bytes=needed if math.isfinite(needed) else None,
        )

    @property
    def fits(self) -> bool:
        return not self.error

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds if self.seconds else 0.0

    @property
    def reason(self) -> str:
        """Why there is no plan, in a few words."""
        if self.needed_bytes is not None and self.limit_bytes is not None:
            return f"needs {short_bytes(self.needed_bytes)} of {short_bytes(self.limit_bytes)} at least"
        return self.error

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds if self.fits else None, "fits": self.fits}
