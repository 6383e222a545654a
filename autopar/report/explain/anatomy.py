"""The anatomy of a plan: its program's timeline and memory, the model's segments and blocks, and the links of the mesh.

All of it is computed again from the model, by the same functions that give the plan its figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster.links import Link
from autopar.cost.memory import Moment, moments
from autopar.cost.timeline import COMPUTE, Timeline
from autopar.passes.blocks.block import Blocks
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.texts import grouped, starred, together


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAt:
    """From `seconds` on, a rank holds so many bytes of each of `memory.KINDS`, in their order."""

    seconds: float
    phase: str
    op: str
    module: str
    parts: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """A ParallelBlock: the modules of its contractions, how many operators it has, and how it can be split."""

    name: str
    modules: tuple[str, ...]
    operators: int
    splits: tuple[str, ...]
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """`sites` are what decides: by name, its kind and module. `reach` says for each mesh axis the levels that its
    groups cross, and how many children of each."""

    timeline: Timeline
    moments: tuple[MemoryAt, ...]
    blocks: tuple[BlockFacts, ...]
    segments: Mapping[str, tuple[int, int]]
    """Name of a repeated segment -> its copies, and the operators of one."""
    sites: Mapping[str, tuple[str, str]]
    reach: Mapping[str, tuple[tuple[str, int], ...]]


def anatomy(planner: Planner, plan: Plan) -> Anatomy:
    program, space = planner.program(plan), planner.space
    step = planner.timeline(plan)
    every = moments(program, planner.optimizer, planner.kind_of_device, planner.memory)
    return Anatomy(
        timeline=step,
        moments=tuple(_placed(every, step)),
        blocks=tuple(_blocks(planner, planner.searches.blocks())),
        segments={repeat.name: (repeat.count, len(repeat.copies[0])) for repeat in planner.segments.repeats},
        sites={name: (site.kind, site.module) for region in space.regions() for name, site in region.sites.items()},
        reach={axis: _reach(link) for axis, link in zip(space.axes, space.redistributor.links, strict=True)},
    )


def _reach(link: Link) -> tuple[tuple[str, int], ...]:
    return tuple((stage.name, stage.width) for stage in link.stages if stage.width > 1)


def _placed(every: Sequence[Moment], step: Timeline) -> Iterator[MemoryAt]:
    """Moments at the times of their instructions. What takes no time on the rank is where the one before it began."""
    starts = {(event.backward, event.op, event.name): event for event in step.events if event.stream == COMPUTE}
    now = 0.0
    for moment in every:
        node, backward = moment.instruction, moment.phase == "backward"
        name = next((name for name in node.outputs if name), "") if node is not None else ""
        event = starts.get((backward, node.op, name)) if node is not None else None
        now = max(now, step.seconds if node is None else event.start_seconds if event is not None else now)
        yield MemoryAt(
            seconds=now,
            phase=moment.phase.partition(",")[0],
            op="" if node is None else node.op,
            module="" if node is None else node.module,
            parts=moment.parts,
        )


def _blocks(planner: Planner, blocks: Blocks) -> Iterator[BlockFacts]:
    """Those whose names and modules differ in numbers alone count as one."""
    graph = planner.captured.graph
    known = (
        (tuple(dict.fromkeys(graph.nodes[node].module for node in block.contractions)), len(block.nodes), block.dims)
        for block in blocks.blocks
    )
    alike = grouped(
        ((tuple(map(starred, modules)), operators, tuple(map(str, dims))), modules)
        for modules, operators, dims in known
    )
    for (_, operators, splits), every in alike.items():
        modules = tuple(dict.fromkeys(map(together, zip(*every, strict=True))))
        named = next((module for module in modules if module), "the model")
        yield BlockFacts(name=named, modules=modules, operators=operators, splits=splits, count=len(every))
