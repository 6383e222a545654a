"""Profiled costs (CFP section 4): segments are measured as the programs that they become, and plans are composed of
them.

A plan is measured by its *segment program*: the real program, with few copies of each run of layers that decide alike
(`writer.KEPT`), so that what is measured does not grow with depth. Each instruction has a clock beside it. What is
composed (CFP Eq. 8 and 9, with what overlaps): the whole program's timeline, with the seconds of operators on their
local shapes, of collectives by size and axis, as they were measured anywhere, times what the segment program took over
what its own timeline says of it. Configurations that were not measured are priced by the same operators and collectives
where those were, and by the roofline times what it was off by elsewhere.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.cluster.collectives import collective_seconds
from autopar.cluster.links import Factors, Link
from autopar.cluster.machine import Cluster, Operators, operator_key
from autopar.cluster.measurements import Case, quartiles
from autopar.compat import is_real
from autopar.cost.roofline import FREE
from autopar.cost.streams import TimelineCache, timeline
from autopar.ir.graph import WAIT, JointGraph, Node, Ref, TensorMeta
from autopar.ir.program import Program
from autopar.ir.rewrite import input_and_output_metas
from autopar.ops import rule_of
from autopar.ops.rule import call_of
from autopar.passes.blocks.block import ParallelBlock
from autopar.passes.blocks.partition import blocks
from autopar.passes.segments.segment import Segments

from .database import CollectiveRow, OperatorRow, Profiles, ProgramRow, links_key

WARM_UPS, RUNS, LEAST_RUNS = 5, 10, 2
"""CFP's; a program that cannot win is stopped after the least, and one more that warms up."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What ranks are told to measure: a program, and collectives by themselves, each on the mesh axis of its index."""

    program: Program
    cases: tuple[Case[int], ...] = ()
    warm_ups: int = WARM_UPS
    runs: int = RUNS
    limit_seconds: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """`steps` are seconds of forward and backward of each run, on its slowest rank; `durations` the seconds of each
    instruction, forward and then backward: the mean over ranks and runs, so that they add up to a step (a median does
    not see the turns of ranks that share processors); `spreads` the mean deviations from it."""

    steps: tuple[float, ...]
    durations: tuple[float, ...]
    spreads: tuple[float, ...]
    ranks: int
    abandoned: bool
    collectives: Mapping[Case[int], float]
    optimizer_seconds: float
    peak_bytes: int
    compile_seconds: float


Measure = Callable[[Order], Measurement]


# --- names


def structure(program: Program) -> str:
    """The same for programs that do the same on tensors of the same shapes, whatever their values and modules are
    called: the segment program of 8 layers is that of 32."""
    numbers: dict[str, int] = {}

    def number(name: str | None) -> int:
        return -1 if not name else numbers.setdefault(name, len(numbers))

    def plain(value: Any) -> Any:
        if isinstance(value, Ref):
            return f"%{number(value.name)}"
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return repr(value)

    made = hashlib.sha256(repr((program.axes, program.mesh)).encode())
    for i in program.inputs:
        made.update(repr((i.role, str(i.meta), str(i.layout), number(i.name))).encode())
    for instruction in (*program.forward, *program.backward):
        kwargs = [(key, plain(value)) for key, value in instruction.kwargs]
        outputs = [(number(name), str(program.metas[name]) if name else "") for name in instruction.outputs]
        made.update(repr((instruction.op, plain(instruction.args), kwargs, outputs)).encode())
    made.update(repr([number(o.name) for o in program.outputs if o.name is not None]).encode())
    return made.hexdigest()[:24]


def segment_programs(graph: JointGraph, segments: Segments, mesh: Sequence[int]) -> int:
    """CFP Eq. 7: how many programs there are to profile. Of each unique segment the product of its blocks' strategies,
    and of each pair of blocks of different segments (or copies) that depend on each other the product of theirs. A
    block has, on an axis, as many strategies as dims of its first contraction to split, and is whole on an axis of one
    rank."""
    found = blocks(graph, max(mesh))
    place: dict[int, tuple[int, int]] = {}
    for number, repeat in enumerate(segments.repeats):
        for k, copy in enumerate(repeat.copies):
            place.update(dict.fromkeys(copy, (number, k)))
    rest = (-1, 0)
    axes = sum(ranks > 1 for ranks in mesh)

    def strategies(block: ParallelBlock) -> int:
        return int(max(1, len(block.dims)) ** axes)

    alike: dict[ParallelBlock, tuple[int, int]] = {}
    """Block -> (segment, place of its first contraction in the copy): equal for the blocks of all copies."""
    inside: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    for block in found.blocks:
        first = block.contractions[0]
        number, k = place.get(first, rest)
        position = first if number < 0 else segments.repeats[number].copies[k].index(first)
        alike[block] = number, position
        inside[number][alike[block]] = strategies(block)
    pairs: dict[tuple[tuple[int, int], tuple[int, int]], int] = {}
    home = {i: block for block in found.blocks for i in block.nodes}
    for i, node in enumerate(graph.nodes):
        if node.backward or i not in home:
            continue
        for other in _sources(graph, i, home):
            one, two = home[other], home[i]
            here, there = place.get(other, rest), place.get(i, rest)
            if one is not two and here != there:
                pairs[alike[one], alike[two]] = strategies(one) * strategies(two)
    return sum(math.prod(segment.values()) for segment in inside.values()) + sum(pairs.values())


def _sources(graph: JointGraph, i: int, home: Mapping[int, ParallelBlock]) -> Iterator[int]:
    """The nodes in blocks on which one depends, through nodes that are in none."""
    queue, seen = [i], {i}
    while queue:
        for name in graph.nodes[queue.pop()].inputs:
            made = graph.producer.get(name)
            if made is None or made in seen:
                continue
            seen.add(made)
            if made in home:
                yield made
            else:
                queue.append(made)


def real_tensors(
    bound: Mapping[str, torch.Tensor], model: nn.Module, constants: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Values that are there, by target: of the example inputs, the buffers and the constants; not of parameters."""
    values = {**bound, **dict(model.named_buffers()), **constants}
    return {name: t.detach() for name, t in values.items() if is_real(t)}


# --- from measurements to a cluster


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a database knows of a machine, and of the links of a cluster's meshes.

    `programs` are the segment programs, by structure, of which something is used: a search that begins anew so comes by
    the same way to the same end, whatever else is known by then. None: all that there are. `with_links` False: what
    collectives take is left to the cluster (`hybrid`).
    """

    profiles: Profiles
    machine: str
    cluster: Cluster
    with_links: bool
    programs: tuple[str, ...] | None = None
    collectives: frozenset[Case[int]] | None = None
    """Those of these programs; None: all that are known."""

    def also(self, program: Program) -> Costs:
        """With what is known of one more segment program."""
        if self.programs is None or self.collectives is None:
            return self
        cases = frozenset(_cases(program))
        return replace(self, programs=(*self.programs, structure(program)), collectives=self.collectives | cases)

    def measured(self, mesh: Sequence[int]) -> Cluster:
        """The cluster with the measured seconds of operators, of collectives and of the optimizers' steps. Of operators
        it is the middle over programs: what disturbed the machine during one of them is in all that it measured."""
        device = self.cluster.device
        rows = [row for row in self.profiles.rows("operators", machine=self.machine) if self._uses(row.program)]
        if not rows:
            return self.cluster
        told: dict[str, float] = defaultdict(float)
        taken: dict[str, float] = defaultdict(float)
        seconds: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            seconds[row.key].append(row.seconds)
            op = row.key.partition(" ")[0]
            if row.bytes and op not in FREE and not op.startswith("collective."):
                roof = device.roofline_seconds(row.flops, row.bytes, getattr(torch, row.dtype))
                for name in (op, ""):
                    told[name] += roof
                    taken[name] += row.seconds
        operators = Operators(
            seconds={key: statistics.median(found) for key, found in seconds.items()},
            ratios={name: taken[name] / told[name] for name in told},
            seconds_per_byte=self._optimizers(mesh),
        )
        links = self.cluster.links(tuple(mesh))
        factors = tuple(self._factors(axis, link) if self.with_links else () for axis, link in enumerate(links))
        # operators were measured in programs, beside the collectives that took their share
        levels = tuple(replace(level, compute_share=0.0) for level in self.cluster.levels)
        return replace(
            self.cluster,
            levels=levels if self.with_links else self.cluster.levels,
            device=replace(device, operators=operators),
            factors={**self.cluster.factors, tuple(mesh): factors},
        )

    def _uses(self, program: str) -> bool:
        return self.programs is None or program in self.programs

    def _optimizers(self, mesh: Sequence[int]) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        moved: dict[str, float] = defaultdict(float)
        for row in self._rows(mesh):
            if row.optimizer_seconds:
                seconds[row.optimizer] += row.optimizer_seconds
                moved[row.optimizer] += row.optimizer_bytes
        return {name: seconds[name] / moved[name] for name in seconds if moved[name]}

    def _rows(self, mesh: Sequence[int]) -> list[ProgramRow]:
        rows = self.profiles.rows("programs", machine=self.machine, links=self.links(mesh))
        return [row for row in rows if self._uses(row.structure)]

    def _factors(self, axis: int, link: Link) -> Factors:
        points: dict[str, list[tuple[int, float]]] = defaultdict(list)
        plain = replace(link, factors=())
        for row in self.profiles.rows("collectives", machine=self.machine, links=links_key([link])):
            if self.collectives is None or Case(kind=row.kind, axis=axis, bytes=row.bytes) in self.collectives:
                points[row.kind].append((row.bytes, row.seconds / collective_seconds(row.kind, row.bytes, plain)))
        return tuple((kind, _smoothed(found)) for kind, found in sorted(points.items()))

    def unmeasured(self, program: Program) -> tuple[Case[int], ...]:
        """The program's collectives of which nothing is known."""
        if not self.with_links:
            return ()
        known: set[Case[int]] = set()
        for axis, link in enumerate(self.cluster.links(program.mesh)):
            rows = self.profiles.rows("collectives", machine=self.machine, links=links_key([link]))
            known |= {Case(kind=row.kind, axis=axis, bytes=row.bytes) for row in rows}
        return tuple(case for case in _cases(program) if case not in known)

    def links(self, mesh: Sequence[int]) -> str:
        return links_key(self.cluster.links(tuple(mesh))) if self.with_links else f"none {tuple(mesh)}"

    def row(self, program: str, mesh: Sequence[int]) -> ProgramRow | None:
        """What was measured of a segment program, by its `structure`."""
        found: list[ProgramRow] = self.profiles.rows(
            "programs", machine=self.machine, links=self.links(mesh), structure=program
        )
        return found[0] if found else None

    def correction(self, program: Program, cluster: Cluster, known: TimelineCache | None = None) -> float:
        """What a segment program takes, over what a cluster makes of its operators and collectives (`measured`); the
        usual one where it was not measured. `known` is what timelines on the same device found out."""
        if not self.with_links:
            return 1.0
        rows = {row.structure: row for row in self._rows(program.mesh)}
        if (row := rows.get(structure(program))) is None:
            return self.usual_correction(program.mesh)
        return row.seconds / timeline(program, cluster, known).seconds

    def usual_correction(self, mesh: Sequence[int]) -> float:
        """That of the programs that were measured on these links, in the middle; 1 where none was."""
        rows = self._rows(mesh) if self.with_links else []
        return statistics.median(row.seconds / row.composed_seconds for row in rows) if rows else 1.0

    def keep(
        self, program: Program, found: Measurement, optimizer: str, optimizer_bytes: int, about: Mapping[str, str]
    ) -> ProgramRow:
        """Writes what was measured, operators first: what a program is composed of is known when it is written."""
        rows: list[Any] = list(_operator_rows(program, found, self.machine))
        links = self.cluster.links(program.mesh)
        for case, seconds in found.collectives.items():
            rows.append(
                CollectiveRow(
                    machine=self.machine,
                    links=links_key([links[case.axis]]),
                    kind=case.kind,
                    bytes=case.bytes,
                    seconds=seconds,
                    runs=len(found.steps),
                )
            )
        self.profiles.add(rows)
        waiting = math.fsum(
            seconds
            for instruction, seconds in zip(_instructions(program), found.durations, strict=True)
            if instruction.op == WAIT
        )
        low, high = quartiles(found.steps)
        row = ProgramRow(
            machine=self.machine,
            links=self.links(program.mesh),
            structure=structure(program),
            seconds=statistics.median(found.steps),
            composed_seconds=timeline(program, self.also(program).measured(program.mesh)).seconds,
            spread=(high - low) / 2,
            runs=len(found.steps),
            abandoned=found.abandoned,
            compute_seconds=math.fsum(found.durations) - waiting,
            waiting_seconds=waiting,
            optimizer=optimizer,
            optimizer_seconds=found.optimizer_seconds,
            optimizer_bytes=optimizer_bytes,
            peak_bytes=found.peak_bytes,
            measured_at=time.time(),
            **about,
        )
        self.profiles.add([row])
        return row


def _smoothed(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Points by size, each the middle of those of at least half and at most twice its size: what disturbed one of
    them is not in a program whose collectives all have that size."""
    return tuple(
        (size, statistics.median(value for other, value in points if size <= 2 * other and other <= 2 * size))
        for size, _ in sorted(points)
    )


def _cases(program: Program) -> list[Case[int]]:
    """The program's collectives, each size once, in a fixed order."""
    axes = {name: axis for axis, name in enumerate(program.axes)}
    found = {(kind, axes[name], size) for kind, name, size in program.collectives() if size}
    return [Case(kind=kind, axis=axis, bytes=size) for kind, axis, size in sorted(found)]


def _instructions(program: Program) -> tuple[Node, ...]:
    return (*program.forward, *program.backward)


def _operator_rows(program: Program, found: Measurement, machine: str) -> Iterator[OperatorRow]:
    """One for each operator on its local shapes: means over all places where it stands."""
    places: dict[str, list[tuple[Node, float, float]]] = defaultdict(list)
    for instruction, seconds, spread in zip(_instructions(program), found.durations, found.spreads, strict=True):
        if instruction.op != WAIT:
            key = operator_key(instruction.op, *input_and_output_metas(instruction, program.metas))
            places[key].append((instruction, seconds, spread))
    whole = structure(program)
    for key, same in places.items():
        instruction = same[0][0]
        read, made = input_and_output_metas(instruction, program.metas)
        yield OperatorRow(
            machine=machine,
            program=whole,
            key=key,
            seconds=statistics.fmean(seconds for _, seconds, _ in same),
            spread=statistics.fmean(spread for _, _, spread in same),
            runs=len(found.steps) * len(same) * found.ranks,
            flops=_flops(instruction, program.metas),
            bytes=sum(meta.bytes for meta in (*read, *made)),
            dtype=str((*read, *made)[0].dtype).removeprefix("torch.") if read or made else "float32",
        )


def _flops(instruction: Node, metas: Mapping[str, TensorMeta]) -> float:
    if instruction.op.startswith("collective.") or instruction.op in FREE:
        return 0.0
    rule = rule_of(call_of(instruction, metas))
    return 0.0 if rule is None else rule.flops
