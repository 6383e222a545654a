"""What a plan says: where every value lives on the mesh, and what that costs. `Plan` adds files, texts and answers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated

from msgspec import Meta

from autopar.cost.memory import Peak
from autopar.files.kinds import Count, Size
from autopar.passes.lower.lowering import LIMIT_BYTES

from .account import Account
from .provenance import Provenance
from .request import LimitFrom
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


WAITING_PART = 0.25
"""Ranks that wait for more of the step are worth a warning, and advice."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """`decisions` (and those of the segments' runs) are the plan: site -> choice, in the words of
    `passes.space.choices`, one for each mesh axis. So is `bucket_bytes`, the most bytes of parameters' gathers and
    reductions that travel together (`passes.lower.bucket`). All else describes it. `graph` is the joint graph's digest.
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
    advice: Advice | None = None
    """What would shorten the waits of ranks, if that was found."""
    timing: Timing | None = None
    """Where the step goes, with overlap."""
    provenance: Provenance | None = None
    """Where the plan is from: inputs, the cluster's figures, versions, candidates, the command."""
    described: str = ""
    """The digest of the decisions that all tables here are of."""
    rewrites: str = ""
    """What was rewritten in the program of the decisions, in order, as `autopar lower` reads it."""

    @property
    def bytes(self) -> int:
        """Predicted peak of the bytes that a rank holds during a training step."""
        return self.peak.bytes

    @property
    def held_in(self) -> str:
        """The dtype in which the module holds most parameters; "" if the plan does not say it."""
        return "" if self.provenance is None else self.provenance.dtype

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
    def digest(self) -> str:
        """Equal for plans that decide alike, for the same model and mesh."""
        segments = [asdict(segment) for segment in self.segments]
        decided = [self.graph, list(self.mesh.items()), sorted(self.decisions.items()), segments, self.bucket_bytes]
        decided += [self.training.given] * bool(self.training.given)
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]
