"""Prints the value of each step for one tiny model, in the order of the flow; docs/guide.md comments on it.

python examples/walkthrough.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from autopar.cluster.library import named_cluster
from autopar.ir.layout import describe
from autopar.passes.blocks.partition import blocks
from autopar.passes.capture.trace import capture
from autopar.passes.codegen.program import codegen
from autopar.passes.segments.search import segments
from autopar.passes.space.choices import SiteChoice
from autopar.passes.space.layers import strategies
from autopar.passes.space.problem import ProblemBuilder
from autopar.planning.account import account
from autopar.planning.options import joint, unique_sites
from autopar.runtime.simulate import simulate_step
from autopar.solve.solvers import solve


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(F.relu(self.up(x)))
        return x + down


class Tiny(nn.Module):
    """Four layers of one kind; the batch is small and the weights are large, so that splitting weights pays."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(4))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


def main() -> None:
    torch.manual_seed(0)
    model = Tiny()
    batch = {"x": torch.randn(8, 512), "target": torch.randn(8, 512)}
    mesh = {"tp": 2}

    captured = capture(model, kwargs=batch)
    graph = captured.graph
    show("1. the joint graph (autopar/ir/graph.py), made by passes/capture/trace.py", str(graph))

    show("2. blocks (passes/blocks/partition.py)", str(blocks(graph, ranks=2)))

    repeated = segments(graph)
    show("3. segments (passes/segments/search.py)", str(repeated))

    space = strategies(graph, mesh, named_cluster("local"), repeated)
    body = space.bodies[0]
    lines = [f"{len(body.sites)} sites in a copy of {body.name}, {len(space.rest.sites)} in the rest"]
    product = next(site for site in body.sites.values() if site.rule is not None and site.rule.contraction)
    assert product.rule is not None
    lines.append(f"{product.name} ({product.module}), factors {[factor.size for factor in product.rule.factors]}:")
    for choice in product.choices[2]:
        option = space.option(product, SiteChoice((choice,)))
        if option is not None:
            reads = ", ".join(describe(layout) for layout in option.reads)
            made = ", ".join(describe(layout) for layout in option.makes)
            lines.append(f"  {choice!s:8} reads {reads}, makes {made}, {option.seconds * 1e6:.1f} us")
    show("4. the space: sites and their options (passes/space/)", "\n".join(lines))

    allowed = {name: joint(site, [site.choices[2]], None) for name, site in unique_sites(space).items()}
    problem, decoder = ProblemBuilder(space).build(allowed)
    show("5. the problem (autopar/solve/problem.py), made by passes/space/problem.py", str(problem))

    solution = solve(problem, "dp")
    assignment = decoder.decode(solution.choice)
    lines = [f"{solution.score.seconds * 1e3:.3f} ms, lower bound {solution.lower_bound * 1e3:.3f} ms; the first copy:"]
    lines += [f"  {name}: {choice}" for name, choice in assignment.copies[0][0].items()]
    show("6. the choice (autopar/solve), decoded", "\n".join(lines))

    costs = account(space, assignment)
    lines = [f"{c.count} x {c.kind} on {c.axis}: {c.bytes} bytes, {c.seconds * 1e6:.1f} us" for c in costs.collectives]
    show("7. the account (autopar/planning/account.py)", "\n".join([f"{costs.seconds * 1e3:.3f} ms", *lines]))

    program = codegen(space, assignment)
    show("8. the program (autopar/ir/program.py), made by passes/codegen/program.py", str(program))

    simulated = simulate_step(program, dict(model.named_parameters()), captured.bind(kwargs=batch))
    loss = model(**batch)
    loss.backward()
    largest = max(
        float((simulated.gradients[name] - p.grad).norm() / p.grad.norm())
        for name, p in model.named_parameters()
        if p.grad is not None
    )
    losses = f"loss {float(simulated.outputs['output']):.6f}, eager {loss.item():.6f}"
    show("9. two simulated ranks run it (runtime/simulate.py)", f"{losses}; gradients differ by {largest:.1e} at most")


def show(title: str, text: str, most: int = 40) -> None:
    lines = text.splitlines()
    print(f"\n== {title}\n")
    print("\n".join(lines[:most]))
    if len(lines) > most:
        print(f"... {len(lines) - most} more lines")


if __name__ == "__main__":
    main()
