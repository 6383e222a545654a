"""The program of one rank as two Python functions.

The source is straight-line code: one call an instruction, each value deleted right after its last
use, so that what is alive is what the program says is alive and nothing is looked up at run time.
While a profiler is active, the same source runs with each call marked by its instruction's label, as in
simulated traces (`autopar.report.simulation`).
"""

import builtins
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from autopar.compat.tensors import is_profiling
from autopar.cost.lifetimes import lifetimes
from autopar.ir.graph import WAIT, Node, Ref, parameters, schema
from autopar.ir.program import Program, RankIndex, names_no_device
from autopar.ops.contract import needed_by
from autopar.ops.kernels import function_of
from autopar.ops.strides import Preparation, contiguous

from .collectives import COLLECTIVES, Pending, all_reduce_in_place, wait

MARK = "mark"
"""What a marked source calls `record_function`."""

WATCH = "watch"
"""What a watched source calls after each instruction."""

CLOCK = "clock"
"""What a clocked source calls in the place of `wait`."""

Source = Literal["plain", "marked", "watched", "clocked"]
Watcher = Callable[[Node, tuple[Any, ...]], None]

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Within it, programs that this thread runs call `watcher` after each instruction, with what it gave."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


class Clock(Protocol):
    """Takes the time of waits for collectives."""

    def begin(self) -> None: ...

    def end(self, kind: str, axis: str) -> None: ...


_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextmanager
def clocked_by(clock: Clock | None) -> Iterator[None]:
    """Within it, programs that this thread runs have this clock take the time of each wait."""
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)


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
    program: Program, process_groups: Groups, *, device: torch.device | None = None, around: Around = _bare
) -> Executable:
    """Compile `program` for this rank of the mesh.

    `process_groups` holds the group of each mesh axis that this rank belongs to, None for an axis of
    size 1. `device` replaces the devices that factory functions of the program name: a model
    captured on one device runs on another. `around` is what says where an error comes from (`agree.located`).
    """
    coordinate = []
    for axis, size, group in zip(program.axes, program.mesh, process_groups, strict=True):
        ranks = 1 if group is None else group.size()
        if ranks != size:
            raise ValueError(f"the program wants {size} ranks on mesh axis {axis!r}; its process group has {ranks}")
        coordinate.append(0 if group is None else dist.get_rank(group))
    return SourceWriter(program, tuple(coordinate), tuple(process_groups), device, around).executable()


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

    def source(self, style: Source = "plain") -> str:
        """The source of `forward` and `backward`."""
        program = self.program
        given = [i.name for i in program.inputs if i.role != "tangent"]
        results = [o.name for o in program.outputs if not o.backward]
        tangents = [i.name for i in program.inputs if i.role == "tangent"]
        gradients = [o.name for o in program.outputs if o.backward]
        lines = self.function("forward", given, program.forward, (*results, *program.saved), 1, style)
        lines.append(f"    return {self.tuple(results)}, {self.tuple(program.saved)}")
        lines.append("")
        saved = [*program.saved, *tangents]
        lines += self.function("backward", saved, program.backward, gradients, len(lines) + 1, style)
        lines.append(f"    return {self.tuple(gradients)}")
        return "\n".join(lines) + "\n"

    def executable(self) -> Executable:
        program = self.program

        def functions(source: str) -> dict[str, Half]:
            scope = {**self.bound, MARK: record_function, CLOCK: clocked}
            scope[WATCH] = lambda n, *values: watch(self.lines[n], values)
            exec(builtins.compile(source, f"<program {program.digest}>", "exec"), scope)
            return {
                name: self.around(scope[name], program, self.groups, self.lines) for name in ("forward", "backward")
            }

        def watch(instruction: Node, values: tuple[Any, ...]) -> None:
            watcher = _watcher.get()
            assert watcher is not None
            watcher(instruction, values)

        all_of = program.nodes
        begun = {name: node for node in all_of if node.collective for name in node.outputs}

        def clocked(line: int, pending: Pending) -> torch.Tensor:
            clock = _clock.get()
            assert clock is not None
            of = begun[self.lines[line].args[0].name]
            clock.begin()
            result = wait(pending)
            clock.end(str(of.collective), program.axes[of.args[-1]])
            return result

        source = self.source()
        plain = functions(source)
        others = cache(lambda style: functions(self.source(style)))
        without_autograd = torch.no_grad()

        def runs(name: str) -> Half:
            function = plain[name]

            def run(arguments: list[torch.Tensor]) -> Any:
                if _watcher.get() is not None:
                    return others("watched")[name](arguments)
                if is_profiling():
                    return others("marked")[name](arguments)
                return function(arguments) if _clock.get() is None else others("clocked")[name](arguments)

            return without_autograd(run)

        return Executable(
            program=program,
            coordinate=self.coordinate,
            source=source,
            forward=runs("forward"),
            backward=runs("backward"),
        )

    def function(
        self,
        name: str,
        arguments: list[str],
        instructions: tuple[Node, ...],
        results: Iterable[str | None],
        first: int,
        style: Source,
    ) -> list[str]:
        """The lines of a function up to its return, of which the first is line `first` of the source. `marked` ones are
        the same lines, with each call under its instruction's label; `watched` ones show what each call gave; in
        `clocked` ones a clock takes the time of each wait."""
        unused, steps = lifetimes(arguments, instructions, results)
        lines = [f"def {name}(arguments):"]
        if arguments:
            lines.append(f"    [{', '.join(map(self.local, arguments))}] = arguments")
            lines.append("    arguments.clear()")
        if unused:
            lines.append(f"    del {', '.join(map(self.local, unused))}")
        for step in steps:
            line = first + len(lines)
            self.lines[line] = step.instruction
            mark = f"with {MARK}({step.instruction.label!r}): " if style == "marked" else ""
            shown = [str(line), *(self.local(name) for name in step.instruction.outputs if name)]
            watch = f"; {WATCH}({', '.join(shown)})" if style == "watched" else ""
            call = self.call(step.instruction, step.in_place)
            if style == "clocked" and step.instruction.op == WAIT:
                call = call.replace("wait(", f"{CLOCK}({line}, ", 1)
            lines.append(f"    {mark}{call}{watch}")
            dead = [self.local(name) for name in step.dead]
            dead += ["_"] if "" in step.instruction.outputs else []
            if dead:
                lines.append(f"    del {', '.join(dead)}")
        return lines

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
        return self.bind("constant_" + "".join(c if c.isalnum() else "_" for c in str(value)), value)

    def bind(self, name: str, value: Any) -> str:
        bound = self.bound.setdefault(name, value)
        assert bound is value or bound == value, name
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
