"""The verb `simulate`: a plan of a model on a cluster, run in time by one rank's events."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from autopar.cost.timeline import COMPUTE, Timeline
from autopar.files import MOST, is_number, json_of, reading, text_of
from autopar.ir.program import COLLECTIVES
from autopar.planning.lengths import resized
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.reading import refreshed
from autopar.planning.request import Options, Request, takes
from autopar.planning.texts import mesh_words, short_seconds

from .document import Document
from .sections import Grid, Lines, Row, Section

MOST_DEVIATIONS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Document):
    """A plan, and the timeline of its program: when each operator and each collective of one rank's step runs, in
    seconds from 0. Prints as a table of collectives with what hides. `timeline.to_chrome()` is a trace for Perfetto."""

    plan: Plan
    timeline: Timeline
    real: Mapping[str, Any] | None = None
    """A trace with a real step in it (`trace`), if there is one."""

    @property
    def seconds(self) -> float:
        """The seconds of a step: forward, backward and the optimizer."""
        return self.timeline.seconds + self.plan.account.optimizer_seconds

    def to_json(self) -> dict[str, Any]:
        """The step, its parts and its collectives, in seconds and bytes, as plain dicts and numbers."""
        timeline = self.timeline
        return {
            "model": self.plan.model,
            "mesh": dict(self.plan.mesh),
            "cluster": self.plan.cluster,
            "solver": self.plan.solver,
            "seconds": self.seconds,
            "optimizer_seconds": self.plan.account.optimizer_seconds,
            "compute_seconds": timeline.busy_seconds(COMPUTE),
            "communication_seconds": timeline.communication_seconds,
            "exposed_seconds": timeline.exposed_seconds,
            "busy": timeline.busy_seconds(COMPUTE) / timeline.seconds if timeline.seconds else 0.0,
            "utilization": self.plan.utilization,
            "communication": self.collectives(),
            "deviations": self.deviations(),
        }

    def trace(self, real: str | Path | Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The timeline as a trace for Perfetto, beside what `torch.profiler` exported of a `real` step (`merged`)."""
        return self.timeline.to_chrome() if real is None else merged(self.timeline, real)

    def collectives(self) -> list[dict[str, Any]]:
        """What it sends: a row for each kind of collective on each mesh axis, with what of it is hidden."""
        return [{**asdict(row), "hidden_seconds": row.hidden_seconds} for row in self.timeline.communication]

    def deviations(self) -> list[Row]:
        """What takes longer or shorter in the real step than predicted, the largest difference first: a row for each
        instruction that is in both."""
        seconds: dict[str, dict[int, float]] = {}
        for event in self.real["traceEvents"] if self.real is not None else ():
            if event["ph"] == "X":
                times = seconds.setdefault(event["name"], {})
                times[event["pid"]] = times.get(event["pid"], 0.0) + event["dur"] * 1e-6
        both = [(name, times[SIMULATED], times[REAL]) for name, times in seconds.items() if len(times) > 1]
        return [
            {"instruction": name, "predicted_seconds": predicted, "real_seconds": real}
            for name, predicted, real in sorted(both, key=lambda one: -abs(one[1] - one[2]))
        ]

    def sections(self) -> Iterator[Section]:
        """The step, and its collectives."""
        timeline, plan = self.timeline, self.plan
        mfu = "" if plan.utilization is None else f", MFU {plan.utilization:.1%}"
        lines = [
            f"{plan.model} on {mesh_words(plan.mesh, ' x ')} of {plan.cluster}, by {plan.solver}",
            f"step {short_seconds(self.seconds)}{mfu}: forward and backward {short_seconds(timeline.seconds)}, "
            f"optimizer {short_seconds(plan.account.optimizer_seconds)}",
            f"operators {short_seconds(timeline.busy_seconds(COMPUTE))}; communication "
            f"{short_seconds(timeline.communication_seconds)}, exposed {short_seconds(timeline.exposed_seconds)}",
        ]
        rows: list[Row] = [{"collective": row.pop("kind"), **row} for row in self.collectives()]
        yield Section("", [Lines(lines, indent=0)])
        yield Section("", [Grid.of(rows, keys=2)])
        if deviating := self.deviations():
            yield Section("what deviates the most from the real step", [Grid.of(deviating[:MOST_DEVIATIONS])])


@takes(Options)
def simulate(
    model: nn.Module,
    mesh_shape: Mapping[str, int],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    **options: Unpack[Options],
) -> Simulation:
    """Simulates one training step of `plan`, or of the plan of `autopar.plan`, on a cluster, without devices.

    Arguments as for `autopar.plan`. A given plan may run on another cluster than the one that it is for.
    Raises ValueError for what cannot be planned, and for a plan of another model or mesh.
    """
    request = Request(**options)
    if plan is not None:
        request = plan.training.asked_by(request)
        args, kwargs = resized((args, kwargs), plan.longest)
    planner = Planner(model, mesh_shape, args, kwargs, loss_fn=loss_fn, request=request)
    plan = planner.plan() if plan is None else refreshed(planner, plan)  # its figures on this cluster
    return Simulation(plan=plan, timeline=planner.timeline(plan))


SIMULATED, REAL = 0, 1
"""Processes of the merged trace."""

DEVICE_MARKS = "gpu_user_annotation"
"""The category of marks by a device. A trace without them has marks by the host."""

HOST_MARKS = "user_annotation"


def merged(simulated: Timeline, real: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Both as one trace: process 0 is simulated, process 1 is the last step of the program on one rank, as
    `torch.profiler` exported it (`export_chrome_trace`). Each begins at 0.

    While a profiler is active, the executor marks each instruction with its label (`Node.label`, as in
    `Timeline.to_chrome`). One thread shows the marks of operators and waits, and one for each mesh axis its
    collectives, from their start to the end of their wait.

    Raises ValueError if the profile is no trace, or has no marks of the program.
    """
    trace = simulated.to_chrome()
    events = [{**event, "pid": SIMULATED} for event in trace["traceEvents"]]
    axis_of = {event.label: event.stream for event in simulated.events if event.stream != COMPUTE}
    labels = {event.label for event in simulated.events} | {f"collective.wait {e.name}" for e in simulated.events}
    marks = _last_step(_marks(_read(real), labels))
    if not marks:
        raise ValueError(
            f"{_named(real)} has no marks of this program: export it with torch.profiler (export_chrome_trace) from a "
            "step of the module that runs this plan"
        )
    threads = {stream: number for number, stream in enumerate((COMPUTE, *simulated.axes))}
    began = marks[0]["ts"]
    for event in (*marks, *_under_way(marks, axis_of)):
        place = {"pid": REAL, "tid": threads[event.get("stream", COMPUTE)], "ts": event["ts"] - began}
        events.append({"ph": "X", "name": event["name"], "cat": "real", "dur": event["dur"], **place})
    events += [
        {"ph": "M", "name": "thread_name", "pid": REAL, "tid": number, "args": {"name": stream}}
        for stream, number in threads.items()
    ]
    events += [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in ((SIMULATED, "simulated"), (REAL, "real"))
    ]
    return {**trace, "traceEvents": events}


def _named(real: str | Path | Mapping[str, Any]) -> str:
    return "the profile" if isinstance(real, Mapping) else str(real)


def _read(real: str | Path | Mapping[str, Any]) -> list[dict[str, Any]]:
    with reading(f"{_named(real)} is no trace", "give what export_chrome_trace wrote"):
        held = real if isinstance(real, Mapping) else json_of(text_of(real))
        events = held.get("traceEvents") if isinstance(held, Mapping) else None
        if not isinstance(events, list):
            raise ValueError("it has no traceEvents")
        for number, event in enumerate(events):
            if not isinstance(event, Mapping) or not isinstance(event.get("name", ""), str):
                raise ValueError(f"traceEvents[{number}] is no event")
            for key in ("ts", "dur") if event.get("ph") == "X" else ():
                if not is_number(event.get(key)) or not abs(event[key]) <= MOST:
                    raise ValueError(f"{key} of traceEvents[{number}] is no number of microseconds")
        return events


def _marks(events: list[dict[str, Any]], labels: set[str]) -> list[dict[str, Any]]:
    """The marks of instructions, in their order."""
    spans = [event for event in events if event.get("ph") == "X" and event.get("name") in labels]
    of_device = [event for event in spans if event.get("cat") == DEVICE_MARKS]
    marks = of_device or [event for event in spans if event.get("cat") == HOST_MARKS]
    return sorted(marks, key=lambda event: event["ts"])


def _last_step(marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The marks from the last one named like the first on: a step that began before the profiler may lack its start."""
    starts = [i for i, mark in enumerate(marks) if mark["name"] == marks[0]["name"]]
    return marks[starts[-1] :] if starts else []


def _under_way(marks: list[dict[str, Any]], axis_of: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Each collective from its start to the end of its wait, on the stream of its axis."""
    started = {}
    kinds = tuple(f"collective.{kind} " for kind in COLLECTIVES)
    for mark in marks:
        if mark["name"].startswith(kinds):
            started[mark["name"].split(" ", 1)[1]] = mark
        elif mark["name"].startswith("collective.wait "):
            start = started.pop(mark["name"].split(" ", 1)[1], None)
            if start is not None:
                seconds = mark["ts"] + mark["dur"] - start["ts"]
                yield {**start, "dur": seconds, "stream": axis_of[start["name"]]}
