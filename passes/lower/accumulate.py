"""Accumulate: backward in parts, so that the gradients of several micro-batches are reduced once.

At the end of backward stands its *tail*: sums over ranks that only gradients of parameters depend on, and what lays
them out. All of it is linear, so the tail of a sum is the sum of the tails. What enters the tail is *pending*: the
gradients as each rank has them before they are reduced, in buckets where the tail reduces buckets. From a program come
three:

- *micro*: backward without its tail, which returns what is pending;
- *last*: backward that adds what is pending to what enters its tail, and reduces the sum, as early as the program does;
- *rest*: the tail alone, of what is pending.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.dataflow import ending, reached
from autopar.ir.emitter import Emitter
from autopar.ir.graph import CAST, InputRole, Node, OutputRole, Ref, TensorMeta
from autopar.ir.layout import Replicate, Shape
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.ir.rewrite import distinct, needed, reading
from autopar.ir.rewriter import returning
from autopar.ops.kinds import ADD, SUMMABLE

MOVING = frozenset({"all_gather", "all_to_all", "shift", "rotate", "broadcast"})
"""Collectives that change no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """`names` are the values that enter the tail, and `pending` what their sums are called as inputs of role "tangent",
    which stand last in `last` and alone in `rest`. `micro` returns `names` after the gradients of the program, of which
    those of parameters are None."""

    names: tuple[str, ...]
    pending: tuple[str, ...]
    micro: Program
    last: Program
    rest: Program


LATE = ("backward", "end of backward")
"""The phases (`cost.memory`) after forward in which gradients of earlier micro-batches wait."""


@dataclass(frozen=True, slots=True)
class Part:
    """A program that a step runs so many `times`. `waiting`: phase -> bytes of the gradients of earlier micro-batches
    that a rank holds meanwhile, beside those that the program is given."""

    program: Program
    times: int = 1
    waiting: Mapping[str, int] = field(default_factory=dict)


def accumulation(program: Program) -> Accumulation:
    """The parts of a program whose gradients of parameters are to be added up before they are reduced."""
    parameters = {i.target for i in program.inputs if i.role == "parameter"}
    reduced = [o for o in program.outputs if o.role == "gradient" and o.target in parameters]
    last = tail(program)
    produced = {name for instruction in last for name in instruction.outputs if name}
    names = needed(last, [o.name for o in reduced])
    metas = dict(program.metas)
    pending = {name: add_meta(metas, f"{name}_pending", metas[name]) for name in names}
    sums = {name: add_meta(metas, f"{name}_sum", metas[name]) for name in names}

    tangents = tuple(within(pending[name], "tangent", metas, program.mesh) for name in names)
    micro = tuple(i for i in program.backward if i.name not in produced)
    handed = tuple(result(name, program.mesh, "gradient") for name in names)
    given = tuple(replace(o, name=None) if o in reduced else o for o in program.outputs)
    renamed = tuple(returning(o, sums) if o in reduced else o for o in program.outputs)
    alone = tuple(returning(o, pending) for o in reduced)
    return Accumulation(
        names=names,
        pending=tuple(pending.values()),
        micro=replace(program, backward=micro, outputs=(*given, *handed)),
        last=replace(
            program,
            inputs=(*program.inputs, *tangents),
            backward=with_sums(
                program.backward, {name: (pending[name], sums[name]) for name in names}, metas, produced
            ),
            outputs=renamed,
            metas=metas,
        ),
        rest=replace(
            program,
            inputs=tangents,
            forward=(),
            backward=tuple(reading(i, pending) for i in last),
            saved=(),
            outputs=alone,
            metas=metas,
        ),
    )


def tail(program: Program) -> tuple[Node, ...]:
    """The linear instructions of backward that only gradients of parameters depend on: those from the first collective
    on, or from the cast before it that makes what is reduced narrower, so that sums are as wide as what is added up."""
    parameters = {i.target for i in program.inputs if i.role == "parameter"}
    results, others = set[str](), set[str]()
    for o in program.outputs:
        if o.name is not None:
            (results if o.role == "gradient" and o.target in parameters else others).add(o.name)

    def only_adds_up(node: Node) -> bool:
        return is_linear(node, program.metas) and others.isdisjoint(node.outputs)

    linear = ending(program.backward, only_adds_up, results)
    begun = [node for node in linear if node.collective or _narrows(node, program.metas)]
    within = reached(linear, (name for node in begun for name in node.outputs))
    return tuple(node for node in linear if node.name in within)


def _narrows(instruction: Node, metas: Mapping[str, TensorMeta]) -> bool:
    sizes = [metas[name].dtype.itemsize for name in (*instruction.inputs, *instruction.outputs)]
    return instruction.op == CAST and sizes[0] > sizes[-1]


def is_linear(instruction: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether an instruction makes of a sum the sum of what it makes of the parts."""
    kind = instruction.collective
    if kind in ("all_reduce", "reduce_scatter", "reduce"):
        return bool(instruction.args[1] == "sum")
    if kind is not None:
        return kind in MOVING
    if instruction.op == ADD:
        dtypes = {metas[name].dtype for name in (*instruction.inputs, *instruction.outputs)}
        return len(instruction.inputs) == 2 and len(dtypes) == 1 and not instruction.kwargs
    return instruction.op in SUMMABLE


def with_sums(
    nodes: Sequence[Node],
    totals: Mapping[str, tuple[str, str]],
    metas: Mapping[str, TensorMeta],
    tail: Collection[str] = (),
) -> tuple[Node, ...]:
    """Nodes that add what they make, or are given, of some values to sums, as soon as it is there: value -> the sum
    before, and after. What is made in the `tail` is made of the sums."""
    emitter = Emitter(metas=dict(metas))
    sums = {name: after for name, (_, after) in totals.items()}

    def add(names: Iterable[str]) -> None:
        for name in names:
            if name in totals:
                before, after = totals[name]
                emitter.emit(ADD, (Ref(name), Ref(before)), after, serves=name)

    computed = {name for node in nodes for name in node.outputs}
    add(name for name in totals if name not in computed)
    for node in nodes:
        emitter.written.append(reading(node, sums) if node.name in tail else node)
        add(node.outputs)
    return tuple(emitter.written)


def add_meta(metas: dict[str, TensorMeta], hint: str, meta: TensorMeta) -> str:
    """A new name for a value of this meta."""
    name = distinct(hint, metas)
    metas[name] = meta
    return name


def within(name: str, role: InputRole, metas: Mapping[str, TensorMeta], mesh: Shape) -> ProgramInput:
    """What a part of a program is given as this rank has it: its meta is local."""
    return ProgramInput(name=name, role=role, target=name, meta=metas[name], layout=(Replicate(),) * len(mesh))


def result(name: str, mesh: Shape, role: OutputRole = "output") -> ProgramOutput:
    """What a part of a program gives as this rank has it."""
    return ProgramOutput(name=name, role=role, target=name, meta=None, layout=(Replicate(),) * len(mesh))
