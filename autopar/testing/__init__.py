"""Try a model on simulated ranks, in this process, before there is a cluster.

    from autopar.testing import check

    result = check(model, {"dp": 2, "tp": 2}, args, kwargs, plans=20, steps=3)
    print(result)
    assert result.equal

Every number is computed: each rank of the mesh runs the program that it would run on a device, collectives and all, in
lock step with the others. The reference is eager PyTorch on a copy of the model, whose own Python runs every step.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.planning.checks import check_mesh
from autopar.planning.request import AUTO, Recompute
from autopar.planning.request import check as check_option
from autopar.planning.texts import mesh_words
from autopar.report.document import Document
from autopar.report.sections import Grid, Lines, Section

from .locate import Departure
from .plans import random_assignment
from .steps import KINDS, relative_error
from .trial import EagerTrial, PlanRow

RANDOM_DRAWS = 5
"""Seeds that are tried for a random plan before it is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check(Document):
    """The result of `check`, a row for each plan. Prints as a table."""

    mesh: Mapping[str, int]
    steps: int
    tolerance: float
    rows: tuple[PlanRow, ...]

    @property
    def equal(self) -> bool:
        """Whether every plan is equal to eager, to within the tolerance."""
        return all(row.equal for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "mesh": dict(self.mesh),
            "steps": self.steps,
            "tolerance": self.tolerance,
            "equal": self.equal,
            "rows": [
                {
                    "plan": row.plan,
                    "equal": row.equal,
                    "errors": {kind: error if math.isfinite(error) else None for kind, error in row.errors.items()},
                    "worst": dict(row.worst),
                    "step": row.step,
                    "first": None if row.first is None else str(row.first),
                    "failure": row.failure,
                }
                for row in self.rows
            ],
        }

    def sections(self) -> Iterator[Section]:
        """The table, and below it what differs."""
        kinds = [kind for kind in KINDS if any(kind in row.errors for row in self.rows)]
        rows = [
            (
                row.plan,
                *(f"{row.errors[kind]:.1e}" if kind in row.errors else "-" for kind in kinds),
                "equal" if row.equal else "differs" if not row.failure else "failed",
            )
            for row in self.rows
        ]
        steps, mesh = f"{self.steps} step{'s' * (self.steps > 1)}", mesh_words(self.mesh, " x ")
        heading = f"{steps} on {mesh}, largest relative errors beside eager"
        told = []
        for row in self.rows:
            if row.failure:
                told.append(f"{row.plan}: {row.failure}")
            if not row.equal and row.step is not None:
                wrong = [f"{kind} {row.worst[kind]}" for kind in kinds if not row.errors.get(kind, 0) <= row.tolerance]
                told.append(f"{row.plan}, step {row.step + 1}: {', '.join(wrong)}")
            if row.first is not None:
                told.append(f"{row.plan}: first {row.first}")
        title = Lines([f"{heading} (equal up to {self.tolerance:g}):"], indent=0)
        yield Section("", [title, Grid(("plan", *kinds, ""), rows), Lines(told, indent=0)])


def check(
    model: nn.Module,
    mesh_shape: Mapping[str, int],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    solver: str = AUTO,
    plans: int = 0,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float64,
    steps: int = 1,
    recompute: Recompute = "auto",
) -> Check:
    """Run the plan of a solver or preset, and `plans` random ones, on simulated ranks, and compare with eager.

    `mesh_shape` maps axis names to sizes for the `model`; `args` and `kwargs` are the global inputs, the same in every
    step; `loss_fn`, `solver` and `recompute` are those of `autopar.plan`. After `steps` steps of SGD each plan has a
    row with the largest relative error of the loss, the outputs, the gradients, the buffers and the parameters, and, if
    it differs, with the first operator that does and its module. Model and inputs are taken to `dtype` (None: as they
    are), so that arithmetic is compared and not rounding; what counts as equal depends on the narrowest dtype that the
    model computes in (`Check.tolerance`). Random operators take, in eager too, the numbers that the program draws (from
    `seed`), so that dropout can be compared.

    The model is copied, and neither it nor the states of torch's, Python's and numpy's generators change. (What a
    function closes over cannot be copied: a `loss_fn` that is a module or a method of one is, a lambda's is not.)

    Raises ValueError for what is refused. A plan that fails in another way has that in its row.
    """
    check_mesh(mesh_shape)
    check_option("solver", solver)
    if not isinstance(plans, int) or isinstance(plans, bool) or plans < 0:
        raise ValueError(f"plans is {plans!r}: give the number of random plans, 0 or more")
    trial = EagerTrial(model, args, kwargs, loss_fn=loss_fn, seed=seed, dtype=dtype, steps=steps, recompute=recompute)
    rows = [trial.of_solver(mesh_shape, solver)]
    for number in range(plans):
        rows.append(_random(trial, mesh_shape, seed + RANDOM_DRAWS * number))
    return Check(mesh=dict(mesh_shape), steps=steps, tolerance=trial.tolerance, rows=tuple(rows))


def _random(trial: EagerTrial, mesh_shape: Mapping[str, int], seed: int) -> PlanRow:
    """The first feasible random plan of a few seeds. Raises ValueError where there is none."""
    for number in range(seed, seed + RANDOM_DRAWS - 1):
        try:
            return trial.of_random(mesh_shape, number)
        except ValueError:
            continue
    return trial.of_random(mesh_shape, seed + RANDOM_DRAWS - 1)


__all__ = ["Check", "Departure", "EagerTrial", "PlanRow", "check", "random_assignment", "relative_error"]
