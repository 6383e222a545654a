"""Sections as HTML without scripts: what a notebook shows, and the cards of a report. All texts are escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest

from autopar.planning.texts import short_bytes

from .sections import BAD, Bars, Grid, Labelled, Lines, Part, Section, Stack

STYLE = """
.autopar{font:14px/1.45 system-ui,sans-serif;max-width:72rem;color:inherit}
.autopar h1{font-size:1.25rem;margin:.2rem 0 .6rem}.autopar h2{font-size:1.02rem;margin:1.4rem 0 .4rem}
.autopar table{border-collapse:collapse;background:none;color:inherit;margin:0}
.autopar td,.autopar th{text-align:left;vertical-align:top;padding:.12rem .9rem .12rem 0;border:0;background:none;
font-weight:400}
.autopar th{opacity:.7}.autopar .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.autopar .label{opacity:.7;white-space:nowrap}.autopar .bad{color:#c0392b;font-weight:600}
.autopar .chart{container-type:inline-size;max-width:44rem}
.autopar .bars{display:grid;grid-template-columns:fit-content(11rem) minmax(6rem,1fr) max-content}
.autopar .bars>div{display:contents}
.autopar .bars .label{white-space:normal}.autopar .bars .label,.autopar .bars .n{padding:.12rem .7rem .12rem 0}
.autopar .bars .n{padding:.12rem 0 .12rem .7rem}
.autopar .track{position:relative;display:flex;align-items:center;border-right:1px solid #8883;
background:repeating-linear-gradient(90deg,#8883 0 1px,transparent 1px var(--step))}
.autopar .fill{height:.8rem;border-radius:0 2px 2px 0;background:#3b7dd8;min-width:2px}
.autopar .pale .fill{opacity:.5}
.autopar .ticks{position:relative;height:1.4em;font-size:.86em;opacity:.7}
.autopar .ticks span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.autopar .ticks span:first-child{transform:none}.autopar .ticks span:last-child{transform:translateX(-100%)}
@container (max-width:34rem){.autopar .bars{grid-template-columns:1fr max-content;grid-auto-flow:dense}
.autopar .bars .track,.autopar .bars .ticks{grid-column:1/-1}.autopar .bars .track{margin-bottom:.35rem}
.autopar .bars>div>:empty{display:none}}
.autopar .stack{display:flex;height:1.3rem;border:1px solid #8888;border-radius:3px;overflow:hidden;max-width:44rem}
.autopar .key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em;vertical-align:-.05em}
.autopar .legend span{margin-right:1.2em;white-space:nowrap}
.autopar details{margin-left:1.1rem}.autopar summary{cursor:pointer;margin-left:-1.1rem}
.autopar .dim{opacity:.72}.autopar .at{overflow-wrap:anywhere}
.autopar code{font:12px ui-monospace,Menlo,Consolas,monospace;background:none;color:inherit}
.autopar svg.tensor{vertical-align:middle}.autopar svg.tensor .own{fill:#3b7dd8;fill-opacity:.75}
.autopar svg.tensor path{stroke:#888;stroke-width:.7;fill:none}
.autopar svg.tensor .edge{fill:none;stroke:#888}
.autopar .strong{font-weight:600}
"""

COLOURS = {
    "parameters": "#3b7dd8",
    "gradients": "#e0912f",
    "optimizer": "#8e63b8",
    "inputs and outputs": "#8a94a0",
    "kept for backward": "#3c9d6d",
    "temporaries": "#d1495b",
}
"""Of the parts of memory; the optimizer's states have its name."""


def fragment(sections: Iterable[Section]) -> str:
    """Sections as a part of a page, with its style."""
    first, *others = sections
    title = f"<h1>{escape(first.heading)}</h1>" * bool(first.heading)
    return f'<div class="autopar"><style>{STYLE}</style>{title}{body(first.parts)}{below(others)}</div>'


def body(parts: Iterable[Part]) -> str:
    return "".join(map(html_of, parts))


def below(sections: Iterable[Section]) -> str:
    """Sections with their headings."""
    return "".join(heading(one.heading) * bool(one.heading) + body(one.parts) for one in sections)


def heading(text: str, anchor: str = "") -> str:
    return f"<h2{f' id={chr(34)}{anchor}{chr(34)}' if anchor else ''}>{escape(text)}</h2>"


def html_of(part: Part) -> str:
    match part:
        case Lines(texts, _, style):
            return "".join(f'<div class="{style if style != "bold" else "strong"}">{escape(t)}</div>' for t in texts)
        case Labelled(rows):
            return table(([_label(label), escape(text)] for label, text in rows), classes=("label", ""))
        case Bars(rows, _, strong):
            return _bars(rows, strong)
        case Stack(parts, whole):
            return _stack(parts, whole)
        case Grid(heads, rows, right=right):
            classes = ["n" if i in right else "" for i in range(len(heads))]
            return table(([*map(escape, row)] for row in rows), heads, classes)


def table(
    rows: Iterable[Sequence[str]], heads: Sequence[str] = (), classes: Sequence[str] = (), names: Sequence[str] = ()
) -> str:
    """A table of cells of HTML, under heads that are text, in columns of these classes. Rows with `names` are found by
    them."""
    kinds = [f' class="{kind}"' if kind else "" for kind in classes]
    opened = [f'<tr class="site" data-name="{escape(name)}">' for name in names]
    top = f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>" if heads else ""
    body = ""
    for number, row in enumerate(rows):
        cells = "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip_longest(row, kinds[: len(row)], fillvalue=""))
        body += f"{opened[number] if opened else '<tr>'}{cells}</tr>"
    return f"<table>{top}{body}</table>"


def _label(label: str) -> str:
    return f'<span class="bad">{escape(label)}</span>' if label in BAD else escape(label)


def _bars(bars: Sequence[tuple[str, float, str]], strong: str) -> str:
    """Bars of labels, seconds and what is written behind them, over an axis. Beside a `strong` one others are pale."""
    step, labels = seconds_ticks(max(seconds for _, seconds, _ in bars))
    end = step * (len(labels) - 1)
    body = "".join(
        f'<div class="{"" if strong in ("", label) else "pale"}"><span class="label">{escape(label)}</span>'
        f'<span class="track"><span class="fill" style="width:{100 * max(0.0, seconds) / end:.2f}%"></span></span>'
        f'<span class="n">{escape(text)}</span></div>'
        for label, seconds, text in bars
    )
    marks = "".join(
        f'<span style="left:{100 * k / (len(labels) - 1):g}%">{label}</span>' for k, label in enumerate(labels)
    )
    return (
        f'<div class="chart"><div class="bars" style="--step:{100 / (len(labels) - 1):.4f}%">{body}'
        f'<div><span></span><span class="ticks">{marks}</span><span></span></div></div></div>'
    )


def seconds_ticks(longest: float) -> tuple[float, list[str]]:
    """The step of an axis from 0 to `longest` or a little more, in at most four steps, and its labels."""
    longest = max(longest, 1e-9)
    power = 10.0 ** math.floor(math.log10(longest / 4))
    step = next(step for k in (1, 2, 2.5, 5, 10) if longest <= 4 * (step := k * power))
    end = math.ceil(longest / step - 1e-9)
    unit, size = next((u, s) for u, s in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)) if s <= longest)
    return step, ["0", *(f"{k * step / size:,.10g} {unit}" for k in range(1, end + 1))]


def _stack(parts: Sequence[tuple[str, int]], whole: float) -> str:
    """One bar, and what its colours are."""
    keys = [
        (COLOURS.get(label, COLOURS["optimizer"]), f"{escape(label)} {short_bytes(size)}", size)
        for label, size in parts
    ]
    bar = "".join(
        f'<div style="width:{100 * size / max(whole, 1):.3f}%;background:{colour}" title="{text}"></div>'
        for colour, text, size in keys
    )
    legend = "".join(f'<span><i class="key" style="background:{colour}"></i>{text}</span>' for colour, text, _ in keys)
    return f'<div class="stack">{bar}</div><div class="legend">{legend}</div>'
