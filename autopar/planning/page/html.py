"""The page of a plan as HTML without scripts: what a notebook shows, and the first sections of a report.

Figures are those of `sections`, which the page in a terminal prints too. All texts are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape

from ..record import Record
from ..texts import short_bytes
from . import sections
from .drawing import tensor_svg
from .tree import Module, module_tree
from .words import parameter_words

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
.autopar .warning{color:#b9770e}
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


def notebook_html(plan: Record) -> str:
    """The page, compact: verdict, bars, communication, and where parameters live."""
    rows, legend = sections.placements(plan)
    parts = [
        *overview(plan),
        heading("where parameters and inputs live"),
        rows_html((escape(name), escape(words)) for name, words in rows),
        *(f'<div class="dim">{escape(line)}</div>' for line in legend),
    ]
    return f'<div class="autopar"><style>{STYLE}</style>{"".join(parts)}</div>'


def overview(plan: Record) -> Iterator[str]:
    """Title, verdict, warnings, and where the step, the memory and the traffic go."""
    yield f"<h1>{escape(sections.title(plan))}</h1>"
    yield from verdict_html(plan)
    if bars := sections.step_bars(plan):
        yield heading("where the step goes")
        yield seconds_bars((bar.label, bar.part * plan.seconds, bar.text) for bar in bars)
    yield heading("memory of a rank at its peak")
    yield memory_html(plan)
    yield heading("communication of a step, by mesh axis")
    yield rows_html((escape(axis), escape(text)) for axis, text in sections.communication(plan))


def verdict_html(plan: Record) -> Iterator[str]:
    """Whether it fits, how long a step takes, why this plan, and what to beware of."""
    yield rows_html((_label(label), escape(text)) for label, text in sections.verdict(plan))
    for text in sections.warnings(plan):
        yield f'<div class="warning">warning: {escape(text)}</div>'


def heading(text: str, anchor: str = "") -> str:
    return f"<h2{f' id={chr(34)}{anchor}{chr(34)}' if anchor else ''}>{escape(text)}</h2>"


def rows_html(rows: Iterable[tuple[str, str]]) -> str:
    """A table of two columns of HTML."""
    body = "".join(f'<tr><td class="label">{name}</td><td>{words}</td></tr>' for name, words in rows)
    return f"<table>{body}</table>"


def seconds_bars(rows: Iterable[tuple[str, float, str]], strong: str = "") -> str:
    """Bars of labels, seconds and what is written behind them, over an axis. Beside a `strong` one others are pale."""
    bars = list(rows)
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


def _label(label: str) -> str:
    return f'<span class="bad">{escape(label)}</span>' if label == "NO FIT" else escape(label)


def memory_html(plan: Record) -> str:
    """What the peak consists of, as one bar of the memory limit."""
    parts = sections.memory_parts(plan)
    whole = max(plan.memory_limit_bytes or 0.0, plan.bytes, 1)
    whole = whole if whole <= 4 * plan.bytes else max(plan.bytes, 1)
    keys = [(COLOURS.get(label, COLOURS["optimizer"]), (label, size)) for label, size in parts]
    bar = "".join(
        f'<div style="width:{100 * size / whole:.3f}%;background:{colour}" title="{escape(label)} '
        f'{short_bytes(size)}"></div>'
        for colour, (label, size) in keys
    )
    legend = "".join(
        f'<span><i class="key" style="background:{colour}"></i>{escape(label)} {short_bytes(size)}</span>'
        for colour, (label, size) in keys
    )
    notes = "".join(f'<div class="dim">{escape(note)}</div>' for note in sections.notes(plan))
    at = f'<div class="dim at">the peak is at {escape(plan.peak.at)}</div>'
    return f'<div class="stack">{bar}</div><div class="legend">{legend}</div>{notes}{at}'


def modules_html(plan: Record) -> str:
    """The model as nested modules that fold, with the shards of each tensor drawn."""
    tree = module_tree(plan.model, plan.parameters)
    return _module(tree, plan, depth=0)


def _module(module: Module, plan: Record, depth: int) -> str:
    """A module that folds. Modules of parameters alone, such as linear layers, are rows of the one that they are in."""
    count = f" <b>× {module.count}</b>" if module.count > 1 else ""
    size = f'<span class="dim"> {sections.count_text(module.elements)} parameters</span>'
    body = [_table(_parameter(module.path, name, name, plan) for name, _ in module.parameters)]
    rows: list[str] = []
    for inner in module.modules:
        if inner.modules or inner.count > 1:
            body += [_table(rows), _module(inner, plan, depth + 1)]
            rows = []
        else:
            rows += (_parameter(inner.path, name, f"{inner.name}.{name}", plan) for name, _ in inner.parameters)
    body.append(_table(rows))
    return (
        f'<details class="module" data-name="{escape(module.path)}"{" open" if depth < 4 else ""}><summary>'
        f"<code>{escape(module.name)}</code>{count}{size}</summary>{''.join(body)}</details>"
    )


def _table(rows: Iterable[str]) -> str:
    text = "".join(rows)
    return f'<table class="tensors">{text}</table>' if text else ""


def _parameter(path: str, name: str, shown: str, plan: Record) -> str:
    full = f"{path}.{name}" if path else name
    parameter = plan.parameters[full]
    use = parameter.in_use[0] if parameter.in_use else parameter.at_rest
    words = parameter_words(parameter, tuple(plan.mesh))
    shape = " × ".join(f"{length:,}" for length in parameter.shape)
    uses = list(dict.fromkeys(" ".join(layout) for layout in parameter.in_use)) or ["nowhere"]
    return (
        f'<tr class="parameter" data-name="{escape(full)}"><td><code>{escape(shown)}</code><br>'
        f'<span class="dim">{shape}</span></td>'
        f"<td>{tensor_svg(parameter.shape, parameter.at_rest, plan.mesh)}</td>"
        f'<td class="dim">at rest<br><code>{escape(" ".join(parameter.at_rest))}</code></td>'
        f"<td>{tensor_svg(parameter.shape, use, plan.mesh)}</td>"
        f'<td class="dim">in use<br><code>{escape(" or ".join(uses))}</code></td>'
        f"<td>{escape(words)}</td></tr>"
    )
