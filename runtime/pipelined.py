"""Pipelines on the ranks of a mesh: what a rank does of a step, and what goes to other stages and comes from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Layout, Replicate, Shape, Split, local_meta
from autopar.ir.program import Program, ProgramOutput
from autopar.ir.schedule import (
    BACKWARD,
    EARLY_RECEIVES,
    FORWARD,
    INPUTS,
    RECEIVE,
    SEND,
    UNITS,
    WEIGHTS,
    Action,
    Schedule,
    with_transfers,
)
from autopar.passes.lower.stages import TIME, Handed, Message, PipelineStage, Staged, check_loss, tells_time

from .compiled import waiting
from .execute import Executable, Groups
from .failures import watched
from .pipeline import StageRun, needs
from .placements import held_indices

Result = tuple[str, str]
"""Role and target of an output."""

Compile = Callable[[Program, Shape], Executable]
"""Of a program, and the coordinate of a rank in it."""


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A program in stages, and the schedule, with transfers, by which devices run them."""

    staged: Staged
    schedule: Schedule

    @staticmethod
    def of(staged: Staged, units: Schedule) -> Pipelined:
        """By a schedule of units, of which those count that the program has. Raises ValueError as `check_loss`."""
        check_loss(staged.program)
        trains = any(stage.step.backward for stage in staged.stages)
        kinds = UNITS if trains else (FORWARD,)
        orders = tuple(tuple(action for action in order if action.kind in kinds) for order in units.orders)
        edges = sorted({message.edge for message in staged.messages})
        return Pipelined(staged=staged, schedule=with_transfers(replace(units, orders=orders), edges))

    @cached_property
    def outside(self) -> Program:
        """The program as a module sees it: the first axis of its mesh are the devices, all of which are given inputs,
        and get outputs."""
        program, devices = self.staged.program, len(self.schedule.orders)

        def same(layout: Layout) -> Layout:
            return (Replicate(), *layout[TIME + 1 :])

        return replace(
            program,
            mesh=(devices, *program.mesh[TIME + 1 :]),
            inputs=tuple(replace(i, layout=same(i.layout)) for i in program.inputs),
            outputs=tuple(replace(o, layout=same(o.layout)) for o in program.outputs),
        )

    @cached_property
    def homes(self) -> dict[str, int]:
        """Parameter -> the device that holds it, and gives its gradient."""
        homes = self.staged.homes
        return {i.target: self.schedule.devices[homes[i.name]] for i in self.staged.program.inputs if i.name in homes}

    @cached_property
    def sources(self) -> dict[Result, int]:
        """Result of a step -> the device that gives it."""
        return {
            (o.role, o.target): self.schedule.devices[stage.number]
            for stage in self.staged.stages
            for program in (stage.step, stage.rest)
            for o in program.outputs
            if o.meta is not None
        }

    @cached_property
    def dropped(self) -> frozenset[Result]:
        """What a step returns of each micro-batch, and nobody keeps: where it has a backward, the loss is what
        counts."""
        if not self.trains:
            return frozenset()
        if self.staged.micro_batches == 1:
            found = [o for o in self.staged.program.outputs if o.meta is not None and o.meta.shape]
        else:
            found = [o for stage in self.staged.stages for o in stage.step.outputs if o.meta is not None]
        return frozenset((o.role, o.target) for o in found if o.role == "output")

    @cached_property
    def is_narrow(self) -> bool:
        """Whether backward computes in float16."""
        metas = self.staged.program.metas
        made = (name for node in self.staged.program.backward for name in node.outputs if name)
        return self.trains and any(metas[name].dtype == torch.float16 for name in made)

    @cached_property
    def trains(self) -> bool:
        """Whether a step has a backward."""
        return any(action.kind != FORWARD for order in self.schedule.orders for action in order if action.kind in UNITS)


class RankMachine:
    """Runs units on this rank, compiled once each, or once for each micro-batch where that makes a difference."""

    def __init__(self, coordinate: Shape, compile: Compile) -> None:
        self.coordinate, self.compile = coordinate, compile
        self.compiled: dict[tuple[int, int], Executable] = {}
        self.units: dict[int, tuple[Program, bool]] = {}
        """By identity: a unit, and whether it differs by micro-batch."""

    def executable(self, unit: Program, micro_batch: int) -> Executable:
        _, differs = self.units.get(id(unit)) or self.units.setdefault(
            id(unit), (unit, any(map(tells_time, unit.forward)))
        )
        key = id(unit), micro_batch if differs else 0
        if key not in self.compiled:
            self.compiled[key] = self.compile(unit, (key[1], *self.coordinate))
        return self.compiled[key]

    def run(self, unit: Program, values: dict[str, torch.Tensor], micro_batch: int) -> dict[str, torch.Tensor]:
        executable = self.executable(unit, micro_batch)
        results, _ = executable.forward([values.pop(i.name) for i in unit.inputs])
        return {str(o.name): value for o, value in zip(unit.outputs, results, strict=True) if value is not None}


class StageLine:
    """Messages between the ranks of one place in all stages."""

    def __init__(self, group: dist.ProcessGroup, axis: str, device: torch.device) -> None:
        self.group, self.axis, self.device = group, axis, device
        self.sending: list[tuple[str, dist.Work, torch.Tensor]] = []

    def send(self, what: str, value: torch.Tensor, peer: int) -> None:
        """Begins to send a value, which is held until it is sent."""
        value = value.contiguous()
        with watched(f"sending {what}", self.axis, self.group):
            work = dist.isend(value, group=self.group, group_dst=peer)
        assert work is not None  # this rank is in the group
        self.sending = [each for each in self.sending if not each[1].is_completed()]
        self.sending.append((what, work, value))

    def receive(self, what: str, meta: TensorMeta, peer: int) -> Callable[[], torch.Tensor]:
        """Begins to receive a value, for which the result waits."""
        value = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
        with watched(f"receiving {what}", self.axis, self.group):
            work = dist.irecv(value, group=self.group, group_src=peer)
        assert work is not None

        def received() -> torch.Tensor:
            with self._waits(f"receiving {what}"):
                work.wait()
            return value

        return received

    def settle(self) -> None:
        """Waits until all is sent."""
        for what, work, _ in self.sending:
            with self._waits(f"sending {what}"):
                work.wait()
        self.sending = []

    def share(self, what: str, value: torch.Tensor, source: int) -> torch.Tensor:
        """What one rank has, which the others have memory for."""
        value = value.contiguous()
        with self._waits(f"sharing {what}"):
            dist.broadcast(value, group=self.group, group_src=source)
        return value

    @contextmanager
    def _waits(self, what: str) -> Iterator[None]:
        with watched(what, self.axis, self.group), waiting("send", self.axis):
            yield


class StageRanks:
    """This rank's part of a pipeline, as the device of this `number`, at a `coordinate` within its stage."""

    def __init__(self, pipelined: Pipelined, number: int, coordinate: Shape, line: StageLine, compile: Compile) -> None:
        self.pipelined, self.staged, self.number = pipelined, pipelined.staged, number
        self.coordinate, self.line = coordinate, line
        self.devices, self.metas = pipelined.schedule.devices, pipelined.staged.program.metas
        machine = RankMachine(coordinate, compile)
        self.stages = {
            stage.number: StageRun(self.staged, stage, machine, self._given, self._kept(stage))
            for stage in self.staged.stages
            if self.devices[stage.number] == number
        }
        for run in self.stages.values():
            for unit in run.programs:
                machine.executable(unit, 0)
        self.names = [i.name for i in self.staged.program.given]
        self.given: dict[str, torch.Tensor] = {}
        self.seed = 1.0
        """The gradient of the loss with which backward begins."""
        orders = pipelined.schedule.orders[number]
        self.plan = [(action, self._messages(action)) for action in orders]
        """What is done, each with what it carries, or waits for."""
        self.receives = [(action, messages) for action, messages in self.plan if action.kind == RECEIVE]

    def _kept(self, stage: PipelineStage) -> set[str]:
        return {
            str(o.name)
            for o in stage.step.outputs
            if o.meta is not None and (o.role, o.target) not in self.pipelined.dropped
        }

    def _given(self, name: str, micro_batch: int) -> torch.Tensor:
        return self.given[name]

    def _messages(self, action: Action) -> list[Message]:
        if action.kind in UNITS:
            return needs(self.staged, action)
        ends = (action.stage, action.peer) if action.kind == SEND else (action.peer, action.stage)
        return [m for m in self.staged.messages if m.edge == (*ends, action.of)]

    def step(self, values: Sequence[torch.Tensor]) -> dict[Result, torch.Tensor]:
        """What the stages of this device give of a step."""
        self.given = dict(zip(self.names, values, strict=True))
        for i in self.staged.program.tangents:
            shape, device = self.metas[i.name].shape, self.line.device
            self.given[i.name] = torch.full(shape, self.seed, dtype=i.meta.dtype, device=device)
        for stage in self.stages.values():
            stage.begin()
        for handed in self.staged.parameters:
            self._hand(handed, self.given, lambda target: target.once)
        for stage in self.stages.values():
            stage.count()
        self._run()
        for handed in self.staged.sums:
            at = self.stages.get(handed.source)
            self._hand(handed, {} if at is None else at.sums, lambda target: target.sums)
        results: dict[Result, torch.Tensor] = {}
        for stage in self.stages.values():
            once = stage.finish()
            results |= {(o.role, o.target): once[o.name] for o in stage.stage.rest.outputs if o.name is not None}
            results |= self._rows(stage)
            stage.begin()
        self.line.settle()
        self.given = {}
        return results

    def _hand(
        self,
        handed: Handed,
        have: Mapping[str, torch.Tensor],
        into: Callable[[StageRun[torch.Tensor]], dict[str, torch.Tensor]],
    ) -> None:
        """Gives what one stage has to another, once a step."""
        name, source, target = handed.name, self.devices[handed.source], self.devices[handed.target]
        what = f"{name} from stage {handed.source} to stage {handed.target}"
        value = have[name] if self.number == source else None
        if source != target and value is not None:
            self.line.send(what, value, target)
        if self.number == target:
            into(self.stages[handed.target])[name] = (
                value if value is not None else self.line.receive(what, self.metas[name], source)()
            )

    def _run(self) -> None:
        """Does what the schedule says. On gloo a message travels from when its receive has begun: some begin early,
        so that it does so while units run. NCCL would run them in the way of what is sent."""
        there: dict[tuple[Message, int], Callable[[], torch.Tensor]] = {}
        early = EARLY_RECEIVES if self.line.device.type == "cpu" else 0
        reached = begun = 0
        for action, messages in self.plan:
            k = action.micro_batch
            reached += action.kind == RECEIVE
            for other, expected in self.receives[begun : reached + early]:
                begun += 1
                for message in expected:
                    meta, peer, of = self.metas[message.name], self.devices[other.peer], other.micro_batch
                    there[message, of] = self.line.receive(words(message, of), meta, peer)
            if action.kind == SEND:
                for message in messages:
                    self.line.send(words(message, k), there.pop((message, k))(), self.devices[action.peer])
            elif action.kind != RECEIVE:
                received = {message.name: there.pop((message, k))() for message in messages}
                try:
                    made = self.stages[action.stage].run(action, received)
                except Exception as error:
                    error.add_note(f"in the {NAMES[action.kind]} of stage {action.stage}, micro-batch {k}")
                    raise
                del received
                for message, value in made.items():
                    there[message, k] = partial(_there, value)

    def _rows(self, stage: StageRun[torch.Tensor]) -> dict[Result, torch.Tensor]:
        """What the model returns of each micro-batch, put together."""
        mesh, found = self.staged.program.mesh, dict[Result, torch.Tensor]()
        for o in stage.stage.step.outputs:
            if o.name is not None and o.meta is not None and (o.role, o.target) not in self.pipelined.dropped:
                parts = [stage.results[k][o.name] for k in range(self.staged.micro_batches)]
                found[o.role, o.target] = joined(parts, o.layout, o.meta.shape, mesh, self.coordinate)
        return found


def _there(value: torch.Tensor) -> torch.Tensor:
    return value


NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUTS: "gradients of inputs", WEIGHTS: "gradients of weights"}


def words(message: Message, micro_batch: int) -> str:
    """What a message is, for people."""
    way = f"stage {message.source} to stage {message.target}"
    return f"{message.name}, of the {message.made} of micro-batch {micro_batch}, from {way}"


def joined(parts: Sequence[torch.Tensor], layout: Layout, shape: Shape, mesh: Shape, at: Shape) -> torch.Tensor:
    """What a rank holds of a value whose parts, one of each micro-batch, it has."""
    split = layout[TIME]
    assert isinstance(split, Split)
    places, rows = _rows_of(layout, shape[split.dim], mesh, at)
    whole = parts[0].new_zeros((*parts[0].shape[: split.dim], rows, *parts[0].shape[split.dim + 1 :]))
    for part, (to, of) in zip(parts, places, strict=True):
        whole.index_copy_(split.dim, to.to(part.device), part.index_select(split.dim, of.to(part.device)))
    return whole


@lru_cache(maxsize=64)
def _rows_of(
    layout: Layout, size: int, mesh: Shape, at: Shape
) -> tuple[tuple[tuple[torch.Tensor, torch.Tensor], ...], int]:
    """Of each micro-batch, where its rows lie in the whole that a rank holds, and in its part; and of how many."""
    split = layout[TIME]
    assert isinstance(split, Split)

    mine = held_indices(size, split.dim, (Replicate(), *layout[TIME + 1 :]), mesh, (0, *at))
    places = torch.zeros(size, dtype=torch.long)
    places[mine[mine >= 0]] = (mine >= 0).nonzero().flatten()
    found = []
    for micro_batch in range(mesh[TIME]):
        rows = held_indices(size, split.dim, layout, mesh, (micro_batch, *at))
        found.append((places[rows[rows >= 0]], (rows >= 0).nonzero().flatten()))
    return tuple(found), len(mine)


def pipeline_executable(
    pipelined: Pipelined, coordinate: Shape, groups: Groups, device: torch.device, compile: Compile
) -> Executable:
    """What runs a pipeline on this rank: `forward` runs the whole step, with backward for a loss whose gradient is 1,
    and gives what comes of that to `backward`, which scales it. In float16, where small gradients would be lost before
    they are scaled, it begins with the gradient that the last loss had, and runs again if the loss has another one. All
    ranks get what a step returns once; what it returns of each micro-batch, they get where there is no backward, and is
    None else. A gradient of a parameter that other devices hold has no elements."""
    outside, homes, group = pipelined.outside, pipelined.homes, groups[TIME]
    assert group is not None, "a pipeline has two devices at least"
    line = StageLine(group, outside.axes[TIME], device)
    ranks = StageRanks(pipelined, coordinate[TIME], coordinate[TIME + 1 :], line, compile)

    def result(o: ProgramOutput, made: Mapping[Result, torch.Tensor]) -> torch.Tensor | None:
        """What this rank has of a result, which the device that made it shares unless it is a parameter's gradient."""
        key = (o.role, o.target)
        value, source = made.get(key), pipelined.sources.get(key)
        if o.name is None or o.meta is None or key in pipelined.dropped:
            return None
        if o.role == "gradient" and o.target in homes:
            return torch.empty(0, dtype=o.meta.dtype, device=device) if value is None else value
        if source is None:
            return None
        if value is None:
            meta = local_meta(o.meta, o.layout, outside.mesh)
            value = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        return line.share(f"{o.role} {o.target}", value, source)

    def gradients(made: Mapping[Result, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(g for o in outside.gradients if (g := result(o, made)) is not None) if pipelined.trains else ()

    written = {o.target for o in outside.outputs if o.role == "mutation"}

    @torch.no_grad()
    def forward(values: list[torch.Tensor]) -> Any:
        step = [*values]
        values.clear()
        again: tuple[torch.Tensor, ...] = ()
        if pipelined.is_narrow:
            inputs = (x.clone() if i.target in written else x for i, x in zip(outside.given, step, strict=True))
            again = (*inputs, torch.tensor(ranks.seed))
        made = ranks.step(step)
        return tuple(result(o, made) for o in outside.results), (*gradients(made), *again)

    @torch.no_grad()
    def backward(values: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        *saved, tangent = values
        values.clear()
        count = sum(o.name is not None for o in outside.gradients)
        if pipelined.is_narrow:
            *step, seed = saved[count:]
            if (wanted := float(tangent)) != float(seed):
                ranks.seed = wanted
                saved[:count] = gradients(ranks.step(step))
        else:
            saved = [value * tangent for value in saved]  # which another backward of this call would read
        waiting = iter(saved)
        return tuple(None if o.name is None else next(waiting) for o in outside.gradients)

    source = "\n".join(str(action) for action in pipelined.schedule.orders[coordinate[TIME]])
    return Executable(program=outside, coordinate=coordinate, source=source, forward=forward, backward=backward)
