"""Costs of pipelines for tests: equal stages, and generated ones."""

from __future__ import annotations

from hypothesis import strategies as st

from autopar.ir.schedule import BACKWARD, FORWARD, Edge, Schedule, chain
from autopar.solve.schedules import SCHEDULES, PipelineCosts, StageCost, scheduled

NAMED = tuple(name for name in SCHEDULES if name != "searched")


def equal_costs(
    stages: int, f: float, i: float, w: float, transfer: float = 0.0, *, chunks: int = 1, kept: float = 1.0
) -> PipelineCosts:
    """Stages of which a device holds `chunks`; seconds and bytes are those of all of them: a device holds 1 byte of a
    micro-batch until its gradient of inputs, `kept` from then on."""
    cost = StageCost(
        forward_seconds=f / chunks,
        inputs_seconds=i / chunks,
        weights_seconds=w / chunks,
        held_bytes=1 / chunks,
        kept_bytes=kept / chunks,
    )
    return PipelineCosts(stages=(cost,) * stages, transfers=chain(stages, transfer))


@st.composite
def some_edges(draw: st.DrawFn, stages: int) -> dict[Edge, float]:
    """Those of neighbours, and some skips with their way back."""
    edges = chain(stages, draw(st.sampled_from((0.0, 0.1, 0.7))))
    for _ in range(draw(st.integers(0, 3)) if stages > 2 else 0):
        source, target = sorted(draw(st.lists(st.integers(0, stages - 1), min_size=2, max_size=2, unique=True)))
        edges[source, target, FORWARD] = edges[target, source, BACKWARD] = draw(st.sampled_from((0.0, 0.4)))
    return edges


@st.composite
def some_costs(draw: st.DrawFn, stages: int) -> PipelineCosts:
    seconds, sizes = st.floats(0, 2), st.integers(0, 4)
    return PipelineCosts(
        stages=tuple(
            StageCost(
                forward_seconds=draw(seconds),
                inputs_seconds=draw(seconds),
                weights_seconds=draw(seconds),
                whole_seconds=draw(st.none() | seconds),
                held_bytes=draw(sizes),
                kept_bytes=draw(sizes),
                rest_bytes=draw(sizes),
            )
            for _ in range(stages)
        ),
        transfers=draw(some_edges(stages)),
        shared_links=draw(st.booleans()),
    )


@st.composite
def named(draw: st.DrawFn) -> Schedule:
    """A named schedule of any size."""
    row = SCHEDULES[draw(st.sampled_from(NAMED))]
    chunks = row.chunks or draw(st.integers(1, 3))
    return scheduled(row.name, draw(st.integers(1, 6)), draw(st.integers(1, 14)), chunks=chunks)
