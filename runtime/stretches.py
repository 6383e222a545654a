"""Programs whose stretches are compiled: the source calls a function of a compiler in the place of their instructions.

Everything between stretches stays as it is: collectives, waits, what is dropped when. A stretch is compiled for the
strides that its operands will have, which running the program on fakes shows; an operand that lies otherwise (a tangent
of the user's, say) is laid out first. A watched program runs its instructions one by one, so that each is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from autopar.compat.inductor import Fused
from autopar.compat.tensors import contiguous_strides, memory_of
from autopar.cost.lifetimes import Line, lifetimes
from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ir.program import Program
from autopar.ir.rewrite import reading
from autopar.passes.lower.stretches import Stretch, stretches

from .compiled import MARK, ObservedSource
from .execute import SourceWriter


class Form(NamedTuple):
    """What a compiler must know of a tensor: local shape, strides in elements, dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, meta: TensorMeta) -> Form:
        """Of a contiguous tensor."""
        return cls(meta.shape, contiguous_strides(meta.shape), meta.dtype)

    def lies(self, x: torch.Tensor) -> bool:
        """Whether a tensor of this shape has these strides, where they matter."""
        strides = x.stride()
        return strides == self.strides or all(
            n == 1 or is_ == wanted for n, is_, wanted in zip(self.shape, strides, self.strides, strict=True)
        )

    def laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """The same numbers with these strides."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=x.device).copy_(x)


class Made(NamedTuple):
    """A result of a unit: its form, and whose memory it shares in eager (the position among operands and then results
    of the first that does)."""

    form: Form
    memory: int


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A stretch whatever its values are called: equal ones have one `key`, and are compiled once. `nodes` read operands
    `v0`, `v1` ..., and make further ones, of which `results` are read by others. `coordinate` is this rank's."""

    nodes: tuple[Node, ...]
    operands: tuple[Form, ...]
    results: tuple[str, ...]
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
        """Equal for units of the same text, operands and device."""
        text = f"{self._written[0]}\n{[*map(str, self.operands)]} {self.device.type}"
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

    def fakes(self) -> list[torch.Tensor]:
        """Operands; within a fake mode."""
        return [torch.empty_strided(f.shape, f.strides, dtype=f.dtype, device=self.device) for f in self.operands]

    def makes(self) -> tuple[Made, ...]:
        """What the results are; within a fake mode."""
        operands = self.fakes()
        results = self(*operands)
        places = sharing([*operands, *results])
        forms = (Form(tuple(x.shape), x.stride(), x.dtype) for x in results)
        return tuple(map(Made, forms, places[len(operands) :]))


def sharing(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The position of the first tensor that lies in the same memory as each."""
    first: dict[int, int] = {}
    places = []
    for position, x in enumerate(tensors):
        places.append(first.setdefault(memory_of(x), position) if x.numel() else position)
    return places


def unit_of(
    stretch: Stretch, forms: Mapping[str, Form], program: Program, coordinate: tuple[int, ...], device: torch.device
) -> Unit:
    """The stretch without names."""
    names = {name: f"v{number}" for number, name in enumerate(stretch.reads)}
    nodes = []
    for node in stretch.nodes:
        outputs = tuple(names.setdefault(o, f"v{len(names)}") if o else "" for o in node.outputs)
        bare = Node(op=node.op, args=node.args, kwargs=node.kwargs, outputs=outputs)
        nodes.append(reading(bare, names))
    return Unit(
        nodes=tuple(nodes),
        operands=tuple(forms[name] for name in stretch.reads),
        results=tuple(names[name] for name in stretch.makes),
        axes=program.axes,
        coordinate=coordinate,
        device=device,
    )


@dataclass(eq=False)
class Kernels:
    """A unit, compiled: lays out operands that lie otherwise than it was compiled for, and copies results that share
    memory where those of eager do not."""

    unit: Unit
    made: tuple[Made, ...]
    fused: Fused
    copied: list[int] | None = None
    """Positions of results that are copied; known after the first run."""

    def __call__(self, operands: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        for k, form in enumerate(self.unit.operands):
            if not form.lies(operands[k]):
                operands[k] = form.laid_out(operands[k])
        if self.copied is None:
            return self._first(operands)
        results = self.fused(operands)
        if self.copied:
            results = [x.clone() if k in self.copied else x for k, x in enumerate(results)]
        return results

    def _first(self, operands: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = [*operands]
        results = self.fused(operands)
        places = sharing([*given, *results])[len(given) :]
        alone = len(given)
        self.copied = [
            k for k, (is_, of) in enumerate(zip(places, self.made, strict=True)) if is_ not in (of.memory, alone + k)
        ]
        return [x.clone() if k in self.copied else x for k, x in enumerate(results)]


class Compiler(Protocol):
    """Compiles units."""

    def forms(self, unit: Unit) -> tuple[Made, ...] | None:
        """What a unit makes; None where only a run shows it."""

    def prepare(self, units: Iterable[tuple[str, Unit]]) -> None:
        """Compile units, each with words for it."""

    def kernels(self, unit: Unit) -> Kernels | None:
        """None for one that does not compile."""


@dataclass(eq=False)
class _Half:
    items: list[tuple[Node | Stretch, Unit | None]] = field(default_factory=list)
    in_place: set[str] = field(default_factory=set)
    """Results of all-reduces that work in their operands."""


STRETCH = "autopar.stretch"
"""The op of the instruction that stands for a stretch."""


class CompiledSource(ObservedSource):
    """The source with stretches compiled."""

    def __init__(self, *given: Any, compiler: Compiler) -> None:
        super().__init__(*given)
        self.compiler = compiler
        self.halves: dict[str, _Half] = {}
        self.stretches: dict[str, Stretch] = {}
        """By the name of the function in the source."""

    def source(self) -> str:
        if not self.halves:
            self._find()
        return super().source()

    def _find(self) -> None:
        program, device = self.program, self.device or torch.device("cpu")
        forms = {i.name: Form.of(program.metas.get(i.name, i.meta)) for i in program.inputs}
        found = []
        for name, instructions in zip(("forward", "backward"), program.halves, strict=True):
            half = self.halves[name] = _Half()
            results = [o.name for o in program.outputs if o.backward == (name == "backward")]
            results += program.saved if name == "forward" else []
            for line in lifetimes((), instructions, results)[1]:
                if line.in_place:
                    half.in_place.update(line.instruction.outputs)
            for item in stretches(program, instructions, results):
                unit = self._unit(item, forms, device)
                half.items.append((item, unit if isinstance(item, Stretch) else None))
                if isinstance(item, Stretch) and unit is not None:
                    found.append((f"{len(item.nodes)} operators of {item.module or 'no module'}", unit))
        self.compiler.prepare(found)

    def _unit(self, item: Node | Stretch, forms: dict[str, Form], device: torch.device) -> Unit | None:
        """The unit of an item, and the forms of what it makes."""
        metas = self.program.metas
        stretch = item
        if isinstance(item, Node):
            names = tuple(name for name in item.outputs if name)
            forms.update((name, Form.of(metas[name])) for name in names)
            if item.op.startswith("collective.") or not self.program.uneven.isdisjoint((*names, *item.inputs)):
                return None
            stretch = Stretch((item,), tuple(dict.fromkeys(item.inputs)), names)
        assert isinstance(stretch, Stretch)
        unit = unit_of(stretch, forms, self.program, self.coordinate, device)
        made = self.compiler.forms(unit)
        known = [Form.of(metas[name]) for name in stretch.makes] if made is None else [m.form for m in made]
        forms.update(zip(stretch.makes, known, strict=True))
        return None if made is None else unit

    def function(
        self, name: str, arguments: list[str], instructions: tuple[Node, ...], results: Iterable[str | None], first: int
    ) -> list[str]:
        if self.style == "watched":
            return super().function(name, arguments, instructions, results, first)
        written: list[Node] = []
        for item, unit in self.halves[name].items:
            kernels = None if unit is None else self.compiler.kernels(unit)
            if isinstance(item, Node):
                written.append(item)
            elif kernels is None:
                written += item.nodes
            else:
                function = self.bind(f"stretch_{len(self.stretches)}", kernels)
                self.stretches[function] = item
                reads = tuple(map(Ref, item.reads))
                written.append(Node(op=STRETCH, args=(function, *reads), outputs=item.makes, module=item.module))
        return super().function(name, arguments, tuple(written), results, first)

    def statement(self, number: int, line: Line) -> str:
        instruction = line.instruction
        if instruction.op != STRETCH:
            in_place = any(instruction.outputs[0] in half.in_place for half in self.halves.values())
            return super().statement(number, replace(line, in_place=in_place and bool(instruction.collective)))
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
