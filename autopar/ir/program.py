"""The program of one rank: ATen operators on local shapes, and explicit collectives.

Every rank runs the same program; only its coordinate in the mesh differs. One instruction starts a collective and
`collective.wait` finishes it, so that passes can move the two apart.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .graph import CONTIGUOUS, PERMUTE, RESHAPE, InputRole, Node, OutputRole, Ref, TensorMeta, takes
from .layout import Layout, describe

COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "exchange"),
    *("rotate", "broadcast", "reduce"),
)
"""The collectives, as ops `collective.<kind>`:

all_reduce(x, reduction, axis)      elementwise, same shape
all_gather(x, axis)                 along dim 0, in rank order:   [d, ...] -> [n d, ...]
reduce_scatter(x, reduction, axis)  along dim 0, n equal chunks:  [n d, ...] -> [d, ...]
all_to_all(x, axis)                 along dim 0, n equal chunks:  [n d, ...] -> [n d, ...], chunk j of
                                    rank i becomes chunk i of rank j
shift(x, offset, axis)              what the rank `offset` places before this one has, same shape; zeros
                                    on ranks without such a one
exchange(x, sizes, rows, axis)      along dim 0, n chunks of any lengths: sizes[0] are those of the chunks that
                                    this rank has for each other, sizes[1] of those that it gets from each;
                                    shapes assume that these are so many rows
rotate(x, offset, axis)             what the rank `offset` places before this one has, around in a circle: same shape;
                                    the offset may be a `RankIndex` that is the same for all ranks of the axis
broadcast(x, root, axis)            what the rank `root` has, same shape
reduce(x, reduction, root, axis)    elementwise, same shape, on the rank `root`; zeros on the others
wait(x)                             the finished value of any of them

`axis` is the index of a mesh axis. The input of all but `wait` is contiguous.
"""

LAYOUT = frozenset({CONTIGUOUS, PERMUTE, RESHAPE, "aten.select.int"})
"""Local ops of one tensor that codegen puts around collectives."""

SCATTERED = ("reduce_scatter", "all_to_all")
"""Kinds that send an equal part of dim 0 to each rank."""

REDUCED = ("all_reduce", "reduce_scatter", "all_gather")
"""Kinds that a reduction over several axes consists of."""

GATHERED = ("all_gather", "all_to_all")
"""Kinds whose result has a part from each rank along dim 0."""


@dataclass(frozen=True, slots=True)
class RankIndex:
    """An integer that differs by rank: constant + sum of coordinate[axis] * stride over `terms`, or the one of `values`
    that stands at that place."""

    terms: tuple[tuple[int, int], ...]
    constant: int = 0
    values: tuple[int, ...] = ()

    def at(self, coordinate: tuple[int, ...]) -> int:
        index = self.constant + sum(coordinate[axis] * stride for axis, stride in self.terms)
        return self.values[index] if self.values else index

    def source(self, axes: tuple[str, ...]) -> str:
        parts = [f"{axes[axis]}_rank" + (f" * {stride}" if stride != 1 else "") for axis, stride in self.terms]
        index = " + ".join(parts + ([str(self.constant)] if self.constant or not parts else []))
        return f"{[*self.values]}[{index}]" if self.values else index


def has_rank(node: Node, such: Callable[[RankIndex], object] = bool) -> bool:
    """Whether an operator takes such a number that differs by rank."""

    def found(value: Any) -> bool:
        return (
            bool(such(value)) if isinstance(value, RankIndex) else isinstance(value, tuple) and any(map(found, value))
        )

    return found((node.args, node.kwargs))


def names_no_device(instruction: Node) -> bool:
    """Whether an op without inputs takes a device and names none: an expansion's arange."""
    if instruction.inputs or instruction.op.startswith("collective."):
        return False
    return takes(instruction.op, "device") and "device" not in dict(instruction.kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramInput:
    """`meta` is global; `layout` says what a rank receives of it, of parameters the layout at rest. It is never
    Partial."""

    name: str
    role: InputRole
    target: str
    meta: TensorMeta
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutput:
    """`meta` is global; `layout` says what the rank returns of it. `name` is None where the graph has no value (no
    gradient)."""

    name: str | None
    role: OutputRole
    target: str
    meta: TensorMeta | None
    layout: Layout

    @property
    def backward(self) -> bool:
        """Whether it is a result of backward."""
        return self.role in ("gradient", "update")


@dataclass(frozen=True, kw_only=True)
class Program:
    """`forward` reads the inputs other than tangents and returns the outputs and mutations among `outputs`. `backward`
    reads tangents and the `saved` values (of forward, or inputs) and returns the gradients. `metas` holds the local
    shape and dtype of every value. `axes` are the names of the mesh axes, `mesh` their sizes."""

    axes: tuple[str, ...]
    mesh: tuple[int, ...]
    inputs: tuple[ProgramInput, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    saved: tuple[str, ...]
    outputs: tuple[ProgramOutput, ...]
    metas: Mapping[str, TensorMeta] = field(repr=False)
    uneven: frozenset[str] = field(default=frozenset(), repr=False)
    """Values whose number of rows only the run decides: their metas are those of the fullest rank, if known."""

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks if and only if they run the same program."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    @property
    def halves(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        return self.forward, self.backward

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The instructions of both halves."""
        return (*self.forward, *self.backward)

    @cached_property
    def given(self) -> tuple[ProgramInput, ...]:
        """The inputs that forward reads."""
        return tuple(i for i in self.inputs if i.role != "tangent")

    @cached_property
    def tangents(self) -> tuple[ProgramInput, ...]:
        return tuple(i for i in self.inputs if i.role == "tangent")

    @cached_property
    def results(self) -> tuple[ProgramOutput, ...]:
        """What forward returns, beside what is saved."""
        return tuple(o for o in self.outputs if not o.backward)

    @cached_property
    def gradients(self) -> tuple[ProgramOutput, ...]:
        """What backward returns."""
        return tuple(o for o in self.outputs if o.backward)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that get a gradient."""
        return frozenset(o.target for o in self.outputs if o.role == "gradient" and o.name is not None)

    def collectives(self) -> list[tuple[str, str, int]]:
        """(kind, axis name, bytes of the larger of what goes in and comes out) of each, in order."""
        issued = []
        for instruction in self.nodes:
            if kind := instruction.collective:
                sizes = [self.metas[name].bytes for name in (*instruction.inputs, *instruction.outputs)]
                issued.append((kind, self.axes[instruction.args[-1]], max(sizes)))
        return issued

    def __str__(self) -> str:
        def arguments(inputs: list[str]) -> str:
            return "".join(f"\n    {name}," for name in inputs)

        lines = [f"# one rank of mesh {', '.join(f'{a}={n}' for a, n in zip(self.axes, self.mesh, strict=True))}"]
        lines.append("def forward(")
        for i in self.given:
            lines.append(f"    {i.name},  # {i.role} {i.target}: {i.meta} {describe(i.layout, self.axes)}")
        lines.append("):")
        lines += self._body(self.forward)
        for o in self.results:
            lines.append(f"    # {o.role} {o.target} = {o.name}: {o.meta} {describe(o.layout, self.axes)}")
        returned, saved = (
            "".join(f"{name}, " for name in names) for names in ((o.name for o in self.results), self.saved)
        )
        lines.append(f"    return ({returned}), ({saved})")
        lines.append("")
        lines.append(f"def backward({', '.join([*self.saved, *(i.name for i in self.tangents)])}):")
        lines += self._body(self.backward)
        for o in self.gradients:
            lines.append(f"    # gradient {o.target} = {o.name} {describe(o.layout, self.axes)}")
        lines.append(f"    return ({''.join(f'{o.name}, ' for o in self.gradients)})")
        return "\n".join(lines)

    def _body(self, instructions: tuple[Node, ...]) -> list[str]:
        lines, module = [], None
        for instruction in instructions:
            if instruction.module != module:
                module = instruction.module
                lines.append(f"    # {module or '(no module)'}")
            lines.append("    " + source_line(instruction, self.axes))
        return lines


def source_line(instruction: Node, axes: tuple[str, ...]) -> str:
    """One readable line of Python."""
    values = [_source(a, axes) for a in instruction.args]
    if instruction.collective:
        values[-1] = axes[instruction.args[-1]]
    values += [f"{key}={_source(value, axes)}" for key, value in instruction.kwargs]
    outputs = ", ".join(name or "_" for name in instruction.outputs)
    return f"{outputs} = {instruction.op}({', '.join(values)})"


def _source(value: Any, axes: tuple[str, ...]) -> str:
    if isinstance(value, Ref):
        return value.name
    if isinstance(value, RankIndex):
        return value.source(axes)
    if isinstance(value, tuple):
        return "[" + ", ".join(_source(item, axes) for item in value) + "]"
    return repr(value)
