"""Pipelines on the ranks of a mesh: what a rank does of a step, and what goes to other stages and comes from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.graph import TensorMeta
from autopar.ir.layout import Layout, Replicate, Shape, Split, owned_digits, owned_indices
from autopar.ir.program import Program, ProgramOutput
from autopar.ir.schedule import FORWARD, RECEIVE, SEND, Action, Schedule
from autopar.passes.lower.stages import TIME, Message, Staged, tells_time

from .execute import Executable
from .pipeline import UNITS, StageRun, needs

Result = tuple[str, str]
"""Role and target of an output."""

Compile = Callable[[Program, Shape], Executable]
"""Of a program, and the coordinate of a rank in it."""


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A program in stages, and the schedule, with transfers, by which devices run them."""

    staged: Staged
    schedule: Schedule

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
    def trains(self) -> bool:
        """Whether a step has a backward."""
        return any(action.kind != FORWARD for order in self.schedule.orders for action in order if action.kind in UNITS)


@dataclass(eq=False)
class RankMachine:
    """Runs units on this rank, compiled once each, or once for each micro-batch where that makes a difference."""

    coordinate: Shape
    compile: Compile
    compiled: dict[tuple[int, int], tuple[Program, Executable]] = field(default_factory=dict)
    sums: set[int] = field(default_factory=set)
    """Which totals are in memory of their own."""

    def run(self, unit: Program, values: Mapping[str, torch.Tensor], micro_batch: int) -> dict[str, torch.Tensor]:
        key = id(unit), micro_batch if any(map(tells_time, unit.forward)) else 0
        if key not in self.compiled:
            self.compiled[key] = unit, self.compile(unit, (key[1], *self.coordinate))
        results, _ = self.compiled[key][1].forward([values[i.name] for i in unit.inputs])
        names = [str(o.name) for o in unit.outputs]
        return {name: value for name, value in zip(names, results, strict=True) if value is not None}

    def add(self, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return total + part


class Ranks:
    """This rank's part of a pipeline. `group` are the ranks of its place in all stages, and `coordinate` is its place
    within a stage."""

    def __init__(
        self,
        pipelined: Pipelined,
        device_number: int,
        group: dist.ProcessGroup,
        coordinate: Shape,
        device: torch.device,
        compile: Compile,
    ) -> None:
        self.pipelined, self.staged, self.number = pipelined, pipelined.staged, device_number
        self.group, self.coordinate, self.device = group, coordinate, device
        self.machine = RankMachine(coordinate, compile)
        self.devices = pipelined.schedule.devices
        self.stages = {
            stage.number: StageRun(self.staged, stage, self.machine, self._given)
            for stage in self.staged.stages
            if self.devices[stage.number] == device_number
        }
        self.names = [i.name for i in self.staged.program.inputs if i.role != "tangent"]
        self.given: dict[str, torch.Tensor] = {}
        self.works: list[tuple[dist.Work, torch.Tensor]] = []
        """Sends under way, with what they send."""

    def _given(self, name: str, micro_batch: int) -> torch.Tensor:
        return self.given[name]

    # ---- messages

    def _send(self, value: torch.Tensor, peer: int) -> None:
        value = value.contiguous()
        work = dist.isend(value, group=self.group, group_dst=peer)
        assert work is not None
        self.works.append((work, value))

    def _receive(self, meta: TensorMeta, peer: int) -> tuple[torch.Tensor, dist.Work]:
        value = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
        work = dist.irecv(value, group=self.group, group_src=peer)
        assert work is not None
        return value, work

    def _hand(self, name: str, meta: TensorMeta, source: int, target: int, value: torch.Tensor | None) -> Any:
        """A value that one stage gives another once a step."""
        here, there = self.devices[source], self.devices[target]
        if here == there:
            return value
        if self.number == here:
            assert value is not None
            self._send(value, there)
        if self.number == there:
            received, work = self._receive(meta, here)
            work.wait()
            return received
        return None

    def _carried(self, action: Action) -> list[Message]:
        """What a transfer carries."""
        source, target = (action.stage, action.peer) if action.kind == SEND else (action.peer, action.stage)
        return [m for m in self.staged.messages if (m.source, m.target) == (source, target) and m.edge[2] == action.of]

    # ---- a step

    def step(self, values: Sequence[torch.Tensor]) -> dict[Result, torch.Tensor]:
        """What the stages of this device give of a step."""
        metas = self.staged.program.metas
        self.given = dict(zip(self.names, values, strict=True))
        for i in self.staged.program.inputs:
            if i.role == "tangent":
                self.given[i.name] = torch.ones(metas[i.name].shape, dtype=i.meta.dtype, device=self.device)
        for stage in self.stages.values():
            stage.begin()
        for handed in self.staged.parameters:
            value = self._hand(handed.name, metas[handed.name], handed.source, handed.target, self.given[handed.name])
            if value is not None and handed.target in self.stages:
                self.stages[handed.target].once[handed.name] = value
        for stage in self.stages.values():
            stage.count()
        self._run()
        for handed in self.staged.sums:
            at = self.stages.get(handed.source)
            value = None if at is None else at.sums[handed.name]
            value = self._hand(handed.name, metas[handed.name], handed.source, handed.target, value)
            if value is not None and handed.target in self.stages:
                self.stages[handed.target].sums[handed.name] = value
        results: dict[Result, torch.Tensor] = {}
        for stage in self.stages.values():
            once = stage.finish()
            results |= {(o.role, o.target): once[o.name] for o in stage.stage.rest.outputs if o.name is not None}
            results |= self._rows(stage)
        for work, _ in self.works:
            work.wait()
        self.works.clear()
        self.given = {}
        return results

    def _run(self) -> None:
        """Does what the schedule says."""
        metas, arrived = self.staged.program.metas, {}
        made: dict[tuple[Message, int], torch.Tensor] = {}
        for action in self.pipelined.schedule.orders[self.number]:
            k = action.micro_batch
            if action.kind == SEND:
                for message in self._carried(action):
                    self._send(made.pop((message, k)), self.devices[action.peer])
            elif action.kind == RECEIVE:
                for message in self._carried(action):
                    arrived[message, k] = self._receive(metas[message.name], self.devices[action.peer])
            else:
                received = {}
                for message in needs(self.staged, action):
                    if (message, k) in made:
                        received[message.name] = made.pop((message, k))
                        continue
                    received[message.name], work = arrived.pop((message, k))
                    work.wait()
                sent = self.stages[action.stage].run(action, received)
                for message in self.staged.messages:
                    if message.source == action.stage and message.name in sent:
                        made[message, k] = sent[message.name]
            self.works = [(work, value) for work, value in self.works if not work.is_completed()]

    def _rows(self, stage: StageRun[torch.Tensor]) -> dict[Result, torch.Tensor]:
        """What the model returns of each micro-batch, put together."""
        program, found = self.staged.program, dict[Result, torch.Tensor]()
        for o in stage.stage.step.outputs:
            if o.name is not None and o.meta is not None:
                parts = {(k, *self.coordinate): stage.results[k][o.name] for k in range(self.staged.micro_batches)}
                found[o.role, o.target] = joined(parts, o, program.mesh)
        return found


def joined(parts: Mapping[Shape, torch.Tensor], o: ProgramOutput, mesh: Shape) -> torch.Tensor:
    """What a rank holds of an output without the axis in time, of what it holds of each micro-batch."""
    assert o.meta is not None
    split = o.layout[TIME]
    assert isinstance(split, Split)
    dim, size = split.dim, o.meta.shape[split.dim]
    rest = (Replicate(), *o.layout[TIME + 1 :])
    some = next(iter(parts.values()))
    at = next(iter(parts))
    mine = owned_indices(_padded(size, rest, dim), owned_digits(rest, mesh, at, dim))
    place = {int(index): k for k, index in enumerate(mine)}
    whole = some.new_zeros((*some.shape[:dim], len(mine), *some.shape[dim + 1 :]))
    for coordinate, part in parts.items():
        rows = owned_indices(_padded(size, o.layout, dim), owned_digits(o.layout, mesh, coordinate, dim))
        kept = [k for k, index in enumerate(rows) if int(index) < size]
        to = torch.tensor([place[int(rows[k])] for k in kept], dtype=torch.long, device=part.device)
        whole.index_copy_(dim, to, part.index_select(dim, torch.tensor(kept, dtype=torch.long, device=part.device)))
    return whole


def _padded(size: int, layout: Layout, dim: int) -> int:
    return max([size, *(p.period for p in layout if isinstance(p, Split) and p.dim == dim)])
