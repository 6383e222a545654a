"""What pages, tables, differences and reports say of a plan, each computed here once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from autopar.cost.timeline import Communication
from autopar.planning.plan import Plan, Run, Segment
from autopar.planning.provenance import EDITED, ELSEWHERE, STAGED, UNSTAGED, Candidate
from autopar.planning.texts import digits, mesh_words

from .sections import Row

STARTS: Mapping[str, str] = {
    "search": "",
    "search again": "at the prices of a timeline",
    ELSEWHERE: "from another start",
    STAGED: "in stages",
    UNSTAGED: "without stages",
}
"""Candidates that are plans of the search, and what sets each apart."""

COLUMNS: Mapping[str, Callable[[Plan], float | str | None]] = {
    "solver": lambda plan: plan.solver,
    "mesh": lambda plan: mesh_words(plan.mesh),
    "cluster": lambda plan: plan.cluster,
    "step_seconds": lambda plan: plan.seconds,
    "peak_memory_bytes": lambda plan: plan.bytes,
    "MFU": lambda plan: plan.utilization,
    "compute_seconds": lambda plan: plan.account.compute_seconds,
    "communication_seconds": lambda plan: plan.account.communication_seconds,
    "exposed_seconds": lambda plan: plan.exposed_seconds,
    "copies_seconds": lambda plan: plan.account.copy_seconds,
    "optimizer_seconds": lambda plan: plan.account.optimizer_seconds,
    "sent_bytes": lambda plan: sum(collective.bytes for collective in plan.account.collectives),
    "solve_seconds": lambda plan: plan.solve_seconds,
    "above_floor_part": lambda plan: plan.gap,
}
"""Figures of a plan by name. `above_floor_part` is the part of the step above the compute floor (`Plan.gap`)."""


def figures_of(plan: Plan) -> Row:
    """What people compare of a plan."""
    return {column: of(plan) for column, of in COLUMNS.items()}


def work_of(plan: Plan | None) -> tuple[int, str]:
    """What a step computes: so many tokens, or samples."""
    origin = None if plan is None else plan.provenance
    return (0, "samples") if origin is None else (origin.items, origin.unit)


def rate_of(plan: Plan) -> float | None:
    """The tokens or samples a second of all devices; None if they are not known."""
    return work_of(plan)[0] / plan.seconds if plan.provenance is not None and plan.seconds else None


def step_parts(plan: Plan) -> dict[str, float]:
    """The seconds of what a rank does in a step, and of what it waits for; nothing if they are not known."""
    timing = plan.timing
    return {} if timing is None else {
        "matrix products": timing.products_seconds,
        "attention": timing.attention_seconds,
        "other operators": timing.others_seconds,
        **{f"waiting for {axis}": seconds for axis, seconds in timing.exposed_on().items()},
        "optimizer": timing.optimizer_seconds,
    }  # fmt: skip


def memory_parts(plan: Plan) -> dict[str, int]:
    """The bytes of what the peak consists of."""
    peak = plan.peak
    parts = {
        "parameters": peak.parameters,
        "gradients": peak.gradients,
        plan.optimizer: peak.optimizer,
        "kept for backward": peak.activations,
        "temporaries": peak.temporaries,
        "inputs and outputs": peak.inputs + peak.outputs,
    }
    return {label: size for label, size in parts.items() if size}


def traffic(plan: Plan) -> tuple[Communication, ...]:
    """The collectives of a step as they run, by kind and axis; none if that is not known."""
    return () if plan.timing is None else plan.timing.communication


def numbered(segment: Segment) -> Iterator[tuple[range, Run]]:
    """The runs of a repeated segment, with the numbers of their copies."""
    ends = accumulate(run.count for run in segment.runs)
    return ((range(end - run.count, end), run) for end, run in zip(ends, segment.runs, strict=True))


def range_text(numbers: range) -> str:
    """ "0 to 31", or "3" alone."""
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def count_text(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{digits(number / size)}{unit}"
    return str(number)


def pinned_text(plan: Plan) -> str:
    """What a person pinned."""
    return ", ".join(f"{name} {axis}={text}" for name, axes in plan.constraints.items() for axis, text in axes.items())


def candidates(plan: Plan) -> list[Candidate]:
    """The plan and those that competed with it; none if they are not known."""
    if (origin := plan.provenance) is None:
        return []
    chosen = Candidate(name=origin.winner, seconds=plan.seconds, bytes=plan.bytes, precision="chosen")
    return [chosen, *origin.candidates]


def called(candidate: str) -> str:
    """A candidate's name, where its own says too little."""
    if candidate == EDITED:
        return "edited by hand"
    return f"search, {STARTS[candidate]}" if STARTS.get(candidate) else candidate


def whose(candidate: str) -> str:
    """Whose plan a candidate's is; that of a preset has its name."""
    if candidate == EDITED:
        return "a plan that was edited"
    return f"the search's plan {STARTS[candidate]}".rstrip() if candidate in STARTS else f"{candidate}'s plan"
