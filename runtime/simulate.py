"""A program on all ranks of a mesh in one process, in lock step, and a graph on global tensors."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.ir.graph import JointGraph, Node
from autopar.ir.layout import Layout, Replicate, Shape
from autopar.ir.program import Program
from autopar.ir.randomness import keys
from autopar.ir.unsharded import unshard
from autopar.ops import lockstep
from autopar.ops.lockstep import Values
from autopar.passes.lower.stretches import Stretch

from .differences import largest_element, relative_error
from .placements import local_slice

RanksRunner = Callable[[Program, Mapping[Shape, Values]], dict[Shape, Values]]
"""Runs forward and backward on what each rank is given, as `run_ranks` does."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Global tensors, by target. A gradient that the graph does not have is absent."""

    outputs: dict[str, torch.Tensor]
    mutations: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def coordinates(mesh: Shape) -> list[Shape]:
    """Every rank's coordinate, row-major."""
    return list(itertools.product(*map(range, mesh)))


class GraphRun:
    """A step of a graph on global tensors in this process: its forward, and its backward from any tangents. What is
    `held`, `inputs` and tangents are by target, and `drawn` are the keys of random operators; values are by name."""

    def __init__(
        self,
        graph: JointGraph,
        held: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        drawn: Sequence[torch.Tensor],
    ) -> None:
        self.graph = graph
        self.forward: Values = {}
        for i in graph.inputs:
            if i.role == "seed":
                self.forward[i.name] = drawn[int(i.target)]
            elif i.role != "tangent":
                self.forward[i.name] = (inputs if i.role == "input" else held)[i.target].detach()
        self._run(self.forward, backward=False)

    def backward(self, tangents: Mapping[str, torch.Tensor]) -> Values:
        """The values of forward and backward."""
        given = {i.name: tangents[i.target] for i in self.graph.inputs if i.role == "tangent"}
        values = {**self.forward, **given}
        self._run(values, backward=True)
        return values

    @torch.no_grad()
    def _run(self, values: Values, *, backward: bool) -> None:
        for node in self.graph.nodes:
            if node.backward == backward:
                lockstep.run(node, (), {(): values})


@torch.no_grad()
def simulate_step(
    program: Program,
    parameters: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    tangents: Mapping[str, torch.Tensor] | None = None,
    *,
    seed: int = 0,
    tolerance: float = 1e-6,
    least: float = 0.0,
    run: RanksRunner | None = None,
) -> Simulated:
    """Forward and backward on global tensors, given by target.

    `parameters` holds parameters and buffers, `inputs` the model's inputs, `tangents` the gradients
    of the outputs (absent: ones); `seed` is that of the step's random numbers. Each is cut by its
    layout, and the results are put together by theirs. AssertionError if replicas differ by more than
    `tolerance` relative to their largest element, which counts as `least` at least. `run` stands for `run_ranks`.
    """
    given = given_to_ranks(program, parameters, inputs, tangents, seed)
    values_of_ranks = (run or run_ranks)(program, given)
    results: dict[str, dict[str, torch.Tensor]] = {"output": {}, "mutation": {}, "gradient": {}, "update": {}}
    for o in program.outputs:
        if o.name is not None and o.meta is not None:
            shards = {coordinate: values[o.name] for coordinate, values in values_of_ranks.items()}
            what = f"{o.role} {o.target}"
            results[o.role][o.target] = assemble(shards, o.meta.shape, o.layout, program.mesh, tolerance, what, least)
    written = results["mutation"] | results["update"]
    return Simulated(outputs=results["output"], mutations=written, gradients=results["gradient"])


def given_to_ranks(
    program: Program,
    parameters: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    tangents: Mapping[str, torch.Tensor] | None,
    seed: int,
) -> dict[Shape, Values]:
    """The inputs of each rank, cut from global tensors as `simulate_step` takes them."""
    given: dict[Shape, Values] = {coordinate: {} for coordinate in coordinates(program.mesh)}
    drawn = keys(torch.tensor(seed), sum(i.role == "seed" for i in program.inputs))
    for i in program.inputs:
        if i.role == "seed":
            value = drawn[int(i.target)]
        elif i.role == "tangent":
            value = (tangents or {}).get(i.target, torch.ones(i.meta.shape, dtype=i.meta.dtype))
        else:
            value = (inputs if i.role == "input" else parameters)[i.target]
        assert tuple(value.shape) == i.meta.shape, f"{i.target}: {tuple(value.shape)}, expected {i.meta}"
        for coordinate, values in given.items():
            values[i.name] = local_slice(value.detach(), i.layout, program.mesh, coordinate)
    return given


def run_ranks(
    program: Program,
    inputs: Mapping[Shape, Values],
    after: Callable[[Node, Mapping[Shape, Values]], None] | None = None,
) -> dict[Shape, Values]:
    """Run forward and backward on what each rank is given, by coordinate and by value name. `after` is called with
    every instruction that ran and what the ranks then hold.

    Returns the named outputs of each rank. Checks on the way that every value has the local shape
    and dtype that `program.metas` says.
    """
    outputs = {o.name for o in program.outputs if o.name is not None}
    last = {name: position for position, node in enumerate(program.nodes) for name in node.inputs}
    ranks = {coordinate: dict(values) for coordinate, values in inputs.items()}
    for i, instruction in enumerate(program.nodes):
        try:
            lockstep.run(instruction, program.mesh, ranks)
        except Exception as error:
            served, module = instruction.serves or "no node", instruction.module or "no module"
            error.add_note(f"in {instruction.op} for {served} of {module}")
            raise
        if after is not None:
            after(instruction, ranks)
        check_outputs(program, instruction, ranks)
        for name in instruction.inputs:
            if last[name] == i and name not in outputs:
                for values in ranks.values():
                    values.pop(name, None)
    return {coordinate: {name: values[name] for name in outputs} for coordinate, values in ranks.items()}


def assemble(
    shards: Mapping[Shape, torch.Tensor],
    shape: Shape,
    layout: Layout,
    mesh: Shape,
    tolerance: float,
    what: str,
    least: float = 0.0,
) -> torch.Tensor:
    """The global tensor from all ranks' values, after a check that replicas agree."""
    for coordinate, local in shards.items():
        source = tuple(0 if isinstance(p, Replicate) else c for p, c in zip(layout, coordinate, strict=True))
        replica = shards[source]
        if not torch.equal(local, replica):
            error, largest = relative_error(local, replica, least), max(largest_element(replica.double()), least)
            assert error <= tolerance, (
                f"{what}: replicas at {coordinate} and {source} differ by {error * largest:.3g} (largest {largest:.3g})"
            )
    return unshard(dict(shards), shape, layout, mesh)


def check_outputs(program: Program, instruction: Node | Stretch, ranks: Mapping[Shape, Values]) -> None:
    """AssertionError where what ran made something else than `program.metas` says."""
    for name in instruction.outputs:
        if not name or name in program.uneven:
            continue
        meta = program.metas[name]
        for coordinate, values in ranks.items():
            value = values[name]
            if isinstance(value, torch.Tensor):
                assert tuple(value.shape) == meta.shape and value.dtype == meta.dtype, (
                    f"{instruction}: at {coordinate} {name} is {value.dtype}{list(value.shape)}, "
                    f"the program says {meta}"
                )
