"""The flow: how a model becomes a program, step by step.

`STEPS` are what every plan goes through, in order; `LOWERINGS` are what is then done to its program, in order, to which
a person may add (`register_lowering`). `Flow` runs them, and says how long each took and what it did. A search over
plans makes a problem and solves it many times, and is timed in one piece; so is the choice among candidates
(`autopar.planning`).
"""

import ast
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from autopar.cluster.machine import Cluster
from autopar.extensions import Table, unknown
from autopar.ir.graph import JointGraph
from autopar.ir.program import Program
from autopar.ops import registry as registry  # all rows, and those of users
from autopar.ops.routing import in_token_order
from autopar.ops.sdpa import ATTENTION
from autopar.solve.solvers import solve

from .blocks.block import Blocks
from .blocks.partition import blocks
from .capture.captured import Captured
from .capture.trace import capture
from .checkpoints import checkpoints
from .codegen.precision import written
from .lower.adopt import adopt
from .lower.bucket import Bucket
from .lower.chunk import CHUNKING
from .lower.compact import Compact
from .lower.lowering import Adopted, Lowering, Rewrite, Target, When, Written, always, check_written, rewritten
from .lower.offload import Offload, as_asked
from .lower.overlap import Overlap
from .lower.prefetch import prefetch
from .lower.rematerialize import Rematerialize, where_fused
from .lower.slice import SLICING
from .masks import without_masks
from .seeds import seeds
from .segments.search import segments
from .segments.segment import Segments
from .space.layers import strategies
from .space.problem import ProblemBuilder
from .space.space import Space

logger = logging.getLogger("autopar")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[P, T]):
    """What a step takes and gives, the function that it is, and what is said in the log of what that returned."""

    name: str
    takes: str
    gives: str
    run: Callable[P, T]
    did: Callable[[T], str] = str


def _captured(captured: Captured) -> str:
    return f"{len(captured.graph.nodes)} operators, {len(captured.graph.parameters)} parameters"


def _seeded(graph: JointGraph) -> str:
    return f"{sum(value.role == 'seed' for value in graph.inputs)} random operators"


def _routed(graph: JointGraph) -> str:
    return f"{sum(node.op == 'autopar.expert_mm.default' for node in graph.nodes)} products of experts"


def _unmasked(graph: JointGraph) -> str:
    calls = [dict(node.kwargs).get("is_causal", False) for node in graph.nodes if node.op == ATTENTION]
    return f"{sum(calls)} of {len(calls)} calls of attention are causal"


def _made_again(graph: JointGraph) -> str:
    return f"{sum(bool(node.serves) for node in graph.nodes)} operators are made again in backward"


def _segmented(result: Segments) -> str:
    runs = [f"{repeat.count} copies of {len(repeat.copies[0])}" for repeat in result.repeats]
    return f"{', '.join(runs) or 'nothing repeats'}, {len(result.rest)} operators in the rest"


def _blocked(result: Blocks) -> str:
    return f"{len(result.blocks)} blocks"


def _built(space: Space) -> str:
    choices = [c for region in space.regions() for site in region.sites.values() for c in site.choices.values()]
    return f"{sum(len(region.sites) for region in space.regions())} sites, {sum(map(len, choices))} choices on axes"


def _written(program: Program) -> str:
    return f"{len(program.forward) + len(program.backward)} instructions{_listed(_collectives(program))}"


CAPTURE = Step(name="capture", takes="a model, inputs", gives="the graph of a step", run=capture, did=_captured)
SEEDS = Step(name="seeds", takes="a graph", gives="one whose random operators read keys", run=seeds, did=_seeded)
ROUTING = Step(name="routing", takes="a graph", gives="one in token order", run=in_token_order, did=_routed)
MASKS = Step(name="masks", takes="a graph", gives="one without known masks", run=without_masks, did=_unmasked)
CHECKPOINTS = Step(name="checkpoints", takes="a graph", gives="one that follows them", run=checkpoints, did=_made_again)
SEGMENTS = Step(name="segments", takes="a graph", gives="layers that repeat", run=segments, did=_segmented)
SPACE = Step(name="space", takes="a graph, mesh, cluster, segments", gives="the space", run=strategies, did=_built)
BLOCKS = Step(name="blocks", takes="a graph", gives="what splits together, for presets", run=blocks, did=_blocked)
PROBLEM = Step(name="problem", takes="a space, allowed choices", gives="a problem", run=ProblemBuilder.build)
SOLVE = Step(name="solve", takes="a problem", gives="a solution, which is an assignment", run=solve)
CODEGEN = Step(name="codegen", takes="a space, an assignment", gives="a program", run=written, did=_written)

STEPS: tuple[Step[..., Any], ...] = (
    CAPTURE, SEEDS, ROUTING, MASKS, CHECKPOINTS, SEGMENTS, SPACE, BLOCKS, PROBLEM, SOLVE, CODEGEN,
)  # fmt: skip

LOWERINGS = Table(
    "lowering",
    Lowering,
    (
        Lowering(
            name="bucket",
            applies="collectives of parameters and gradients, and all that are soon waited for",
            writes="the former in buckets, as far ahead of their readers as pays, and all of them started early",
            costs="copies into and out of buckets, and what is gathered ahead in memory",
            adopt=prefetch,
            rewrites=(Bucket(), Overlap()),
            taken="first",
        ),
        Lowering(
            name="slice",
            applies="products next to a gather or a reduction",
            writes="2, 3, 4 or 8 slices: one is multiplied while others travel",
            costs="a latency for each slice, and smaller products",
            adopt=partial(adopt, SLICING),
            rewrites=(SLICING,),
        ),
        Lowering(
            name="chunk",
            applies="stretches from a collective through the next one or two",
            writes="2 or 4 chunks of a dim: one is computed while others travel",
            costs="a latency for each chunk, and smaller operators",
            adopt=partial(adopt, CHUNKING),
            rewrites=(CHUNKING,),
        ),
        Lowering(
            name="rematerialize",
            applies="programs that are compiled",
            writes="element-wise operators again in backward, of what is kept anyway",
            costs="nothing where they fuse with what reads them",
            adopt=where_fused,
            rewrites=(Rematerialize(),),
            taken="last",
        ),
        Lowering(
            name="compact",
            applies="what backward keeps of a larger tensor",
            writes="a copy, so that the rest is not kept with it",
            costs="the copy",
            adopt=always(Compact()),
            rewrites=(Compact(),),
            taken="last",
        ),
        Lowering(
            name="offload",
            applies="what backward keeps, where a plan says how many bytes of it leave",
            writes="copies to the host's memory, and back ahead of their readers",
            costs="the host's link, where nothing hides it",
            adopt=as_asked,
            rewrites=(Offload(),),
            taken="last",
        ),
    ),
    functions=("adopt",),
)


def register_lowering(lowering: Lowering, *, replace: bool = False) -> None:
    """Adds a `lowering`, which every later plan takes as its row says. Every rank must register the same, before it
    plans. Raises ValueError for what is none, and for a name that is taken unless it is to `replace` that one."""
    LOWERINGS.add(lowering, replace=replace)


def lowerings(taken: When) -> tuple[Lowering, ...]:
    """Those that are taken then, in their order."""
    return tuple(lowering for lowering in LOWERINGS.values() if lowering.taken == taken)


def rewrites(text: str) -> tuple[Rewrite, ...]:
    """The rewrites of a text such as `bucket{limit_bytes=1000000},slice{parts=4}`. A registered lowering is named
    without arguments, and taken as its row says. Raises ValueError for what is none."""
    known = {r.name or row.name: r for row in LOWERINGS.values() for r in row.rewrites or (Written(row.on),)}
    found = []
    for item in filter(None, re.split(r",(?![^{]*})", text.replace(" ", "").replace("\n", ""))):
        parts = re.fullmatch(r"([\w.-]+)(?:{(.*)})?", item)
        if parts is None:
            raise ValueError(f"{item!r} is no rewrite: write name or name{{argument=value,...}}")
        name, said = parts.groups()
        if name not in known:
            raise ValueError(unknown("rewrite", name, list(known)))
        rewrite = known[name]
        allowed = [f.name for f in fields(rewrite) if f.repr]
        try:
            call = ast.parse(f"f({said or ''})", mode="eval").body
            given = {str(k.arg): ast.literal_eval(k.value) for k in getattr(call, "keywords", ())}
        except (SyntaxError, ValueError):
            raise ValueError(f"{item!r} has no arguments that can be read: write name{{argument=value,...}}") from None
        for argument, value in given.items():
            if argument not in allowed:
                raise ValueError(unknown(f"argument of {name}", argument, allowed))
            if type(value) is not type(getattr(rewrite, argument)):
                raise ValueError(f"{argument} of {name} is {value!r}: write it as {getattr(rewrite, argument)!r}")
        found.append(replace(rewrite, **given))
    return tuple(found)


def lowered(program: Program, text: str, cluster: Cluster) -> Program:
    """The program after the rewrites of a text, by the prices of a cluster. Raises ValueError for what is none, and
    where one does not fit the program."""
    return rewritten(program, rewrites(text), Target(cluster=cluster))


class Flow(dict[str, float]):
    """Runs steps: what each took, in seconds, is added up under its name, and what it did is logged."""

    def run(self, step: Step[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        seconds, result = self._timed(step.name, lambda: step.run(*args, **kwargs))
        logger.info("%s: %s, %.2f s", step.name, step.did(result), seconds)
        return result

    def adopt(self, lowering: Lowering, program: Program, target: Target) -> Adopted | None:
        """How a lowering is taken, as a program of few copies says."""
        with _lowering(lowering):
            seconds, adopted = self._timed(lowering.name, lambda: lowering.adopt(program, target))
            if adopted is not None and adopted.program is not None and lowering.name in LOWERINGS.added:
                check_written(adopted.program, lowering.name)
        if adopted is None or adopted.what:
            logger.info("%s: %s, %.2f s", lowering.name, adopted.what if adopted else "not taken", seconds)
        return adopted

    def lower(self, lowering: Lowering, adopted: Adopted, program: Program) -> Program:
        """A program with a lowering that is taken."""
        with _lowering(lowering):
            seconds, lowered = self._timed(lowering.name, lambda: adopted.on(program))
            if lowering.name in LOWERINGS.added:
                check_written(lowered, lowering.name)
        if logger.isEnabledFor(logging.INFO) and lowered is not program:
            logger.info("%s: %s, %.2f s", lowering.name, changes(program, lowered), seconds)
        return lowered

    def timed(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function returns that is part of a search or a choice, and no step."""
        return self._timed(name, lambda: function(*args, **kwargs))[1]

    def _timed(self, name: str, function: Callable[[], T]) -> tuple[float, T]:
        began = time.perf_counter()
        result = function()
        seconds = time.perf_counter() - began
        self[name] = self.get(name, 0.0) + seconds
        return seconds, result


@contextmanager
def _lowering(lowering: Lowering) -> Iterator[None]:
    """Errors within it name the lowering that another package added."""
    try:
        yield
    except Exception as error:
        if lowering.name in LOWERINGS.added:
            error.add_note(f"in lowering {lowering.name!r}, which is registered")
        raise


def changes(before: Program, after: Program) -> str:
    """What a lowering did: "+120 instructions, -12 all_gather, +3 all_reduce"."""
    counts = [len(program.forward) + len(program.backward) for program in (before, after)]
    changed = _collectives(after)
    changed.subtract(_collectives(before))
    return f"{counts[1] - counts[0]:+} instructions{_listed(changed, '+')}"


def _collectives(program: Program) -> Counter[str]:
    return Counter(i.collective for i in program.nodes if i.collective)


def _listed(counts: Counter[str], sign: str = "") -> str:
    return "".join(f", {count:{sign}} {kind}" for kind, count in sorted(counts.items()) if count)
