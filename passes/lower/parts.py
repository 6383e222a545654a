"""Parts: a stretch of a program runs in several parts, so that the communication of one hides behind the computation
of the others.

The parts of a region (`regions`) are software-pipelined: part s + 1 is one stage behind part s, where a stage ends with
the start of a collective. `slice.py` and `chunk.py` say which stretches; this file says how they are written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.emitter import Emitter
from autopar.ir.graph import CONTIGUOUS, PERMUTE, RESHAPE, WAIT, Node, Ref, TensorMeta
from autopar.ir.layout import REPLICATE, Partial, Shape, Split
from autopar.ir.program import LAYOUT, has_rank
from autopar.ir.rewriter import inlined
from autopar.ops.aten import SELECT, SLICE
from autopar.ops.emit import OPERAND, Emission, local_program
from autopar.ops.kinds import ADD, CAT
from autopar.ops.rules import rule_of

from .regions import Metas, Refused, Region, adding, factors_of, local_call


def in_parts(
    window: Sequence[Node], metas: dict[str, TensorMeta], region: Region, kept: frozenset[str], label: str
) -> list[Node]:
    """A window of a half with a region in parts, software-pipelined: part s + 1 is one stage behind part s, where a
    stage ends with the start of a collective. What others read of it, `kept` after the window, is put together under
    its old name; `metas` gets those of new values, whose names end with `label` and the number of the part.

    Raises Refused where a member reads what others compute from the region.
    """
    first, last = region.members[0], region.members[-1]
    writer = PartsWriter(half=window, metas=metas, region=region, kept=kept, label=label)
    return [*window[:first], *writer.stretch(first, last), *window[last + 1 :]]


@dataclass(eq=False, kw_only=True)
class PartsWriter(Emitter):
    """Writes the stretch of a window that a region takes, in parts."""

    half: Sequence[Node]
    region: Region
    kept: frozenset[str]
    label: str
    part_names: dict[tuple[str, int], str] = field(default_factory=dict)
    """(value, part) -> that part of it, once written."""
    maker: dict[str, int] = field(default_factory=dict)
    """Value of the region -> the member that makes it."""
    stage: dict[int, int] = field(default_factory=dict)
    """Member -> collectives of the region before it."""
    done: set[tuple[int, int]] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)
    forms: dict[int, Emission] = field(default_factory=dict)
    dropped: frozenset[int] = frozenset()
    """Instructions that the parts take the place of."""

    def stretch(self, first: int, last: int) -> list[Node]:
        """What stands from the first member to the last one."""
        assert not self.dropped.intersection(self.region.members)
        for position in self.region.members:
            instruction = self.half[position]
            before = [self.stage[self.maker[name]] for name in instruction.inputs if name in self.maker]
            self.stage[position] = max(before, default=0) + (instruction.op == WAIT and bool(before))
            self.maker.update((name, position) for name in instruction.outputs if name)
        members = set(self.region.members)
        inside = members | self.dropped
        read_outside = {n for i, instr in enumerate(self.half) if i not in inside for n in instr.inputs} | self.kept
        anchor = max((p for p in members if not self._is_light(p)), default=last)
        late: list[Node] = []
        behind: set[str] = set()  # what others compute from the region
        for position in range(first, last + 1):
            instruction = self.half[position]
            if position in members:
                if not behind.isdisjoint(instruction.inputs):
                    raise Refused(f"{instruction.op} reads what others make of the stretch: {instruction.inputs}")
            elif position in self.dropped:
                pass
            elif position > anchor:
                self._outside(instruction)
            elif behind.isdisjoint(instruction.inputs) and self.maker.keys().isdisjoint(instruction.inputs):
                self.written.append(instruction)
            else:
                late.append(instruction)
                behind.update(name for name in instruction.outputs if name)
            if position == first:
                self._head({n for i in range(first + 1, last + 1) if i not in members for n in self.half[i].outputs})
            if position == anchor:
                self._body()
                for waiting in late:
                    self._outside(waiting)
                behind.clear()
        for name in self.maker:
            if name in read_outside:
                self._join(name)
        return self.written

    def _outside(self, instruction: Node) -> None:
        for name in instruction.inputs:
            if name in self.maker:
                self._join(name)
        self.written.append(instruction)

    def _is_light(self, position: int) -> bool:
        instruction = self.half[position]
        return instruction.op == WAIT or instruction.op in LAYOUT

    # --- the order

    def _head(self, later: set[str]) -> None:
        """What of the first part is only the start of a collective goes where it stood. `later` is not yet there."""
        for member in self._members(0):
            is_start = self._is_light(member) or self.half[member].collective is not None
            inputs = self.half[member].inputs
            if not is_start or not later.isdisjoint(inputs):
                return
            self._write(member, 0)

    def _body(self) -> None:
        """Everything but what only waits: that is written where it is read."""
        stages = max(self.stage.values()) + 1
        light = [all(self._is_light(m) or self.half[m].collective for m in self._members(k)) for k in range(stages)]
        only_waits = light[-1] and not any(self.half[m].collective for m in self._members(stages - 1))
        running = stages - only_waits
        for step in range(self.region.parts + running - 1):
            for k in range(running):
                part = step - k
                if 0 <= part < self.region.parts:
                    if light[k] and k + 1 < running and part > 0:  # the axis is free when the part before has come
                        for member in self._members(k + 1):
                            if self.half[member].op == WAIT:
                                self._write(member, part - 1)
                    for member in self._members(k):
                        self._write(member, part)

    def _members(self, stage: int) -> list[int]:
        return [m for m in self.region.members if self.stage[m] == stage]

    # --- instructions

    def _write(self, member: int, part: int) -> None:
        """One member on one part."""
        if (member, part) in self.done:
            return
        self.done.add((member, part))
        instruction = self.half[member]
        operands = [self._part(instruction, name, part) for name in instruction.inputs]
        if instruction.op in (WAIT, RESHAPE, PERMUTE, CONTIGUOUS) or instruction.collective:
            shape = self._shape(instruction.outputs[0])
            args = (Ref(operands[0]), *instruction.args[1:])
            if instruction.op == RESHAPE:
                args = (Ref(operands[0]), shape)
            (value,) = instruction.outputs
            meta = TensorMeta(shape, self.metas[value].dtype)
            name = self.part_names[value, part] = self._name(value, part)
            self._emit(instruction, instruction.op, args, name, meta)
            return
        more = adding(instruction.op)
        if isinstance(self.region.cuts[instruction.outputs[0]], Partial) and more and not instruction.kwargs:
            self._add(instruction, more, operands, part)
            return
        self._local(member, operands, part)

    def _add(self, instruction: Node, more: str, operands: list[str], part: int) -> None:
        """A partial product onto the sum of those before it."""
        value = instruction.outputs[0]
        args: tuple[Any, ...] = tuple(map(Ref, operands))
        if part:
            args = (Ref(self.part_names[value, part - 1]), *factors_of(instruction.op, args))
        op = more if part else instruction.op
        final = part == self.region.parts - 1
        name = value if final else self._name(value, part)
        if final:
            self.joined.add(value)
        self.part_names[value, part] = self._emit(instruction, op, args, name)

    def _local(self, member: int, operands: list[str], part: int) -> None:
        instruction = self.half[member]
        if member not in self.forms:
            self.forms[member] = _form(instruction, self.metas, self.region)
        emission = self.forms[member]
        names = {OPERAND.format(i): operand for i, operand in enumerate(operands)}
        for result, value in zip(emission.results, instruction.outputs, strict=True):
            if value:
                assert result is not None
                names[result] = self.part_names[value, part] = self._name(value, part)
        for written in emission.instructions:
            for output in written.outputs:
                if output:
                    names.setdefault(output, self._name(f"{instruction.outputs[0]}_{output}", part))
                    self.metas[names[output]] = emission.metas[output]
            about = {"module": instruction.module, "serves": instruction.serves}
            self.written.append(inlined(written, names, **about))

    def _part(self, reader: Node, value: str, part: int) -> str:
        """The name of a part of a value that a member reads."""
        cut = self.region.cuts[value]
        if not isinstance(cut, Split):
            assert value not in self.maker, value
            return value
        if (value, part) in self.part_names:
            return self.part_names[value, part]
        if value in self.maker:
            self._write(self.maker[value], part)
            return self.part_names[value, part]
        name = self._cut_out(reader, value, self._source(reader, value, cut), cut, part)
        if reader.collective:
            name = self._emit(reader, CONTIGUOUS, (Ref(name),), self._name(value, part))
        self.part_names[value, part] = name
        return name

    def _source(self, reader: Node, value: str, cut: Split) -> str:
        """What parts of a value from outside are cut out of."""
        return value

    def _join(self, value: str) -> None:
        """A value of the region, put together under its name."""
        if value in self.joined:
            return
        self.joined.add(value)
        member = self.maker[value]
        instruction = self.half[member]
        source = instruction.inputs[0]
        if instruction.op in (RESHAPE, PERMUTE) and source in self.joined:
            self.written.append(instruction)
            return
        for part in range(self.region.parts):
            self._write(member, part)
        self._together(instruction, value, value)

    # --- values, cut and put together

    def _name(self, value: str, part: int) -> str:
        name = f"{value}_{self.label}{part}"
        while name in self.metas:
            name += "_"
        return name

    def _emit(self, like: Node, op: str, args: tuple[Any, ...], name: str, meta: TensorMeta | None = None) -> str:
        return self.emit(
            op, args, name, metas=None if meta is None else (meta,), module=like.module, serves=like.serves
        )

    def _shape(self, value: str) -> Shape:
        shape, cut = list(self.metas[value].shape), self.region.cuts[value]
        if isinstance(cut, Split):
            shape[cut.dim] //= self.region.parts
        return tuple(shape)

    def _cut_out(self, reader: Node, value: str, source: str, cut: Split, part: int) -> str:
        parts, shape, name = self.region.parts, self.metas[value].shape, self._name(value, part)
        each = cut.period // parts
        if cut.period == shape[cut.dim]:
            args = (Ref(source), cut.dim, part * each, (part + 1) * each)
            return self._emit(reader, SLICE, args, name)
        blocks = (*shape[: cut.dim], shape[cut.dim] // cut.period, parts, each, *shape[cut.dim + 1 :])
        wide = self._emit(reader, RESHAPE, (Ref(source), blocks), self._name(f"{value}_blocks", part))
        block = (Ref(wide), cut.dim + 1, part)
        one = self._emit(reader, SELECT, block, self._name(f"{value}_block", part))
        return self._emit(reader, RESHAPE, (Ref(one), self._shape(value)), name)

    def _together(self, instruction: Node, value: str, joint: str) -> None:
        """Put all parts of a value together, under the name `joint`."""
        cut = self.region.cuts[value]
        parts = [Ref(self.part_names[value, part]) for part in range(self.region.parts)]
        meta = self.metas[value]
        if isinstance(cut, Partial):
            total = parts[0]
            for number, more in enumerate(parts[1:], 1):
                name = joint if number == len(parts) - 1 else self._name(f"{value}_sum", number)
                total = Ref(self._emit(instruction, ADD, (total, more), name))
            return
        assert isinstance(cut, Split)
        size = meta.shape[cut.dim]
        if cut.period == size:
            self._emit(instruction, CAT, (tuple(parts), cut.dim), joint)
            return
        each = (*meta.shape[: cut.dim], size // cut.period, 1, cut.period // len(parts), *meta.shape[cut.dim + 1 :])
        blocks = tuple(
            Ref(self._emit(instruction, RESHAPE, (part, each), self._name(f"{value}_block", n)))
            for n, part in enumerate(parts)
        )
        apart = self._emit(instruction, CAT, (blocks, cut.dim + 1), self._name(f"{value}_blocks", 0))
        self._emit(instruction, RESHAPE, (Ref(apart), meta.shape), joint)


def _form(instruction: Node, metas: Metas, region: Region) -> Emission:
    """The local program of an instruction on a part. Raises Refused where it would depend on which part it is."""
    call = local_call(instruction, metas)
    rule = rule_of(call)
    assert rule is not None
    mesh = (region.parts,)
    operands = tuple((region.cuts[name],) for name in instruction.inputs)
    results = tuple((region.cuts[name] if name else REPLICATE,) for name in instruction.outputs)
    factor = next(
        digit[0]
        for i, (cut,) in enumerate(operands)
        if isinstance(cut, Split) and (digit := rule.input_factor(i, cut)) is not None
    )
    emission = local_program(call, rule, ((rule.factors[factor].name, (0,)),), operands, results, mesh)
    for written in emission.instructions:
        if written.collective or has_rank(written):
            raise Refused(f"{instruction.op} depends on which part it makes")
    return emission
