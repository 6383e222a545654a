"""Precision: the casts of parameters from how they rest to how they are used, and of gradients on their way back.

Operators of a graph read parameters as they are used. Where the module holds them in another dtype, each rank casts its
part as it rests, so that gathers carry what is used. Backward casts anew what it gathers again, so that nothing is kept
for that. Around collectives that carry parameters in a narrower dtype stands what `narrow` writes. Gradients are cast
to the dtype in which they are reduced before the first collective of their tail (`lower.accumulate`), and to that of
the parameter at rest after the last one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from autopar.ir.emitter import Emitter
from autopar.ir.graph import CAST, JointGraph, Node, Ref, TensorMeta, readers
from autopar.ir.layout import local_meta
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.ir.rewrite import distinct, reading
from autopar.passes.lower.accumulate import tail
from autopar.passes.space.problem import Assignment
from autopar.passes.space.space import Space

from .narrow import is_gathered, narrowed
from .program import codegen


def written(space: Space, assignment: Assignment) -> Program:
    """The program that runs `assignment`, with its casts."""
    program = narrowed(codegen(space, assignment), {name: meta.dtype for name, meta in space.travels.items()})
    return with_casts(program, at_rest(space.graph), space.reduced_in)


def at_rest(graph: JointGraph) -> dict[str, torch.dtype]:
    """Parameters that rest in another dtype than that in which operators use them -> that dtype."""
    return {i.target: i.at_rest for i in graph.inputs if i.at_rest is not None}


def with_casts(program: Program, held_in: Mapping[str, torch.dtype], reduced_in: torch.dtype | None) -> Program:
    """The program whose parameters rest in other dtypes, given by their names, and whose gradients of parameters are
    `reduced_in` a dtype (None: in that in which they are computed)."""
    if reduced_in is not None:
        program = _reduced(program, reduced_in)
    return _rested(program, held_in) if held_in or reduced_in is not None else program


@dataclass(eq=False, kw_only=True)
class _Casts(Emitter):
    """Casts in one half of a program, each written once."""

    made: dict[tuple[str, torch.dtype], Node] = field(default_factory=dict)
    """(value, dtype) -> what casts it."""

    def of(self, name: str, dtype: torch.dtype, suffix: str, module: str = "", serves: str = "") -> str:
        """The name of a value's cast."""
        if (name, dtype) not in self.made:
            cast = distinct(f"{name}_{suffix}", self.metas)
            self.emit(CAST, (Ref(name),), cast, kwargs=(("dtype", dtype),), module=module, serves=serves)
            self.made[name, dtype] = self.written[-1]
        return self.made[name, dtype].name

    @property
    def names(self) -> dict[str, str]:
        """Value -> its cast."""
        return {name: cast.name for (name, _), cast in self.made.items()}

    def among(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """The nodes with each cast right after what makes the value, or first if none of them does."""
        by_value: dict[str, list[Node]] = {}
        for (name, _), cast in self.made.items():
            by_value.setdefault(name, []).append(cast)
        after = [[node, *(cast for name in node.outputs for cast in by_value.pop(name, ()))] for node in nodes]
        return (*(cast for casts in by_value.values() for cast in casts), *(node for group in after for node in group))


def _reduced(program: Program, dtype: torch.dtype) -> Program:
    """With the tail of backward in another dtype."""
    nodes = tail(program)
    within = {name for node in nodes for name in node.outputs}
    metas = {
        name: TensorMeta(meta.shape, dtype) if name in within and meta.dtype.is_floating_point else meta
        for name, meta in program.metas.items()
    }
    casts = _Casts(metas=metas)
    makers = {name: node for node in program.backward for name in node.outputs}
    for node in nodes:
        for name in node.inputs:
            if metas[name].dtype.is_floating_point and metas[name].dtype != dtype:
                maker = makers.get(name, node)
                casts.of(name, dtype, "to_reduce", maker.module, maker.serves)
    names = casts.names
    backward = (reading(node, names) if within.intersection(node.outputs) else node for node in program.backward)
    return replace(program, backward=casts.among(backward), metas=metas)


def _rested(program: Program, held_in: Mapping[str, torch.dtype]) -> Program:
    """With parameters in other dtypes outside of it, and the gradients of all in those of their parameters."""
    held = {i.name: _at_rest(i, held_in) for i in program.inputs if i.role == "parameter" and i.target in held_in}
    parameters = {i.target for i in program.inputs if i.role == "parameter"}
    metas, late = dict(program.metas), readers(program.backward)
    again = {name for name in held if is_gathered(name, program.backward, late)}
    early = {name for node in program.forward for name in node.inputs}
    early.update(o.name for o in program.results if o.name is not None)
    early.update(name for name in program.saved if name not in again)
    forward, backward, gradients = (_Casts(metas=metas) for _ in range(3))
    for name, i in held.items():
        for casts, names in ((forward, early), (backward, again)):
            if name in names:
                casts.of(name, metas[name].dtype, "used", i.target.rpartition(".")[0], name)

    def returned(output: ProgramOutput) -> ProgramOutput:
        if not output.backward:
            return replace(output, name=forward.names.get(output.name or "", output.name))
        if output.name is None or output.target not in parameters:
            return output
        assert output.meta is not None
        dtype = held_in.get(output.target, output.meta.dtype)
        name = output.name
        if metas[name].dtype != dtype:
            name = gradients.of(name, dtype, "at_rest", serves=f"gradient of {output.target}")
        return replace(output, name=name, meta=TensorMeta(output.meta.shape, dtype))

    outputs = tuple(map(returned, program.outputs))
    metas.update({name: local_meta(i.meta, i.layout, program.mesh) for name, i in held.items()})
    in_forward, in_backward = forward.names, forward.names | backward.names
    return replace(
        program,
        inputs=tuple(held.get(i.name, i) for i in program.inputs),
        forward=forward.among(reading(node, in_forward) for node in program.forward),
        backward=gradients.among(backward.among(reading(node, in_backward) for node in program.backward)),
        saved=tuple(name if name in again else in_forward.get(name, name) for name in program.saved),
        outputs=outputs,
        metas=metas,
    )


def _at_rest(i: ProgramInput, held_in: Mapping[str, torch.dtype]) -> ProgramInput:
    return replace(i, meta=TensorMeta(i.meta.shape, held_in[i.target]))
