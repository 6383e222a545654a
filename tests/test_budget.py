"""Every solve ends: where a budget is spent, the next and cheaper way answers, and the bound stays honest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.planner import Planner
from autopar.solve import elimination, ilp, relax
from autopar.solve.budget import Budget


def planner() -> Planner:
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 7), nn.Tanh())
    return Planner(model, {"a": 2, "b": 2}, (torch.randn(6, 6),), loss_fn=torch.sum)


SPENT = {
    "elimination": Budget(elimination_entries=1),
    "message passing too": Budget(elimination_entries=1, message_entries=0),
    "the integer program too": Budget(elimination_entries=1, message_entries=0, program_columns=0),
    "its nodes": Budget(elimination_entries=1, message_entries=0, program_work=0, program_iterations=1),
}


@pytest.mark.parametrize("spent", SPENT)
@pytest.mark.parametrize("solver", ["dp", "ilp"])
def test_a_spent_budget_still_gives_a_plan(spent: str, solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    best = planner().plan(cost="serial")
    for module in (elimination, relax, ilp):
        monkeypatch.setattr(module, "BUDGET", SPENT[spent])
    short = planner()
    plan = short.plan(cost="serial", solver=solver)
    assert plan.lower_bound_seconds <= best.objective_seconds <= plan.objective_seconds * (1 + 1e-9)
    assert short.plan(cost="serial", solver=solver).digest == plan.digest
    assert short.program(plan).forward
