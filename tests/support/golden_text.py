"""A plan and its program as a text that people read, and what differs between two such texts, in words.

A text is a list of sections. Each begins with a line in brackets. Its lines are `keys: value`, but for those of lists
(collectives, instructions), in which the order counts; lines that begin with # name the module of those that follow.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.ir.graph import JointGraph, Node, map_references
from autopar.ir.layout import describe
from autopar.ir.program import Program, source_line
from autopar.planning.plan import ParameterPlan, Plan

LISTS = ("collectives of", "forward", "backward")
"""How the names of sections begin that are lists."""

SHOWN = 12
"""Sentences about one section; the rest is counted."""


# ---- writing ---------------------------------------------------------------------------------------


def plan_lines(plan: Plan, graph: JointGraph) -> list[str]:
    """All that a plan says, but for how long it took to find."""
    peak, account = plan.peak, plan.account
    totals = ("seconds", "exposed_seconds", "objective_seconds", "lower_bound_seconds", "bytes", "bucket_bytes")
    lines = ["[plan]", f"model: {plan.model}", f"graph: {plan.graph}", f"digest: {plan.digest}"]
    lines += [f"{name}: {getattr(plan, name)!r}" for name in totals]
    lines += [f"optimizer: {plan.optimizer}", f"cost: {plan.cost}"]
    lines += [f"without a rule {op}: {count}" for op, count in plan.without_rule.items()]
    lines += ["", "[peak]"]
    lines += [f"{name}: {getattr(peak, name)!r}" for name in _fields(peak)]
    lines += ["", "[account]"]
    lines += [f"{name}: {getattr(account, name)!r}" for name in _fields(account) if name != "collectives"]
    lines += [
        f"{c.kind} on {c.axis}: {c.count} of {c.bytes} bytes in {c.seconds!r} seconds" for c in account.collectives
    ]
    lines += ["", "[parameters]", *_parameter_lines(plan)]
    lines += ["", "[inputs]", *(f"{name}: {' '.join(placements)}" for name, placements in plan.inputs.items())]
    sites = _Sites(graph)
    lines += ["", "[decisions outside of segments]", *sites.lines(plan.decisions)]
    for segment in plan.segments:
        first = 0
        for run in segment.runs:
            copies = f"copies {first} to {first + run.count - 1}" + ", recomputed" * run.recompute
            lines += ["", f"[decisions of {segment.name}, {copies}]", *sites.lines(run.decisions)]
            first += run.count
    return lines


def _fields(value: object) -> tuple[str, ...]:
    return tuple(getattr(value, "__dataclass_fields__"))  # noqa: B009


def _parameter_lines(plan: Plan) -> list[str]:
    """Parameters that differ only in numbers of their paths, and are planned alike, on one line."""
    rows: dict[tuple[str, ParameterPlan], list[str]] = {}
    for name, planned in plan.parameters.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        rows.setdefault((pattern, planned), []).append(name)
    lines = []
    several = Counter(pattern for pattern, _ in rows)
    for (pattern, planned), names in rows.items():
        keys = names if several[pattern] > 1 else [f"{pattern} ({len(names)})" if len(names) > 1 else names[0]]
        used = " or ".join(" ".join(layout) for layout in planned.in_use) or "nowhere"
        lines += [f"{key}: at rest {' '.join(planned.at_rest)}, in use {used}, {planned.gather}" for key in keys]
    return lines


class _Sites:
    """The sites of a graph: their modules, and the order in which their values are made."""

    def __init__(self, graph: JointGraph) -> None:
        self.module = {i.name: f"{i.role}s" for i in graph.inputs}
        for node in graph.nodes:
            self.module |= {name: node.module for name in node.outputs if name}
        self.order = {name: place for place, name in enumerate(self.module)}

    def lines(self, decisions: Mapping[str, str]) -> Iterator[str]:
        ordered = sorted(decisions, key=lambda site: (self.order.get(_value(site), len(self.order)), site))
        for module, sites in itertools.groupby(ordered, key=lambda site: self.module.get(_value(site), "")):
            yield f"# {module or '(no module)'}"
            for choice, alike in itertools.groupby(sites, key=decisions.__getitem__):
                yield f"{', '.join(alike)}: {choice}"


def _value(site: str) -> str:
    return site.partition("|")[0]


def program_lines(program: Program, *, every_instruction: bool, every_collective: bool) -> list[str]:
    """Digests and counts, and as many of the instructions as are asked for."""
    both = (*program.forward, *program.backward)
    lines = ["[program]", f"text: {_sha256(str(program))}", f"text without names: {_sha256(nameless(program))}"]
    lines += [f"saved for backward: {len(program.saved)} values"]
    for (kind, axis), sizes in _issued(program).items():
        lines.append(f"{kind} on {axis}: {len(sizes)} of {sum(sizes)} bytes")
    if not every_instruction:
        counts = sorted(Counter(i.op for i in both if not i.collective and i.op != "collective.wait").items())
        lines += ["", "[operators]", *(f"{op}: {count}" for op, count in counts)]
    halves = {"forward": program.forward, "backward": program.backward}
    if every_instruction:
        for phase, half in halves.items():
            lines += ["", f"[{phase}]", *_signature(program, phase), *_instruction_lines(program, half)]
    elif every_collective:
        for phase, half in halves.items():
            lines += ["", f"[collectives of {phase}]", *_collective_lines(program, half)]
    return lines


def _issued(program: Program) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for kind, axis, size in program.collectives():
        found.setdefault((kind, axis), []).append(size)
    return dict(sorted(found.items()))


def _signature(program: Program, phase: str) -> Iterator[str]:
    """What a half is given and what it returns, with layouts; parameters and their gradients lie as the plan says."""
    axes = program.axes
    for i in program.inputs:
        if i.role != "parameter" and (i.role == "tangent") == (phase == "backward"):
            yield f"{i.role} {i.target} = {i.name}: {i.meta} {describe(i.layout, axes)}"
    for o in program.outputs:
        if o.role != "gradient" and phase == "forward":
            yield f"{o.role} {o.target} = {o.name}: {o.meta or ''} {describe(o.layout, axes)}"
    if phase == "forward":
        yield f"saved = {', '.join(program.saved)}"


def _instruction_lines(program: Program, instructions: Iterable[Node]) -> Iterator[str]:
    for module, group in itertools.groupby(instructions, key=lambda instruction: instruction.module):
        yield f"# {module or '(no module)'}"
        for instruction in group:
            metas = ", ".join(str(program.metas[name]) for name in instruction.outputs if name)
            yield f"{source_line(instruction, program.axes)}: {metas}"


def _collective_lines(program: Program, instructions: Sequence[Node]) -> Iterator[str]:
    """One a line, with what goes in and comes out; those alike that follow each other are counted."""

    def line(instruction: Node) -> str:
        given, made = (
            " ".join(str(program.metas[name]) for name in names) for names in (instruction.inputs, instruction.outputs)
        )
        options = "".join(f" {value}" for value in instruction.args[:-1] if isinstance(value, str | int))
        return f"{instruction.collective}{options} on {program.axes[instruction.args[-1]]}: {given} -> {made}"

    for text, alike in itertools.groupby(line(i) for i in instructions if i.collective):
        count = len(list(alike))
        yield f"{count} x {text}" if count > 1 else text


def group_lines(mesh: Mapping[str, int]) -> list[str]:
    """The ranks that a collective on an axis joins."""
    sizes = list(mesh.values())
    lines = ["[groups]"]
    for place, (axis, size) in enumerate(mesh.items()):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(itertools.product(*map(range, sizes))):
            groups.setdefault((*at[:place], *at[place + 1 :]), []).append(rank)
        first, *others = map(str, groups.values())
        others = others if len(others) < 4 else [f"and {len(others)} more"]
        lines.append(f"{axis}: {' '.join([first, *others])}, of {size} ranks each")
    return lines


def nameless(program: Program) -> str:
    """The program with its values numbered in the order in which they appear, and without the names of modules."""
    numbers: dict[str, str] = {}

    def number(name: str) -> str:
        return numbers.setdefault(name, f"v{len(numbers)}")

    lines = [f"{i.role} {i.target} {number(i.name)} {i.meta} {describe(i.layout)}" for i in program.inputs]
    for i in (*program.forward, *program.backward):
        arguments = (map_references(i.args, number), map_references(i.kwargs, number))
        made = [(number(name), str(program.metas[name])) if name else "_" for name in i.outputs]
        lines.append(f"{i.op} {arguments!r} {made}")
    lines.append(" ".join(map(number, program.saved)))
    lines += [f"{o.role} {o.target} {o.name and number(o.name)} {describe(o.layout)}" for o in program.outputs]
    return "\n".join(lines)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---- comparing -------------------------------------------------------------------------------------


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each section; those before the first are of the section ""."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in text.splitlines():
        if header := re.fullmatch(r"\[(\w.*)\]", line):
            name = header[1]
            found[name] = []
        elif line:
            found[name].append(line)
    return found


def differences(recorded: str, made: str) -> list[str]:
    """A sentence for each thing that changed; none for texts that are equal."""
    if recorded == made:
        return []
    before, after = sections(recorded), sections(made)
    told: list[str] = []
    for name in dict.fromkeys([*before, *after]):
        if name not in after or name not in before:
            verb = "is gone" if name in before else "is new"
            told.append(f"[{name}] {verb}")
        elif before[name] != after[name]:
            in_order = name.startswith(LISTS)
            found = _first_difference if in_order else _changes
            told += _at_most(found(name, before[name], after[name]), name)
    return told or ["the order of sections or blank lines changed, and nothing else"]


def _at_most(sentences: list[str], name: str) -> list[str]:
    left = len(sentences) - SHOWN
    return sentences if left <= 0 else [*sentences[:SHOWN], f"and {left} more in [{name}]"]


def _first_difference(name: str, before: list[str], after: list[str]) -> list[str]:
    """Of lists: where they part. Lines that name modules are no instructions."""
    module = ""
    for number, (old, new) in enumerate(itertools.zip_longest(before, after, fillvalue="the end"), start=1):
        if old != new:
            place = f"[{name}] line {number}" + (f", in {module}" if module else "")
            return [f"{place}, the first that differs, was `{old}` and is `{new}`"]
        if old.startswith("# "):
            module = old[2:]
    return []


def _changes(name: str, before: list[str], after: list[str]) -> list[str]:
    """Of lines `key: value`: those that changed, came and went."""
    old, new = _values(before), _values(after)
    told = []
    for key in dict.fromkeys([*old, *new]):
        if key not in new:
            told.append(f"[{name}] {key} is gone; it was {old[key]}")
        elif key not in old:
            told.append(f"[{name}] {key} is new: {new[key]}")
        elif old[key] != new[key]:
            told.append(f"[{name}] {key} was {old[key]} and is {new[key]}{_change(old[key], new[key])}")
    return told or [f"[{name}] the order of lines changed, and nothing else"]


def _values(lines: list[str]) -> dict[str, str]:
    """Keys with the module under which they stand, if they stand under one."""
    found, module = {}, ""
    for line in lines:
        keys, _, value = line.partition(": ")
        if line.startswith("# "):
            module = f" ({line[2:]})"
        else:
            found |= {key + module: value for key in keys.split(", ")}
    return found


def _change(old: str, new: str) -> str:
    """How much a number grew, in percent."""
    try:
        before, after = float(old), float(new)
    except ValueError:
        return ""
    return f" ({(after / before - 1) * 100:+.3g}%)" if before else ""
