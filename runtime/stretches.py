"""Programs whose stretches are compiled: the source calls a function of a compiler in the place of their instructions.

Everything between stretches stays as it is: collectives, waits, what is dropped when. A stretch is compiled for the
strides that its operands will have, which running the program on fakes shows; an operand that lies otherwise (a tangent
of the user's, say) is laid out first. A watched program runs its instructions one by one, so that each is seen.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from autopar.compat.inductor import Fused
from autopar.compat.tensors import memory_of
from autopar.cost.lifetimes import Line, lifetimes
from autopar.cost.liveness import Memory, MemoryPlace
from autopar.ir.graph import Node, Ref
from autopar.ir.program import Program, has_rank
from autopar.ir.rewrite import reading
from autopar.passes.lower.stretches import Stretch, stretches

from .compiled import MARK, ObservedSource
from .execute import SourceWriter


def laid_out(x: torch.Tensor, place: MemoryPlace) -> torch.Tensor:
    """The same numbers with these strides; the tensor itself if it has them, where they matter."""
    sizes = zip(place.shape, x.stride(), place.stride, strict=True)
    if all(n == 1 or is_ == wanted for n, is_, wanted in sizes):
        return x
    for dim, stride in enumerate(place.stride):
        if stride == 0 and place.shape[dim] > 1:  # one element along it stands for all
            x = x.narrow(dim, 0, 1)
    laid = torch.empty_strided(x.shape, place.stride, dtype=place.dtype, device=x.device)
    return laid.copy_(x).expand(place.shape)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A stretch whatever its values are called: equal ones have one `key`, and are compiled once. `nodes` read operands
    `v0`, `v1` ..., and make further ones, of which `results` are read by others. Each of these lies, in eager, in the
    memory of one of `shared`: a position among operands and then results. `coordinate` is this rank's."""

    nodes: tuple[Node, ...]
    operands: tuple[MemoryPlace, ...]
    results: tuple[str, ...]
    shared: tuple[int, ...]
    axes: tuple[str, ...]
    coordinate: tuple[int, ...]
    device: torch.device

    @cached_property
    def _written(self) -> tuple[str, dict[str, Any]]:
        program = Program(
            axes=self.axes, mesh=(1,) * len(self.axes), inputs=(), forward=self.nodes, backward=(), saved=(),
            outputs=(), metas={},
        )  # fmt: skip
        writer = SourceWriter(program, self.coordinate, (None,) * len(self.axes), self.device)
        names = [f"v{number}" for number in range(len(self.operands))]
        lines = writer.function("stretch", names, self.nodes, self.results, 1)
        return "\n".join([*lines, f"    return {writer.tuple(self.results)}"]), writer.bound

    @cached_property
    def key(self) -> str:
        """Equal for units of the same text, operands, device and default dtype, which products of integers have."""
        source, bound = self._written
        values = [(name, repr(value)) for name, value in bound.items() if not callable(value)]
        text = f"{source}\n{values} {self.operands} {self.shared} {self.device.type} {torch.get_default_dtype()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the instructions one by one."""
        return self._function(list(operands))  # type: ignore[no-any-return]

    @cached_property
    def _function(self) -> Callable[[list[torch.Tensor]], Any]:
        source, scope = self._written
        scope = {**scope}
        exec(compile(source, f"<stretch {self.key}>", "exec"), scope)
        return scope["stretch"]  # type: ignore[no-any-return]

    @property
    def differs_by_rank(self) -> bool:
        """Whether ranks have other numbers in its place."""
        return any(map(has_rank, self.nodes))

    def examples(self) -> list[torch.Tensor]:
        """Operands that lie as they will."""
        return [torch.empty_strided(p.shape, p.stride, dtype=p.dtype, device=self.device) for p in self.operands]


def unit_of(
    stretch: Stretch, memory: Memory, program: Program, coordinate: tuple[int, ...], device: torch.device
) -> Unit:
    """The stretch without names. `memory` says how values lie."""
    names = {name: f"v{number}" for number, name in enumerate(stretch.inputs)}
    nodes = []
    for node in stretch.nodes:
        outputs = tuple(names.setdefault(o, f"v{len(names)}") if o else "" for o in node.outputs)
        bare = Node(op=node.op, args=node.args, kwargs=node.kwargs, outputs=outputs)
        nodes.append(reading(bare, names))
    storages = [memory.storages[name][0] for name in (*stretch.inputs, *stretch.outputs)]
    return Unit(
        nodes=tuple(nodes),
        operands=tuple(replace(memory.placed[name], offset=0) for name in stretch.inputs),
        results=tuple(names[name] for name in stretch.outputs),
        shared=tuple(map(storages.index, storages[len(stretch.inputs) :])),
        axes=program.axes,
        coordinate=coordinate,
        device=device,
    )


@dataclass(eq=False)
class Kernels:
    """A unit, compiled: lays out operands that lie otherwise than it was compiled for, and copies results that share
    memory where those of eager do not, or keep more of it than they have."""

    unit: Unit
    fused: Fused
    copied: list[int] | None = None
    """Positions of results that are copied; known after the first run."""

    def __call__(self, operands: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        for k, place in enumerate(self.unit.operands):
            if operands[k].stride() != place.stride:
                operands[k] = laid_out(operands[k], place)
        memories = self._memories(operands) if self.copied is None else []
        results = self.fused(operands)
        if self.copied is None:
            self.copied = self._shared(memories, results)
        if not self.copied:
            return results
        return [x.clone() if k in self.copied else x for k, x in enumerate(results)]

    @staticmethod
    def _memories(operands: Sequence[torch.Tensor]) -> list[tuple[int, weakref.ref[torch.UntypedStorage]]]:
        """Where operands lie; none is kept for that."""
        return [(memory_of(x), weakref.ref(x.untyped_storage())) for x in operands]

    def _shared(
        self, memories: Sequence[tuple[int, weakref.ref[torch.UntypedStorage]]], results: Sequence[torch.Tensor]
    ) -> list[int]:
        """The results that are to be copied. Memory of operands that are gone may be that of results."""
        places: dict[int, int] = {}
        for position, (memory, storage) in enumerate(memories):
            if storage() is not None:
                places.setdefault(memory, position)
        copied = []
        for k, (x, in_eager) in enumerate(zip(results, self.unit.shared, strict=True)):
            own = len(memories) + k
            shares = places.setdefault(memory_of(x), own) not in (in_eager, own) and x.numel()
            larger = in_eager == own and x.untyped_storage().nbytes() > x.numel() * x.itemsize
            if shares or larger:
                copied.append(k)
        return copied


def compiled_halves(program: Program) -> Iterator[list[Node | Stretch]]:
    """The instructions of forward and of backward, with stretches."""
    yield [*stretches(program, program.forward, [*(o.name for o in program.results), *program.saved])]
    yield [*stretches(program, program.backward, [o.name for o in program.gradients])]


class Compiler(Protocol):
    """Compiles units."""

    def prepare(self, units: Iterable[tuple[str, Unit]], *, together: bool) -> None:
        """Compile units, each with words for it; `together`: all ranks ask for the units of one program at once."""

    def kernels(self, unit: Unit) -> Kernels | None:
        """None for one that does not compile."""


STRETCH = "autopar.stretch"
"""The op of the instruction that stands for a stretch."""


class CompiledSource(ObservedSource):
    """The source with stretches compiled."""

    def __init__(self, *given: Any, compiler: Compiler, together: bool = False) -> None:
        super().__init__(*given)
        self.compiler, self.together = compiler, together
        self.items: dict[str, list[tuple[Node | Stretch, Unit | None]]] = {}
        """By the name of a half, what it consists of."""
        self.in_place: set[str] = set()
        """Results of all-reduces that work in their operands."""
        self.stretches: dict[str, Stretch] = {}
        """By the name of the function in the source."""

    def source(self) -> str:
        if not self.items:
            self._find()
        return super().source()

    def _find(self) -> None:
        program, device = self.program, self.device or torch.device("cpu")
        memory = Memory.of(program, program.nodes)
        found = []
        halves = zip(("forward", "backward"), program.halves, compiled_halves(program), strict=True)
        for name, instructions, items in halves:
            results = (*program.saved, *(o.name for o in program.outputs))
            lines = lifetimes((), instructions, results)[1]
            self.in_place.update(output for line in lines if line.in_place for output in line.instruction.outputs)
            self.items[name] = []
            for item in items:
                unit = None
                if isinstance(item, Stretch):
                    unit = unit_of(item, memory, program, self.coordinate, device)
                    found.append((f"{len(item.nodes)} operators of {item.module or 'no module'}", unit))
                self.items[name].append((item, unit))
        self.compiler.prepare(found, together=self.together)

    def function(
        self, name: str, arguments: list[str], instructions: tuple[Node, ...], results: Iterable[str | None], first: int
    ) -> list[str]:
        if self.style == "watched":
            return super().function(name, arguments, instructions, results, first)
        written: list[Node] = []
        for item, unit in self.items[name]:
            kernels = None if unit is None else self.compiler.kernels(unit)
            if isinstance(item, Node):
                written.append(item)
            elif kernels is None:
                written += item.nodes
            else:
                function = self.bind(f"stretch_{len(self.stretches)}", kernels)
                self.stretches[function] = item
                reads = tuple(map(Ref, item.inputs))
                written.append(Node(op=STRETCH, args=(function, *reads), outputs=item.outputs, module=item.module))
        return super().function(name, arguments, tuple(written), results, first)

    def statement(self, number: int, line: Line) -> str:
        instruction = line.instruction
        if instruction.op != STRETCH:
            in_place = bool(instruction.collective) and instruction.outputs[0] in self.in_place
            return super().statement(number, replace(line, in_place=in_place))
        function, *reads = instruction.args
        # what nobody reads any more lies in the list alone, which the function empties
        dead = "".join(f"{self.local(name)} = " for name in line.dead if name in instruction.inputs)
        operands = ", ".join(self.local(ref.name) for ref in reads)
        results = ", ".join(map(self.local, instruction.outputs))
        begin = f"held = [{operands}]; " + (f"{dead}None; " if dead else "")
        call = f"{begin}[{results}] = {function}(held)"
        if self.style == "marked":
            stretch = self.stretches[function]
            labels = ", ".join(node.label for node in stretch.nodes)
            return f"with {MARK}({f'{function} of {stretch.module}: {labels}'!r}): {call}"
        return call
