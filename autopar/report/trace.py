"""Trace: a simulated and a real run of one program, side by side in Perfetto, under the same names.

While a profiler is active, the executor marks each instruction with its label (`Node.label`, as in
`Timeline.to_chrome`). Of what the profiler wrote, `merged` takes these marks: operators and waits on one thread, and on
one for each mesh axis what was started until it was waited for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar.cost.timeline import COMPUTE, Timeline
from autopar.ir.program import COLLECTIVES

SIMULATED, REAL = 0, 1
"""Processes of the merged trace."""

DEVICE_MARKS = "gpu_user_annotation"
"""The category of marks as a device ran them, which are taken where there are any; else those of the host."""

HOST_MARKS = "user_annotation"


def merged(simulated: Timeline, real: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Both as one trace: process 0 is simulated, process 1 is the last step of what `torch.profiler` exported
    (`export_chrome_trace`) of a run of the same program on one rank. Each begins at 0.

    Raises ValueError where the profile is no trace, or has no marks of the program.
    """
    trace = simulated.to_chrome()
    events = [{**event, "pid": SIMULATED} for event in trace["traceEvents"]]
    axis_of = {event.label: event.stream for event in simulated.events if event.stream != COMPUTE}
    known = {event.label for event in simulated.events} | {f"collective.wait {e.name}" for e in simulated.events}
    marks = _last_step(_marks(_read(real), known))
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
    if not isinstance(real, Mapping):
        try:
            real = json.loads(Path(real).read_text())
        except OSError as error:
            why = f"{real} cannot be read ({error.strerror}): give what export_chrome_trace wrote"
            raise ValueError(why) from error
        except ValueError as error:
            raise ValueError(f"{real} is no trace: it is not JSON ({error})") from error
    events = real.get("traceEvents") if isinstance(real, Mapping) else None
    if not isinstance(events, list):
        raise ValueError(f"{_named(real)} is no trace: it has no traceEvents; give what export_chrome_trace wrote")
    return events


def _marks(events: list[dict[str, Any]], known: set[str]) -> list[dict[str, Any]]:
    """Those of instructions, in their order."""
    spans = [event for event in events if event.get("ph") == "X" and event.get("name") in known]
    of_device = [event for event in spans if event.get("cat") == DEVICE_MARKS]
    found = of_device or [event for event in spans if event.get("cat") == HOST_MARKS]
    return sorted(found, key=lambda event: event["ts"])


def _last_step(marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A step begins with the first mark of all. Started before the profiler was, one may lack its beginning."""
    again = [i for i, mark in enumerate(marks) if mark["name"] == marks[0]["name"]]
    return marks[again[-1] :] if again else []


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
