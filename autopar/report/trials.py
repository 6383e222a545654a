"""The trials of a fit: for each number of devices, its meshes by one descent each; then the search on the most
promising of them, and every strategy on the mesh that people write by hand.

Each answer is kept by everything that it depends on, so that a fit that was interrupted goes on where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.cluster.library import CLUSTERS
from autopar.cluster.library.write import cluster_toml
from autopar.cluster.machine import Cluster
from autopar.extensions import TABLES
from autopar.files.typed import read
from autopar.ir.garbage import uncollected
from autopar.planning.costs import COSTS
from autopar.planning.meshes import AXES, meshes
from autopar.planning.over import quick_seconds
from autopar.planning.plan import graph_digest
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.planning.progress import Stage
from autopar.planning.request import Request

from .kept import Kept, code_digest, key_of
from .trial import Trial

SCAN, PRESET, SEARCH = 1.0, 1.0, 5.0
"""How long a descent, a preset and a search take beside each other, until they were timed."""

Report = Callable[[float, str], None]


@dataclass(slots=True, kw_only=True)
class Progress:
    """The part that is done, and how long the rest takes, by how long what was computed took. What was kept takes no
    time, and says nothing about what does."""

    report: Report
    total: float
    done: float = 0.0
    computed: float = 0.0
    seconds: float = 0.0
    was_kept: int = 0

    def told(self, what: str, weight: float) -> Stage:
        """Reports what is computed next, and gives its part of all."""
        left = ""
        if self.computed:
            seconds = self.seconds / self.computed * (self.total - self.done)
            left = f", {_duration(seconds)} left"
        stage = Stage(doing=f"{what}{left}").part(self.done / self.total, min(1.0, (self.done + weight) / self.total))
        self.report(stage.begin, stage.doing)
        return stage


def _duration(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {max(1.0, seconds):.0f} s"


def hand_mesh(cluster: Cluster, devices: int) -> dict[str, int]:
    """The mesh that people write by hand: data parallel between machines, tensor parallel within one. (Presets take
    their axes by these names.)"""
    inner = cluster.levels[-1].size
    if devices <= inner or devices % inner or inner == 1:
        return {AXES[0]: devices}
    return {"dp": devices // inner, "tp": inner}


class Trials:
    """The trials of one captured model under one request."""

    def __init__(
        self,
        planner: Planner,
        request: Request,
        strategies: Sequence[str],
        *,
        axes: int,
        kept: Kept,
        report: Report,
    ) -> None:
        self.planner, self.request, self.strategies, self.axes = planner, request, tuple(strategies), axes
        self.kept = kept if self._is_repeatable else Kept(None)
        self.progress = Progress(report=report, total=1.0)
        self.searches = [name for name in self.strategies if name not in PRESETS]
        graph = planner.captured.graph
        self.depends_on: tuple[Any, ...] = (
            code_digest(),
            dict(planner.facts.versions),
            graph_digest(graph),
            repr(planner.optimizer),
            cluster_toml(planner.cluster, planner.cluster.source),
            repr(planner.cluster.factors),
            planner.device_type,
            request.cost,
            request.memory_limit_bytes,
            request.free_part,
            request.pinned,
            repr(planner.training),
        )

    @property
    def _is_repeatable(self) -> bool:
        """Whether answers follow from their key: not where something is measured or ends by the clock, nor with
        code that is registered, which the key does not see. (A cluster is in the key.)"""
        measured = COSTS[self.request.cost].plan is not None or self.planner.cluster.device.operators is not None
        added = any(table.added for table in TABLES if table is not COSTS and table is not CLUSTERS)
        timed = self.request.effort is not None
        return not (measured or added or timed or self.request.cost in COSTS.added)

    def run(self, sizes: Sequence[int]) -> Iterator[Trial]:
        """The trials of each size, in the order in which they are made."""
        machine = self.planner.cluster
        fitting = [size for size in sizes if size <= machine.devices]
        for size in sizes:
            if size not in fitting:
                yield Trial(devices=size, error=f"cluster {machine.name} has {machine.devices:,} devices")
        scans = {size: self._meshes(size) for size in fitting}
        finalists = self.planner.effort.mesh_finalists
        total = sum(
            SCAN * len(scan) * bool(self.searches)
            + SEARCH * len(self.searches) * (min(len(scan), finalists) + (self._by_hand(size) not in scan))
            + PRESET * (len(self.strategies) - len(self.searches))
            for size, scan in scans.items()
        )
        self.progress.total = max(total, SCAN)
        for size, candidates in scans.items():
            yield from self._size(size, candidates, finalists)
        self.progress.report(1.0, "")

    @property
    def was_kept(self) -> int:
        """How many answers were known from before."""
        return self.progress.was_kept

    def _by_hand(self, size: int) -> dict[str, int]:
        return hand_mesh(self.planner.cluster, size)

    def _meshes(self, size: int) -> list[dict[str, int]]:
        return meshes(size, self.axes)

    def _size(self, size: int, candidates: list[dict[str, int]], finalists: int) -> Iterator[Trial]:
        by_hand = self._by_hand(size)
        best: list[dict[str, int]] = []
        if self.searches:
            estimates: list[tuple[float, dict[str, int]]] = []
            for mesh in sorted(candidates, key=lambda mesh: max(mesh.values())):
                known = sorted(seconds for seconds, _ in estimates)
                below = known[finalists - 1] if len(known) >= finalists else math.inf
                estimates.append((self._scanned(mesh, len(candidates), below), mesh))
            best = [mesh for _, mesh in sorted(estimates, key=lambda entry: entry[0])[:finalists]]
        for strategy in self.strategies:
            on = best if strategy in self.searches else []
            for mesh in [*on, by_hand] if by_hand not in on else on:
                yield self._planned(mesh, strategy)

    def _scanned(self, mesh: Mapping[str, int], count: int, below: float) -> float:
        key = key_of("scan", *self.depends_on, self.axes, list(mesh.items()), count, repr(below))

        def compute(stage: Stage) -> float | None:
            try:
                with uncollected():
                    seconds = quick_seconds(self._on(mesh), replace(self.request, stage=stage), count, below)
            except ValueError:  # the search itself says what is wrong
                return None
            return seconds if math.isfinite(seconds) else None

        size = math.prod(mesh.values())
        seconds = self._answer(key, compute, SCAN, f"{size:,} devices, looking at {mesh_words(mesh)}")
        return math.inf if seconds is None else float(seconds)

    def _planned(self, mesh: Mapping[str, int], strategy: str) -> Trial:
        key = key_of("plan", *self.depends_on, list(mesh.items()), strategy)

        def compute(stage: Stage) -> dict[str, Any]:
            request = replace(self.request, solver=strategy, stage=stage)
            try:
                trial = Trial.of(self._on(mesh).planned(request), strategy)
            except ValueError as error:
                trial = Trial.failed(mesh, strategy, error, self.planner.limit(request))
            return trial.to_json()

        weight = PRESET if strategy in PRESETS else SEARCH
        what = f"{math.prod(mesh.values()):,} devices, {strategy} on {mesh_words(mesh)}"
        answer = dict(self._answer(key, compute, weight, what))
        answer.pop("fits")
        seconds = answer.pop("seconds")
        return read(Trial, {**answer, **({} if seconds is None else {"seconds": seconds})})

    def _answer(self, key: str, compute: Callable[[Stage], Any], weight: float, what: str) -> Any:
        progress = self.progress
        answer = self.kept.get(key)
        if answer is not None:
            progress.was_kept += 1
            progress.done += weight
            return answer["is"]
        stage = progress.told(what, weight)
        began = time.monotonic()
        value = compute(stage)
        progress.seconds += time.monotonic() - began
        progress.computed += weight
        progress.done += weight
        self.kept.put(key, {"is": value})
        return value

    def _on(self, mesh: Mapping[str, int]) -> Planner:
        return self.planner if mesh == self.planner.mesh else self.planner.on(mesh, self.planner.cluster)


def mesh_words(mesh: Mapping[str, int]) -> str:
    """As `--mesh` takes it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())
