"""Two plans side by side: what changed in what was asked, in the step, the memory and the traffic, and what moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.planning.plan import Plan
from autopar.planning.texts import UNITS, digits, listed, mesh_words, pairs, short_bytes, signed, together

from .document import Document
from .facts import (
    count_text,
    figures_of,
    memory_parts,
    numbered,
    pinned_text,
    rate_of,
    step_parts,
    traffic,
    whose,
    work_of,
)
from .placements import input_rows, joined, placement_rows, words_of
from .sections import Grid, Lines, Part, Row, Section
from .words import legend

ALIKE = 5e-4
"""Figures that differ by less than this part are the same."""

TRAFFIC = "traffic"
"""The unit of a count and bytes."""

MOST_ROWS = 20
"""Rows of a table; the others are counted."""


Value = float | str | Mapping[str, int] | None
"""A figure, a text, or several counts by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value of both plans. `unit` is that of a figure (`texts.UNITS`), TRAFFIC, or "" for anything else."""

    what: str
    before: Value
    after: Value
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """What lives differently: names in a module (`count` alike), in words."""

    names: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Difference(Document):
    """From the plan `before` to the plan `after`, which stand here with their figures (`comparison.COLUMNS`): what was
    asked differently, figures, collectives, and what moved.
    `models` are both models where they differ: figures are then of different work.
    `gave` are sentences: what the second plan does for what it was asked. `operators` of `all_operators` are split
    differently; None where the plans are of different graphs."""

    before: Row
    after: Row
    models: tuple[str, ...]
    asked: tuple[Change, ...]
    figures: tuple[Change, ...]
    collectives: tuple[Change, ...]
    moved: tuple[Relocation, ...]
    gave: tuple[str, ...]
    operators: int | None
    all_operators: int

    def sections(self) -> Iterator[Section]:
        if self.models:
            told = f"plans of two different models, whose figures are of different work: {listed(self.models)}"
            yield Section("", [Lines([told], indent=0)])
        for heading, changes in (("asked", self.asked), ("figures", self.figures), ("traffic", self.collectives)):
            if changes:
                yield Section("", [_grid(heading, changes)])
        if self.moved:
            parts: list[Part] = []
            for row in self.moved[:MOST_ROWS]:
                parts += [Lines([row.names]), Lines([f"{row.before} -> {row.after}"], indent=4)]
            if len(self.moved) > MOST_ROWS:
                parts.append(Lines([f"and {len(self.moved) - MOST_ROWS} more"]))
            words = legend([text for row in self.moved for text in (row.before, row.after)])
            yield Section("what is placed differently", [*parts, Lines(words, style="dim")])
        if self.gave:
            yield Section("what changed", [Lines(self.gave)])
        if not any((self.asked, self.figures, self.collectives, self.moved)):
            yield Section("", [Lines(["the plans are the same"], indent=0)])


def difference(before: Plan, after: Plan) -> Difference:
    """What changes from the plan `before` to the plan `after`: figures, what travels, what lives differently.
    The plans may be of different meshes, clusters and batches; operators are compared where both are of one graph."""
    operators, every = _operators(before, after)
    return Difference(
        before=figures_of(before),
        after=figures_of(after),
        models=_models(before, after),
        asked=tuple(_changed(_asked(before), _asked(after))),
        figures=tuple(_changed(_figures(before), _figures(after))),
        collectives=tuple(_changed(_collectives(before), _collectives(after))),
        moved=tuple(_moved(before, after)),
        gave=tuple(_gave(before, after, operators, every)),
        operators=operators,
        all_operators=every,
    )


def _models(before: Plan, after: Plan) -> tuple[str, ...]:
    """Both models in words, if they differ: of other classes, or of other sizes."""
    origins = before.provenance, after.provenance
    counts = [None if origin is None else origin.parameter_count for origin in origins]
    if before.model == after.model and (counts[0] == counts[1] or None in counts):
        return ()
    return tuple(
        plan.model if count is None else f"{plan.model} ({count_text(count)} parameters)"
        for plan, count in zip((before, after), counts, strict=True)
    )


Told = Mapping[str, tuple[Value, str]]
"""What -> a value and its unit."""


def _changed(before: Told, after: Told) -> Iterator[Change]:
    for what in dict.fromkeys((*before, *after)):
        old, new = before.get(what, (None, ""))[0], after.get(what, (None, ""))[0]
        if not _is_same(old, new):
            yield Change(what=what, before=old, after=new, unit=(before.get(what) or after[what])[1])


def _is_same(old: Value, new: Value) -> bool:
    """Equal, or figures that read alike."""
    if isinstance(old, float | int) and isinstance(new, float | int):
        return math.isclose(old, new, rel_tol=ALIKE)
    return old == new


def _asked(plan: Plan) -> Told:
    origin = plan.provenance
    told: dict[str, Value] = {
        "model": plan.model,
        "mesh": plan.mesh,
        "cluster": plan.cluster,
        "solver": plan.solver,
        "cost": plan.cost,
        "optimizer": plan.optimizer,
        "memory limit": plan.memory_limit_bytes,
        "pinned": pinned_text(plan) or None,
        "recompute": plan.training.recompute,
        "micro-batches": str(plan.training.micro_batches),
        "compile": plan.training.compile or "no",
        "imbalance": ", ".join(f"{rows:g}" for rows in plan.training.imbalance) or "1",
    }
    if origin is not None:
        told["parameters"] = float(origin.parameter_count)
        told |= {"inputs": pairs(origin.inputs), "versions": pairs(origin.versions)}
    return {what: (value, UNIT_OF_ASKED.get(what, "")) for what, value in told.items()}


UNIT_OF_ASKED = {"memory limit": "bytes", "parameters": "count"}


def _figures(plan: Plan) -> Told:
    told: dict[str, tuple[Value, str]] = {"step": (plan.seconds, "seconds")}
    if (rate := rate_of(plan)) is not None:
        told[f"{work_of(plan)[1]}/s a device"] = (rate / plan.ranks, "per_second")
        told["MFU"] = (plan.utilization, "MFU")
    parts = {"optimizer step" if what == "optimizer" else what: part for what, part in step_parts(plan).items()}
    sizes = {"peak of a rank": plan.bytes, **memory_parts(plan), "buckets": plan.bucket_bytes}
    told |= {what: (seconds, "seconds") for what, seconds in parts.items()}
    return told | {what: (float(size), "bytes") for what, size in sizes.items()}


def _collectives(plan: Plan) -> Told:
    """As they run, or as they are planned where no timeline is known: bytes and count by kind and axis."""
    rows = plan.account.collectives if plan.timing is None else traffic(plan)
    return {f"{row.kind} {row.axis}": ({"count": row.count, "bytes": row.bytes}, TRAFFIC) for row in rows}


def _moved(before: Plan, after: Plan) -> Iterator[Relocation]:
    old, new = words_of(before), words_of(after)
    moved = {name: (old.get(name, "not there"), words) for name, words in new.items() if old.get(name) != words}
    for row in placement_rows(moved):
        layers = f" ({row.count} layers)" if row.count > 1 else ""
        of = f"{together(row.layers)}{layers}: " if row.module else ""
        was, words = row.words
        yield Relocation(names=of + joined(row.names), before=was, after=words)
    inputs = dict(input_rows(before))
    for which, words in input_rows(after):
        if inputs.get(which) not in (None, words):
            yield Relocation(names=which, before=inputs[which], after=words)


def _decisions(plan: Plan) -> dict[str, str]:
    """Every decision by its place; those of layers by their run's place."""
    told = {f"/{site}": choice for site, choice in plan.decisions.items()}
    for segment in plan.segments:
        for copies, run in numbered(segment):
            for copy in copies:
                told |= {f"{segment.name}[{copy}]/{site}": choice for site, choice in run.decisions.items()}
    return told


def _operators(before: Plan, after: Plan) -> tuple[int | None, int]:
    """How many places decide differently, and of how many."""
    old, new = _decisions(before), _decisions(after)
    if before.graph != after.graph or list(before.mesh) != list(after.mesh):
        return None, len(new)
    return sum(1 for site, choice in new.items() if old.get(site) != choice), len(new)


def _gave(before: Plan, after: Plan, operators: int | None, every: int) -> Iterator[str]:
    """What the second plan does differently, in sentences."""
    if before.digest == after.digest:
        yield "nothing: the plan stays as it is"
        return
    if operators:
        yield f"{operators:,} of {every:,} decisions changed"
    old, new = _recomputed(before), _recomputed(after)
    if old != new:
        yield f"{new} of {_layers(after)} layers are recomputed in backward, instead of {old}"
    if before.offload_bytes != after.offload_bytes:
        sizes = f"{short_bytes(after.offload_bytes)} instead of {short_bytes(before.offload_bytes)}"
        yield f"of what is kept for backward, at least {sizes} wait in the host's memory"
    if before.bucket_bytes != after.bucket_bytes:
        sizes = f"{short_bytes(after.bucket_bytes)} instead of {short_bytes(before.bucket_bytes)}"
        yield f"parameters travel in buckets of {sizes}, so less of them overlaps"
    size = after.bytes - before.bytes
    if size:
        yield f"a rank needs {short_bytes(abs(size))} {'more' if size > 0 else 'less'} at its peak"
    rates = [rate / plan.ranks for plan in (before, after) if (rate := rate_of(plan)) is not None]
    if len(rates) == 2:
        old_rate, new_rate = rates
        times = f"{digits(new_rate)} {work_of(before)[1]} a second instead of {digits(old_rate)}"
        yield f"a device computes {times} ({new_rate / old_rate - 1:+.1%})"
        was, now = (plan.provenance.winner for plan in (before, after) if plan.provenance is not None)
        if was != now:
            yield f"it is {whose(now)} instead of {whose(was)}"


def _layers(plan: Plan) -> int:
    return sum(run.count for segment in plan.segments for run in segment.runs)


def _recomputed(plan: Plan) -> int:
    return sum(run.count for segment in plan.segments for run in segment.runs if run.recompute)


# ---- tables


def _grid(heading: str, changes: tuple[Change, ...]) -> Grid:
    figures = heading == "figures"
    rows = [
        (f"  {c.what}", _text(c.before, c.unit), _text(c.after, c.unit), *([_by(c)] if figures else []))
        for c in changes
    ]
    heads = (heading, "before", "after", *(["change"] if figures else []))
    return Grid(heads, rows, keys=0, right=range(1, 4) if figures else ())


def _text(value: Value, unit: str) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        if unit == TRAFFIC:
            return f"{value['count']:,} x, {short_bytes(value['bytes'])}"
        return mesh_words(value, ", ")
    return value if isinstance(value, str) else UNITS[unit](value)


def _by(change: Change) -> str:
    """The difference of two figures, and its part of the first."""
    old, new = change.before, change.after
    if not isinstance(old, float | int) or not isinstance(new, float | int):
        return ""
    if change.unit == "MFU":
        return f"{(new - old) * 100:+.1f} points"
    part = f" ({new / old - 1:+.1%})" if old and abs(new / old - 1) < 10 else ""
    return f"{signed(new - old, UNITS[change.unit])}{part}"
