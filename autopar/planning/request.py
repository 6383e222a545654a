"""The request for a plan: one value from the verbs down to the solves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.solve.solvers import AUTO, SOLVERS

from .constraints import Constraints
from .costs import COSTS
from .given import HEADROOM, check_constraints, check_effort, check_headroom, check_limit, check_solver
from .plan import LimitFrom
from .presets import PRESETS
from .progress import WHOLE, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`solver` names a solver or a preset, `cost` a cost mode; `memory_limit_bytes` bounds a rank's peak: None by
    the device's memory less its reserve, and of that the part `headroom` is left free; `math.inf` not at all.
    `constraints` pin placements. After `effort` seconds a
    search ends with the best that it has (None: when its work is done). `stage`: of all that is done for a plan. (The
    optimizer, whose states count, belongs to the space.)

    Raises ValueError for an invalid option. `constraints.pins` checks the names in constraints.
    """

    solver: str = AUTO
    cost: str = "analytical"
    memory_limit_bytes: float | None = None
    constraints: Constraints | None = None
    effort: float | None = None
    headroom: float | None = None
    stage: Stage = field(default=WHOLE, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_solver(self.solver)
        COSTS.named(self.cost)
        check_limit(self.memory_limit_bytes)
        check_constraints(self.constraints)
        check_effort(self.effort)
        check_headroom(self.headroom)

    @property
    def bytes_limit(self) -> float | None:
        """The limit of a search: none where it is lifted, or left to the device (`Planner.fitting`)."""
        limit = self.memory_limit_bytes
        return None if limit is None or math.isinf(limit) else float(limit)

    @property
    def free_part(self) -> float:
        """The part of a device's memory that is left free."""
        return HEADROOM if self.headroom is None else self.headroom

    @property
    def limit_from(self) -> LimitFrom:
        """Where the limit is from, as a plan says it."""
        if self.memory_limit_bytes is None:
            return "none"
        return "lifted" if self.bytes_limit is None else "given"

    @property
    def preset(self) -> str | None:
        return self.solver if self.solver in PRESETS else None

    @property
    def exact_solver(self) -> str:
        """The solver of the request's problems; the dynamic program by default, and for a preset's."""
        return self.solver if self.solver in SOLVERS and self.solver != AUTO else "dp"

    @property
    def pinned(self) -> Mapping[str, Mapping[str, str]]:
        """The constraints, as a plan keeps them."""
        return {pattern: dict(placements) for pattern, placements in (self.constraints or {}).items()}
