"""The program of one rank as two Python functions.

The source is straight-line code: one call an instruction, each value deleted right after its last
use, so that what is alive is what the program says is alive and nothing is looked up at run time.
"""

import builtins
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost.lifetimes import Line, lifetimes
from autopar.ir.graph import WAIT, Node, Ref, parameters, schema
from autopar.ir.program import Program, RankIndex, names_no_device
from autopar.ops.contract import needed_by
from autopar.ops.kernels import function_of
from autopar.ops.strides import Preparation, contiguous

from .collectives import COLLECTIVES, all_reduce_in_place, wait


@dataclass(frozen=True, kw_only=True)
class Executable:
    """`forward` and `backward` empty the list that they are given, so that the caller keeps nothing alive.

    forward([the inputs that are not tangents, in the program's order])
        -> (values of the outputs of role output and mutation, values of `program.saved`)
    backward([values of `program.saved`, then tangents]) -> gradients in the program's order, None where there is none
    """

    program: Program
    coordinate: tuple[int, ...]
    source: str = field(repr=False)
    forward: Callable[[list[torch.Tensor]], tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor, ...]]]
    backward: Callable[[list[torch.Tensor]], tuple[torch.Tensor | None, ...]]


Half = Callable[[list[torch.Tensor]], Any]
"""A function of the source: `forward` or `backward`."""

Groups = Sequence[dist.ProcessGroup | None]
Around = Callable[[Half, Program, Groups, Mapping[int, Node]], Half]
"""What stands around each function of the source, given the instruction on each of its lines."""


def process_groups(mesh: DeviceMesh) -> tuple[dist.ProcessGroup | None, ...]:
    """The group of each mesh axis that this rank belongs to, None for an axis of size 1."""
    return tuple(mesh.get_group(axis) if size > 1 else None for axis, size in enumerate(mesh.shape))


def _bare(half: Half, program: Program, groups: Groups, lines: Mapping[int, Node]) -> Half:
    return half


def compile(
    program: Program,
    process_groups: Groups,
    *,
    device: torch.device | None = None,
    around: Around = _bare,
    writer: "Callable[..., SourceWriter] | None" = None,
) -> Executable:
    """Compile `program` for this rank of the mesh.

    `process_groups` holds the group of each mesh axis that this rank belongs to, None for an axis of
    size 1. `device` replaces the devices that factory functions of the program name: a model
    captured on one device runs on another. `around` is what says where an error comes from (`failures.located`).
    `writer` writes the source.
    """
    coordinate = []
    for axis, size, group in zip(program.axes, program.mesh, process_groups, strict=True):
        ranks = 1 if group is None else group.size()
        if ranks != size:
            raise ValueError(f"the program wants {size} ranks on mesh axis {axis!r}; its process group has {ranks}")
        coordinate.append(0 if group is None else dist.get_rank(group))
    return (writer or SourceWriter)(program, tuple(coordinate), tuple(process_groups), device, around).executable()


class SourceWriter:
    """Writes the source; `bound` are the objects that it refers to by name."""

    def __init__(
        self,
        program: Program,
        coordinate: tuple[int, ...],
        groups: tuple[dist.ProcessGroup | None, ...],
        device: torch.device | None,
        around: Around = _bare,
    ) -> None:
        self.program, self.coordinate, self.groups, self.device = program, coordinate, groups, device
        self.around = around
        self.index = cache(lambda index: index.at(coordinate))
        self.bound: dict[str, Any] = {}
        self.lines: dict[int, Node] = {}
        """Number of a line of the source -> the instruction on it."""

    def source(self) -> str:
        """The source of `forward` and `backward`."""
        program = self.program
        given = [i.name for i in program.given]
        results = [o.name for o in program.results]
        gradients = [o.name for o in program.gradients]
        lines = self.function("forward", given, program.forward, (*results, *program.saved), 1)
        lines.append(f"    return {self.tuple(results)}, {self.tuple(program.saved)}")
        lines.append("")
        saved = [*program.saved, *(i.name for i in program.tangents)]
        lines += self.function("backward", saved, program.backward, gradients, len(lines) + 1)
        lines.append(f"    return {self.tuple(gradients)}")
        return "\n".join(lines) + "\n"

    def executable(self) -> Executable:
        source = self.source()
        functions = self.functions(source)
        without_autograd = torch.no_grad()
        return Executable(
            program=self.program,
            coordinate=self.coordinate,
            source=source,
            forward=without_autograd(functions["forward"]),
            backward=without_autograd(functions["backward"]),
        )

    def functions(self, source: str) -> dict[str, Half]:
        """`forward` and `backward` of a source."""
        scope = {**self.bound}
        exec(builtins.compile(source, f"<program {self.program.digest}>", "exec"), scope)
        halves = ("forward", "backward")
        return {name: self.around(scope[name], self.program, self.groups, self.lines) for name in halves}

    def function(
        self, name: str, arguments: list[str], instructions: tuple[Node, ...], results: Iterable[str | None], first: int
    ) -> list[str]:
        """The lines of a function up to its return, of which the first is line `first` of the source."""
        unused, steps = lifetimes(arguments, instructions, results)
        lines = [f"def {name}(arguments):"]
        if arguments:
            lines.append(f"    [{', '.join(map(self.local, arguments))}] = arguments")
            lines.append("    arguments.clear()")
        if unused:
            lines.append(f"    del {', '.join(map(self.local, unused))}")
        for step in steps:
            number = first + len(lines)
            self.lines[number] = step.instruction
            lines.append(f"    {self.statement(number, step)}")
            dead = [self.local(name) for name in step.dead]
            dead += ["_"] if "" in step.instruction.outputs else []
            if dead:
                lines.append(f"    del {', '.join(dead)}")
        return lines

    def statement(self, number: int, line: Line) -> str:
        """An instruction, on that line of the source."""
        return self.call(line.instruction, line.in_place)

    def call(self, instruction: Node, in_place: bool) -> str:
        outputs = ", ".join(self.local(name) if name else "_" for name in instruction.outputs)
        if len(instruction.outputs) == 1 and _returns_tuple(instruction.op):
            outputs = f"[{outputs}]"
        return f"{outputs} = {self.expression(instruction, in_place)}"

    def expression(self, instruction: Node, in_place: bool) -> str:
        op = instruction.op
        if op == WAIT:
            return f"{self.bind('wait', wait)}({self.value(instruction.args[0])})"
        if kind := instruction.collective:
            return self.collective(kind, instruction, in_place)
        needs, names = needed_by(op), [parameter.name for parameter in parameters(op)]

        def value(name: str, argument: Any) -> str:
            return self.given(needs[name], argument) if name in needs else self.value(argument)

        values = [value(*pair) for pair in zip(names, instruction.args, strict=False)]
        values += [f"{key}={value(key, argument)}" for key, argument in instruction.kwargs]
        if self.device is not None and names_no_device(instruction):
            values.append(f"device={self.value(self.device)}")
        function = self.bind(op.replace(".", "_"), function_of(op))
        return f"{function}({', '.join(values)})"

    def collective(self, kind: str, instruction: Node, in_place: bool) -> str:
        x, axis = self.given(contiguous, instruction.args[0]), instruction.args[-1]
        assert self.groups[axis] is not None, f"{instruction} on mesh axis {self.program.axes[axis]!r} of size 1"
        group = self.bind(f"{self.program.axes[axis]}_group", self.groups[axis])
        function = all_reduce_in_place if kind == "all_reduce" and in_place else COLLECTIVES[kind]
        arguments = ", ".join([x, *map(self.value, instruction.args[1:-1]), group])
        return f"{self.bind(function.__name__, function)}({arguments})"

    def given(self, make: Preparation, value: Any) -> str:
        """Source of an argument whose strides matter to the kernel."""
        if isinstance(value, tuple | list):
            return "[" + ", ".join(self.given(make, item) for item in value) + "]"
        source = self.value(value)
        return f"{self.bind(make.__name__, make)}({source})" if isinstance(value, Ref) else source

    def value(self, value: Any) -> str:
        """Source of an argument. What is not a plain literal is bound to a name."""
        if isinstance(value, Ref):
            return self.local(value.name)
        if isinstance(value, RankIndex):
            value = self.index(value)
        if isinstance(value, tuple | list):
            return "[" + ", ".join(map(self.value, value)) + "]"
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        if isinstance(value, float):
            return f"float({str(value)!r})"
        if isinstance(value, torch.device) and self.device is not None:
            value = self.device
        said = str(value).replace("-", "m")  # 1-2j is not 1+2j
        return self.bind("constant_" + "".join(c if c.isalnum() else "_" for c in said), value)

    def bind(self, name: str, value: Any) -> str:
        bound = self.bound.setdefault(name, value)
        assert repr(bound) == repr(value), name
        return name

    def local(self, name: str) -> str:
        """The Python variable of a value; the prefix keeps it apart from keywords and from what is bound."""
        assert name.isidentifier(), name
        return f"v_{name}"

    def tuple(self, names: Iterable[str | None]) -> str:
        return "(" + "".join(f"{'None' if n is None else self.local(n)}, " for n in names) + ")"


def _returns_tuple(op: str) -> bool:
    """Whether the op returns a sequence even if the program names only one output of it."""
    if op.startswith("collective."):
        return False
    returns = schema(op).returns
    return len(returns) > 1 or (len(returns) == 1 and str(returns[0].type) == "List[Tensor]")
