"""Runs all ranks of a mesh in one process: every instruction runs for each rank before the next begins, so
that a collective sees the operands of all ranks of its group. The numbers are right, the timing says nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.ir.graph import WAIT, Node, Ref, parameters
from autopar.ir.layout import Shape
from autopar.ir.program import RankIndex, names_no_device

from . import contract
from . import registry as registry  # all rows, and those of users
from .kernels import kernel_of
from .prepared import laid_out
from .strides import Preparation, contiguous

Values = dict[str, Any]


Read = Callable[[Shape, Values], Any]
"""What the rank of a coordinate, which holds these values, gives an operator for an argument."""


def run(instruction: Node, mesh: Shape, ranks: Mapping[Shape, Values]) -> None:
    """Run one instruction on every rank. `ranks` holds each rank's values by name, and receives the results."""
    if kind := instruction.collective:
        _collective(kind, instruction, mesh, ranks)
    elif instruction.op == WAIT:
        for values in ranks.values():
            values[instruction.outputs[0]] = values[instruction.args[0].name]
    else:
        _local(instruction, ranks)


def _local(instruction: Node, ranks: Mapping[Shape, Values]) -> None:
    """An operator on every rank. What does not differ by rank is looked up once."""
    op, needs = kernel_of(instruction.op), contract.needed_by(instruction.op)
    names = [parameter.name for parameter in parameters(instruction.op)[: len(instruction.args)]]
    reads = [_read(argument, needs.get(name)) for name, argument in zip(names, instruction.args, strict=True)]
    named_reads = {key: _read(argument, needs.get(key)) for key, argument in instruction.kwargs}
    if names_no_device(instruction):
        named_reads["device"] = _device
    for coordinate, values in ranks.items():
        arguments = [read(coordinate, values) for read in reads]
        named = {key: read(coordinate, values) for key, read in named_reads.items()}
        result = op(*arguments, **named)
        results = result if isinstance(result, tuple | list) else (result,)
        for name, tensor in zip(instruction.outputs, results, strict=True):
            if name:
                values[name] = tensor


def _read(argument: Any, make: Preparation | None) -> Read:
    """How ranks read an argument, which `make` lays out for the kernel."""
    if isinstance(argument, Ref):
        name = argument.name
        if make is None:
            return lambda coordinate, values: values[name]
        return lambda coordinate, values: laid_out(make, values[name])
    if isinstance(argument, RankIndex):
        return lambda coordinate, values: argument.at(coordinate)
    if isinstance(argument, tuple | list):
        reads = [_read(item, make) for item in argument]
        return lambda coordinate, values: [read(coordinate, values) for read in reads]
    return lambda coordinate, values: argument


def _device(_: Shape, values: Values) -> torch.device | None:
    """Where a rank's tensors are."""
    return next((value.device for value in values.values() if isinstance(value, torch.Tensor)), None)


def _collective(kind: str, instruction: Node, mesh: Shape, ranks: Mapping[Shape, Values]) -> None:
    axis = instruction.args[-1]
    source, target = instruction.args[0].name, instruction.outputs[0]
    groups: dict[Shape, list[Values]] = {}
    for coordinate in sorted(ranks):
        groups.setdefault((*coordinate[:axis], *coordinate[axis + 1 :]), []).append(ranks[coordinate])
    n = mesh[axis]
    for others, group in groups.items():
        given: list[Any] = [contiguous(values[source]) for values in group]
        assert len(given) == n > 1, f"{instruction}: mesh axis {axis} has {len(given)} ranks"
        if kind in ("reduce_scatter", "all_to_all"):
            assert given[0].shape[0] % n == 0, f"{instruction}: {tuple(given[0].shape)} has no {n} equal chunks"
        if kind == "all_reduce":
            combined = _reduce(given, instruction.args[1])
            received = [combined.clone() for _ in group]
        elif kind == "all_gather":
            combined = torch.cat(given)
            received = [combined.clone() for _ in group]
        elif kind == "reduce_scatter":
            received = [chunk.clone() for chunk in _reduce(given, instruction.args[1]).chunk(n)]
        elif kind == "shift":
            sources = [i - instruction.args[1] for i in range(n)]
            received = [given[i].clone() if 0 <= i < n else torch.zeros_like(given[0]) for i in sources]
        elif kind == "rotate":
            turn = instruction.args[1]
            if isinstance(turn, RankIndex):
                assert all(term != axis for term, _ in turn.terms), f"{instruction}: the offset differs within a group"
                turn = turn.at((*others[:axis], 0, *others[axis:]))
            received = [given[(i - turn) % n].clone() for i in range(n)]
        elif kind == "broadcast":
            received = [given[instruction.args[1]].clone() for _ in group]
        elif kind == "reduce":
            combined, root = _reduce(given, instruction.args[1]), instruction.args[2]
            received = [combined.clone() if i == root else torch.zeros_like(combined) for i in range(n)]
        elif kind == "exchange":
            sizes = [values[instruction.args[1].name].tolist() for values in group]
            parts = [x.split(put) for x, (put, _) in zip(given, sizes, strict=True)]
            for i, (_, got) in enumerate(sizes):
                assert got == [sizes[j][0][i] for j in range(n)], f"{instruction}: the ranks' sizes contradict"
            received = [torch.cat([parts[j][i] for j in range(n)]) for i in range(n)]
        else:
            chunks = [x.chunk(n) for x in given]
            received = [torch.cat([chunks[j][i] for j in range(n)]) for i in range(n)]
        for values, x in zip(group, received, strict=True):
            values[target] = x


def _reduce(given: list[torch.Tensor], reduction: str) -> torch.Tensor:
    combiners: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    combine = combiners[reduction]
    result = given[0]
    for x in given[1:]:
        result = combine(result, x)
    return result
