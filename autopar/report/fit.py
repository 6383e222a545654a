"""The verb `fit`: which numbers of devices, meshes and strategies fit a model, ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import nn

from autopar.cluster.library import named_cluster
from autopar.cluster.machine import Cluster
from autopar.cost.optimizers import Optimizer
from autopar.planning.constraints import Constraints
from autopar.planning.fit.kept import Kept
from autopar.planning.fit.trial import Trial
from autopar.planning.fit.trials import Trials, hand_mesh, mesh_words
from autopar.planning.given import check_solver
from autopar.planning.page.sections import count_text
from autopar.planning.planner import Planner
from autopar.planning.presets import PRESETS
from autopar.planning.rendering import rendered, table
from autopar.planning.request import Request
from autopar.planning.texts import digits, short_bytes, short_seconds

DEVICES_MOST = 2**20


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Trials, by size; within a size the fastest first, then those without a plan. `kept` answers of all were known
    from before. Prints as tables."""

    model: str
    cluster: str
    trials: tuple[Trial, ...]
    kept: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(trial.devices for trial in self.trials))

    def of(self, devices: int) -> tuple[Trial, ...]:
        """The trials of a size."""
        return tuple(trial for trial in self.trials if trial.devices == devices)

    def best(self, devices: int) -> Trial | None:
        """The fastest that fits on so many devices, or None."""
        return next((trial for trial in self.of(devices) if trial.fits), None)

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "cluster": self.cluster, "trials": [trial.to_json() for trial in self.trials]}

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 80) -> str:
        """The tables in at most so many columns."""
        return rendered(self._parts(), width)

    def _parts(self) -> Iterator[Text | Table | Padding]:
        yield Text(f"{self.model} on {self.cluster}", style="bold")
        if len(self.sizes) > 1:
            yield Text("\nthe fastest on each number of devices", style="bold")
            yield self._summary()
        for size in self.sizes:
            trials = self.of(size)
            fitting = [trial for trial in trials if trial.fits]
            count = f"{len(fitting)} of {len(trials)} fit" if trials[0].mesh else "NO"
            yield Text(f"\n{size:,} devices: {count}", style="bold")
            if fitting:
                yield self._ranked(fitting)
            for names, reason in self._reasons(trials):
                yield Padding(Text(f"NO  {names}{': ' if names else ''}{reason}"), (0, 0, 0, 2))

    def _summary(self) -> Table:
        unit = next((trial.unit for trial in self.trials if trial.fits), "samples")
        heads = ("devices", "step", f"{unit}/s", "a device", "MFU", "strategy", "mesh")
        rows = []
        for size in self.sizes:
            best = self.best(size)
            if best is None:
                rows.append((f"{size:,}", "NO", *("-",) * 5))
                continue
            rate, part = best.items_per_second, _part(best.utilization)
            figures = (f"{size:,}", short_seconds(best.seconds), digits(rate), digits(rate / size), part)
            rows.append((*figures, strategy_words(best), mesh_words(best.mesh)))
        return table(heads, rows, right=range(5))

    def _ranked(self, trials: Sequence[Trial]) -> Table:
        limits = {trial.limit_bytes for trial in trials}
        limit = next(iter(limits)) if len(limits) == 1 else None
        peak = "peak" if limit is None else f"peak of {short_bytes(limit)}"
        heads = ("", "step", f"{trials[0].unit}/s", "MFU", peak, "strategy", "mesh")
        rows = []
        for rank, trial in enumerate(trials, 1):
            of = "" if limit is None else f" {trial.bytes / limit:4.0%}"
            rows.append(
                (
                    str(rank), short_seconds(trial.seconds), digits(trial.items_per_second), _part(trial.utilization),
                    f"{short_bytes(trial.bytes)}{of}", strategy_words(trial), mesh_words(trial.mesh),
                )
            )  # fmt: skip
        return table(heads, rows, right=range(5), indent=2)

    def _reasons(self, trials: Sequence[Trial]) -> Iterator[tuple[str, str]]:
        """Trials without a plan, those of one reason together."""
        told: dict[str, list[str]] = {}
        for trial in trials:
            if not trial.fits:
                names = f"{trial.strategy} on {mesh_words(trial.mesh)}" if trial.mesh else ""
                told.setdefault(trial.reason, []).append(names)
        yield from ((", ".join(names), reason) for reason, names in told.items())


def strategy_words(trial: Trial) -> str:
    """The strategy; of a search that took a preset's plan, that too."""
    return (
        f"{trial.strategy}: {trial.winner}"
        if trial.winner in PRESETS and trial.strategy not in PRESETS
        else trial.strategy
    )


def _part(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def fit(
    model: nn.Module,
    devices: Sequence[int],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    cluster: str | Cluster | None = None,
    strategies: Sequence[str] | None = None,
    axes: int = 2,
    cost: str = "analytical",
    memory_limit_bytes: float | None = None,
    headroom: float | None = None,
    optimizer: str | float | Optimizer = "adamw",
    constraints: Constraints | None = None,
    keep: str | Path | None = None,
    report: Callable[[float, str], None] = lambda part, what: None,
) -> Fit:
    """Which meshes and strategies fit a model on each number of `devices`, and how fast they are, the fastest first.

    Every mesh of at most so many `axes` gets a quick look, and the three that promise most the whole search. The search
    and every preset are also planned on the mesh that people write by hand: the devices of a machine, and the machines.
    `strategies` are solvers and presets; the search and all presets if not given. The global batch is that of the
    inputs, for every size. All other arguments are as for `autopar.plan`. What cannot be planned is a trial with its
    reason, and does not stop the others.

    Each answer is kept in the file `keep`, if one is given, by everything that it depends on (model, inputs, cluster,
    limit, autopar's code, versions), so that the same call continues after an interruption. Plans that measure are not
    kept. `report` gets the part that is done, and the current work with the time that is left.

    Raises ValueError for invalid arguments, and for a model that cannot be captured.
    """
    sizes = _sizes(devices)
    chosen = tuple(dict.fromkeys((Request().solver, *PRESETS) if strategies is None else strategies))
    for strategy in chosen:
        check_solver(strategy)
    if not chosen:
        raise ValueError("strategies is empty: give solvers or presets, such as ['fsdp'], or None for all")
    if isinstance(axes, bool) or not isinstance(axes, int) or not 1 <= axes <= 4:
        raise ValueError(f"axes is {axes!r}: give the most axes of a mesh, from 1 to 4")
    request = Request(cost=cost, memory_limit_bytes=memory_limit_bytes, headroom=headroom, constraints=constraints)
    kept = Kept(keep)
    machine = named_cluster(cluster, device_type="cpu")
    report(0.0, "reading the model")
    mesh = hand_mesh(machine, min([*sizes, machine.devices]))
    planner = Planner(model, mesh, args, kwargs, loss_fn=loss_fn, cluster=machine, optimizer=optimizer)
    trials = Trials(planner, request, chosen, axes=axes, kept=kept, report=report)
    rows = list(trials.run(sizes))
    ranked = sorted(rows, key=lambda trial: (sizes.index(trial.devices), not trial.fits, trial.seconds))
    about = planner.facts.provenance(machine, 1)
    named = f"{planner.facts.name} ({count_text(about.parameter_count)} parameters, {about.dtype})"
    return Fit(model=named, cluster=machine.name, trials=tuple(ranked), kept=trials.was_kept)


def _sizes(devices: Any) -> list[int]:
    given = [devices] if isinstance(devices, int) else list(devices) if isinstance(devices, Sequence) else []
    valid = all(isinstance(size, int) and not isinstance(size, bool) and 0 < size <= DEVICES_MOST for size in given)
    if not given or not valid or isinstance(devices, (str, bool)):
        raise ValueError(
            f"devices is {devices!r}: give numbers of devices, such as [64, 256], each at most {DEVICES_MOST}"
        )
    return list(dict.fromkeys(given))


__all__ = ["Fit", "Trial", "fit"]
