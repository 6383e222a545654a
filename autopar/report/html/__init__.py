"""A plan as one HTML page that needs no network: everything that it says, with its timeline and its memory over the
step, to search, fold and zoom.

The drawings are inline SVG, and canvases that 200 lines of JavaScript draw. No chart library draws shards, groups of
ranks or a timeline of tens of thousands of events that one zooms into; for the remaining area chart, plotly alone would
add 4 MB to every page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from autopar.cost.memory import KINDS
from autopar.cost.timeline import COMPUTE
from autopar.planning.plan import Plan
from autopar.planning.texts import digits, mesh_words, pairs, short_bytes, short_seconds
from autopar.planning.timing import OPERATOR_KINDS, operator_kind

from .. import page
from ..explain.anatomy import Anatomy
from ..facts import called, candidates, count_text, numbered, range_text, rate_of, work_of
from ..hypertext import COLOURS, STYLE, below, body, heading, table
from ..sections import Bars, Labelled, Lines
from .drawing import mesh_svg
from .modules import modules_html

NANO = 1e9

KIND_COLOURS = {
    **{kind: COLOURS[kind] for kind in ("parameters", "gradients", "optimizer", "temporaries")},
    "inputs": COLOURS["inputs and outputs"],
    "outputs": "#6b7280",
    "activations": COLOURS["kept for backward"],
}

KIND_WORDS = {"activations": "kept for backward"}

POLICY = "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\""
"""What the page may load: nothing."""


def report_html(plan: Plan) -> str:
    """The page. Raises ValueError for a plan without its model (`autopar.read_plan` reads one with it)."""
    about = plan.anatomy()
    assert isinstance(about, Anatomy)
    data = json.dumps(page_data(plan, about), separators=(",", ":"), allow_nan=False)
    for char, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):  # no text ends the script
        data = data.replace(char, code)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" {POLICY}>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(page.title(plan))}</title><style>{STYLE}{_asset('page.css')}</style></head>"
        f'<body><div class="autopar">{"".join(_body(plan, about))}</div>'
        f'<div id="tip" hidden></div><script type="application/json" id="data">{data}</script>'
        f"<script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")


def save_report(plan: Plan, path: str | Path) -> None:
    """Writes the page of a `plan` to `path`, a file that ends in .html. Raises ValueError for a plan without its model
    (`autopar.read_plan` reads one with it), and if the file cannot be written."""
    text = report_html(plan)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): give the path of a file") from error


SECTIONS = {
    "timeline": "one step of a rank",
    "modules": "the model",
    "mesh": "the mesh",
    "presets": "the plan and the presets",
    "segments": "blocks and segments",
    "from": "provenance",
}

LOGO = (
    '<svg class="logo" viewBox="0 0 24 24" aria-hidden="true"><path d="M5 6 L12 12 L19 5 M12 12 L6 19 M12 12 L19 18" '
    'fill="none" stroke="currentColor" stroke-width="1.6"/>'
    + "".join(f'<circle cx="{x}" cy="{y}" r="2.6"/>' for x, y in ((5, 6), (12, 12), (19, 5), (6, 19), (19, 18)))
    + "</svg>"
)


def _body(plan: Plan, about: Anatomy) -> Iterator[str]:
    links = "".join(f'<a href="#{anchor}">{escape(words)}</a>' for anchor, words in SECTIONS.items())
    yield (
        f'<nav><span class="links">{links}</span>'
        '<span class="finds"><input id="search" type="search" placeholder="search names" aria-label="search names">'
        '<button id="unfold">unfold all</button><button id="fold">fold all</button></span></nav>'
    )
    yield _header(plan)
    yield '<div class="cards">'
    (about_plan,), *groups = page.overview(plan)
    notes = [Lines([f"warning: {text}" for text in page.warnings(plan)], style="bold")]
    yield _card("the plan", body([*about_plan.parts, *notes]), "third first")
    for first, *others in groups:
        yield _card(first.heading, body(first.parts) + below(others), "third")
    yield _card(SECTIONS["timeline"], "".join(_step(plan, about)), anchor="timeline")
    drawn = "the coloured part of a tensor is what rank 0 has; S(0) splits dim 0, R is whole"
    yield _card(SECTIONS["modules"], body([Lines([drawn], style="dim")]) + modules_html(plan), "most", "modules")
    inputs = body([Labelled([(name, " ".join(placed)) for name, placed in plan.inputs.items()])])
    yield _card(SECTIONS["mesh"], f"{mesh_svg(plan, about.reach)}{heading('inputs')}{inputs}", "least", "mesh")
    yield _card(SECTIONS["presets"], _candidates(plan), "half", "presets")
    yield _card(SECTIONS["from"], _origin(plan), "half", "from")
    yield _card(SECTIONS["segments"], "".join(_segments(plan, about)), anchor="segments")
    yield "</div>"


def _card(title: str, shown: str, width: str = "", anchor: str = "") -> str:
    return f'<section class="card {width}">{heading(title, anchor)}{shown}</section>'


def _header(plan: Plan) -> str:
    """What the page is about, and the figures that a reader wants first."""
    origin = plan.provenance
    about = [f"mesh {mesh_words(plan.mesh, ' × ')}, {plan.ranks:,} devices", f"cluster {plan.cluster}"]
    if origin is not None:
        about.insert(0, f"{count_text(origin.parameter_count)} parameters, {origin.dtype}")
        about.append(f"planned by {pairs(origin.versions)}")
    tiles = "".join(
        f'<div class="tile"><div class="dim">{escape(label)}</div><b>{escape(figure)}</b>'
        f'<div class="dim">{escape(note)}</div></div>'
        for label, figure, note in _figures(plan)
    )
    return (
        f'<header><div class="brand">{LOGO}autopar <span class="dim">plan</span></div><h1>{escape(plan.model)}</h1>'
        f'<p>{"".join(f"<span>{escape(text)}</span>" for text in about)}</p><div class="tiles">{tiles}</div></header>'
    )


def _figures(plan: Plan) -> Iterator[tuple[str, str, str]]:
    limit, left, rate = plan.memory_limit_bytes, plan.headroom_bytes, rate_of(plan)
    between = " to ".join(map(short_seconds, plan.range_seconds)) if plan.range_seconds is not None else ""
    yield "predicted step", short_seconds(plan.seconds), between
    if rate is not None:
        yield f"{work_of(plan)[1]} a second", digits(rate), f"{digits(rate / plan.ranks)} a device"
    if plan.utilization is not None:
        yield "model FLOPs utilization", f"{plan.utilization:.1%}", "of the devices' peak"
    spare = "" if limit is None or left is None else f"{short_bytes(left)} to spare" if left >= 0 else "does not fit"
    yield "memory of a rank", short_bytes(plan.bytes), f"of {short_bytes(limit)}, {spare}" if limit and spare else ""
    if plan.timing is not None and plan.seconds:
        waits = plan.exposed_seconds
        yield "waits for communication", f"{waits / plan.seconds:.1%}", f"{short_seconds(waits)} of the step"


def _step(plan: Plan, about: Anatomy) -> Iterator[str]:
    step = about.timeline
    yield (
        f'<div class="dim">simulated: {short_seconds(step.seconds)} of forward and backward, and '
        f"{short_seconds(plan.account.optimizer_seconds)} of the optimizer. Drag to move, scroll or use the buttons "
        "to zoom; hover for what runs.</div>"
        '<div class="tools"><button data-zoom="whole">whole step</button><button data-zoom="forward">forward</button>'
        '<button data-zoom="backward">backward</button><button data-zoom="in" aria-label="zoom in">+</button>'
        '<button data-zoom="out" aria-label="zoom out">−</button><span id="range" class="dim"></span></div>'
        '<canvas id="streams"></canvas><div id="streams-key" class="legend"></div>'
        '<div id="shares" class="dim">At this zoom the height of a colour is its share of the time. Zoom in to see '
        "single operators.</div>"
        '<h2>memory of a rank over the step</h2><canvas id="memory"></canvas>'
        '<div id="memory-key" class="legend"></div>'
    )


def _candidates(plan: Plan) -> str:
    known = sorted(candidates(plan), key=lambda candidate: candidate.seconds)
    if not known:
        return ""
    names = {c: f"{called(c.name)} (chosen)" if c.precision == "chosen" else called(c.name) for c in known}
    said = {c: "" if c.precision in ("chosen", "simulated") else f"{c.precision} " for c in known}
    bars = [(names[c], c.seconds, said[c] + short_seconds(c.seconds)) for c in known]
    peaks = ", ".join(f"{names[c]} {short_bytes(c.bytes)}" for c in known if c.bytes is not None)
    chosen = next(names[c] for c in known if c.precision == "chosen")
    return body([Bars(bars, plan.seconds, chosen), Lines([f"memory at the peak: {peaks}"], style="dim")])


def _segments(plan: Plan, about: Anatomy) -> Iterator[str]:
    for segment in plan.segments:
        copies, operators = about.segments.get(segment.name, (0, 0))
        yield f"<div><code>{escape(segment.name)}</code> <b>× {copies}</b>, {operators} operators each</div>"
        for numbers, run in numbered(segment):
            again = ", recomputed in backward" if run.recompute else ""
            yield _decided(f"copies {range_text(numbers)}{again}", run.decisions, plan, about)
    yield _decided("outside of repeated segments", plan.decisions, plan, about)
    blocks = [
        (
            f"<code>{escape(block.name)}</code>{f' <b>× {block.count}</b>' if block.count > 1 else ''}",
            str(block.operators),
            escape(", ".join(block.splits)),
        )
        for block in about.blocks
    ]
    names = [" ".join(block.modules) for block in about.blocks]
    title = f"{sum(block.count for block in about.blocks)} ParallelBlocks: what splits together without communication"
    yield _folded(title, table(blocks, ("block", "operators", "can be split by"), ("", "n", ""), names))


def _folded(title: str, rows: str) -> str:
    return f'<details><summary>{escape(title)}</summary><div class="wide">{rows}</div></details>'


def _decided(title: str, decisions: Mapping[str, str], plan: Plan, about: Anatomy) -> str:
    sites = {name: about.sites.get(name, ("", "")) for name in decisions}
    rows = (
        (
            f"<code>{escape(name)}</code>",
            *map(escape, sites[name]),
            *(f"<code>{escape(w)}</code>" for w in choice.split()),
        )
        for name, choice in decisions.items()
    )
    names = [f"{name} {module}" for name, (_, module) in sites.items()]
    heads = ("site", "kind", "module", *plan.mesh, "")
    return _folded(f"{title}: {len(decisions)} decisions", table(rows, heads, ("", "dim", "dim"), names))


def _origin(plan: Plan) -> str:
    origin = plan.provenance
    rows = [("solver", plan.solver), ("cost", plan.cost), ("optimizer", plan.optimizer)]
    if origin is not None:
        rows += [(f"input {name}", text) for name, text in origin.inputs.items()]
        rows += [(name, text) for name, text in origin.versions.items()]
        rows += [("command", origin.command)] if origin.command else []
    lines = escape("\n".join(origin.cluster) if origin is not None else "")
    return body([Labelled(rows)]) + _folded("figures of the cluster", f"<pre>{lines}</pre>")


def page_data(plan: Plan, about: Anatomy) -> dict[str, Any]:
    """What the script draws: events and moments, in nanoseconds and bytes. Words are numbers into lists of them. The
    time and the bytes of a moment are those that it has more than the one before; zeros at its end are left out."""
    step, words = about.timeline, _Words()
    streams = [COMPUTE, *(axis for axis in step.axes if any(event.stream == axis for event in step.events))]
    number = {stream: k for k, stream in enumerate(streams)}
    return {
        "seconds": plan.seconds,
        "optimizer_seconds": plan.account.optimizer_seconds,
        "bytes": plan.bytes,
        "limit": plan.memory_limit_bytes,
        "streams": streams,
        "operators": list(OPERATOR_KINDS),
        "kinds": [KIND_WORDS.get(kind, kind) for kind in KINDS],
        "colours": [KIND_COLOURS[kind] for kind in KINDS],
        "backward": round(min((e.start_seconds for e in step.events if e.backward), default=0.0) * NANO),
        "end": round(step.seconds * NANO),
        "events": [
            [number[e.stream], round(e.start_seconds * NANO), round(e.seconds * NANO), words(e.op), words(e.module),
             e.bytes, round(e.alone_seconds * NANO),
             *([OPERATOR_KINDS.index(operator_kind(e))] if e.stream == COMPUTE else ())]
            for e in step.events
        ],
        "stalls": [
            [round(s.start_seconds * NANO), round(s.seconds * NANO), number.get(s.stream, 0)] for s in step.stalls
        ],
        "moments": list(_moments(about, words)),
        "words": words.list,
    }  # fmt: skip


def _moments(about: Anatomy, words: _Words) -> Iterator[list[int]]:
    time, parts = 0, (0,) * len(KINDS)
    for moment in about.moments:
        now = round(moment.seconds * NANO)
        more = [after - before for before, after in zip(parts, moment.parts, strict=True)]
        row = [now - time, words(moment.phase), words(moment.op), words(moment.module), *more]
        while not row[-1] and len(row) > 4:
            row.pop()
        yield row
        time, parts = now, moment.parts


class _Words:
    """Numbers of words."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, word: str) -> int:
        return self.numbers.setdefault(word, len(self.numbers))

    @property
    def list(self) -> list[str]:
        return list(self.numbers)


__all__ = ["page_data", "report_html", "save_report"]
