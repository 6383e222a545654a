"""A plan as a person reads it: a page that fits into 80 columns and a screen for any number of layers, and all that it
says, one line an item."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from autopar.cost.timeline import HOST
from autopar.planning.plan import LIMIT_WORDS, ParameterPlan, Plan
from autopar.planning.provenance import EDITED, STAGED, UNSTAGED, Candidate
from autopar.planning.request import NAMES
from autopar.planning.texts import (
    bytes_text,
    digits,
    grouped,
    listed,
    mesh_words,
    pairs,
    short_bytes,
    short_seconds,
    starred,
    together,
)
from autopar.planning.training import (
    compile_text,
    experts_text,
    micro_batches_text,
    precision_text,
    recompute_text,
)

from .document import Document
from .facts import (
    STARTS,
    candidates,
    count_text,
    memory_parts,
    numbered,
    pinned_text,
    range_text,
    rate_of,
    step_parts,
    traffic,
    work_of,
)
from .pipeline import stages
from .placements import MOST_ROWS, PlacementRow, input_rows, joined, placement_rows, shortened, words_of
from .sections import Bars, Grid, Labelled, Lines, Row, Section, Stack
from .words import legend

PARTS = ("compute_seconds", "communication_seconds", "copy_seconds", "optimizer_seconds")
"""What the step consists of as if nothing overlapped."""

SCALED_BEYOND = 4
"""A limit of more than so many times the peak is not drawn: the bar is then the peak."""

TIGHT_PART = 0.05
"""Less headroom than this part of the limit is worth a warning."""

LEAST_RATIO = 1.005
"""A smaller one says that two plans are as fast."""

LEAST_GAP = 0.0005
"""A smaller distance from a bound is none."""

LEAST_UNFUSED = 0.02
"""Less of a step is not worth changing a model for."""

UNFUSED = "dropout of attention weights keeps attention from the fused kernels"
WITHOUT_DROPOUT = "set it to 0 in the model, such as by --set attn_pdrop=0 or attention_dropout=0"


@dataclass(frozen=True, kw_only=True)
class Page(Document):
    """The page of a plan, or all that it says."""

    plan: Plan
    full: bool = False

    def sections(self) -> Iterator[Section]:
        return full_sections(self.plan) if self.full else page_sections(self.plan)


def page_sections(plan: Plan) -> Iterator[Section]:
    """The sections of the page, from top to bottom."""
    yield from chain.from_iterable(overview(plan))
    rows, words = placements(plan)
    yield Section("where parameters and inputs live", [Labelled(rows, wide=True), Lines(words, style="dim")])
    yield from _warned(plan)


def full_sections(plan: Plan) -> Iterator[Section]:
    """The page, with tables of all that it counts and places."""
    yield from chain.from_iterable(overview(plan))
    yield from _warned(plan)
    account, axes = plan.account, list(plan.mesh)
    yield Section("the step without overlap", [Grid.of([{name: getattr(account, name) for name in PARTS}])])
    sent: list[Row] = [asdict(row) for row in account.collectives]
    yield Section("its collectives", [Grid.of(sent, keys=2)])
    peak: dict[str, int] = asdict(plan.peak)
    told = [f"that is in {peak.pop('at')}", limit_text(plan)]
    held = Grid.of([{f"{part}_bytes": size for part, size in peak.items()}])
    yield Section("predicted peak memory of a rank", [held, Lines(told, indent=0)])
    placed = []
    for names, p in _grouped(plan.parameters):
        use = [" or ".join(dict.fromkeys(layout[i] for layout in p.in_use)) or "-" for i in range(len(axes))]
        gathered = any(layout != p.at_rest for layout in p.in_use)
        placed.append((names, *p.at_rest, *use, p.gather if gathered else ""))
    heads = ("parameter", *(f"{a} at rest" for a in axes), *(f"{a} in use" for a in axes), "")
    yield Section("", [Grid(heads, placed)])
    yield Section("", [Grid(("input", *axes), [(name, *p) for name, p in plan.inputs.items()])])
    if (origin := plan.provenance) is None:
        return
    yield Section("candidates", [Grid.of([asdict(candidate) for candidate in candidates(plan)])])
    told = [
        f"model: {origin.parameter_count:,} parameters, mostly {origin.dtype}; {origin.flops:.4g} floating point "
        f"operations a step",
        f"inputs: {pairs(origin.inputs)}",
        f"versions: {pairs(origin.versions)}",
        *([f"command: {origin.command}"] if origin.command else []),
    ]
    yield Section("", [Lines(told, indent=0)])


def overview(plan: Plan) -> Iterator[Sequence[Section]]:
    """The sections of what a reader wants first, those that belong together in one group."""
    yield [Section(title(plan), [Labelled([*verdict(plan)])])]
    if bars := step_bars(plan):
        yield [Section("where the step goes", [Bars(bars, plan.seconds)])]
    if plan.pipeline is not None:
        yield [*stages(plan.pipeline)]
    yield [
        Section("memory of a rank at its peak", [memory(plan), at_peak(plan)]),
        Section("communication of a step, by mesh axis", [Labelled([*communication(plan)])]),
    ]


def _warned(plan: Plan) -> Iterator[Section]:
    if told := [("warning", text) for text in warnings(plan)]:
        yield Section("", [Labelled(told)])


def title(plan: Plan) -> str:
    origin = plan.provenance
    about = "" if origin is None else f" ({count_text(origin.parameter_count)} parameters, {origin.dtype})"
    return f"{plan.model}{about} on {mesh_words(plan.mesh, ' x ')} of {plan.cluster}"


def verdict(plan: Plan) -> Iterator[tuple[str, str]]:
    yield _fits(plan)
    yield "step", _step(plan)
    yield "choice", _choice(plan)
    searched = f"search took {plan.solve_seconds:.1f} s"
    if bound := ", ".join(_bounds(plan)):
        yield "bound", f"{bound}; {searched}"
    if (origin := plan.provenance) is not None and origin.is_cut:
        seconds = origin.effort_seconds
        why = "an interrupt ended it" if seconds is None else f"which ended its budget (effort={seconds:g})"
        yield "cut", f"{searched}, {why}: more may find a shorter step"
    if plan.constraints:
        yield "pinned", pinned_text(plan)
    if plan.lengths:
        parts = [f"{one.length} {short_seconds(one.seconds)} ({one.share:.0%} of batches)" for one in plan.lengths]
        mean = short_seconds(sum(one.share * one.seconds for one in plan.lengths))
        yield "lengths", f"{', '.join(parts)}: {mean} in the mean, with one placement of parameters at rest"
    trained = {
        "dtypes": precision_text(plan.training, plan.held_in),
        "micros": micro_batches_text(plan.training),
        "kernels": compile_text(plan.training),
        "again": recompute_text(plan.training, plan.checkpoints),
        "experts": experts_text(plan.training, plan.experts),
    }
    yield from ((label, text) for label, texts in trained.items() for text in texts)


def _fits(plan: Plan) -> tuple[str, str]:
    peak, limit, left = short_bytes(plan.bytes), plan.memory_limit_bytes, plan.headroom_bytes
    if limit is None or left is None:
        why = "not limited, as asked" if plan.memory_limit_from == "lifted" else "the cluster names no memory to fit in"
        return "memory", f"{peak} a rank at the peak; {why}"
    of = f"{peak} of {short_bytes(limit)} a rank at the peak"
    if left < 0:
        return "NO FIT", f"{of}: {short_bytes(-left)} too much"
    free = f" (headroom {plan.headroom:.0%})" if plan.headroom else ""
    return "fits", f"{of}, {short_bytes(left)} to spare{free}"


def _step(plan: Plan) -> str:
    step, rate = short_seconds(plan.seconds), rate_of(plan)
    if plan.range_seconds is not None:
        step += " ({} to {})".format(*map(short_seconds, plan.range_seconds))
    if rate is None:
        return step
    per_device = f"{digits(rate / plan.ranks)} {work_of(plan)[1]}/s a device"
    mfu = "" if plan.utilization is None else f", MFU {plan.utilization:.1%}"
    return f"{step} predicted: {per_device}{mfu}"


def _choice(plan: Plan) -> str:
    origin = plan.provenance
    if origin is None:
        return f"by {plan.solver}"
    if origin.winner == plan.solver:
        return f"{plan.solver}, as asked"
    if plan.within and origin.winner != EDITED:
        return f"the cheapest within {plan.within}, as asked"
    if origin.winner == EDITED:
        before = origin.candidates[0] if origin.candidates else None
        return f"edited by hand; before, the step was {short_seconds(before.seconds)}" if before else "edited by hand"
    if origin.winner in STARTS:
        chosen = f"{', '.join(filter(None, ('found by the search', STARTS[origin.winner])))}{_registered(plan)}"
    else:
        chosen = f"preset {origin.winner}, faster than the searched plan and all other presets"
    for c in origin.candidates:
        if c.name in (STAGED, UNSTAGED):
            chosen += f"; {STARTS[c.name]} a step takes {short_seconds(c.seconds)}"
    limit = plan.memory_limit_bytes
    fitting = [c for c in origin.candidates if limit is None or c.bytes is None or c.bytes <= limit]
    rivals = [c for c in fitting if c.name not in STARTS]
    if not rivals or not plan.seconds:
        return chosen
    best = min(rivals, key=lambda candidate: candidate.seconds)
    ratio, is_bound = best.seconds / plan.seconds, best.precision == "at least"
    which = "the next preset" if origin.winner not in STARTS else "the best preset"
    if is_bound and ratio < LEAST_RATIO:
        return f"{chosen}; {which}, {best.name}, takes {_precise(best)}"
    return f"{chosen}; {'at least ' * is_bound}{_times(ratio)} {which}, {best.name} ({_precise(best)})"


def _registered(plan: Plan) -> str:
    """The solver and the cost mode that a plan was found by, where another package added them."""
    solver = f", with solver {plan.solver}" if plan.solver not in (*NAMES["solver"], *NAMES["preset"]) else ""
    return solver + (f", by cost {plan.cost}" if plan.cost not in NAMES["cost"] else "")


def _times(ratio: float) -> str:
    """How fast a plan is beside another one that takes `ratio` times as long."""
    return f"{ratio:.2f}x as fast as" if ratio >= LEAST_RATIO else "as fast as"


def _precise(candidate: Candidate) -> str:
    words = {"simulated": "", "estimated": "about "}.get(candidate.precision, f"{candidate.precision} ")
    return f"{words}{short_seconds(candidate.seconds)}"


def _bounds(plan: Plan) -> Iterator[str]:
    """How far the plan may be from the best one: by its step, and, where the solver proved it, by its objective."""
    if (gap := plan.gap) is not None:
        floor = f"the compute floor ({short_seconds(plan.lower_bound_seconds)})"
        yield f"at {floor}" if gap < LEAST_GAP else f"within {gap:.1%} of {floor}"
    if (gap := plan.objective_gap) is not None:
        cheapest = "the cheapest without overlap, as proved"
        yield cheapest if gap < LEAST_GAP else f"within {gap:.1%} of {cheapest}"


def step_bars(plan: Plan) -> list[tuple[str, float, str]]:
    """Where the step goes, the largest part first; the optimizer and the waits are parts of it."""
    if not plan.seconds:
        return []
    shown = sorted(step_parts(plan).items(), key=lambda item: -item[1])
    return [
        (label, seconds, f"{short_seconds(seconds)}  {_percent(part)}")
        for label, seconds in shown
        if (part := seconds / plan.seconds) >= 0.0005
    ]


def _percent(part: float) -> str:
    return f"{part:.0%}" if part >= 0.01 else "<1%"


def communication(plan: Plan) -> Iterator[tuple[str, str]]:
    """Each mesh axis, and the host: what travels, how much of it overlaps with computation, and by what."""
    for axis, ranks in {**plan.mesh, HOST: 1}.items():
        own = [row for row in traffic(plan) if row.axis == axis]
        if not own:
            if ranks > 1:
                yield axis, "nothing"
            continue
        total, exposed = sum(row.seconds for row in own), sum(row.exposed_seconds for row in own)
        kinds = ", ".join(f"{row.count:,}×{row.kind}" for row in sorted(own, key=lambda row: -row.bytes))
        overlaps = f", {max(0.0, 1 - exposed / total):.0%} overlapped" if total else ""
        yield axis, f"{short_bytes(sum(row.bytes for row in own))} in {short_seconds(total)}{overlaps}: {kinds}"


def placements(plan: Plan) -> tuple[list[tuple[str, str]], list[str]]:
    """Rows of parameters, of layers under their common name, and of inputs; and what the words in them mean."""
    rows = placement_rows(words_of(plan))
    alike = {row.words for row in rows}
    shown = [("all parameters", rows[0].words)] if len(alike) == 1 else _shown(rows)
    shown += input_rows(plan)
    return shown, legend([words for _, words in shown])


def _shown(rows: list[PlacementRow[str]]) -> list[tuple[str, str]]:
    """Names and words; a module with several rows has a heading."""
    shown: list[tuple[str, str]] = []
    heading = ""
    for row in rows[:MOST_ROWS]:
        own = [other for other in rows if other.module == row.module]
        if row.module != heading and row.module and len(own) > 1:
            shown.append((_heading(row.module, rows), ""))
        heading = row.module
        prefix = "" if not row.module else "  " if len(own) > 1 else f"{_heading(row.module, rows)}: "
        shown.append((prefix + joined(shortened(row.names)) + _fewer(row, rows), row.words))
    if len(rows) > MOST_ROWS:
        shown.append((f"and {len(rows) - MOST_ROWS} more rows", "with --full, or plan.text(full=True)"))
    return shown


def _most(module: str, rows: list[PlacementRow[str]]) -> int:
    return max(row.count for row in rows if row.module == module)


def _heading(module: str, rows: list[PlacementRow[str]]) -> str:
    count = _most(module, rows)
    return f"{module} ({count} alike)" if count > 1 else module


def _fewer(row: PlacementRow[str], rows: list[PlacementRow[str]]) -> str:
    """How many layers a row is of, if not of all."""
    return f" ({row.count} of them)" if row.module and row.count < _most(row.module, rows) else ""


def unfused(plan: Plan) -> list[str]:
    """What attention costs for want of a fused kernel, and what to do."""
    seconds = 0.0 if plan.timing is None else plan.timing.unfused_seconds
    if not plan.seconds or seconds < LEAST_UNFUSED * plan.seconds:
        return []
    costs = f"about {short_seconds(seconds)} of the step ({seconds / plan.seconds:.0%})"
    return [f"{UNFUSED}, which costs {costs}: {WITHOUT_DROPOUT}"]


def warnings(plan: Plan) -> Iterator[str]:
    if plan.is_edited:
        again = "autopar show computes them again" if plan.provenance and plan.provenance.source else ""
        again = again or "autopar.read_plan(path, model, ...) computes them again"
        yield f"the decisions were edited since these figures were computed: {again}"
    limit, left = plan.memory_limit_bytes, plan.headroom_bytes
    if limit is not None and left is not None and left < 0:
        yield f"the peak exceeds the memory limit by {short_bytes(-left)}"
    elif limit and left is not None and left < TIGHT_PART * limit:
        yield f"only {left / limit:.1%} of the memory limit is left at the peak"
    if plan.waits:
        yield f"ranks wait for communication {plan.exposed_seconds / plan.seconds:.0%} of the step{_advice(plan)}"
    yield from unfused(plan)
    if idle := _idle(plan):
        yield f"nothing is split on {listed(idle)}: all of its ranks do the same work"
    if plan.without_rule:
        ops = ", ".join(f"{count} x {op}" for op, count in plan.without_rule.items())
        yield f"replicated, since the op has no rule: {ops}"


def _advice(plan: Plan) -> str:
    """What to try, by its option and with its figure."""
    if plan.advice is None:
        return ""
    count, speedup = plan.advice.micro_batches, plan.advice.speedup
    times = count // plan.training.micro_batches
    return (
        f"; try --micro-batches {count}: {speedup:.2g}x the {work_of(plan)[1]}/s, with {times} times the batch a step"
    )


def _idle(plan: Plan) -> list[str]:
    """Axes on which nothing travels: what is split there costs collectives at least for gradients."""
    busy = {row.axis for row in plan.account.collectives}
    return [axis for axis, ranks in plan.mesh.items() if ranks > 1 and axis not in busy]


def memory(plan: Plan) -> Stack:
    """What the peak consists of, of the limit if that is not far."""
    whole = max(plan.memory_limit_bytes or 0.0, plan.bytes)
    return Stack([*memory_parts(plan).items()], whole if whole <= SCALED_BEYOND * plan.bytes else plan.bytes)


def at_peak(plan: Plan) -> Lines:
    """What is recomputed, and when the peak is."""
    sent = short_bytes(plan.offload_bytes)
    away = [f"of what is kept for backward, {sent} or more wait in the host's memory"] if plan.offload_bytes else []
    return Lines([*recomputed(plan), *away, f"the peak is at {_at(plan)}"], style="dim")


def _at(plan: Plan) -> str:
    """When the peak is, without the instruction's arguments."""
    at = plan.peak.at
    match = re.match(r"(?P<phase>[\w ]+), `[^`]*? = (?P<op>[\w.]+)\(.*`(?: of module '(?P<module>[^']*)')?", at)
    if match is None:
        return at
    where = f" of {match['module']}" if match["module"] else ""
    return f"{match['op'].removesuffix('.default')}{where}, in {match['phase'].removeprefix('in ')}"


def recomputed(plan: Plan) -> list[str]:
    """Which copies run forward again in backward."""
    lines = []
    for segment in plan.segments:
        total = sum(run.count for run in segment.runs)
        if numbers := ", ".join(range_text(copies) for copies, run in numbered(segment) if run.recompute):
            lines.append(f"of {total} copies of {segment.name} (0 to {total - 1}), recomputed in backward: {numbers}")
    return lines


def limit_text(plan: Plan) -> str:
    words, headroom = LIMIT_WORDS[plan.memory_limit_from], plan.headroom_bytes
    if plan.memory_limit_bytes is None or headroom is None:
        return words
    left = f"headroom {bytes_text(headroom)}" if headroom >= 0 else f"exceeded by {bytes_text(-headroom)}"
    return f"memory limit {bytes_text(plan.memory_limit_bytes)} ({words}), {left}"


def _grouped(parameters: Mapping[str, ParameterPlan]) -> list[tuple[str, ParameterPlan]]:
    """One row for parameters that are planned alike, and whose names differ only in numbers."""
    groups = grouped(((starred(name), plan), name) for name, plan in parameters.items())
    return [
        (together(names) + (f" ({len(names)})" if len(names) > 1 else ""), plan) for (_, plan), names in groups.items()
    ]
