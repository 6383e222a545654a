"""Profiled costs (CFP section 4): measures segments as the programs that they become, and composes plans of them.

A plan is measured by its *segment program*: the real program, with few copies of each run of layers that decide alike
(`writer.KEPT`), so that measuring does not take longer for deeper models. A clock times each instruction. A plan's
seconds are composed (CFP Eq. 8 and 9, with overlap) as the timeline of its full program, in which operators (by local
shapes) and collectives (by size and axis) take their measured seconds, times a correction: the measured step of the
segment program over that of its own timeline. Operators that were not measured take their roofline, times the factor by
which others exceeded theirs.
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
from autopar.compat.tensors import is_real
from autopar.cost.roofline import FREE
from autopar.cost.streams import TimelineCache, timeline
from autopar.ir.graph import WAIT, JointGraph, Node, Ref, TensorMeta
from autopar.ir.program import Program
from autopar.ir.rewrite import input_and_output_metas
from autopar.ops.rule import call_of
from autopar.ops.rules import rule_of
from autopar.passes.blocks.block import ParallelBlock
from autopar.passes.blocks.partition import blocks
from autopar.passes.segments.segment import Segments

from .database import CollectiveRow, OperatorRow, Profiles, ProgramRow, links_key

WARM_UPS, RUNS, LEAST_RUNS = 5, 10, 2
"""CFP's; a program that cannot win is stopped after `LEAST_RUNS`, and one more to warm up."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order to ranks: measure a program, and each collective of `cases` alone on its mesh axis."""

    program: Program
    cases: tuple[Case[int], ...] = ()
    warm_ups: int = WARM_UPS
    runs: int = RUNS
    limit_seconds: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """`steps` are the seconds of forward and backward of each run, on its slowest rank. `durations` are the seconds of
    each instruction, forward and then backward, as the mean over ranks and runs, so that they add up to a step (a
    median would miss the turns of ranks that share processors). `spreads` are the mean deviations from them."""

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
    """Equal for programs that do the same on tensors of the same shapes, whatever the names of values and modules: the
    segment program of 8 layers has the structure of that of 32."""
    numbers: dict[str, int] = {}

    def number(name: str | None) -> int:
        return -1 if not name else numbers.setdefault(name, len(numbers))

    def plain(value: Any) -> Any:
        if isinstance(value, Ref):
            return f"%{number(value.name)}"
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return repr(value)

    digest = hashlib.sha256(repr((program.axes, program.mesh)).encode())
    for i in program.inputs:
        digest.update(repr((i.role, str(i.meta), str(i.layout), number(i.name))).encode())
    for instruction in program.nodes:
        kwargs = [(key, plain(value)) for key, value in instruction.kwargs]
        outputs = [(number(name), str(program.metas[name]) if name else "") for name in instruction.outputs]
        digest.update(repr((instruction.op, plain(instruction.args), kwargs, outputs)).encode())
    digest.update(repr([number(o.name) for o in program.outputs if o.name is not None]).encode())
    return digest.hexdigest()[:24]


def segment_programs(graph: JointGraph, segments: Segments, mesh: Sequence[int]) -> int:
    """The number of programs to profile by CFP Eq. 7: for each unique segment the product of its blocks' strategies,
    and for each pair of dependent blocks of different segments (or copies) the product of theirs. A block has as many
    strategies on an axis as dims of its first contraction to split, and one on an axis of one rank."""
    partition = blocks(graph, max(mesh)).blocks
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
    for block in partition:
        first = block.contractions[0]
        number, k = place.get(first, rest)
        position = first if number < 0 else segments.repeats[number].copies[k].index(first)
        alike[block] = number, position
        inside[number][alike[block]] = strategies(block)
    pairs: dict[tuple[tuple[int, int], tuple[int, int]], int] = {}
    home = {i: block for block in partition for i in block.nodes}
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
    """The nodes in blocks on which a node depends, through nodes that are in none."""
    queue, seen = [i], {i}
    while queue:
        for name in graph.nodes[queue.pop()].inputs:
            source = graph.producer.get(name)
            if source is None or source in seen:
                continue
            seen.add(source)
            if source in home:
                yield source
            else:
                queue.append(source)


def real_tensors(
    bound: Mapping[str, torch.Tensor], model: nn.Module, constants: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Target -> value, for the example inputs, buffers and constants that have one."""
    values = {**bound, **dict(model.named_buffers()), **constants}
    return {name: t.detach() for name, t in values.items() if is_real(t)}


# --- from measurements to a cluster


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The measurements of a machine, and of the links of a cluster's meshes, in a database.

    `programs` restricts them to those of some segment programs, by structure (None: all), so that a search that begins
    anew takes the same way to the same end, whatever else the database holds by then. Without `with_links`, the
    cluster prices collectives (`hybrid`).
    """

    profiles: Profiles
    machine: str
    cluster: Cluster
    with_links: bool
    programs: tuple[str, ...] | None = None
    collectives: frozenset[Case[int]] | None = None
    """The collectives of these programs; None: all."""

    def also(self, program: Program) -> Costs:
        """The costs with the measurements of one more segment program."""
        if self.programs is None or self.collectives is None:
            return self
        cases = frozenset(_cases(program))
        return replace(self, programs=(*self.programs, structure(program)), collectives=self.collectives | cases)

    def measured(self, mesh: Sequence[int]) -> Cluster:
        """The cluster with the measured seconds of operators, of collectives and of the optimizers' steps. An operator
        takes its median over programs, since a disturbance during one program affects all that it measured."""
        device = self.cluster.device
        rows = [row for row in self.profiles.rows("operators", machine=self.machine) if self._uses(row.program)]
        if not rows:
            return self.cluster
        predicted: dict[str, float] = defaultdict(float)
        taken: dict[str, float] = defaultdict(float)
        seconds: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            seconds[row.key].append(row.seconds)
            op = row.key.partition(" ")[0]
            if row.bytes and op not in FREE and not op.startswith("collective."):
                roof = device.roofline_seconds(row.flops, row.bytes, getattr(torch, row.dtype))
                for name in (op, ""):
                    predicted[name] += roof
                    taken[name] += row.seconds
        operators = Operators(
            seconds={key: statistics.median(measured) for key, measured in seconds.items()},
            ratios={name: taken[name] / predicted[name] for name in predicted},
            seconds_per_byte=self._optimizers(mesh),
        )
        links = self.cluster.links(tuple(mesh))
        factors = tuple(self._factors(axis, link) if self.with_links else () for axis, link in enumerate(links))
        # the programs ran their collectives beside the operators, which include the collectives' share of the device
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
        return tuple((kind, _smoothed(of_kind)) for kind, of_kind in sorted(points.items()))

    def unmeasured(self, program: Program) -> tuple[Case[int], ...]:
        """The program's collectives that the database lacks."""
        if not self.with_links:
            return ()
        recorded: set[Case[int]] = set()
        for axis, link in enumerate(self.cluster.links(program.mesh)):
            rows = self.profiles.rows("collectives", machine=self.machine, links=links_key([link]))
            recorded |= {Case(kind=row.kind, axis=axis, bytes=row.bytes) for row in rows}
        return tuple(case for case in _cases(program) if case not in recorded)

    def links(self, mesh: Sequence[int]) -> str:
        return links_key(self.cluster.links(tuple(mesh))) if self.with_links else f"none {tuple(mesh)}"

    def row(self, program: str, mesh: Sequence[int]) -> ProgramRow | None:
        """The row of a segment program, by its `structure`."""
        rows: list[ProgramRow] = self.profiles.rows(
            "programs", machine=self.machine, links=self.links(mesh), structure=program
        )
        return rows[0] if rows else None

    def correction(self, program: Program, cluster: Cluster, cache: TimelineCache | None = None) -> float:
        """The measured step of a segment program over that of its timeline on the `measured` cluster; the usual
        correction if it was not measured. `cache` is that of timelines on the same device."""
        if not self.with_links:
            return 1.0
        rows = {row.structure: row for row in self._rows(program.mesh)}
        if (row := rows.get(structure(program))) is None:
            return self.usual_correction(program.mesh)
        return row.seconds / timeline(program, cluster, cache).seconds

    def usual_correction(self, mesh: Sequence[int]) -> float:
        """The median correction of the programs that were measured on these links; 1 if there are none."""
        rows = self._rows(mesh) if self.with_links else []
        return statistics.median(row.seconds / row.composed_seconds for row in rows) if rows else 1.0

    def keep(
        self, program: Program, measurement: Measurement, optimizer: str, optimizer_bytes: int, about: Mapping[str, str]
    ) -> ProgramRow:
        """Records a measurement; operators and collectives first, since they give the program's `composed_seconds`."""
        links, runs = self.cluster.links(program.mesh), len(measurement.steps)
        collectives = (
            CollectiveRow(
                machine=self.machine,
                links=links_key([links[case.axis]]),
                kind=case.kind,
                bytes=case.bytes,
                seconds=seconds,
                runs=runs,
            )
            for case, seconds in measurement.collectives.items()
        )
        self.profiles.add([*_operator_rows(program, measurement, self.machine), *collectives])
        waiting = math.fsum(
            seconds
            for instruction, seconds in zip(program.nodes, measurement.durations, strict=True)
            if instruction.op == WAIT
        )
        low, high = quartiles(measurement.steps)
        row = ProgramRow(
            machine=self.machine,
            links=self.links(program.mesh),
            structure=structure(program),
            seconds=statistics.median(measurement.steps),
            composed_seconds=timeline(program, self.also(program).measured(program.mesh)).seconds,
            spread=(high - low) / 2,
            runs=runs,
            abandoned=measurement.abandoned,
            compute_seconds=math.fsum(measurement.durations) - waiting,
            waiting_seconds=waiting,
            optimizer=optimizer,
            optimizer_seconds=measurement.optimizer_seconds,
            optimizer_bytes=optimizer_bytes,
            peak_bytes=measurement.peak_bytes,
            measured_at=time.time(),
            **about,
        )
        self.profiles.add([row])
        return row


def _smoothed(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Points by size, each the median of those of at least half and at most twice its size, so that a disturbance of
    one does not distort a program whose collectives all have that size."""
    return tuple(
        (size, statistics.median(value for other, value in points if size <= 2 * other and other <= 2 * size))
        for size, _ in sorted(points)
    )


def _cases(program: Program) -> list[Case[int]]:
    """The program's collectives, each size once, in a fixed order."""
    axes = {name: axis for axis, name in enumerate(program.axes)}
    cases = {(kind, axes[name], size) for kind, name, size in program.collectives() if size}
    return [Case(kind=kind, axis=axis, bytes=size) for kind, axis, size in sorted(cases)]


def _operator_rows(program: Program, measurement: Measurement, machine: str) -> Iterator[OperatorRow]:
    """A row for each operator on its local shapes, with the means over all its places in the program."""
    places: dict[str, list[tuple[Node, float, float]]] = defaultdict(list)
    clocks = zip(program.nodes, measurement.durations, measurement.spreads, strict=True)
    for instruction, seconds, spread in clocks:
        if instruction.op != WAIT:
            key = operator_key(instruction.op, *input_and_output_metas(instruction, program.metas))
            places[key].append((instruction, seconds, spread))
    of_program = structure(program)
    for key, same in places.items():
        instruction = same[0][0]
        operands, results = input_and_output_metas(instruction, program.metas)
        flops, inside = _work(instruction, program.metas)
        yield OperatorRow(
            machine=machine,
            program=of_program,
            key=key,
            seconds=statistics.fmean(seconds for _, seconds, _ in same),
            spread=statistics.fmean(spread for _, _, spread in same),
            runs=len(measurement.steps) * len(same) * measurement.ranks,
            flops=flops,
            bytes=sum(meta.bytes for meta in (*operands, *results)) + round(inside),
            dtype=str((*operands, *results)[0].dtype).removeprefix("torch.") if operands or results else "float32",
        )


def _work(instruction: Node, metas: Mapping[str, TensorMeta]) -> tuple[float, float]:
    """Flops, and bytes within the operator."""
    if instruction.op.startswith("collective.") or instruction.op in FREE:
        return 0.0, 0.0
    rule = rule_of(call_of(instruction, metas))
    return (0.0, 0.0) if rule is None else (rule.flops, rule.inside_bytes)
