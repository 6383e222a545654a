"""One question: the plans that a captured model has under changed requests, one after the other.

`compare`, `fit` and the alternatives that `explain` plans again are tables of its answers. It says how far it is and
how long the rest takes, by how long what it computed took, and keeps each answer by everything that it depends on, so
that a table that was interrupted goes on where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from autopar.cluster.library import CLUSTERS, named_cluster
from autopar.cluster.library.write import cluster_toml
from autopar.extensions import TABLES
from autopar.files.kinds import Count, Size
from autopar.ir.garbage import uncollected
from autopar.planning.costs import COSTS
from autopar.planning.plan import Plan, graph_digest
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.planning.progress import Stage
from autopar.planning.request import DEFAULTS, Request, Several, quiet
from autopar.planning.texts import digits, left_text, mesh_words, short_bytes, short_seconds

from .facts import work_of
from .kept import Kept, code_digest, key_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A request with changes of what is searched, on a mesh. Its plan takes `weight` beside others, until they were
    timed."""

    name: str
    mesh: Mapping[str, int]
    request: Request
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The plan of a case. Without one, `error` says why, and `needed_bytes` is the smallest peak that was reached,
    where memory is the reason."""

    name: str = ""
    devices: Count
    mesh: Mapping[str, Size] = field(default_factory=dict)
    strategy: str = ""
    plan: Plan | None = field(default=None, compare=False, repr=False)
    limit_bytes: float | None = None
    error: str = ""
    needed_bytes: float | None = None

    @property
    def fits(self) -> bool:
        return not self.error

    @property
    def seconds(self) -> float:
        return math.inf if self.plan is None else self.plan.seconds

    @property
    def bytes(self) -> float:
        """The peak of a rank."""
        return 0.0 if self.plan is None else self.plan.bytes

    @property
    def work(self) -> tuple[int, str]:
        """What a step computes: so many tokens, or samples."""
        return work_of(self.plan)

    @property
    def items_per_second(self) -> float:
        return self.work[0] / self.seconds

    @property
    def utilization(self) -> float | None:
        """MFU: the part of the devices' peak that a step reaches."""
        return None if self.plan is None else self.plan.utilization

    @property
    def winner(self) -> str:
        """The candidate that a search chose (`Provenance.winner`)."""
        return "" if self.plan is None or self.plan.provenance is None else self.plan.provenance.winner

    @property
    def found_by(self) -> str:
        """The strategy; of a search that took a preset's plan, that too."""
        is_preset = self.winner in PRESETS and self.strategy not in PRESETS
        return f"{self.strategy}: {self.winner}" if is_preset else self.strategy

    def __str__(self) -> str:
        """What it reaches, and how."""
        reached = f"{short_seconds(self.seconds)}, {digits(self.items_per_second)} {self.work[1]}/s"
        return f"{reached} by {self.found_by} on {mesh_words(self.mesh)}"

    @property
    def reason(self) -> str:
        """Why there is no plan, in a few words."""
        if self.needed_bytes is not None and self.limit_bytes is not None:
            return f"needs {short_bytes(self.needed_bytes)} of {short_bytes(self.limit_bytes)} at least"
        return self.error

    def to_json(self) -> dict[str, Any]:
        items, unit = self.work
        told = {"seconds": self.seconds if self.fits else None, "items": items, "unit": unit, "error": self.error}
        names = ("devices", "mesh", "strategy", "winner", "bytes", "limit_bytes", "utilization", "needed_bytes", "fits")
        return {**{name: getattr(self, name) for name in names}, **told}


def asked(options: Several) -> tuple[dict[str, Any], Kept | None, Callable[[float, str], None], Callable[[Any], None]]:
    """The keywords of a request; and apart, where answers are kept, who is told how far it is, and who of them."""
    request: dict[str, Any] = dict(options)
    keep, report, each = (request.pop(name, DEFAULTS[name]) for name in ("keep", "report", "each"))
    return request, None if keep is None else Kept(keep), report, each


class Question:
    """Asks a planner, and those of its model on other meshes and clusters."""

    def __init__(
        self,
        planner: Planner,
        *,
        total: float = 1.0,
        keep: Kept | None = None,
        report: Callable[[float, str], None] = quiet,
    ) -> None:
        """Its answers weigh `total`. `report` gets the part that is done, and what is next."""
        self.planner, self.total, self.kept, self.report = planner, total, keep, report
        self.last = (planner.mesh, planner.asked.cluster, planner)
        self.done = self.computed = self.seconds = 0.0
        self.was_kept = 0

    def answer(self, case: Variant) -> Reply:
        """The answer to one case."""
        devices = math.prod(case.mesh.values())
        asked = Reply(name=case.name, devices=devices, mesh=case.mesh, strategy=case.request.solver)

        def compute(request: Request) -> Reply:
            limit = None
            try:
                on = self.on(case.mesh, request)
                limit = on.limit(request)
                plan = on.planned(request)
            except ValueError as error:
                needed = getattr(error, "smallest_bytes", math.inf)
                needed = needed if math.isfinite(needed) else None
                return replace(asked, limit_bytes=limit, error=str(error), needed_bytes=needed)
            return replace(asked, plan=plan, limit_bytes=plan.memory_limit_bytes)

        def write(answer: Reply) -> Any:
            plan = None if answer.plan is None else answer.plan.to_json()
            return {"plan": plan, **{n: getattr(answer, n) for n in ("limit_bytes", "error", "needed_bytes")}}

        def read(kept: Any) -> Reply:
            return replace(asked, **{**kept, "plan": None if kept["plan"] is None else Plan.from_json(kept["plan"])})

        key = ("plan", case.mesh, case.request.solver)
        return self.known(key, case.request, compute, case.weight, case.name, write, read)

    def known(
        self,
        key: tuple[Any, ...],
        request: Request,
        compute: Callable[[Request], T],
        weight: float,
        doing: str,
        write: Callable[[T], Any] = lambda value: value,
        read: Callable[[Any], T] = lambda value: value,
    ) -> T:
        """What was kept of a request by a key, or what is computed of it, which is kept."""
        kept = self.kept if self.kept is not None and self._is_repeatable(request) else None
        whole = key_of(*key, *self._depends_on(request)) if kept is not None else ""
        if kept is not None and (answer := kept.get(whole)) is not None:
            self.was_kept += 1
            self.done += weight
            return read(answer["is"])
        left = self.seconds / self.computed * (self.total - self.done) if self.computed else 0.0
        stage = Stage(doing=doing, left=f", {left_text(left)}" if self.computed else "")
        stage = stage.part(self.done / self.total, min(1.0, (self.done + weight) / self.total))
        self.report(stage.begin, f"{stage.doing}{stage.left}")
        began = time.monotonic()
        with uncollected():
            value = compute(replace(request, stage=stage))
        self.seconds += time.monotonic() - began
        self.computed += weight
        self.done += weight
        if kept is not None:
            kept.put(whole, {"is": write(value)})
        return value

    def on(self, mesh: Mapping[str, int], request: Request) -> Planner:
        """The planner on a mesh of a request's cluster."""
        if self.last[:2] != (mesh, request.cluster):
            self.last = (dict(mesh), request.cluster, self.planner.on(mesh, request.cluster))
        return self.last[2]

    def _depends_on(self, request: Request) -> tuple[Any, ...]:
        planner, cluster = self.planner, named_cluster(request.cluster)
        return (
            code_digest(),
            dict(planner.facts.versions),
            graph_digest(planner.captured.graph),
            repr(planner.optimizer),
            cluster_toml(cluster, cluster.source),
            repr(cluster.factors),
            planner.device_type,
            request.cost,
            request.memory_limit_bytes,
            request.free_part,
            request.pinned,
            repr(planner.training),
        )

    def _is_repeatable(self, request: Request) -> bool:
        """Whether answers follow from their key: not where something is measured or ends by the clock, nor with
        code that is registered, which the key does not see. (A cluster is in the key.)"""
        measured = COSTS[request.cost].plan is not None or named_cluster(request.cluster).device.operators is not None
        added = any(table.added for table in TABLES if table is not COSTS and table is not CLUSTERS)
        return not (measured or added or request.effort is not None or request.cost in COSTS.added)
