"""A plan: where every value lives on the mesh, what that costs, and why.

A plan shows people a solver's choice as text and as JSON that they can edit, and determines the program for the same
model and mesh.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from autopar.cost.memory import Peak
from autopar.files import json_of, record, text_of
from autopar.ir.graph import JointGraph
from autopar.passes.lower.bucket import LIMIT_BYTES

from .account import Account

FORMAT = 2

LimitFrom = Literal["given", "device", "lifted", "none"]
"""Where a plan's memory limit is from: the caller; the device's memory less its reserve; nowhere, since the caller
lifted it, or since the cluster does not say what memory its devices have."""

LIMIT_WORDS: Mapping[LimitFrom, str] = {
    "given": "as given",
    "device": "the device's memory less its reserve",
    "lifted": "no memory limit, as asked",
    "none": "no memory limit, since the cluster does not say what its devices have",
}

LEAST_BUCKET_BYTES = LIMIT_BYTES // 512
"""Smaller buckets save no memory that counts, and each travels alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """One parameter: the placements that ranks store, those that operators use, and whether backward keeps what forward
    gathered or gathers it again. Placements are texts, one per mesh axis: R, S(dim), or S(dim%period) for a periodic
    split."""

    at_rest: tuple[str, ...]
    in_use: tuple[tuple[str, ...], ...]
    gather: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` consecutive copies of a repeated segment that decide alike. Copies that `recompute` keep only their
    borders, and run forward again in backward."""

    count: int
    decisions: Mapping[str, str]
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count of a run is {self.count}: an integer, at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    name: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`decisions` (and those of the segments' runs) are the plan: site -> choice, in the words of
    `passes.space.choices`, one for each mesh axis. So is `bucket_bytes`, the most bytes of parameters' gathers and
    reductions that travel together (`passes.lower.bucket`). All else describes it. `graph` is the joint graph's digest.
    """

    model: str
    graph: str
    mesh: Mapping[str, int]
    cluster: str
    solver: str
    cost: str
    decisions: Mapping[str, str]
    segments: tuple[Segment, ...]
    parameters: Mapping[str, ParameterPlan]
    inputs: Mapping[str, tuple[str, ...]]
    optimizer: str
    account: Account
    peak: Peak
    bucket_bytes: int
    seconds: float
    """Predicted, of one training step: the timeline of its program, with what overlaps, and the optimizer."""
    exposed_seconds: float
    """The communication that nothing hides."""
    objective_seconds: float
    """The solver's objective: the account's seconds, as if nothing overlapped."""
    lower_bound_seconds: float
    solve_seconds: float
    without_rule: Mapping[str, int] = field(default_factory=dict)
    constraints: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What a person pinned."""
    memory_limit_bytes: float | None = None
    """The limit on `bytes`, if there is one, and where it is from."""
    memory_limit_from: LimitFrom = "none"

    @property
    def bytes(self) -> int:
        """Predicted peak of the bytes that a rank holds during a training step."""
        return self.peak.bytes

    @property
    def headroom_bytes(self) -> float | None:
        """What is left of the limit at the peak; None without a limit."""
        return None if self.memory_limit_bytes is None else self.memory_limit_bytes - self.bytes

    @property
    def gap(self) -> float | None:
        """The proved relative distance from the optimum of the search; None if nothing is proved."""
        if not self.lower_bound_seconds or not self.objective_seconds:
            return None
        return max(0.0, 1 - self.lower_bound_seconds / self.objective_seconds)

    @property
    def digest(self) -> str:
        """Equal for plans that decide alike, for the same model and mesh."""
        segments = [asdict(segment) for segment in self.segments]
        decided = (self.graph, list(self.mesh.items()), sorted(self.decisions.items()), segments, self.bucket_bytes)
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "headroom_bytes": self.headroom_bytes}

    def save(self, path: str | Path) -> None:
        """Raises ValueError if the file cannot be written, or holds something else than a plan."""
        path = Path(path)
        try:
            if path.exists() and not path.is_dir() and not _is_empty_or_plan(path):
                raise ValueError(f"{path} is there, and is no plan: move it away, or give another path")
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}): give the path of a file") from error

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Raises ValueError if the file is no plan."""
        if not isinstance(path, (str, Path)):
            raise ValueError(f"{path!r} is no path of a plan: give that of a file that Plan.save wrote")
        what, give = f"{path} is no plan", "give the path of a file that Plan.save wrote"
        return Plan.from_json(json_of(text_of(path, what, give), what, give), str(path))

    @staticmethod
    def from_json(data: Any, source: str = "the plan") -> Plan:
        """Raises ValueError if a field is missing, unknown or invalid."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            given = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{source} is no plan of format {FORMAT} (found {given!r}): make it with Plan.save")
        try:
            given = {name: value for name, value in data.items() if name not in ("format", "headroom_bytes")}
            # files from before it was written have given limits, or none
            given.setdefault("memory_limit_from", "lifted" if data.get("memory_limit_bytes") is None else "given")
            plan = record(Plan, given)
            plan._check()
        except ValueError as error:
            raise ValueError(f"{source} is no plan: {error}; correct it there, or save the plan again") from error
        return plan

    def _check(self) -> None:
        """Raises ValueError for what types do not say."""
        for axis, size in self.mesh.items():
            if size < 1:
                raise ValueError(f"size of mesh axis {axis} is {size}: an integer, at least 1")
        if self.bucket_bytes < LEAST_BUCKET_BYTES:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}: an integer, at least {LEAST_BUCKET_BYTES}")
        placed = {f"inputs[{name!r}]": [placements] for name, placements in self.inputs.items()}
        placed |= {f"parameters[{name!r}]": [p.at_rest, *p.in_use] for name, p in self.parameters.items()}
        for where, layouts in placed.items():
            for layout in layouts:
                if len(layout) != len(self.mesh):
                    raise ValueError(f"{where} has {len(layout)} placements: one for each of {len(self.mesh)} axes")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _recomputed(self) -> list[str]:
        """Which copies run forward again in backward."""
        lines = []
        for segment in self.segments:
            total = sum(run.count for run in segment.runs)
            starts = accumulate((run.count for run in segment.runs), initial=0)
            runs = zip(starts, segment.runs, strict=False)
            recomputed = [(first, first + run.count - 1) for first, run in runs if run.recompute]
            if recomputed:
                numbers = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in recomputed)
                lines.append(
                    f"of {total} copies of {segment.name} (0 to {total - 1}), recomputed in backward: {numbers}"
                )
        return lines

    def _limit(self) -> str:
        words, headroom = LIMIT_WORDS[self.memory_limit_from], self.headroom_bytes
        if self.memory_limit_bytes is None or headroom is None:
            return words
        left = f"headroom {bytes_text(headroom)}" if headroom >= 0 else f"exceeded by {bytes_text(-headroom)}"
        return f"memory limit {bytes_text(self.memory_limit_bytes)} ({words}), {left}"

    def _pinned(self) -> list[str]:
        pins = [f"{name} {axis}={text}" for name, axes in self.constraints.items() for axis, text in axes.items()]
        return [f"pinned: {', '.join(pins)}"] if pins else []

    def _lines(self) -> list[str]:
        account, peak, axes = self.account, self.peak, list(self.mesh)
        mesh = ", ".join(f"{axis}={n}" for axis, n in self.mesh.items())
        gap = "" if self.gap is None else f", gap {self.gap:.1%}"
        lines = [
            f"plan of {self.model} on mesh {mesh} of {self.cluster}, by {self.solver} "
            f"({self.solve_seconds:.2f} s{gap})",
            f"predicted step {seconds_text(self.seconds)}, of which communication {seconds_text(self.exposed_seconds)}",
            f"without overlap {seconds_text(account.seconds)}: compute {seconds_text(account.compute_seconds)}, "
            f"communication {seconds_text(account.communication_seconds)}, "
            f"local copies {seconds_text(account.copy_seconds)}, "
            f"optimizer {seconds_text(account.optimizer_seconds)}",
            f"predicted peak memory of a rank {bytes_text(peak.bytes)}: "
            f"parameters {bytes_text(peak.parameters)}, gradients {bytes_text(peak.gradients)}, "
            f"optimizer ({self.optimizer}) {bytes_text(peak.optimizer)}, "
            f"buffers and inputs {bytes_text(peak.inputs)}, outputs {bytes_text(peak.outputs)}, "
            f"kept for backward {bytes_text(peak.activations)}, temporaries {bytes_text(peak.temporaries)}",
            f"that is in {peak.at}",
            self._limit(),
            *self._recomputed(),
            *self._pinned(),
            "",
        ]
        rows: list[tuple[str, ...]] = [("collective", "axis", "count", "bytes", "seconds")]
        rows += [
            (c.kind, c.axis, str(c.count), bytes_text(c.bytes), seconds_text(c.seconds)) for c in account.collectives
        ]
        lines += [*table(rows), ""]
        rows_ = [("parameter", *(f"{a} at rest" for a in axes), *(f"{a} in use" for a in axes), "")]
        for names, p in _grouped(self.parameters):
            use = [" or ".join(dict.fromkeys(layout[i] for layout in p.in_use)) or "-" for i in range(len(axes))]
            gathered = any(layout != p.at_rest for layout in p.in_use)
            rows_.append((names, *p.at_rest, *use, p.gather if gathered else ""))
        lines += table(rows_)
        lines += ["", *table([("input", *axes), *((name, *p) for name, p in self.inputs.items())])]
        if self.without_rule:
            ops = ", ".join(f"{count} x {op}" for op, count in self.without_rule.items())
            lines += ["", f"replicated, since the op has no rule: {ops}"]
        return lines


def _is_empty_or_plan(path: Path) -> bool:
    """Whether a file may be a plan, maybe an edited one, by how it begins."""
    with path.open("rb") as file:
        return re.match(rb'\s*(\Z|\{\s*"(format|account)")', file.read(1000)) is not None


def graph_digest(graph: JointGraph) -> str:
    """Equal for two captures of the same model with the same input shapes."""
    return hashlib.sha256(str(graph).encode()).hexdigest()[:16]


def _grouped(parameters: Mapping[str, ParameterPlan]) -> list[tuple[str, ParameterPlan]]:
    """One row for parameters that are planned alike, and whose names differ only in numbers."""
    groups: dict[tuple[str, ParameterPlan], list[str]] = {}
    for name, plan in parameters.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups.setdefault((pattern, plan), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names)})", plan)
        for (pattern, plan), names in groups.items()
    ]


def table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def seconds_text(value: float) -> str:
    if value >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.3f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def bytes_text(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"
