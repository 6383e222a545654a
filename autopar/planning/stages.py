"""What a plan says of its stages, and the figures that they have: units timed one by one, and what devices hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster.collectives import collective_seconds
from autopar.cluster.staged import StagedCluster
from autopar.cost.liveness import Memory
from autopar.cost.memory import Peak, moments
from autopar.cost.optimizers import OPTIMIZERS
from autopar.cost.pipeline import PipelineTimeline, bound_seconds, simulate
from autopar.cost.streams import TimelineCache, timeline
from autopar.cost.timeline import Timeline
from autopar.files.kinds import Count, Size
from autopar.ir.layout import local_meta
from autopar.ir.program import Program
from autopar.ir.schedule import EARLY_RECEIVES, Edge, Schedule
from autopar.passes.lower.stages import PipelineStage, Staged, Units, adding, units
from autopar.passes.space.space import Space
from autopar.solve.schedules import PipelineCosts, StageCost

NOTHING = OPTIMIZERS["sgd"]
"""An optimizer of a unit, which has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A stage, on the device of this number on the axis of stages: the `first` and the `last` module of its forward,
    and how many copies of repeated `layers` begin in it. Seconds are those of a micro-batch; `rest_bytes` are there at
    all times, `held_bytes` of a micro-batch from its forward to its gradient of inputs, and `kept_bytes` from then on
    to that of weights."""

    device: Count
    first: str
    last: str
    layers: Count
    forward_seconds: float
    inputs_seconds: float
    weights_seconds: float
    once_seconds: float
    rest_bytes: Count
    held_bytes: Count
    kept_bytes: Count

    @property
    def cost(self) -> StageCost:
        return StageCost(
            forward_seconds=self.forward_seconds,
            inputs_seconds=self.inputs_seconds,
            weights_seconds=self.weights_seconds,
            held_bytes=self.held_bytes,
            kept_bytes=self.kept_bytes,
            rest_bytes=self.rest_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The stages of a plan along a mesh `axis`. `cuts` are the operators with which stages begin, but for the first,
    each with its module; a device holds `chunks` of them, and does what the `schedule` of that name says. `bubble_rate`
    is the part of its own time, from its first unit to its last, that the busiest device idles, and `idle_rate` the
    part of the schedule that devices idle in the mean. `in_flight` are the most micro-batches of each device between
    forward and the gradient of inputs, and `peak_bytes` the most that each holds."""

    axis: str
    schedule: str
    micro_batches: Size
    chunks: Size
    cuts: Mapping[str, str]
    stages: tuple[StagePlan, ...]
    bubble_rate: float
    idle_rate: float
    in_flight: tuple[Count, ...]
    peak_bytes: tuple[Count, ...]

    @property
    def decided(self) -> list[object]:
        """What of it is decided: the rest describes it."""
        return [self.axis, self.schedule, self.micro_batches, self.chunks, list(self.cuts)]


@dataclass(frozen=True, kw_only=True)
class StageFigures:
    """Of one stage: what a micro-batch costs, the timelines of its units, seconds `before` the first micro-batch and
    `after` the last one, and the parts of what it holds: parameters at rest, states of the optimizer, sums, and the
    most that its units need beside what is held, `working`, or at the end, `finishing`."""

    cost: StageCost
    timelines: tuple[Timeline, ...]
    before: float
    after: float
    parameters: int
    states: int
    sums: int
    working: int
    finishing: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of all stages, and the seconds of what goes between them."""

    staged: Staged
    stages: tuple[StageFigures, ...]
    transfers: Mapping[Edge, float]
    inputs: int
    """Bytes of the batch and of buffers, which every device has, and of messages that it is about to receive."""

    @cached_property
    def costs(self) -> PipelineCosts:
        """Values from one device to another travel one after the other."""
        costs = tuple(stage.cost for stage in self.stages)
        return PipelineCosts(stages=costs, transfers=self.transfers, shared_links=True)

    def step(self, schedule: Schedule) -> PipelineStep:
        return PipelineStep(figures=self, run=simulate(schedule, self.costs))


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """A step by a schedule."""

    figures: Figures
    run: PipelineTimeline

    @cached_property
    def held(self) -> list[list[int]]:
        """The stages of each device."""
        devices = self.run.schedule.devices
        return [[s for s, at in enumerate(devices) if at == device] for device in range(max(devices) + 1)]

    @cached_property
    def seconds(self) -> float:
        """What is counted before the first micro-batch, the schedule, and what follows it: until the last device has
        taken the step of its optimizer."""
        stages = self.figures.stages
        before = max(sum(stages[s].before for s in here) for here in self.held)
        ends = [
            order[-1] + sum(stages[s].after for s in here) for order, here in zip(self.run.ends, self.held, strict=True)
        ]
        return before + max(ends)

    @cached_property
    def peaks(self) -> list[Peak]:
        """Of each device."""
        return [self._peak(device, here) for device, here in enumerate(self.held)]

    def _peak(self, device: int, here: Sequence[int]) -> Peak:
        stages = [self.figures.stages[s] for s in here]
        most, at = self.run.peaks[device]
        working = sum(stage.working for stage in stages)
        flying = most - sum(stage.cost.rest_bytes for stage in stages)
        finishing = max(stage.finishing for stage in stages)
        ends = finishing > flying + working
        return Peak(
            parameters=sum(stage.parameters for stage in stages),
            gradients=sum(stage.sums for stage in stages),
            optimizer=sum(stage.states for stage in stages),
            inputs=self.figures.inputs,
            outputs=0,
            activations=0 if ends else round(flying),
            temporaries=finishing if ends else working,
            at=f"device {device} of the pipeline, " + ("after the last micro-batch" if ends else f"{at:.3g} s in"),
        )

    @property
    def largest(self) -> Peak:
        return max(self.peaks, key=lambda peak: peak.bytes)

    @cached_property
    def bound_seconds(self) -> float:
        """No schedule of these stages has a shorter step."""
        run = self.run.schedule
        return bound_seconds(run.devices, run.micro_batches, self.figures.costs)


def figures(staged: Staged, space: Space, operators: TimelineCache, device_type: str) -> Figures:
    """Of stages, on the cluster of a space whose first axis lies in time."""
    cluster, program = space.cluster, staged.program
    assert isinstance(cluster, StagedCluster)
    link = cluster.between_stages(program.mesh)
    edges: dict[Edge, int] = defaultdict(int)
    for message in staged.messages:
        edges[message.edge] += program.metas[message.name].bytes
    handed = {"before": staged.parameters, "after": staged.sums}
    handing = {
        when: [
            sum(
                collective_seconds("shift", program.metas[h.name].bytes, link)
                for h in some
                if stage.number in (h.source, h.target)
            )
            for stage in staged.stages
        ]
        for when, some in handed.items()
    }
    given = sum(local_meta(i.meta, i.layout, program.mesh).bytes for i in program.inputs if i.role == "input")
    if device_type == "cpu":
        given += EARLY_RECEIVES * max((program.metas[message.name].bytes for message in staged.messages), default=0)
    return Figures(
        staged=staged,
        stages=tuple(
            _Stage(staged, stage, space, operators, device_type).figures(before, after)
            for stage, before, after in zip(staged.stages, handing["before"], handing["after"], strict=True)
        ),
        transfers={edge: collective_seconds("shift", size, link) for edge, size in edges.items()},
        inputs=given,
    )


class _Stage:
    def __init__(
        self, staged: Staged, stage: PipelineStage, space: Space, operators: TimelineCache, device_type: str
    ) -> None:
        self.staged, self.stage, self.space = staged, stage, space
        self.operators, self.device_type = operators, device_type
        number, self.metas = stage.number, staged.program.metas
        self.units: Units = units(stage, {m.name for m in staged.messages if m.source == number})
        self.received = {m.name for m in staged.messages if m.target == number}
        self.own = [i for i in staged.program.inputs if staged.homes.get(i.name) == number]

    def figures(self, before: float, after: float) -> StageFigures:
        u, space, count = self.units, self.space, self.staged.micro_batches
        trained = [
            local_meta(i.meta, i.layout, space.mesh) for i in self.own if i.target in self.staged.program.trained
        ]
        parameters = sum(local_meta(i.meta, i.layout, space.mesh).bytes for i in self.own)
        parameters += sum(self.metas[h.name].bytes for h in self.staged.parameters if h.target == self.stage.number)
        parameters += self._bytes((str(o.name) for o in u.counted.outputs), (u.counted,))  # gathered once
        states = sum(map(space.optimizer.bytes, trained))
        sums = sum(self.metas[name].bytes for name in self.stage.summed)
        updating = space.optimizer.seconds(space.cluster.device, trained) if trained else 0.0
        parts = (u.forward, u.inputs, u.weights)
        lines = [timeline(adding(p, self.stage.summed)[0], space.cluster, self.operators) for p in parts]
        held = self._bytes({i.name for unit in (u.inputs, u.weights) for i in unit.inputs}, (u.forward,))
        kept = self._bytes({i.name for i in u.weights.inputs}, (u.forward, u.inputs))
        working = max(0, self._working(u.forward) - held, self._working(u.inputs), self._working(u.weights))
        copies = space.optimizer.copies * max((meta.bytes for meta in trained), default=0)
        copies += sum(map(space.optimizer.brought_bytes, trained))
        return StageFigures(
            cost=StageCost(
                forward_seconds=lines[0].seconds, inputs_seconds=lines[1].seconds, weights_seconds=lines[2].seconds,
                held_bytes=held, kept_bytes=min(held, kept), rest_bytes=parameters + states + sums + working,
            ),
            timelines=tuple(lines),
            before=before + count * self._seconds(u.counts) + self._seconds(u.counted),
            after=after + self._seconds(u.rest) + updating,
            parameters=parameters,
            states=states,
            sums=sums,
            working=working,
            finishing=max(self._working(u.rest) - sums, copies),  # sums go as they are reduced
        )  # fmt: skip

    def _seconds(self, unit: Program) -> float:
        return timeline(unit, self.space.cluster, self.operators).seconds if unit.forward else 0.0

    def _bytes(self, wanted: Iterable[str], makers: Sequence[Program]) -> int:
        """What of these values the stage has of a micro-batch: what units make, or others send; each memory once."""
        total, names = 0, set(wanted)
        for unit in makers:
            memory = Memory.of(unit, unit.forward, self.operators.placements)
            lasting = {memory.storages[i.name][0] for i in unit.inputs if i.name not in self.received}
            made = [name for name in memory.storages if name in names]
            names.difference_update(made)
            total += sum(memory.bytes[s] for s in {memory.storages[name][0] for name in made} - lasting)
        return total

    def _working(self, unit: Program) -> int:
        """The most bytes that a unit has beside what it is given."""
        if not unit.forward:
            return 0
        own = set(self.stage.summed)  # which is added up as it is made
        summed = [self.metas[str(o.name)].bytes for o in unit.outputs if o.name in own]
        others = tuple(o for o in unit.outputs if o.name not in own)
        found = moments(replace(unit, outputs=others), NOTHING, self.device_type, self.operators.placements)
        given = min(moment.parts[0] + moment.parts[3] for moment in found)
        return max(sum(moment.parts) for moment in found) - given + max(summed, default=0)
