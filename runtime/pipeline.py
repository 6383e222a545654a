"""A step of a pipeline: what each device does for its stages, micro-batch by micro-batch.

The same code runs ranks that are simulated in one process, and those of a mesh (`pipelined`): they differ in what a
value is (`Machine`), and in how messages go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from autopar.ir.layout import Shape
from autopar.ir.program import Program
from autopar.ir.schedule import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, Schedule
from autopar.ops import lockstep
from autopar.passes.lower.stages import TIME, Half, Message, PipelineStage, Staged, Units, units

from .simulate import Simulated, assemble, coordinates, given_to_ranks

V = TypeVar("V")

UNITS = (FORWARD, BACKWARD, INPUTS, WEIGHTS)


class Machine(Protocol[V]):
    """What runs a program's forward on values by name, for a micro-batch, and adds a part to a total, in its memory if
    that is `owned`."""

    def run(self, unit: Program, values: Mapping[str, V], micro_batch: int) -> dict[str, V]: ...

    def add(self, total: V, part: V, *, owned: bool) -> V: ...


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
    """What holds for the whole step: parameters of other stages, and what is counted."""
    sums: dict[str, V] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)
    """Totals in memory of their own."""
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
        self.parts = {
            kind: (program, {i.name for left in later[kind] for i in left.inputs}) for kind, program in of_kind.items()
        }
        """Of each kind, what is run, and what of its values the kinds behind it read."""

    def begin(self) -> None:
        """Forgets the last step."""
        self.once, self.sums, self.owned = {}, {}, set()
        self.kept, self.results = defaultdict(dict), defaultdict(dict)

    def count(self) -> None:
        """Counts all micro-batches."""
        if not self.stage.totals:
            return
        totals: dict[str, V] = {}
        for micro_batch in range(self.staged.micro_batches):
            self._add(totals, self._run(self.units.counts, {}, micro_batch))
        self.owned.clear()
        parts = [o.name for o in self.units.counts.outputs]
        named = {total: totals[str(part)] for total, part in zip(self.stage.totals, parts, strict=True)}
        self.once |= self._run(self.units.counted, named, 0)

    def run(self, action: Action, received: Mapping[str, V]) -> dict[Message, V]:
        """Does a unit, given what others sent for it, and returns what it sends."""
        k = action.micro_batch
        kept = self.kept[k]
        kept |= received
        sent: dict[Message, V] = {}
        for kind in (INPUTS, WEIGHTS) if action.kind == BACKWARD else (action.kind,):
            program, wanted = self.parts[kind]
            made = self._run(program, kept, k)
            self._add(self.sums, {name: made[name] for name in self.stage.summed if name in made})
            self.results[k] |= {name: made[name] for name in self.returned if name in made}
            sent |= {message: made[message.name] for message in self.messages if message.name in made}
            self.kept[k] = kept = {name: value for name, value in (kept | made).items() if name in wanted}
        if not kept:
            del self.kept[k]
        return sent

    def finish(self) -> dict[str, V]:
        """What is done once, behind the last micro-batch: outputs, mutations and gradients."""
        return self._run(self.units.rest, self.sums, 0)

    def _run(self, program: Program, values: Mapping[str, V], micro_batch: int) -> dict[str, V]:
        def value(name: str) -> V:
            if name in values:
                return values[name]
            return self.once[name] if name in self.once else self.given(name, micro_batch)

        return self.machine.run(program, {i.name: value(i.name) for i in program.inputs}, micro_batch)

    def _add(self, totals: dict[str, V], parts: Mapping[str, V]) -> None:
        for name, part in parts.items():
            if name in totals:
                totals[name] = self.machine.add(totals[name], part, owned=name in self.owned)
                self.owned.add(name)
            else:
                totals[name] = part


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

    def run(self, unit: Program, values: Mapping[str, Shards], micro_batch: int) -> dict[str, Shards]:
        others = coordinates(self.mesh[TIME + 1 :])
        ranks = {(micro_batch, *at): {name: shards[at] for name, shards in values.items()} for at in others}
        for instruction in unit.forward:
            lockstep.run(instruction, self.mesh, ranks)
        names = [o.name for o in unit.outputs if o.name is not None]
        return {name: {at: ranks[micro_batch, *at][name] for at in others} for name in names}

    def add(self, total: Shards, part: Shards, *, owned: bool) -> Shards:
        return {at: value + part[at] for at, value in total.items()}


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
    """A step on global tensors, as `simulate_step`, of all devices of a pipeline: each does what its order says, as
    soon as what it needs was sent."""
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
    waiting = [list(reversed(order)) for order in schedule.orders]
    while any(waiting):
        ready = [order for order in waiting if order and _is_ready(staged, order[-1], sent)]
        assert ready, f"all devices wait: {', '.join(str(order[-1]) for order in waiting if order)}"
        for order in ready:
            action = order.pop()
            if action.kind not in UNITS:
                continue
            received = {m.name: sent.pop((m, action.micro_batch)) for m in needs(staged, action)}
            for message, value in stages[action.stage].run(action, received).items():
                sent[message, action.micro_batch] = value
    for handed in staged.sums:
        stages[handed.target].sums[handed.name] = stages[handed.source].sums[handed.name]
    return _together(staged, stages, tolerance)


def _is_ready(staged: Staged, action: Action, sent: Mapping[tuple[Message, int], Shards]) -> bool:
    return action.kind not in UNITS or all((m, action.micro_batch) in sent for m in needs(staged, action))


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
