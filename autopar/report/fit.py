"""The verb `fit`: which numbers of devices, meshes and strategies fit a model, ranked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn

from autopar.cluster.library import named_cluster
from autopar.cluster.machine import Cluster
from autopar.planning.meshes import AXES, may_gain, meshes, promising, quick_seconds, with_stages
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.planning.request import AUTO, Request, Several, check, takes
from autopar.planning.texts import by_reason, mesh_words

from .document import Document
from .facts import count_text
from .question import Question, Reply, Variant, asked
from .sections import Grid, Lines, Row, Section, without

SCAN, PRESET, SEARCH = 1.0, 1.0, 5.0
"""How long a descent, a preset and a search take beside each other."""

DEVICES_MOST = 2**20


@dataclass(frozen=True, kw_only=True)
class Fit(Document):
    """Trials, by size; within a size the fastest first, then those without a plan. `kept` answers of all were known
    from before. Prints as tables."""

    model: str
    cluster: str
    trials: tuple[Reply, ...]
    kept: int = 0

    @property
    def unit(self) -> str:
        """What a step computes: tokens, or samples."""
        return next((trial.work[1] for trial in self.trials if trial.fits), "samples")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(trial.devices for trial in self.trials))

    def of(self, devices: int) -> tuple[Reply, ...]:
        """The trials of a size."""
        return tuple(trial for trial in self.trials if trial.devices == devices)

    def best(self, devices: int) -> Reply | None:
        """The fastest that fits on so many devices, or None."""
        return next((trial for trial in self.of(devices) if trial.fits), None)

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "cluster": self.cluster, "trials": [trial.to_json() for trial in self.trials]}

    def rows(self) -> list[Row]:
        """All trials in their order, each a row: what it reaches, or why it does not fit."""
        return [self._row(trial) for trial in self.trials]

    def _row(self, trial: Reply) -> Row:
        rate = trial.items_per_second if trial.fits else None
        size = trial.bytes if trial.fits else trial.needed_bytes
        return {
            "devices": trial.devices,
            "step_seconds": trial.seconds if trial.fits else None,
            f"{self.unit}_per_second": rate,
            f"device_{self.unit}_per_second": rate and rate / trial.devices,
            "MFU": trial.utilization,
            "peak_bytes": size,
            "limit_bytes": trial.limit_bytes,
            "of_limit_part": size / trial.limit_bytes if size and trial.limit_bytes else None,
            "strategy": trial.found_by,
            "mesh": mesh_words(trial.mesh) if trial.mesh else "",
            "error": "" if trial.fits else trial.reason,
        }

    def sections(self) -> Iterator[Section]:
        yield Section(f"{self.model} on {self.cluster}", [])
        if len(self.sizes) > 1:
            yield Section("the fastest on each number of devices", [Grid.of(self._summary())])
        for size in self.sizes:
            trials = self.of(size)
            fitting = [trial for trial in trials if trial.fits]
            count = f"{len(fitting)} of {len(trials)} fit" if trials[0].mesh else "NO"
            refused = by_reason(
                (trial.strategy, f"{trial.strategy} on {mesh_words(trial.mesh)}" if trial.mesh else "", trial.reason)
                for trial in trials
                if not trial.fits
            )
            told = [f"NO  {': '.join(filter(None, (', '.join(names), reason)))}" for names, reason in refused]
            yield Section(f"{size:,} devices: {count}", [Grid.of(self._ranked(fitting), indent=2), Lines(told)])

    def _summary(self) -> list[Row]:
        bests = [self.best(size) or Reply(devices=size, strategy="NO", error="NO") for size in self.sizes]
        return [without(self._row(best), "peak_bytes", "limit_bytes", "of_limit_part", "error") for best in bests]

    def _ranked(self, trials: Sequence[Reply]) -> list[Row]:
        left_out = ("devices", f"device_{self.unit}_per_second", "limit_bytes", "error")
        return [{"rank": k, **without(self._row(trial), *left_out)} for k, trial in enumerate(trials, 1)]


@takes(Several)
def fit(
    model: nn.Module,
    devices: Sequence[int],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    strategies: Sequence[str] | None = None,
    cluster: str | Cluster | None = None,
    axes: int = 2,
    **options: Unpack[Several],
) -> Fit:
    """Which meshes and strategies fit a model on each number of `devices`, and how fast they are, the fastest first.

    Every mesh of at most so many `axes` gets a quick look, and the three that promise most the whole search; so do
    two with stages of a pipeline, where these may be worth it. The search and every preset are also planned on the mesh
    that people write by hand: the devices of a machine, and the machines.
    `strategies` are solvers and presets; the search and all presets if not given. The global batch is that of the
    inputs, for every size. All other arguments are as for `autopar.plan`. What cannot be planned is a trial with its
    reason, and does not stop the others.

    Each answer is kept in the file `keep`, if one is given, by everything that it depends on (model, inputs, cluster,
    limit, autopar's code, versions), so that the same call continues after an interruption. Plans that measure are not
    kept. `report` gets the part that is done, and the current work with the time that is left; `each` gets what is
    known so far, after each trial.

    Raises ValueError for invalid arguments, and for a model that cannot be captured.
    """
    of_request, keep, report, each = asked(options)
    sizes = _sizes(devices)
    chosen = tuple(dict.fromkeys((AUTO, *PRESETS) if strategies is None else strategies))
    for strategy in chosen:
        check("solver", strategy)
    if not chosen:
        raise ValueError("strategies is empty: give solvers or presets, such as ['fsdp'], or None for all")
    if isinstance(axes, bool) or not isinstance(axes, int) or not 1 <= axes <= 4:
        raise ValueError(f"axes is {axes!r}: give the most axes of a mesh, from 1 to 4")
    machine = named_cluster(cluster, device_type="cpu")
    request = Request(cluster=machine, **of_request)
    report(0.0, "reading the model")
    mesh = hand_mesh(machine, min([*sizes, machine.devices]))
    planner = Planner(model, mesh, args, kwargs, loss_fn=loss_fn, request=request)
    question = Question(planner, keep=keep, report=report)
    about = planner.facts.provenance(machine, 1)
    named = f"{planner.facts.name} ({count_text(about.parameter_count)} parameters, {about.dtype})"
    known = Fit(model=named, cluster=machine.name, trials=())
    for trial in _trials(question, request, chosen, sizes, axes):
        ranked = sorted((*known.trials, trial), key=lambda t: (sizes.index(t.devices), not t.fits, t.seconds))
        known = replace(known, trials=tuple(ranked), kept=question.was_kept)
        each(known)
    report(1.0, "")
    return known


def _trials(
    question: Question, request: Request, strategies: Sequence[str], sizes: Sequence[int], axes: int
) -> Iterator[Reply]:
    """The trials of each size, in the order in which they are made: the search on the meshes that promise most, and
    every strategy on that of the machines."""
    machine, finalists = named_cluster(request.cluster), question.planner.effort.mesh_finalists
    searches = [name for name in strategies if name not in PRESETS]
    fitting = [size for size in sizes if size <= machine.devices]
    for size in sizes:
        if size not in fitting:
            yield Reply(devices=size, error=f"cluster {machine.name} has {machine.devices:,} devices")
    looks = {size: meshes(size, axes) for size in fitting}
    question.total = max(SCAN, sum(
        SCAN * len(on) * bool(searches)
        + SEARCH * len(searches) * (min(len(on), finalists) + (hand_mesh(machine, size) not in on))
        + PRESET * (len(strategies) - len(searches))
        for size, on in looks.items()
    ))  # fmt: skip
    for size, candidates in looks.items():
        by_hand = hand_mesh(machine, size)
        look = partial(_looked, question, request, len(candidates))
        best = promising(candidates, look, finalists) if searches else []
        searched = best if by_hand in best else [*best, by_hand]
        known = []
        for strategy in strategies:
            for mesh in searched if strategy in searches else [by_hand]:
                known.append(_planned(question, replace(request, solver=strategy), mesh))
                yield known[-1]
        if AUTO in searches:
            yield from _in_stages(question, request, min(known, key=lambda answer: answer.seconds))


def _in_stages(question: Question, request: Request, best: Reply) -> Iterator[Reply]:
    """The search on the meshes with stages in the place of the outermost axes of the best trial, if they may be worth
    it."""
    if best.plan is not None and not may_gain(best.plan):
        return

    def compute(asked: Request) -> list[dict[str, int]]:
        return with_stages(partial(question.on, request=request), best.mesh, question.planner.batch, asked)

    doing = f"{best.devices:,} devices, looking at stages"
    for mesh in question.known(("stages", best.mesh), request, compute, SCAN, doing):
        yield _planned(question, request, mesh)


def _planned(question: Question, request: Request, mesh: Mapping[str, int]) -> Reply:
    name = f"{math.prod(mesh.values()):,} devices, {request.solver} on {mesh_words(mesh)}"
    return question.answer(Variant(name=name, mesh=mesh, request=request, weight=PRESET if request.preset else SEARCH))


def _looked(question: Question, request: Request, count: int, mesh: Mapping[str, int], below: float) -> float:
    """The seconds of a quick look at one of so many meshes; infinity if nothing fits."""

    def compute(asked: Request) -> float | None:
        try:
            seconds = quick_seconds(question.on(mesh, request), asked, count, below)
        except ValueError:  # the search itself says what is wrong
            return None
        return seconds if math.isfinite(seconds) else None

    doing = f"{math.prod(mesh.values()):,} devices, looking at {mesh_words(mesh)}"
    seconds = question.known(("look", mesh, count, repr(below)), request, compute, SCAN, doing)
    return math.inf if seconds is None else seconds


def hand_mesh(cluster: Cluster, devices: int) -> dict[str, int]:
    """The mesh that people write by hand: data parallel between machines, tensor parallel within one. (Presets take
    their axes by these names.)"""
    inner = cluster.levels[-1].size
    if devices <= inner or devices % inner or inner == 1:
        return {AXES[0]: devices}
    return {"dp": devices // inner, "tp": inner}


def _sizes(devices: Any) -> list[int]:
    given = [devices] if isinstance(devices, int) else list(devices) if isinstance(devices, Sequence) else []
    valid = all(isinstance(size, int) and not isinstance(size, bool) and 0 < size <= DEVICES_MOST for size in given)
    if not given or not valid or isinstance(devices, (str, bool)):
        raise ValueError(
            f"devices is {devices!r}: give numbers of devices, such as [64, 256], each at most {DEVICES_MOST}"
        )
    return list(dict.fromkeys(given))


__all__ = ["Fit", "fit"]
