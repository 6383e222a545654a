"""Everything that a plan says, one line an item."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate

from rich.console import RenderableType
from rich.text import Text

from ..record import LIMIT_WORDS, ParameterPlan, Record
from ..rendering import rendered, tables
from ..texts import bytes_text, seconds_text, short_seconds, starred, together
from ..training import micro_batches_text, precision_text, recompute_text

LEAST_UNFUSED = 0.02
"""Less of a step is not worth changing a model for."""

UNFUSED = "dropout of attention weights keeps attention from the fused kernels"
WITHOUT_DROPOUT = "set it to 0 in the model, such as by --set attn_pdrop=0 or attention_dropout=0"


def unfused(plan: Record) -> list[str]:
    """What attention costs for want of a fused kernel, and what to do."""
    seconds = 0.0 if plan.timing is None else plan.timing.unfused_seconds
    if not plan.seconds or seconds < LEAST_UNFUSED * plan.seconds:
        return []
    costs = f"about {short_seconds(seconds)} of the step ({seconds / plan.seconds:.0%})"
    return [f"{UNFUSED}, which costs {costs}: {WITHOUT_DROPOUT}"]


def full_text(plan: Record, width: int) -> str:
    account, peak, axes = plan.account, plan.peak, list(plan.mesh)
    mesh = ", ".join(f"{axis}={n}" for axis, n in plan.mesh.items())
    lines = [
        f"plan of {plan.model} on mesh {mesh} of {plan.cluster}, by {plan.solver} ({plan.solve_seconds:.2f} s)",
        f"predicted step {seconds_text(plan.seconds)}, of which communication {seconds_text(plan.exposed_seconds)}",
        *_bounds(plan),
        f"without overlap {seconds_text(account.seconds)}: compute {seconds_text(account.compute_seconds)}, "
        f"communication {seconds_text(account.communication_seconds)}, "
        f"local copies {seconds_text(account.copy_seconds)}, "
        f"optimizer {seconds_text(account.optimizer_seconds)}",
        f"predicted peak memory of a rank {bytes_text(peak.bytes)}: "
        f"parameters {bytes_text(peak.parameters)}, gradients {bytes_text(peak.gradients)}, "
        f"optimizer ({plan.optimizer}) {bytes_text(peak.optimizer)}, "
        f"buffers and inputs {bytes_text(peak.inputs)}, outputs {bytes_text(peak.outputs)}, "
        f"kept for backward {bytes_text(peak.activations)}, temporaries {bytes_text(peak.temporaries)}",
        f"that is in {peak.at}",
        limit_text(plan),
        *recomputed(plan),
        *unfused(plan),
        *_pinned(plan),
        *(f"precision: {text}" for text in precision_text(plan.training, plan.held_in)),
        *(f"micro-batches: {text}" for text in micro_batches_text(plan.training)),
        *(f"made again in backward: {text}" for text in recompute_text(plan.training, plan.checkpoints)),
        "",
    ]
    rows: list[tuple[str, ...]] = [("collective", "axis", "count", "bytes", "seconds")]
    rows += [(c.kind, c.axis, str(c.count), bytes_text(c.bytes), seconds_text(c.seconds)) for c in account.collectives]
    parts = [*map(Text, lines), *_spaced(rows, width, keys=2, right=range(2, 5))]
    placements = [("parameter", *(f"{a} at rest" for a in axes), *(f"{a} in use" for a in axes), "")]
    for names, p in _grouped(plan.parameters):
        use = [" or ".join(dict.fromkeys(layout[i] for layout in p.in_use)) or "-" for i in range(len(axes))]
        gathered = any(layout != p.at_rest for layout in p.in_use)
        placements.append((names, *p.at_rest, *use, p.gather if gathered else ""))
    parts += _spaced(placements, width, keys=1)
    parts += _spaced([("input", *axes), *((name, *p) for name, p in plan.inputs.items())], width, keys=1)
    if candidates := _candidates(plan):
        parts += _spaced(candidates, width, keys=1)
    if plan.without_rule:
        ops = ", ".join(f"{count} x {op}" for op, count in plan.without_rule.items())
        parts.append(Text(f"replicated, since the op has no rule: {ops}\n"))
    return rendered([*parts, *map(Text, _made(plan))], width)


def _bounds(plan: Record) -> Iterator[str]:
    if plan.gap is not None:
        yield f"no plan's step is shorter than {seconds_text(plan.lower_bound_seconds)}, {plan.gap:.1%} less than this"
    if plan.objective_gap is not None:
        bound = f"{seconds_text(plan.objective_bound_seconds)}, {plan.objective_gap:.1%} less than this"
        yield f"without overlap, none that was searched takes less than {bound}"


def _spaced(rows: list[tuple[str, ...]], width: int, *, keys: int, right: Collection[int] = ()) -> list[RenderableType]:
    """A table of rows with heads, and an empty line after each part of it."""
    heads, *body = rows
    return [part for grid in tables(heads, body, width, keys=keys, right=right) for part in (grid, Text(""))]


def recomputed(plan: Record) -> list[str]:
    """Which copies run forward again in backward."""
    lines = []
    for segment in plan.segments:
        total = sum(run.count for run in segment.runs)
        starts = accumulate((run.count for run in segment.runs), initial=0)
        runs = zip(starts, segment.runs, strict=False)
        again = [(first, first + run.count - 1) for first, run in runs if run.recompute]
        if again:
            numbers = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in again)
            lines.append(f"of {total} copies of {segment.name} (0 to {total - 1}), recomputed in backward: {numbers}")
    return lines


def limit_text(plan: Record) -> str:
    words, headroom = LIMIT_WORDS[plan.memory_limit_from], plan.headroom_bytes
    if plan.memory_limit_bytes is None or headroom is None:
        return words
    left = f"headroom {bytes_text(headroom)}" if headroom >= 0 else f"exceeded by {bytes_text(-headroom)}"
    return f"memory limit {bytes_text(plan.memory_limit_bytes)} ({words}), {left}"


def _pinned(plan: Record) -> list[str]:
    pins = [f"{name} {axis}={text}" for name, axes in plan.constraints.items() for axis, text in axes.items()]
    return [f"pinned: {', '.join(pins)}"] if pins else []


def _grouped(parameters: Mapping[str, ParameterPlan]) -> list[tuple[str, ParameterPlan]]:
    """One row for parameters that are planned alike, and whose names differ only in numbers."""
    groups: dict[tuple[str, ParameterPlan], list[str]] = {}
    for name, plan in parameters.items():
        groups.setdefault((starred(name), plan), []).append(name)
    return [
        (together(names) + (f" ({len(names)})" if len(names) > 1 else ""), plan) for (_, plan), names in groups.items()
    ]


def _candidates(plan: Record) -> list[tuple[str, ...]]:
    origin = plan.provenance
    if origin is None or not origin.candidates:
        return []
    rows: list[tuple[str, ...]] = [("candidate", "step", "peak", "")]
    rows += [(origin.winner, seconds_text(plan.seconds), bytes_text(plan.bytes), "chosen")]
    rows += [
        (c.name, seconds_text(c.seconds), "-" if c.bytes is None else bytes_text(c.bytes), c.precision)
        for c in origin.candidates
    ]
    return rows


def _made(plan: Record) -> list[str]:
    origin = plan.provenance
    if origin is None:
        return []
    inputs = ", ".join(f"{name} {text}" for name, text in origin.inputs.items())
    versions = ", ".join(f"{name} {text}" for name, text in origin.versions.items())
    lines = [
        f"model: {origin.parameter_count:,} parameters, mostly {origin.dtype}; {origin.flops:.4g} floating point "
        f"operations a step",
        f"inputs: {inputs}",
        f"versions: {versions}",
        *([f"command: {origin.command}"] if origin.command else []),
    ]
    return lines
