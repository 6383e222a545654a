"""The program of one rank as two Python functions, and the collectives behind it.

The source is straight-line code: one call an instruction, each value deleted right after its last
use, so that what is alive is what the program says is alive and nothing is looked up at run time.
While a profiler is active, the same source runs with each call marked by its instruction's label, as in
simulated traces (`autopar.trace`).
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.profiler import record_function

from autopar.compat import all_gather_single, is_profiling, reduce_scatter_single
from autopar.cost.liveness import lifetimes
from autopar.ir import randomness, variates
from autopar.ir.graph import Ref, overload
from autopar.ir.program import Instruction, Program, RankIndex, names_no_device
from autopar.ops import bounds, experts
from autopar.ops.contract import needed_by
from autopar.ops.rule import parameters
from autopar.ops.strides import Given, contiguous

from .failures import located

EQUIVALENTS: dict[str, Callable[..., Any]] = {
    "aten.add.Tensor": torch.add,
    "aten.addmm.default": torch.addmm,
    "aten.bmm.default": torch.bmm,
    "aten.clone.default": torch.clone,
    "aten.div.Tensor": torch.div,
    "aten.expand.default": torch.Tensor.expand,
    "aten.mm.default": torch.mm,
    "aten.mul.Tensor": torch.mul,
    "aten.neg.default": torch.neg,
    "aten.permute.default": torch.permute,
    "aten.reshape.default": torch.reshape,
    "aten.squeeze.dim": torch.squeeze,
    "aten.sub.Tensor": torch.sub,
    "aten.sum.dim_IntList": torch.sum,
    "aten.t.default": torch.t,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
    "aten.view.default": torch.Tensor.view,
    **{
        f"autopar.{function.__name__}.default": function
        for module in (randomness, variates, bounds, experts)
        for function in module.OPERATORS
    },
}
"""Functions that call the same overload with the same arguments for less: 0.8 us instead of 1.4."""

MARK = "mark"
"""What a marked source calls `record_function`."""

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Waited(Protocol):
    """Something that can be waited for: a `dist.Work`, or several."""

    def wait(self) -> Any: ...


Pending = tuple[torch.Tensor, Waited]
"""A collective under way: its result, and the handle that says when it is there. Both are held until
then. (With the functional collectives, which keep the handle in a registry, training on gloo in torch
2.13 aborted now and then on a loaded machine, in the worker of a coalesced all-gather. The cause was
not established; these calls do not take that path.)"""


@dataclass(frozen=True, slots=True)
class Extremes:
    """A reduction of `ordered` numbers under way, whose result goes to `target`."""

    work: Waited
    reduced: torch.Tensor
    target: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        self.target.copy_(_swapped(self.reduced).view(_NUMBERS[self.reduced.dtype]))


@dataclass(frozen=True, slots=True)
class Summed:
    """Parts on their way here, whose sum over dim 0 goes to `target`: gloo's own reduce-scatter is an all-reduce, of
    which each rank keeps its part, and sends twice as much. The sum is the same whatever the order of arrival."""

    work: Waited
    parts: torch.Tensor
    target: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.parts, 0, dtype=self.target.dtype, out=self.target)


_NUMBERS = {torch.int32: torch.float32, torch.int64: torch.float64}
_BITS = {number: bits for bits, number in _NUMBERS.items()}


def _swapped(bits: torch.Tensor) -> torch.Tensor:
    """Bits of floating numbers as integers in their order, and back."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


def ordered(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Floating numbers as integers in their order, with NaN as the extreme: backends compare NaN as they please."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    bits = _swapped(wide.contiguous().view(_BITS[wide.dtype]))
    info = torch.iinfo(bits.dtype)
    return bits.masked_fill(x.isnan(), info.max if reduction == "max" else info.min)


def all_reduce_in_place(x: torch.Tensor, reduction: str, group: dist.ProcessGroup) -> Pending:
    if reduction != "sum" and x.is_floating_point():
        bits, pending = all_reduce_in_place(ordered(x, reduction), reduction, group)
        return x, Extremes(pending, bits, x)
    work = dist.all_reduce(x, REDUCTIONS[reduction], group, async_op=True)
    assert work is not None
    return x, work


def all_reduce(x: torch.Tensor, reduction: str, group: dist.ProcessGroup) -> Pending:
    return all_reduce_in_place(x.clone(memory_format=torch.contiguous_format), reduction, group)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    work = all_gather_single(gathered, x, group)
    assert work is not None
    return gathered, work


def reduce_scatter(x: torch.Tensor, reduction: str, group: dist.ProcessGroup) -> Pending:
    part = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    if reduction != "sum" and x.is_floating_point():
        bits, pending = reduce_scatter(ordered(x, reduction), reduction, group)
        return part, Extremes(pending, bits, part)
    if reduction == "sum" and x.is_cpu:
        exchanged, work = all_to_all(x, group)
        return part, Summed(work, exchanged.view(group.size(), *part.shape), part)
    scattering = reduce_scatter_single(part, x, REDUCTIONS[reduction], group)
    assert scattering is not None
    return part, scattering


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    exchanged = torch.empty_like(x, memory_format=torch.contiguous_format)
    work = dist.all_to_all_single(exchanged, x, group=group, async_op=True)
    assert work is not None
    return exchanged, work


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages under way, and the tensor that is being sent, held until it is."""

    works: Sequence[dist.Work]
    sent: torch.Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def shift(x: torch.Tensor, offset: int, group: dist.ProcessGroup) -> Pending:
    rank, ranks = dist.get_rank(group), group.size()
    received = torch.zeros_like(x, memory_format=torch.contiguous_format)
    messages = []
    if 0 <= rank + offset < ranks:
        messages.append(dist.P2POp(dist.isend, x, group=group, group_peer=rank + offset))
    if 0 <= rank - offset < ranks:
        messages.append(dist.P2POp(dist.irecv, received, group=group, group_peer=rank - offset))
    works = dist.batch_isend_irecv(messages) if messages else []
    return received, Messages(works, x)


def rotate(x: torch.Tensor, offset: int, group: dist.ProcessGroup) -> Pending:
    rank, ranks = dist.get_rank(group), group.size()
    if offset % ranks == 0:
        return x.clone(memory_format=torch.contiguous_format), Messages((), x)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    messages = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + offset) % ranks),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - offset) % ranks),
    ]
    return received, Messages(dist.batch_isend_irecv(messages), x)


def broadcast(x: torch.Tensor, root: int, group: dist.ProcessGroup) -> Pending:
    received = x.clone(memory_format=torch.contiguous_format)
    work = dist.broadcast(received, group=group, group_src=root, async_op=True)
    assert work is not None
    return received, work


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A reduction under way of which this rank gets nothing: its buffer holds what happened to pass."""

    work: Waited
    target: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        self.target.zero_()


def reduce(x: torch.Tensor, reduction: str, root: int, group: dist.ProcessGroup) -> Pending:
    reduced = x.clone(memory_format=torch.contiguous_format)
    work = dist.reduce(reduced, op=REDUCTIONS[reduction], group=group, group_dst=root, async_op=True)
    assert work is not None
    return reduced, work if dist.get_rank(group) == root else Elsewhere(work, reduced)


def exchange(x: torch.Tensor, sizes: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    put, got = sizes.tolist()
    exchanged = x.new_empty((sum(got), *x.shape[1:]))
    work = dist.all_to_all_single(exchanged, x, got, put, group=group, async_op=True)
    assert work is not None
    return exchanged, work


def wait(pending: Pending) -> torch.Tensor:
    result, work = pending
    work.wait()
    return result


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


def compile(
    program: Program,
    process_groups: Sequence[dist.ProcessGroup | None],
    *,
    device: torch.device | None = None,
) -> Executable:
    """Compile `program` for this rank of the mesh.

    `process_groups` holds the group of each mesh axis that this rank belongs to, None for an axis of
    size 1. `device` replaces the devices that factory functions of the program name: a model
    captured on one device runs on another.
    """
    coordinate = []
    for axis, size, group in zip(program.axes, program.mesh, process_groups, strict=True):
        given = 1 if group is None else group.size()
        if given != size:
            raise ValueError(f"the program wants {size} ranks on mesh axis {axis!r}; its process group has {given}")
        coordinate.append(0 if group is None else dist.get_rank(group))
    return Writer(program, tuple(coordinate), tuple(process_groups), device).executable()


class Writer:
    """Writes the source; `bound` are the objects that it refers to by name."""

    def __init__(
        self,
        program: Program,
        coordinate: tuple[int, ...],
        groups: tuple[dist.ProcessGroup | None, ...],
        device: torch.device | None,
    ) -> None:
        self.program, self.coordinate, self.groups, self.device = program, coordinate, groups, device
        self.bound: dict[str, Any] = {}
        self.lines: dict[int, Instruction] = {}
        """Number of a line of the source -> the instruction on it."""

    def executable(self) -> Executable:
        program = self.program
        saved = program.saved
        given = [i.name for i in program.inputs if i.role != "tangent"]
        made = [o.name for o in program.outputs if o.role != "gradient"]
        tangents = [i.name for i in program.inputs if i.role == "tangent"]
        gradients = [o.name for o in program.outputs if o.role == "gradient"]

        def written(marked: bool) -> str:
            lines = self.function("forward", given, program.forward, (*made, *saved), 1, marked)
            lines.append(f"    return {self.tuple(made)}, {self.tuple(saved)}")
            lines.append("")
            lines += self.function("backward", [*saved, *tangents], program.backward, gradients, len(lines) + 1, marked)
            lines.append(f"    return {self.tuple(gradients)}")
            return "\n".join(lines) + "\n"

        def functions(source: str) -> dict[str, Callable[[list[torch.Tensor]], Any]]:
            scope = {**self.bound, MARK: record_function}
            exec(builtins.compile(source, f"<program {program.digest}>", "exec"), scope)
            return {name: located(scope[name], program, self.groups, self.lines) for name in ("forward", "backward")}

        source = written(False)
        plain = functions(source)
        profiled = cache(lambda: functions(written(True)))
        without_autograd = torch.no_grad()

        def runs(name: str) -> Callable[[list[torch.Tensor]], Any]:
            function = plain[name]

            def run(arguments: list[torch.Tensor]) -> Any:
                return profiled()[name](arguments) if is_profiling() else function(arguments)

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
        instructions: tuple[Instruction, ...],
        results: Iterable[str | None],
        first: int,
        marked: bool,
    ) -> list[str]:
        """The lines of a function up to its return, of which the first is line `first` of the source. `marked` ones are
        the same lines, with each call under its instruction's label."""
        unused, steps = lifetimes(arguments, instructions, results)
        lines = [f"def {name}(arguments):"]
        if arguments:
            lines.append(f"    [{', '.join(map(self.local, arguments))}] = arguments")
            lines.append("    arguments.clear()")
        if unused:
            lines.append(f"    del {', '.join(map(self.local, unused))}")
        for step in steps:
            self.lines[first + len(lines)] = step.instruction
            mark = f"with {MARK}({step.instruction.label!r}): " if marked else ""
            lines.append("    " + mark + self.call(step.instruction, step.in_place))
            dead = [self.local(name) for name in step.dead]
            dead += ["_"] if "" in step.instruction.outputs else []
            if dead:
                lines.append(f"    del {', '.join(dead)}")
        return lines

    def call(self, instruction: Instruction, in_place: bool) -> str:
        outputs = ", ".join(self.local(name) if name else "_" for name in instruction.outputs)
        if len(instruction.outputs) == 1 and _returns_tuple(instruction.op):
            outputs = f"[{outputs}]"
        return f"{outputs} = {self.expression(instruction, in_place)}"

    def expression(self, instruction: Instruction, in_place: bool) -> str:
        op = instruction.op
        if op == "collective.wait":
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
        function = self.bind(op.replace(".", "_"), EQUIVALENTS.get(op) or overload(op))
        return f"{function}({', '.join(values)})"

    def collective(self, kind: str, instruction: Instruction, in_place: bool) -> str:
        x, axis = self.given(contiguous, instruction.args[0]), instruction.args[-1]
        assert self.groups[axis] is not None, f"{instruction} on mesh axis {self.program.axes[axis]!r} of size 1"
        group = self.bind(f"{self.program.axes[axis]}_group", self.groups[axis])
        if kind == "all_reduce":
            function = all_reduce_in_place if in_place else all_reduce
            return f"{self.bind(function.__name__, function)}({x}, {instruction.args[1]!r}, {group})"
        if kind == "reduce_scatter":
            return f"{self.bind(kind, reduce_scatter)}({x}, {instruction.args[1]!r}, {group})"
        if kind == "shift":
            return f"{self.bind(kind, shift)}({x}, {instruction.args[1]}, {group})"
        if kind == "exchange":
            return f"{self.bind(kind, exchange)}({x}, {self.value(instruction.args[1])}, {group})"
        if kind in ("rotate", "broadcast", "reduce"):
            by_rank: dict[str, Callable[..., Pending]] = {"rotate": rotate, "broadcast": broadcast, "reduce": reduce}
            given = ", ".join(map(self.value, instruction.args[1:-1]))
            return f"{self.bind(kind, by_rank[kind])}({x}, {given}, {group})"
        return f"{self.bind(kind, {'all_gather': all_gather, 'all_to_all': all_to_all}[kind])}({x}, {group})"

    def given(self, make: Given, value: Any) -> str:
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
            return str(value.at(self.coordinate))
        if isinstance(value, tuple | list):
            return "[" + ", ".join(map(self.value, value)) + "]"
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        if isinstance(value, float):
            return f"float({str(value)!r})"
        if isinstance(value, torch.device) and self.device is not None:
            value = self.device
        return self.bind(f"constant_{_identifier(str(value))}", value)

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


def _identifier(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)


def _returns_tuple(op: str) -> bool:
    """Whether the op returns a sequence even if the program names only one output of it."""
    if op.startswith("collective."):
        return False
    returns = overload(op)._schema.returns  # type: ignore[attr-defined]
    return len(returns) > 1 or (len(returns) == 1 and returns[0].type.str() == "Tensor[]")
