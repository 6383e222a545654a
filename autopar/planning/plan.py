"""A plan: where every value lives on the mesh, what that costs, and why.

A plan shows people a solver's choice as text and as JSON that they can edit, and determines the program for the same
model and mesh.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from autopar.cost.memory import Peak
from autopar.files import reading
from autopar.files.kinds import Count, Seconds, Share, Size
from autopar.files.typed import read, schema
from autopar.ir.graph import JointGraph
from autopar.ir.program import Program
from autopar.passes.lower.lowering import LIMIT_BYTES

from .account import Account
from .provenance import Provenance
from .request import LimitFrom
from .saved import FORMAT, may_be_plan, of_format, saved
from .stages import Pipeline
from .texts import short_bytes, short_seconds
from .timing import Timing
from .training import Training

BucketBytes = Annotated[int, Meta(ge=LIMIT_BYTES // 512, description=f"an integer, at least {LIMIT_BYTES // 512}")]
"""Smaller buckets save no memory that counts, and each travels alone."""

LIMIT_WORDS: Mapping[LimitFrom, str] = {
    "given": "as given",
    "device": "the device's memory less its reserve",
    "lifted": "no memory limit, as asked",
    "none": "no memory limit, since the cluster does not say what its devices have",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """One parameter: the placements that ranks store, those that operators use, and whether backward keeps what forward
    gathered or gathers it again. Placements are texts, one per mesh axis: R, S(dim), or S(dim%period) for a periodic
    split."""

    at_rest: tuple[str, ...]
    in_use: tuple[tuple[str, ...], ...]
    gather: str
    shape: tuple[Count, ...] = field(default=(), compare=False)
    kind: str = field(default="", compare=False)
    """What its dims mean (`provenance.kind_of`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` consecutive copies of a repeated segment that decide alike. Copies that `recompute` keep only their
    borders, and run forward again in backward."""

    count: Size
    decisions: Mapping[str, str]
    recompute: bool = False


def _gap(bound_seconds: float, seconds: float) -> float | None:
    return max(0.0, 1 - bound_seconds / seconds) if bound_seconds and seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    name: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A step of so many micro-batches computes `speedup` times as much a second, with the decisions of the plan."""

    micro_batches: Count
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """The step of batches that are padded to a `length`, a `share` of all, with parameters at rest where the plan has
    them: its predicted `seconds`, and the `bytes` of its peak."""

    length: Size
    share: Share
    seconds: Seconds
    bytes: Count


DEFAULTS = ("training", "checkpoints", "experts", "pipeline", "lengths", "within")
"""Fields that a file leaves out where they are as by default."""

WAITING_PART = 0.25
"""Ranks that wait for more of the step are worth a warning, and advice."""


def _view(module: str) -> Any:
    """A module of `autopar.report`, which shows plans. It stands above them, and a plan knows it by name alone."""
    return import_module(f"autopar.report.{module}")


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """A plan, its file, and what people ask of it. It prints as one page.

    `decisions` (and those of the segments' runs) are the plan: site -> choice, in the words of `passes.space.choices`,
    one for each mesh axis. So is `bucket_bytes`, the most bytes of parameters' gathers and reductions that travel
    together (`passes.lower.bucket`). All else describes it: `seconds` is the predicted step, in seconds, with overlap,
    and `bytes` the predicted peak of a rank; `parameters` and `inputs` have placements, one for each mesh axis;
    `account` itemises the step as if nothing overlapped, `timing` where it goes, `peak` what the memory is. `graph` is
    the joint graph's digest. docs/files.md lists every field.
    """

    model: str
    """The name of the model's class."""
    graph: str
    mesh: Mapping[str, Size]
    """Axis name -> ranks, the outermost first."""
    cluster: str
    solver: str
    """The solver or preset that was asked for; `provenance.winner` says which candidate won."""
    cost: str
    """The cost mode that was asked for."""
    decisions: Mapping[str, str]
    """Outside of repeated layers."""
    segments: tuple[Segment, ...]
    """Repeated layers, as runs of copies that decide alike."""
    parameters: Mapping[str, ParameterPlan]
    inputs: Mapping[str, tuple[str, ...]]
    """Input -> the placements in which a rank takes it, one for each mesh axis."""
    optimizer: str
    """Whose states count in the peak."""
    account: Account
    """The step as if nothing overlapped, by operators and collectives."""
    peak: Peak
    """What a rank holds when it holds the most, in bytes."""
    bucket_bytes: BucketBytes
    seconds: float
    """Predicted, of one training step: the timeline of its program, with what overlaps, and the optimizer."""
    exposed_seconds: float
    """The communication that nothing hides."""
    objective_seconds: float
    """The solver's objective: the account's seconds, as if nothing overlapped."""
    lower_bound_seconds: float
    """No plan of the search space has a step below it; 0 if no bound is known."""
    solve_seconds: float
    """How long the search took, on the machine that planned."""
    objective_bound_seconds: float = 0.0
    """No plan that was searched has an objective below it, as the solver proved; 0 if it proved nothing."""
    without_rule: Mapping[str, Count] = field(default_factory=dict)
    """Operators that are replicated for want of a rule, and how often each is run."""
    constraints: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What a person pinned."""
    memory_limit_bytes: int | float | None = None
    """The limit on `bytes`, if there is one, and where it is from."""
    memory_limit_from: LimitFrom = "none"
    headroom: float = 0.0
    """The part of a device's limit that the search left free."""
    range_seconds: tuple[float, float] | None = None
    """Within which 8 of 10 steps were, of those that were compared with predictions for such a cluster."""
    training: Training = field(default_factory=Training)
    """How the step trains; a plan's file says what is not as by default."""
    checkpoints: Count = 0
    """The calls of `torch.utils.checkpoint` in a step of the model."""
    experts: Count = 0
    """The products of rows with the weights of their experts in a step's graph."""
    advice: Advice | None = None
    """What would shorten the waits of ranks, if that was found."""
    timing: Timing | None = None
    """Where the step goes, with overlap."""
    provenance: Provenance | None = None
    """Where the plan is from: inputs, the cluster's figures, versions, candidates, the command."""
    described: str = ""
    """The digest of the decisions that all tables here are of."""
    pipeline: Pipeline | None = None
    """The stages, if the mesh has an axis of them, in whose place decisions are about micro-batches."""
    lengths: tuple[LengthPlan, ...] = ()
    """What batches are padded to, if that was planned: the longest first, which the plan is of."""
    offload_bytes: Count = 0
    """Of what forward keeps for backward, so many bytes at least wait in the host's memory."""
    rewrites: str = ""
    """What was rewritten in the program of the decisions, in order, as `autopar lower` reads it."""
    within: str = ""
    """The library, or the plan of one, inside of whose means it was searched; "" if they were not bound."""

    @property
    def bytes(self) -> int:
        """Predicted peak of the bytes that a rank holds during a training step."""
        return self.peak.bytes

    @property
    def held_in(self) -> str:
        """The dtype in which the module holds most parameters; "" if the plan does not say it."""
        return "" if self.provenance is None else self.provenance.dtype

    @property
    def longest(self) -> int:
        """The length of the batches that its figures are of; 0 if it is the example's own."""
        return self.lengths[0].length if self.lengths else 0

    @property
    def headroom_bytes(self) -> float | None:
        """What is left of the limit at the peak; None without a limit."""
        return None if self.memory_limit_bytes is None else self.memory_limit_bytes - self.bytes

    @property
    def gap(self) -> float | None:
        """The part of its step by which a plan's step could be shorter at most; None if no bound is known."""
        return _gap(self.lower_bound_seconds, self.seconds)

    @property
    def objective_gap(self) -> float | None:
        """The part of its objective by which a plan's could be less at most; None if the solver proved nothing."""
        return _gap(self.objective_bound_seconds, self.objective_seconds)

    @property
    def waits(self) -> bool:
        """Whether ranks wait for much of the step."""
        return self.exposed_seconds > WAITING_PART * self.seconds > 0

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def is_edited(self) -> bool:
        """Whether the decisions were changed after the tables were computed, which are of the plan before then."""
        return bool(self.described) and self.described != self.digest

    @property
    def utilization(self) -> float | None:
        """MFU: the model's arithmetic (nothing replicated, nothing recomputed) over what all devices could do in a
        step at their peak. None if the model's arithmetic is not known, or the devices' peak is not."""
        ideal = None if self.provenance is None else self.provenance.ideal_seconds
        return None if ideal is None or not self.seconds else ideal / self.seconds

    @property
    def fitted(self) -> dict[str, Any]:
        """What the plan says of its program beside the decisions, as `Steps.evaluate` takes it."""
        return {"buckets": (self.bucket_bytes,), "offload_bytes": self.offload_bytes}

    @property
    def digest(self) -> str:
        """Equal for plans that decide alike, for the same model and mesh."""
        segments = [asdict(segment) for segment in self.segments]
        decided = [self.graph, list(self.mesh.items()), sorted(self.decisions.items()), segments, self.bucket_bytes]
        decided += [self.training.given] * bool(self.training.given)
        decided += [self.pipeline.decided] if self.pipeline else []
        decided += [self.offload_bytes] * bool(self.offload_bytes)
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]

    def answering(self, planner: Callable[[], Any]) -> Plan:
        """The plan with a planner of its model, which its questions need: it stays in this process."""
        plan = copy(self)
        plan.__dict__["planner"] = cache(planner)
        return plan

    @property
    def planner(self) -> Any:
        """The planner of the plan's model (`planning.planner.Planner`). Raises ValueError for a plan without it."""
        if "planner" not in self.__dict__:
            raise ValueError(
                "this plan was read without its model, which questions need: read it with "
                "autopar.read_plan(path, model, kwargs=batch)"
            )
        return self.__dict__["planner"]()

    def explain(self, name: str, *, replan: int = 0) -> Any:
        """Why a parameter, an input, a module, an operator or a collective is planned so (an
        `autopar.report.explain.answer.Explanation`): each alternative with all else as it is, in seconds and bytes,
        what it changes, and what speaks for the choice. The `replan` most promising alternatives are also pinned, with
        everything else planned again (about as long as planning, each).

        `name` is that of a parameter or an input ("lm_head.weight"), of a module ("model.layers.*.mlp"), of an
        operator, as in `decisions`, or a collective on a mesh axis ("all_gather tp"). Raises ValueError for a name that
        the plan does not have, and for a plan without its model: `autopar.read_plan` reads a file with it.
        """
        return _view("explain.engine").Explainer(self.planner, self).explain(name, replan=replan)

    def export(self, to: str) -> Any:
        """The plan as a script for another library, such as "fsdp2" (an `autopar.report.libraries.Export`): it needs
        nothing of autopar, and names what the library cannot express. Raises ValueError for an unknown library, and for
        a plan without its model, as `explain`."""
        return _view("libraries").export_plan(self, to)

    def anatomy(self) -> Any:
        """The plan's timeline, its memory over the step, segments, blocks and links
        (`autopar.report.explain.anatomy.Anatomy`), computed again from the model. Raises ValueError for a plan without
        its model, as `explain`."""
        return _view("explain.anatomy").anatomy(self.planner, self)

    def history(self) -> dict[str, Any]:
        """The steps of planning as values to print, by name, in their order: the `graph` of a step; the `layouts` that
        each site can take on the slowest axis of the mesh, with all others as in the plan; the `problem` that these
        are, as a solver sees it; its `solution`; and the `program`. Raises ValueError as `explain`."""
        values: dict[str, Any] = _view("history").history(self.planner, self)
        return values

    def program(self, rewrites: str | None = None) -> Program:
        """The program that each rank runs, written again from the model; `print` shows it as Python. It is the one that
        `parallelize` runs; or, with other `rewrites` than the plan's, such as "" or "bucket,slice{parts=4}", the one
        that these write. Raises ValueError for a plan without its model, as `explain`, and for what is no rewrite."""
        program: Program = self.planner.program(self, rewrites)
        return program

    def joint_graph(self) -> JointGraph:
        """The model's graph, forward and backward, for which the plan is made. Raises ValueError as `explain`."""
        graph: JointGraph = self.planner.captured.graph
        return graph

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "planner"}

    def to_json(self) -> dict[str, Any]:
        """What `save` writes: plain dicts, lists, numbers and texts."""
        fields = {**asdict(self), "training": self.training.given}
        said = {name: value for name, value in fields.items() if value or name not in DEFAULTS}
        return {"format": FORMAT, **said, "headroom_bytes": self.headroom_bytes}

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, over an earlier plan if there is one. Raises ValueError if the file cannot be
        written, or holds something else than a plan."""
        path = Path(path)
        try:
            self.check_path(path)
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}): give the path of a file") from error

    @staticmethod
    def check_path(path: Path | None) -> None:
        """Raises ValueError for a file that holds something else than a plan."""
        if path is not None and path.exists() and not path.is_dir() and not may_be_plan(path):
            raise ValueError(f"{path} is there, and is no plan: move it away, or give another path")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read what `save` wrote, maybe edited since. Figures are those of the file; `autopar.read_plan` computes them
        again. Raises ValueError if the file is no plan, naming the field that is missing, unknown or invalid."""
        return Plan.from_json(saved(path), str(path))

    @staticmethod
    def from_json(data: Any, source: str = "the plan") -> Plan:
        """Read what `to_json` returned; `source` names it in errors. Raises ValueError if a field is missing, unknown
        or invalid."""
        data = of_format(data, source)
        with reading(f"{source} is no plan", "correct it there, or save the plan again"):
            given = {name: value for name, value in data.items() if name not in ("format", "headroom_bytes")}
            # files from before it was written have given limits, or none
            given.setdefault("memory_limit_from", "lifted" if data.get("memory_limit_bytes") is None else "given")
            if "objective_bound_seconds" not in given and "lower_bound_seconds" in given:
                # files from before bounds were those of the step have one of the objective
                given |= {"objective_bound_seconds": given["lower_bound_seconds"], "lower_bound_seconds": 0.0}
            return read(Plan, given)

    @staticmethod
    def schema() -> dict[str, Any]:
        """JSON Schema of the file that `save` writes."""
        whole = schema(Plan, format={"const": FORMAT}, headroom_bytes={"type": ["number", "null"]})
        return {**whole, "required": ["format", *whole["required"]]}

    def __post_init__(self) -> None:
        """Raises ValueError for what types do not say."""
        placed = {f"inputs[{name!r}]": [placements] for name, placements in self.inputs.items()}
        placed |= {f"parameters[{name!r}]": [p.at_rest, *p.in_use] for name, p in self.parameters.items()}
        for where, layouts in placed.items():
            for layout in layouts:
                if len(layout) != len(self.mesh):
                    raise ValueError(f"{where} has {len(layout)} placements: one for each of {len(self.mesh)} axes")

    def text(self, *, full: bool = False, width: int | None = None) -> str:
        """The plan on one page of so many columns (those of the terminal if not given), or all that it says."""
        text: str = self._page(full=full).text(width)
        return text

    def _page(self, **how: bool) -> Any:
        return _view("page").Page(plan=self, **how)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis}={n}" for axis, n in self.mesh.items())
        return (
            f"<Plan of {self.model} on {mesh} of {self.cluster}, by {self.solver}: step {short_seconds(self.seconds)}, "
            f"peak {short_bytes(self.bytes)}>"
        )

    def _repr_html_(self) -> str:
        html: str = self._page()._repr_html_()
        return html

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield from self._page().__rich_console__(console, options)


def graph_digest(graph: JointGraph) -> str:
    """Equal for two captures of the same model with the same input shapes."""
    return hashlib.sha256(str(graph).encode()).hexdigest()[:16]


__all__ = [
    "LimitFrom",
    "ParameterPlan",
    "Plan",
    "Run",
    "Segment",
    "graph_digest",
]
