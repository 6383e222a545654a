"""Prints what the kernel makes of an MLP, step by step, and then of a large batch; docs/kernel.md comments on it.

python examples/kernel.py
"""

from __future__ import annotations

from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn

from autopar import kernel
from autopar.cluster.machine import Cluster, Device, Level
from autopar.ir.layout import describe
from autopar.passes.space.problem import ProblemBuilder
from autopar.runtime.execute import SourceWriter


class MLP(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(F.relu(self.up(x))), target)


CLUSTER = Cluster(
    name="two",
    device=Device(name="one", flops_per_second={"float32": 1e12}, memory_bytes_per_second=5e10, seconds_per_op=2e-6),
    levels=(Level(name="bus", size=2, bytes_per_second=1e10, group_bytes_per_second=1e10, latency_seconds=2e-6),),
)


def main() -> None:
    graph, _ = kernel.trace(MLP(), torch.randn(8, 256), torch.randn(8, 256))
    show("1. the graph", str(graph))

    space = kernel.space_of(graph, {"tp": 2}, CLUSTER)
    lines = []
    for site in space.rest.sites.values():
        lines.append(f"{site.name}:")
        for choice in site.choices[2]:
            option = space.option(site, space.replicated(site).on(0, choice))
            if option is not None:
                reads, made = ([describe(layout) for layout in layouts] for layouts in (option.reads, option.makes))
                lines.append(f"  {choice!s:8} {', '.join(reads) or '-'} -> {', '.join(made) or '-'}")
    show("2. the space: what each site reads and makes, by choice", "\n".join(lines))

    every = {name: [space.replicated(s).on(0, c) for c in s.choices[2]] for name, s in space.rest.sites.items()}
    problem, _ = ProblemBuilder(space).build(every)
    show("3. the problem", str(problem))

    assignment = kernel.search(space)
    show("4. the assignment", "\n".join(f"{name}: {choice}" for name, choice in assignment.rest.items()))

    program = kernel.codegen(space, assignment)
    show("5. the program", str(program))

    group = object()  # what a rank has there: the group of its axis
    show("6. the source of rank 0", SourceWriter(program, (0,), (group,), None).source())  # type: ignore[arg-type]

    import_module("autopar.ops.table")  # the rows of the other operators, the loss's among them
    graph, _ = kernel.trace(MLP(), torch.randn(8192, 256), torch.randn(8192, 256))
    space = kernel.space_of(graph, {"tp": 2}, CLUSTER)
    show("7. the program of a large batch", str(kernel.codegen(space, kernel.search(space))))


def show(title: str, text: str) -> None:
    print(f"\n== {title}\n\n{text.rstrip()}")


if __name__ == "__main__":
    main()
