"""A step of a pipeline: what each device does for its stages, micro-batch by micro-batch.

The same code runs ranks that are simulated in one process, and those of a mesh (`pipelined`): they differ in what a
value is (`Machine`), and in how messages go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import torch

from autopar.ir.layout import Shape
from autopar.ir.program import Program
from autopar.ir.schedule import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, Schedule, in_sequence
from autopar.ops import lockstep
from autopar.ops.kinds import ADD_TO
from autopar.passes.lower.stages import TIME, Half, Message, PipelineStage, Staged, Units, adding, units

from .simulate import Simulated, assemble, coordinates, given_to_ranks

V = TypeVar("V")


class Machine(Protocol[V]):
    """What runs a program's forward on values by name, for a micro-batch, and takes them as it reads them."""

    def run(self, unit: Program, values: dict[str, V], micro_batch: int) -> dict[str, V]: ...


@dataclass(frozen=True)
class SummedUnit:
    """A unit, and two that add what is summed of it to sums: name -> what the sum is called as its input, and as its
    output. The first one adds to what a unit made, which may be a view, or be on its way to another rank; the other one
    to what an addition made, which it overwrites."""

    unit: Program
    adding: Program
    adding_to: Program
    totals: Mapping[str, tuple[str, str]]

    @staticmethod
    def of(unit: Program, summed: Collection[str], others: Collection[str] = ()) -> SummedUnit:
        added, totals = adding(unit, summed, others)
        sums = {after for _, after in totals.values()}
        overwriting = [
            replace(node, op=ADD_TO, args=tuple(reversed(node.args))) if node.name in sums else node
            for node in added.forward
        ]
        return SummedUnit(unit, added, replace(added, forward=tuple(overwriting)), totals)


@dataclass(eq=False)
class StageRun(Generic[V]):
    """One stage in one step. `given` is what a rank is given, by name and micro-batch; `returned` is what is kept of
    what the model returns of each."""

    staged: Staged
    stage: PipelineStage
    machine: Machine[V]
    given: Callable[[str, int], V]
    returned: Collection[str]
    units: Units = field(init=False)
    once: dict[str, V] = field(default_factory=dict)
    """What holds for the whole step: parameters of other stages, what is counted, and what is gathered once."""
    sums: dict[str, V] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    """The sums that an addition made."""
    kept: dict[int, dict[str, V]] = field(default_factory=lambda: defaultdict(dict))
    """Of each micro-batch, what backward will read."""
    results: dict[int, dict[str, V]] = field(default_factory=lambda: defaultdict(dict))
    """Of each micro-batch, what the model returns."""

    def __post_init__(self) -> None:
        number = self.stage.number
        self.messages = [m for m in self.staged.messages if m.source == number]
        self.units = units(self.stage, {m.name for m in self.messages})
        of_kind = {FORWARD: self.units.forward, INPUTS: self.units.inputs, WEIGHTS: self.units.weights}
        later = {kind: list(of_kind.values())[k + 1 :] for k, kind in enumerate(of_kind)}
        self.wanted = {kind: {i.name for left in later[kind] for i in left.inputs} for kind in of_kind}
        """Of each kind of unit, what of its values the kinds behind it read."""
        others = {*self.returned, *(m.name for m in self.messages)}
        self.parts = {
            kind: SummedUnit.of(unit, self.stage.summed, others | self.wanted[kind]) for kind, unit in of_kind.items()
        }
        self.counts = SummedUnit.of(self.units.counts, [str(o.name) for o in self.units.counts.outputs])

    @property
    def programs(self) -> list[Program]:
        """What it runs, as often as there are micro-batches for it."""
        found = [self.units.counted, self.units.rest]
        for part in (self.counts, *self.parts.values()):
            variants = (part.unit, part.adding, part.adding_to) if part.totals else (part.unit,)
            found += variants[: self.staged.micro_batches]
        return [program for program in found if program.forward]

    def begin(self) -> None:
        """Forgets the last step."""
        self.once, self.sums, self.added = {}, {}, set()
        self.kept, self.results = defaultdict(dict), defaultdict(dict)

    def count(self) -> None:
        """Counts all micro-batches, and computes what is done once before them."""
        totals: dict[str, V] = {}
        for micro_batch in range(self.staged.micro_batches) if self.stage.totals else ():
            self._run(self.counts, {}, micro_batch, totals)
        parts = [str(o.name) for o in self.units.counts.outputs]
        named = {total: totals[part] for total, part in zip(self.stage.totals, parts, strict=True)}
        counted = self.units.counted
        self.once |= self.machine.run(counted, {i.name: self._value(i.name, named, 0) for i in counted.inputs}, 0)

    def run(self, action: Action, received: Mapping[str, V]) -> dict[Message, V]:
        """Does a unit, given what others sent for it, and returns what it sends."""
        k = action.micro_batch
        kept = self.kept[k]
        kept |= received
        sent: dict[Message, V] = {}
        for kind in (INPUTS, WEIGHTS) if action.kind == BACKWARD else (action.kind,):
            wanted = self.wanted[kind]
            made = self._run(self.parts[kind], kept, k, self.sums)
            self.results[k] |= {name: made[name] for name in self.returned if name in made}
            sent |= {message: made[message.name] for message in self.messages if message.name in made}
            self.kept[k] = kept = {name: value for name, value in (kept | made).items() if name in wanted}
        if not kept:
            del self.kept[k]
        return sent

    def finish(self) -> dict[str, V]:
        """What is done once, behind the last micro-batch: outputs, mutations and gradients. Sums go as they are
        read."""
        sums, rest = self.sums, self.units.rest
        given = {i.name: sums.pop(i.name) if i.name in sums else self._value(i.name, {}, 0) for i in rest.inputs}
        return self.machine.run(rest, given, 0)

    def _run(self, part: SummedUnit, values: Mapping[str, V], micro_batch: int, sums: dict[str, V]) -> dict[str, V]:
        """What a unit makes of a micro-batch. What is summed of it is in the sums instead."""
        unit = part.unit
        begun = {before: sums.pop(name) for name, (before, _) in part.totals.items() if name in sums}
        if begun:
            unit = part.adding_to if self.added.issuperset(part.totals) else part.adding
            self.added.update(part.totals)
        given = {
            i.name: begun.pop(i.name) if i.name in begun else self._value(i.name, values, micro_batch)
            for i in unit.inputs
        }
        made = self.machine.run(unit, given, micro_batch)
        for name, (_, after) in part.totals.items():
            sums[name] = made[name] if unit is part.unit else made.pop(after)
        return made

    def _value(self, name: str, values: Mapping[str, V], micro_batch: int) -> V:
        if name in values:
            return values[name]
        return self.once[name] if name in self.once else self.given(name, micro_batch)


def needs(staged: Staged, action: Action) -> list[Message]:
    """The messages that a unit waits for."""
    read: Half = "forward" if action.kind == FORWARD else "backward"
    if action.kind == WEIGHTS:
        return []
    return [m for m in staged.messages if m.target == action.stage and m.read == read]


# ---- ranks in one process

Shards = dict[Shape, torch.Tensor]
"""What each rank of a stage holds, by its coordinate on the axes but time."""


@dataclass(frozen=True)
class SimulatedStage:
    """The ranks of a stage in one process, in lock step."""

    mesh: Shape

    def run(self, unit: Program, values: dict[str, Shards], micro_batch: int) -> dict[str, Shards]:
        others = coordinates(self.mesh[TIME + 1 :])
        ranks = {(micro_batch, *at): {name: shards[at] for name, shards in values.items()} for at in others}
        for instruction in unit.forward:
            lockstep.run(instruction, self.mesh, ranks)
        names = [o.name for o in unit.outputs if o.name is not None]
        return {name: {at: ranks[micro_batch, *at][name] for at in others} for name in names}


@torch.no_grad()
def simulate_pipeline(
    staged: Staged,
    schedule: Schedule,
    parameters: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    tangents: Mapping[str, torch.Tensor] | None = None,
    *,
    seed: int = 0,
    tolerance: float = 1e-6,
) -> Simulated:
    """A step on global tensors, as `simulate_step`, of all devices of a pipeline: each does what its order says, after
    what it needs was sent."""
    ranks = given_to_ranks(staged.program, parameters, inputs, tangents, seed)
    others = coordinates(staged.program.mesh[TIME + 1 :])

    def given(name: str, micro_batch: int) -> Shards:
        return {at: ranks[micro_batch, *at][name] for at in others}

    machine = SimulatedStage(staged.program.mesh)
    stages = [
        StageRun(staged, stage, machine, given, {o.name for o in stage.step.outputs if o.name and o.meta is not None})
        for stage in staged.stages
    ]
    for stage in stages:
        stage.count()
    sent: dict[tuple[Message, int], Shards] = {}
    for action in in_sequence(schedule, {message.edge for message in staged.messages}):
        received = {m.name: sent.pop((m, action.micro_batch)) for m in needs(staged, action)}
        for message, value in stages[action.stage].run(action, received).items():
            sent[message, action.micro_batch] = value
    for handed in staged.sums:
        stages[handed.target].sums[handed.name] = stages[handed.source].sums[handed.name]
    return _together(staged, stages, tolerance)


def _together(staged: Staged, stages: list[StageRun[Shards]], tolerance: float) -> Simulated:
    """The global results of all stages."""
    results: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for stage in stages:
        assert not stage.kept, f"stage {stage.stage.number} keeps {stage.kept.keys()}"
        once = stage.finish()
        for o in (*stage.stage.rest.outputs, *stage.stage.step.outputs):
            if o.name is None or o.meta is None:
                continue
            shards = {
                (k, *at): value
                for k in range(staged.micro_batches)
                for at, value in (once if o in stage.stage.rest.outputs else stage.results[k])[o.name].items()
            }
            what, mesh = f"{o.role} {o.target}", staged.program.mesh
            results[o.role][o.target] = assemble(shards, o.meta.shape, o.layout, mesh, tolerance, what)
    return Simulated(outputs=results["output"], mutations=results["mutation"], gradients=results["gradient"])
