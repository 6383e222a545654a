"""The first operator at which a program departs from the captured graph."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.graph import JointGraph, Node, references
from autopar.ir.layout import Layout, Shape, is_routed
from autopar.ir.program import Program
from autopar.ir.randomness import keys
from autopar.ops.lockstep import Values
from autopar.runtime.differences import largest_element
from autopar.runtime.simulate import GraphRun, assemble, given_to_ranks, run_ranks

from .steps import NEGLIGIBLE, relative_error


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """Where a step departs from eager: at an operator of the program, or in what was captured.

    `value` is the value of the graph that differs, `operator` what makes it and `module` the module that this belongs
    to. They are empty where every value of the program that can be put together is that of the captured graph: then the
    graph is not what the model does, or a lowering moved what differs; `what` says which."""

    what: str
    value: str = ""
    operator: str = ""
    module: str = ""
    error: float = math.inf

    def __str__(self) -> str:
        if not self.operator:
            return self.what
        return f"{self.operator} makes {self.value} in {self.module or 'no module'}: {self.what}"


@torch.no_grad()
def reference_values(
    graph: JointGraph,
    held: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    tangents: Mapping[str, torch.Tensor],
    seed: int,
) -> dict[str, Any]:
    """Every value of a graph, on global tensors in this process. Tangents that are not given are ones."""
    drawn = keys(torch.tensor(seed), sum(i.role == "seed" for i in graph.inputs))
    metas = {i.target: graph.metas[i.name] for i in graph.inputs if i.role == "tangent"}
    ones = {path: torch.ones(meta.shape, dtype=meta.dtype) for path, meta in metas.items()}
    return GraphRun(graph, held, inputs, drawn).backward({**ones, **tangents})


@torch.no_grad()
def first_difference(
    program: Program,
    layouts: Mapping[str, Layout],
    graph: JointGraph,
    held: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    tangents: Mapping[str, torch.Tensor],
    *,
    seed: int,
    tolerance: float,
) -> Departure | None:
    """The first value, in program order, that put together from all ranks is not the graph's own; None if all are."""
    expected = reference_values(graph, held, inputs, tangents, seed)
    nodes = {name: node for node in graph.nodes for name in node.outputs if name}

    def look(instruction: Node, ranks: Mapping[Shape, Values]) -> None:
        for name in instruction.outputs:
            if name in nodes and name in layouts and name not in program.uneven and not is_routed(layouts[name]):
                difference = _difference(program, name, layouts[name], nodes[name], expected, ranks, tolerance)
                if difference is not None:
                    raise _Stop(difference)

    try:
        run_ranks(program, given_to_ranks(program, held, inputs, tangents, seed), look)
    except _Stop as stop:
        return stop.difference
    return None


class _Stop(Exception):
    def __init__(self, difference: Departure) -> None:
        super().__init__(difference)
        self.difference = difference


def _difference(
    program: Program,
    name: str,
    layout: Layout,
    node: Node,
    expected: Mapping[str, Any],
    ranks: Mapping[Shape, Values],
    tolerance: float,
) -> Departure | None:
    reference = expected[name]
    shards = {coordinate: values[name] for coordinate, values in ranks.items()}
    local = tuple(next(iter(shards.values())).shape)
    if not isinstance(reference, torch.Tensor) or local != program.metas[name].shape:
        return None
    operands = (expected[name] for name in references((node.args, node.kwargs)))
    floor = NEGLIGIBLE * max((largest_element(x) for x in operands if isinstance(x, torch.Tensor)), default=0.0)
    try:
        assembled = assemble(shards, tuple(reference.shape), layout, program.mesh, math.inf, name)
    except (AssertionError, RuntimeError) as raised:
        return Departure(what=str(raised), value=name, operator=node.op, module=node.module)
    error = relative_error(assembled, reference, floor)
    if error <= tolerance:
        return None
    return Departure(
        what=f"differs by {error:.3g} of its largest element",
        value=name,
        operator=node.op,
        module=node.module,
        error=error,
    )
