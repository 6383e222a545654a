"""Stages: a program whose first mesh axis is time, cut into the programs of a pipeline.

A pipeline runs the micro-batches of a step one after the other. They are the ranks of a mesh axis, the first, which
lies in time: each holds a part of the batch, and what is added up over that axis is added up as micro-batches pass. So
a step equals that of the whole batch by construction: a mean divides by the count of all labels, and a random number
is that of its global index. What a program computes falls into kinds:

- *constant*: the same in all micro-batches, such as casts of parameters; a stage computes what of it it reads, each
  time, or once, if a parameter is *held* as it is gathered;
- *free*: of a micro-batch, and of no parameter (masks, positions); a stage computes what of it it reads;
- *counted*: what micro-batches read of all of them, such as how many labels there are: sums of free values, added up
  before the first micro-batch;
- *of a stage*: all else that forward and backward compute of a micro-batch;
- *rest*: what follows the sums over micro-batches, once: the loss, and reductions of gradients (`accumulate.tail`).

Forward is cut where it stands: a stage has what lies between two cuts. An operator of backward runs on the last of the
stages, up to where its gradients are from, that has all of forward that it reads. So backward passes the stages in the
opposite order, and a value goes from any stage to any that reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from autopar.ir.dataflow import ending, leading, reached
from autopar.ir.emitter import Emitter
from autopar.ir.graph import (
    WAIT,
    JointGraph,
    Node,
    Ref,
    map_references,
    producers,
    readers,
)
from autopar.ir.layout import Replicate
from autopar.ir.program import LAYOUT, Program, ProgramInput, ProgramOutput, has_rank
from autopar.ir.rewrite import living, needed, reading
from autopar.ir.rewriter import returning
from autopar.ir.schedule import Edge
from autopar.ops.apart import APART
from autopar.ops.kinds import SELECT, STACK
from autopar.ops.traced import Traced

from .accumulate import add_meta, is_linear, result, tail, with_sums, within
from .hold import gathered

TIME = 0
"""The mesh axis that lies in time."""

Half = Literal["forward", "backward"]
HALVES: tuple[Half, Half] = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A value of each micro-batch that goes from a half of the step of a stage to a half of that of another."""

    name: str
    source: int
    made: Half
    target: int
    read: Half

    @property
    def edge(self) -> Edge:
        """What carries it: what forward makes for a later stage goes with its forward, all else with backward."""
        ahead = self.made == "forward" and self.source < self.target
        return self.source, self.target, "F" if ahead else "B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A value that goes from a stage to another once a step: a parameter before it, or a sum behind it."""

    name: str
    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """The programs of one stage, on the mesh of the whole, whose first coordinate is the number of a micro-batch.

    `step` is run of every micro-batch, forward and backward. Among its outputs are what it sends, what the model
    returns of a micro-batch, and what is `summed`. `counts` gives what of a micro-batch is counted, before the first
    one, and `counted` what micro-batches read that is computed once before them: of parameters that are held, and of
    the sums, which are its inputs called `totals`. `rest` is run once, on
    sums under the names of what they add up: its forward gives outputs and mutations, its backward gradients.
    """

    number: int
    counts: Program
    totals: tuple[str, ...]
    counted: Program
    step: Program
    summed: tuple[str, ...]
    rest: Program


@dataclass(frozen=True, kw_only=True)
class Staged:
    """The stages of a program, and what goes from one to another: `messages` of each micro-batch, `parameters` that
    several stages use before a step, and `sums` behind it."""

    program: Program
    stages: tuple[PipelineStage, ...]
    messages: tuple[Message, ...]
    parameters: tuple[Handed, ...]
    sums: tuple[Handed, ...]
    homes: Mapping[str, int]
    """Value of a parameter -> the stage that holds it."""

    @property
    def micro_batches(self) -> int:
        return self.program.mesh[TIME]


def staged(program: Program, cuts: Sequence[str], held: Collection[str] = ()) -> Staged:
    """The program, whose first axis is time, in stages. Each but the first begins with the operator that serves a node
    of a cut, or is empty ("", or the same as the next one). What forward gathers of `held` parameters is gathered once,
    before the first micro-batch. Raises ValueError where micro-batches need one another in the midst of a step, or a
    cut is no place of forward."""
    return _Cutter(unstacked(program), tuple(cuts), held).staged()


def check_loss(of: JointGraph | Program) -> None:
    """Raises ValueError where backward begins from something else than one number: a pipeline runs forward and backward
    of a step together, before anybody says what the gradients of several results are."""
    begins = {i.target: of.metas[i.name].shape for i in of.inputs if i.role == "tangent"}
    if len(begins) > 1 or any(begins.values()):
        found = ", ".join(f"{name} {[*shape]}" for name, shape in begins.items())
        likely = min(begins, key=lambda name: len(begins[name]))
        keys = (key if key.isdigit() else f'"{key}"' for key in likely.split(".")[1:])
        loss = "".join(("output", *(f"[{key}]" for key in keys), ".mean()" if begins[likely] else ""))
        others = ", or return the others detached" if len(begins) > 1 else ""
        raise ValueError(
            f"a pipeline begins backward from one number, the loss, and the model returns what gradients may come from "
            f"as {found}: say what the loss is (loss_fn=lambda output: {loss}){others}"
        )


def cuts_by(program: Program, homes: Mapping[str, int], stages: int) -> tuple[str, ...]:
    """Where stages begin such that each of the parameters, by name, is first read in the stage that is its home: each
    with what first reads a parameter of it or of a later one, "" where nothing does."""
    of = {i.name: {homes[i.target]} for i in program.inputs if i.role == "parameter" and i.target in homes}
    varying = {i.name for i in program.inputs if varies(i, program)}
    first: dict[int, str] = {}
    for node in program.forward:
        read = set().union(*(of.get(name, ()) for name in node.inputs))
        if varying.isdisjoint(node.inputs) and not tells_time(node):
            of.update(dict.fromkeys(filter(None, node.outputs), read))
            continue
        varying.update(filter(None, node.outputs))
        for stage in range(1, max(read, default=0) + 1):
            first.setdefault(stage, node.serves)
    return tuple(first.get(stage, "") for stage in range(1, stages))


def _marked(program: Program) -> Program:
    """The program; with one micro-batch, of which all is the sum, what it returns is added up as that of several."""
    if program.mesh[TIME] > 1:
        return program
    emitter = Emitter(metas=dict(program.metas), mesh=program.mesh)
    halves: tuple[list[Node], list[Node]] = ([*program.forward], [*program.backward])
    totals: dict[tuple[str, bool], str] = {}
    for o in program.outputs:
        if o.name is not None and (o.name, o.backward) not in totals:
            emitter.written, emitter.about = halves[o.backward], {"serves": f"{o.role} {o.target}"}
            begun = emitter.emit("collective.all_reduce", (Ref(o.name), "sum", TIME), emitter.fresh(o.name))
            totals[o.name, o.backward] = emitter.emit(WAIT, (Ref(begun),), emitter.fresh(o.name))
    outputs = tuple(replace(o, name=totals.get((o.name or "", o.backward))) for o in program.outputs)
    forward, backward = map(tuple, halves)
    return replace(program, forward=forward, backward=backward, outputs=outputs, metas=emitter.metas)


def unstacked(program: Program) -> Program:
    """The program in which numbers that are added up over ranks side by side travel alone, and results that need not
    all of their operators' operands are had without: they may be needed at other times."""
    program = _marked(program)
    emitter = Emitter(metas=dict(program.metas), mesh=program.mesh)
    parts: dict[str, tuple[str, ...]] = {}
    same: dict[str, str] = {}
    every = readers(program.nodes)

    def is_apart(name: str) -> bool:
        """Whether all that reads a value takes one of its numbers, or adds it up over ranks."""
        following = [program.nodes[k] for k in every.get(name, ())]
        return bool(following) and all(
            (node.op == SELECT and node.args[1] == 0)
            or ((node.op == WAIT or node.collective == "all_reduce") and is_apart(node.name))
            for node in following
        )

    kept = {o.name for o in program.outputs} | set(program.saved)

    def written(nodes: Sequence[Node]) -> tuple[Node, ...]:
        emitter.written = []
        for node in nodes:
            source = node.inputs[0] if node.inputs else ""
            emitter.about = {"module": node.module, "serves": node.serves}
            if node.op == STACK and len(node.args) == 1 and is_apart(node.name) and node.name not in kept:
                parts[node.name] = tuple(same.get(name, name) for name in node.inputs)
            elif source in parts and node.op == SELECT:
                same[node.name] = parts[source][node.args[2]]
            elif source in parts:
                parts[node.name] = tuple(emitter.emit(node.op, (Ref(part), *node.args[1:])) for part in parts[source])
            elif node.op in APART and node.outputs[APART[node.op][0]]:
                number, function = APART[node.op]
                values: Any = map_references(node.args, lambda name: Traced(emitter, name))
                total: Any = function(*values)
                same[node.outputs[number]] = total.name
                outputs = tuple("" if k == number else name for k, name in enumerate(node.outputs))
                emitter.written.append(reading(node, same, outputs=outputs))
            else:
                emitter.written.append(reading(node, same))
        return tuple(emitter.written)

    forward, backward = _counting_first(program, written(program.forward), written(program.backward))
    outputs = tuple(returning(o, same) for o in program.outputs)
    made = {name for node in forward for name in node.outputs}
    counts = (name for node in backward for name in node.inputs if name in made)
    saved = tuple(dict.fromkeys((*(same.get(name, name) for name in program.saved), *counts)))
    return replace(program, forward=forward, backward=backward, outputs=outputs, saved=saved, metas=emitter.metas)


def _counting_first(
    program: Program, forward: tuple[Node, ...], backward: tuple[Node, ...]
) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The halves, with what backward alone counts, of what depends on no parameter, at the end of forward."""
    known = {name for node in forward for name in node.outputs} | {i.name for i in program.inputs if i.role == "input"}
    trained = reached(forward, (i.name for i in program.inputs if i.role == "parameter"))
    free: list[Node] = []
    for node in backward:
        if trained.isdisjoint(node.inputs) and known.issuperset(node.inputs):
            known.update(node.outputs)
            free.append(node)
    counted = {node.name for node in free if _in_time(node)}
    kept = living(free, [n.name for n in free if n.op == WAIT and n.inputs[0] in counted])
    moved = {node.name for node in kept}
    return (*forward, *kept), tuple(node for node in backward if node.name not in moved)


def _in_time(node: Node) -> bool:
    return node.collective is not None and node.args[-1] == TIME


def varies(i: ProgramInput, program: Program) -> bool:
    """Whether an input differs by micro-batch. If there is one, those of the model do."""
    return not isinstance(i.layout[TIME], Replicate) or (program.mesh[TIME] == 1 and i.role == "input")


def tells_time(node: Node) -> bool:
    """Whether a number that a node is given differs by micro-batch."""
    return has_rank(node, lambda index: any(axis == TIME for axis, _ in index.terms))


class Kinds:
    """What the values of a program are, whose first axis is time. `varying` ones differ by micro-batch, `trained` ones
    depend on a parameter, and `summed` ones follow a sum over micro-batches. Nodes, which go by their first result, are
    of the `tail`, `late` (what results of the step alone read of sums), `early` (what micro-batches read of sums), of a
    stage, or else computed where they are read. Raises ValueError where micro-batches need one another."""

    def __init__(self, program: Program) -> None:
        self.program, self.nodes = program, program.nodes
        self.made, self.read = producers(self.nodes), readers(self.nodes)
        self.parameters = {i.target: i.name for i in program.inputs if i.role == "parameter"}
        self.varying = {i.name for i in program.inputs if varies(i, program)}
        self.trained = reached(self.nodes, self.parameters.values())
        begun = [node.name for node in self.nodes if _in_time(node)]
        self.summed = reached(self.nodes, begun)
        self.totals: dict[str, str] = {}
        """A sum over micro-batches -> what it adds up."""
        self._follow()
        self.tail = {node.name for node in tail(program)}
        self.late = self._late()
        self.early = {n.name for n in program.forward if self._is_sum(n) and n.name not in self.late}
        self._refuse_between()

    def _follow(self) -> None:
        for node in self.nodes:
            if _in_time(node) or (node.op == WAIT and node.inputs[0] in self.totals):
                self.totals[node.name] = self.totals.get(node.inputs[0], node.inputs[0])
            elif not self.varying.isdisjoint(node.inputs) or tells_time(node):
                self.varying.update(filter(None, node.outputs))

    def _is_sum(self, node: Node) -> bool:
        """Whether a node follows sums, and so is the same in all micro-batches."""
        return node.name in self.summed and node.name not in self.varying

    def _late(self) -> set[str]:
        everywhere = self.made.keys()  # also what nobody reads
        return {node.name for node in ending(self.nodes, self._is_sum, everywhere)}

    def _refuse_between(self) -> None:
        """Raises ValueError where a micro-batch reads what others compute with parameters, or writes."""
        for k, node in enumerate(self.nodes):
            if not _in_time(node):
                continue
            is_forward = k < len(self.program.forward)
            is_count = is_forward and node.name not in self.trained
            if not (node.collective == "all_reduce" and node.args[1] == "sum" and (self.is_end(node) or is_count)):
                raise ValueError(
                    f"{node.module or 'the model'} needs all micro-batches of a step at once ({node.op} for "
                    f"{node.serves}), and a pipeline has one after the other: take a layer or loss that treats each "
                    f"sample alone (LayerNorm and GroupNorm do; batch norm, and losses that balance experts or compare "
                    f"samples, do not), or a mesh without stages"
                )
        for o in self.program.outputs:
            if o.role == "update" or (o.role == "mutation" and o.name in self.varying):
                raise ValueError(f"{o.target} is written by each micro-batch, and a pipeline writes once a step")

    def leading(self, homes: Mapping[str, int]) -> dict[str, int]:
        """Value of which a sum leads to the gradient of a parameter, and to nothing else -> where that parameter is."""
        found = {
            o.name: homes[self.parameters[o.target]]
            for o in self.program.outputs
            if o.role == "gradient" and o.name is not None and o.target in self.parameters
        }
        others = {o.name for o in self.program.outputs if o.name not in found}
        for node in reversed(self.program.backward):
            ends = [found[name] for name in node.outputs if name in found]
            if ends and (self.is_end(node) or node.op in LAYOUT):
                for name in node.inputs:
                    found.setdefault(name, ends[0])
            elif not self.is_end(node):
                others.update(node.inputs)
        return {name: home for name, home in found.items() if name not in others}

    def is_end(self, node: Node) -> bool:
        return node.name in self.tail or node.name in self.late

    def is_of_stage(self, node: Node) -> bool:
        """Whether a stage computes it of each micro-batch: it varies, and depends on a parameter. What lays a value out
        is done where that is read."""
        if self.is_end(node) or node.name in self.early or node.op in LAYOUT:
            return False
        return any(name in self.varying and name in self.trained for name in node.outputs)

    def is_late(self, name: str) -> bool:
        """Whether backward makes a value."""
        return self.made.get(name, -1) >= len(self.program.forward)

    def viewed(self, name: str) -> str:
        """What a value is a view of: itself, if it is none."""
        node = self.maker(name)
        return name if node is None or node.op not in LAYOUT else self.viewed(node.inputs[0])

    def maker(self, name: str | None) -> Node | None:
        return self.nodes[self.made[name]] if name in self.made else None


class _Cutter(Kinds):
    """Cuts one program."""

    def __init__(self, program: Program, cuts: tuple[str, ...], held: Collection[str] = ()) -> None:
        super().__init__(program)
        known = gathered(program, held) - self.varying
        self.early |= {node.name for node in program.forward if node.name in known}
        self.cuts, self.numbers = cuts, range(len(cuts) + 1)
        self.given = {i.name: i for i in program.inputs}
        self.tangents = {i.name for i in program.tangents}
        self.stage_of: dict[str, int] = {}
        self._place_forward()
        self.there = self._availability()
        self.homes = {name: min(self.there[name]) for name in self.parameters.values()}
        leading = self.leading(self.homes)
        self._place_backward(leading)
        self._put_off(leading)
        self.messages: dict[Message, None] = {}

    # ---- places

    def _starts(self) -> list[int]:
        """Where in forward each stage begins."""
        first: dict[str, int] = {}
        for k, node in enumerate(self.program.forward):
            first.setdefault(node.serves, k)
        first[""] = len(self.program.forward)
        for cut in self.cuts:
            if cut not in first:
                raise ValueError(f"a stage is to begin with {cut!r}, and forward has no operator that is called so")
        starts = [0, *(first[cut] for cut in self.cuts)]
        if starts != sorted(starts):
            raise ValueError(f"stages begin with {', '.join(self.cuts)}: name operators in the order of forward")
        return starts

    def _place_forward(self) -> None:
        starts = self._starts()
        for number, (first, end) in enumerate(pairwise((*starts, len(self.program.forward)))):
            for node in self.program.forward[first:end]:
                if self.is_of_stage(node):
                    self.stage_of[node.name] = number

    def _availability(self) -> dict[str, set[int]]:
        """Value that a parameter leads to -> the stages whose forward makes or reads it; all, if none does."""
        there: dict[str, set[int]] = {name: set() for name in self.trained}
        for node in reversed(self.program.forward):
            results = [name for name in node.outputs if name in there]
            if node.name in self.stage_of:
                here = {self.stage_of[node.name]}
                for name in results:
                    there[name] |= here
            else:
                here = set().union(*(there[name] for name in results))
            for name in node.inputs:
                if name in there:
                    there[name] |= here
        return {name: stages or set(self.numbers) for name, stages in there.items()}

    def _place_backward(self, leading: Mapping[str, int]) -> None:
        for node in self.program.backward:
            if not self.is_of_stage(node):
                continue
            read = list(map(self.viewed, node.inputs))
            behind = [self._place(name) for name in read if self.is_late(name)]
            most = min((number for number in behind if number is not None), default=self.numbers[-1])
            saved = [self.there[name] for name in read if name in self.there and not self.is_late(name)]
            fitting = [number for number in range(most + 1) if saved and all(number in at for at in saved)]
            home = leading.get(node.name)
            if home is not None and (not saved or home in fitting):  # so that no sum goes there
                fitting = [min(most, home)]
            self.stage_of[node.name] = max(fitting, default=most)

    def _put_off(self, leading: Collection[str]) -> None:
        """Adds to the tail what adds up parts of gradients that several stages make."""
        for node in reversed(self.program.backward):
            makers = {self._place(name) for name in node.inputs}
            if len(makers) > 1 and node.name in leading and is_linear(node, self.program.metas):
                self.tail.add(node.name)
                self.stage_of.pop(node.name, None)
        for node in self.program.backward:
            if node.op in LAYOUT and node.name in leading and not self.tail.isdisjoint(node.inputs):
                self.tail.add(node.name)

    def _place(self, name: str | None) -> int | None:
        """The stage that computes a value, if that is one."""
        node = None if name is None else self.maker(self.viewed(name))
        return None if node is None else self.stage_of.get(node.name)

    def _end(self, o: ProgramOutput) -> int:
        """The stage that gives what a step returns once: that which holds the parameter, or the last that leads to
        it."""
        if o.target in self.parameters:
            return self.homes[self.parameters[o.target]]
        ways = leading(self.nodes, [o.name or ""], lambda node: self._place(node.name) is None, self.made)
        ends = [o.name, *(name for position in ways for name in self.nodes[position].inputs)]
        return max(self._place(name) or 0 for name in ends)

    # ---- programs

    def staged(self) -> Staged:
        rests = [self._rest(number) for number in self.numbers]
        sums: dict[Handed, None] = {}
        for number, (_, entries) in enumerate(rests):
            for name in entries:
                at = self._place(name)
                sums[Handed(name=name, source=number if at is None else at, target=number)] = None
        stages = []
        for number, (rest, _) in enumerate(rests):
            summed = list(dict.fromkeys(h.name for h in sums if h.source == number))
            step = self._step(number, summed)
            counts, totals, counted = self._counts([i.name for p in (step, rest) for i in p.inputs])
            stages.append(
                PipelineStage(
                    number=number, counts=counts, totals=totals, counted=counted, step=step,
                    summed=tuple(summed), rest=rest,
                )
            )  # fmt: skip
        guests = {
            Handed(name=i.name, source=self.homes[i.name], target=stage.number): None
            for stage in stages
            for program in (stage.step, stage.counted, stage.rest)
            for i in program.inputs
            if i.role == "parameter" and self.homes[i.name] != stage.number
        }
        return Staged(
            program=self.program,
            stages=tuple(stages),
            messages=tuple(self.messages),
            parameters=tuple(guests),
            sums=tuple(handed for handed in sums if handed.source != handed.target),
            homes=self.homes,
        )

    def _step(self, number: int, summed: Sequence[str]) -> Program:
        def is_here(o: ProgramOutput) -> bool:
            return o.name in self.varying and o.target not in self.parameters and (self._place(o.name) or 0) == number

        of_model = [o for o in self.program.outputs if is_here(o)]
        handed = dict.fromkeys((*self._sent(number), *summed))
        halves: tuple[list[str], list[str]] = ([], [])
        for name in handed:
            halves[self.is_late(name)].append(name)
        own = [node for node in self.nodes if self.stage_of.get(node.name) == number]
        return self._program(own, *halves, once=False, results=of_model)

    def _rest(self, number: int) -> tuple[Program, list[str]]:
        """The rest of a stage, and what it reads of sums."""
        outputs = self.program.outputs
        results = [o for o in outputs if o.name and o.name not in self.varying and self._end(o) == number]
        program = self._program([], [], [], once=True, results=results)
        entries = [i.name for i in program.inputs if i.name in self.made and not self._is_early(i.name)]
        return program, sorted(entries, key=self.made.__getitem__)

    def _counts(self, read: Iterable[str]) -> tuple[Program, tuple[str, ...], Program]:
        """What is counted of each micro-batch, the sums, and what follows from these of what is read."""
        names = [name for name in dict.fromkeys(read) if self._is_early(name)]
        before = leading(self.nodes, names, lambda node: node.name in self.early, self.made)
        taken = {self.nodes[position].name for position in before}
        own = [node for node in self.program.forward if node.name in taken and node.name not in self.totals]
        totals = [n.name for n in self.program.forward if n.name in taken and n.name in self.totals and n.op == WAIT]
        counts = self._program([], [self.totals[name] for name in totals], [], once=False)
        for i in counts.inputs:
            if self._is_early(i.name):
                raise ValueError(f"{i.name} is counted over a step, and what follows from it is counted again")
        counted = self._program(own, names, [], once=True, entries=totals)
        return counts, tuple(totals), counted

    def _is_early(self, name: str) -> bool:
        node = self.maker(name)
        return node is not None and node.name in self.early

    def _sent(self, number: int) -> list[str]:
        """What a stage sends, in order; to whom, is noted."""
        sent: dict[str, None] = {}
        for target in self.numbers:
            for read, names in zip(HALVES, self._needs[target], strict=True):
                for name in names:
                    maker = self.maker(name)
                    assert maker is not None
                    made = HALVES[self.is_late(name)]
                    is_there = (made, read) == HALVES and name in self._needs[target][0]
                    if target != number and self.stage_of[maker.name] == number and not is_there:
                        sent[name] = None
                        message = Message(name=name, source=number, made=made, target=target, read=read)
                        self.messages[message] = None
        return sorted(sent, key=self.made.__getitem__)

    @cached_property
    def _needs(self) -> list[tuple[dict[str, None], dict[str, None]]]:
        """What each stage's forward, and its backward, read of what stages compute, directly or by way of what they
        compute where it is read."""
        found = []
        for number in self.numbers:
            here = [[n for n in half if self.stage_of.get(n.name) == number] for half in self.program.halves]
            found.append((dict.fromkeys(self._leaves(here[0])), dict.fromkeys(self._leaves(here[1]))))
        return found

    def _leaves(self, own: Iterable[Node]) -> Iterator[str]:
        seen, waiting = set[str](), [name for node in own for name in node.inputs]
        while waiting:
            name = waiting.pop()
            node = self.maker(name)
            if name in seen or node is None or node.name in self.early:
                continue
            seen.add(name)
            if node.name in self.stage_of:
                yield name
            else:
                waiting += node.inputs

    def _program(
        self,
        own: Sequence[Node],
        forward_handed: Sequence[str],
        backward_handed: Sequence[str],
        *,
        once: bool,
        results: Sequence[ProgramOutput] = (),
        entries: Sequence[str] = (),
    ) -> Program:
        """The program of own nodes that hands on values of its halves, and has results of the whole, with what these
        need of what is computed where it is read: `once`, of what does not vary. Of sums, it reads what they add up
        under its name, but for `entries`."""
        metas, mesh = self.program.metas, self.program.mesh
        totals = {name: of for name, of in self.totals.items() if once and name not in entries}
        chosen = {node.name for node in own if node.name not in self.totals}

        def closed(half: Sequence[Node], wanted: Iterable[str]) -> tuple[Node, ...]:
            within = {node.name for node in half}
            waiting = [*(name for node in half if node.name in chosen for name in node.inputs), *wanted]
            while waiting:
                node = self.maker(waiting.pop())
                if node is None or node.name in chosen or node.name not in within or self._is_placed(node):
                    continue
                if node.name in totals:
                    waiting += node.inputs
                elif not once or self.is_end(node) or self.varying.isdisjoint(filter(None, node.outputs)):
                    chosen.add(node.name)
                    waiting += node.inputs
            return tuple(reading(node, totals) for node in half if node.name in chosen)

        results = [returning(o, totals) for o in results]
        first = [*forward_handed, *(o.name for o in results if o.name and not o.backward)]
        second = [*backward_handed, *(o.name for o in results if o.name and o.backward)]
        backward = closed(self.program.backward, second)
        late = needed(backward, second)
        forward = closed(self.program.forward, [*first, *(name for name in late if not self.is_late(name))])
        made = {name for node in forward for name in node.outputs}
        ahead = [n for n in late if n in made or self._is_early(n) or (n in self.given and n not in self.tangents)]
        reads = needed(forward, [*first, *ahead])
        behind = [name for name in late if name not in reads and name not in made]
        return replace(
            self.program,
            inputs=(
                *(self.given.get(name) or within(name, "input", metas, mesh) for name in reads),
                *(self.given.get(name) or within(name, "tangent", metas, mesh) for name in behind),
            ),
            forward=forward,
            backward=backward,
            saved=tuple(name for name in late if name in reads or name in made),
            outputs=(
                *(result(name, mesh) for name in forward_handed),
                *(result(name, mesh, "gradient") for name in backward_handed),
                *results,
            ),
        )

    def _is_placed(self, node: Node) -> bool:
        return node.name in self.stage_of or node.name in self.early


@dataclass(frozen=True, kw_only=True)
class Units:
    """What a stage runs, each a program whose forward alone counts, and which gives what others need: `counts` and
    `forward` of a micro-batch; backward in two parts, `inputs`, which leads to what is sent, and `weights`; and
    `counted` and `rest` once a step. In all micro-batches but the first, what is summed is added up as it is made
    (`adding`)."""

    counts: Program
    counted: Program
    forward: Program
    inputs: Program
    weights: Program
    rest: Program


def units(stage: PipelineStage, sent: Collection[str]) -> Units:
    """Those of a stage that sends these values, among others."""
    step, rest = stage.step, stage.rest
    results = [o.name for o in step.outputs if o.name is not None]
    made_by = producers(step.backward)
    soon = leading(step.backward, (name for name in results if name in sent), made=made_by)
    halves = [[node for at, node in enumerate(step.backward) if (at in soon) == first] for first in (True, False)]
    ahead = {*needed(halves[1]), *results}
    made = [name for node in halves[0] for name in node.outputs if name in ahead]
    return Units(
        counts=unit(stage.counts, stage.counts.forward, [o.name for o in stage.counts.outputs]),
        counted=unit(stage.counted, stage.counted.forward, [o.name for o in stage.counted.outputs]),
        forward=unit(step, step.forward, [*(name for name in results if name not in made_by), *step.saved]),
        inputs=unit(step, halves[0], made),
        weights=unit(step, halves[1], [name for name in results if name in made_by and name not in made]),
        rest=unit(rest, rest.nodes, [o.name for o in rest.outputs]),
    )


def adding(
    program: Program, summed: Collection[str], others: Collection[str] = ()
) -> tuple[Program, dict[str, tuple[str, str]]]:
    """A unit that adds what it makes of what is summed to sums that it is given, as soon as it is made; and of each
    what the sum is called as an input, and as an output. What it made itself is returned to `others` alone."""
    metas, mesh, own = dict(program.metas), program.mesh, set(summed)
    totals = {
        name: (add_meta(metas, f"{name}_pending", metas[name]), add_meta(metas, f"{name}_sum", metas[name]))
        for name in (o.name for o in program.outputs)
        if name is not None and name in own
    }
    unit = replace(
        program,
        inputs=(*program.inputs, *(within(before, "input", metas, mesh) for before, _ in totals.values())),
        forward=with_sums(program.forward, totals, metas),
        outputs=(
            *(o for o in program.outputs if o.name not in totals or o.name in others),
            *(result(after, mesh) for _, after in totals.values()),
        ),
        metas=metas,
    )
    return unit, totals


def unit(program: Program, nodes: Sequence[Node], results: Iterable[str | None]) -> Program:
    """The program of these nodes alone, as a forward."""
    names = [name for name in dict.fromkeys(results) if name is not None]
    kept = living(nodes, names)
    given = {i.name: replace(i, role="input") if i.role == "tangent" else i for i in program.inputs}
    return replace(
        program,
        inputs=tuple(
            given.get(name) or within(name, "input", program.metas, program.mesh) for name in needed(kept, names)
        ),
        forward=kept,
        backward=(),
        saved=(),
        outputs=tuple(result(name, program.mesh) for name in names),
    )
