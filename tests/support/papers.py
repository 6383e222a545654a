"""The transformer layer of the papers, and the collectives of its program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.program import Program
from autopar.passes.codegen.program import codegen
from autopar.planning.constraints import Constraints
from autopar.planning.planner import Planner


class Layer(nn.Module):
    """Four products with weights: q, k and v in one (their parts side by side for each head), attention's output,
    and the two of the MLP. Norms without weights: the papers count matrices."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)
        self.fc1 = nn.Linear(hidden, 4 * hidden, bias=False)
        self.fc2 = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, self.heads, 3, hidden // self.heads).unbind(3)
        attended = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


Collectives = Counter[tuple[str, str, str, int]]
"""(phase, kind, mesh axis, bytes of the larger of what goes in and comes out) -> how many."""


def collectives(program: Program) -> Collectives:
    found: Collectives = Counter()
    for phase, instructions in (("forward", program.forward), ("backward", program.backward)):
        for instruction in instructions:
            if kind := instruction.collective:
                size = max(program.metas[name].bytes for name in (*instruction.inputs, *instruction.outputs))
                found[phase, kind, program.axes[instruction.args[-1]], size] += 1
    return found


def planned(
    model: nn.Module, x: torch.Tensor, mesh: Mapping[str, int], preset: str, cluster: str
) -> tuple[Planner, Program]:
    """A model's program under a preset."""
    planner = Planner(model, mesh, (x,), cluster=cluster)
    plan = planner.plan(solver=preset)
    return planner, codegen(planner.space, planner.assignment(plan))


@cache
def layers(count: int, batch: int, length: int, hidden: int, heads: int) -> Planner:
    """So many layers in bfloat16, captured once."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(hidden, heads) for _ in range(count))).to(torch.bfloat16)
        x = torch.zeros(batch, length, hidden, dtype=torch.bfloat16)
    return Planner(model, {"a": 1}, (x,))


def of_one_layer(
    mesh: Mapping[str, int],
    preset: str,
    *,
    batch: int,
    length: int,
    hidden: int,
    heads: int,
    constraints: Constraints | None = None,
    cluster: str = "dgx-a100",
) -> Collectives:
    """What the program of four layers has more than that of three, in bfloat16."""
    found = []
    for count in (3, 4):
        planner = layers(count, batch, length, hidden, heads).on(mesh, cluster)
        plan = planner.plan(solver=preset, constraints=constraints)
        found.append(collectives(codegen(planner.space, planner.assignment(plan))))
    less, more = found
    more.subtract(less)
    assert all(count >= 0 for count in more.values()), "the layers of the two are not the same"
    return +more
