"""The page of a plan: its figures are the plan's, nothing is loaded, names are escaped, and a browser shows it without
an error. (That test needs playwright, and Chromium: playwright's own, or the one that CHROMIUM names.)"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn
from tower import given
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.cost.memory import KINDS
from autopar.planning.plan import ParameterPlan, Plan
from autopar.planning.texts import short_seconds
from autopar.report import page as shown_page
from autopar.report.facts import called
from autopar.report.html import report_html, save_report
from autopar.report.html.drawing import tensor_svg
from autopar.report.html.modules import module_tree
from autopar.report.hypertext import seconds_ticks

MESH = {"dp": 2, "tp": 2}
VOID = {"meta", "br", "input", "rect", "path"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> & \"'"


@cache
def plan(name: str) -> Plan:
    arguments = given(name)
    return autopar.plan(arguments.pop("model"), MESH, cluster="dgx-h100", **arguments)


@cache
def page(name: str) -> str:
    return report_html(plan(name))


class Parsed(HTMLParser):
    """Tags that are open, all attributes, the texts, and the data of the script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.data = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data = self.data or data
        elif not (self.open and self.open[-1] == "style"):
            self.text.append(data)


# --- figures


def summed(moments: list[list[int]]) -> list[list[int]]:
    """As the script reads them: each row says what it has more than the one before."""
    rows, now = [], [0] * (4 + len(KINDS))
    for row in moments:
        more = [*row, *[0] * (len(now) - len(row))]
        now = [more[i] if i in (1, 2, 3) else now[i] + more[i] for i in range(len(now))]
        rows.append(now)
    return rows


@pytest.mark.parametrize("name", ["tower", "gpt2"])
def test_figures_are_the_plans(name: str) -> None:
    made, parsed = plan(name), Parsed(page(name))
    data = json.loads(parsed.data)
    assert (data["seconds"], data["bytes"], data["limit"]) == (made.seconds, made.bytes, made.memory_limit_bytes)
    assert data["end"] / 1e9 + made.account.optimizer_seconds == pytest.approx(made.seconds, abs=2e-9)
    moments = summed(data["moments"])
    held = [moment[4:] for moment in moments]
    most = max(held, key=sum)
    assert sum(most) == made.bytes
    assert dict(zip(KINDS, most, strict=True)) == {kind: getattr(made.peak, kind) for kind in KINDS}
    starts = [moment[0] for moment in moments]
    assert starts == sorted(starts) and starts[-1] == data["end"]
    assert made.timing is not None
    for row in made.timing.communication:
        own = [e for e in data["events"] if data["streams"][e[0]] == row.axis]
        kinds = [e for e in own if data["words"][e[3]] == f"collective.{row.kind}"]
        assert (len(kinds), sum(e[5] for e in kinds)) == (row.count, row.bytes)
    text = " ".join(parsed.text)
    for label, words in (*shown_page.verdict(made), *shown_page.communication(made)):
        assert label in text and words in text
    for label, _, words in shown_page.step_bars(made):
        assert label in text and words in text
    assert made.provenance is not None
    for candidate in made.provenance.candidates:
        assert called(candidate.name) in text and short_seconds(candidate.seconds) in text


def test_the_header_says_what_it_is_of_and_what_made_it() -> None:
    made = plan("gpt2")
    assert made.provenance is not None and made.utilization is not None
    header = page("gpt2").partition("<header>")[2].partition("</header>")[0]
    for words in (made.model, "mesh dp=2 × tp=2, 4 devices", "cluster dgx-h100", f"{made.utilization:.1%}"):
        assert words in header
    assert all(f"{name} {number}" in header for name, number in made.provenance.versions.items())
    assert page("gpt2") == report_html(made)


@pytest.mark.parametrize("name", ["tower", "gpt2"])
def test_operators_are_coloured_by_the_kinds_that_the_bars_count(name: str) -> None:
    made, data = plan(name), json.loads(Parsed(page(name)).data)
    assert made.timing is not None
    seconds = dict.fromkeys(data["operators"], 0.0)
    for event in data["events"]:
        if event[0] == 0:
            seconds[data["operators"][event[7]]] += event[2] / 1e9
    timing = made.timing
    counted = (timing.products_seconds, timing.attention_seconds, timing.others_seconds)
    assert tuple(seconds.values()) == pytest.approx(counted, abs=1e-6)


@pytest.mark.parametrize("longest", [0.0, 2.5e-9, 0.00045, 0.04, 0.289, 0.888, 1.0, 3.2, 1234.0])
def test_an_axis_has_few_labels_that_differ_and_reaches_the_longest_bar(longest: float) -> None:
    step, labels = seconds_ticks(longest)
    assert 2 <= len(labels) <= 5 and len(set(labels)) == len(labels)
    assert longest <= step * (len(labels) - 1) * 1.0001 and len({label.split()[-1] for label in labels[1:]}) == 1


def test_every_parameter_and_decision_is_there() -> None:
    made, parsed = plan("gpt2"), Parsed(page("gpt2"))
    names = [
        attributes["data-name"] or "" for tag, attributes in parsed.tags if tag == "tr" and "data-name" in attributes
    ]
    patterns = {re.sub(r"\.\d+\.", ".0.", name) for name in made.parameters}
    assert patterns <= set(names) | {re.sub(r"\.\d+\.", ".0.", name) for name in names}
    sites = " ".join(names)
    assert all(name in sites for name in made.decisions)


# --- the page by itself


@pytest.mark.parametrize("name", ["tower", "gpt2"])
def test_nothing_is_loaded(name: str) -> None:
    parsed = Parsed(page(name))
    assert not parsed.open
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "action", "onload", "onclick", "onerror"} & attributes.keys()
        assert str(attributes.get("href") or "#").startswith("#")
    assert "http://" not in page(name).replace("http://www.w3.org", "") or name == "gpt2"
    assert "default-src 'none'" in page(name)


def hostile() -> Plan:
    inner = nn.ModuleDict({HOSTILE: nn.Linear(32, 32)})

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner[HOSTILE](x))

    Odd.__name__ = HOSTILE
    return autopar.plan(Odd(), MESH, (torch.zeros(8, 32),), loss_fn=models.mean_square, cluster="dgx-h100")


def test_names_are_text() -> None:
    made = hostile()
    assert any(HOSTILE in name for name in made.parameters)
    parsed = Parsed(report_html(made))
    assert [tag for tag, _ in parsed.tags if tag in ("script", "img")] == ["script", "script"]
    assert HOSTILE in json.loads(parsed.data)["words"][0] or any(
        HOSTILE in word for word in json.loads(parsed.data)["words"]
    )
    assert "<img" not in made._repr_html_() and "<script" not in made._repr_html_()


def test_a_notebook_shows_a_part_of_it() -> None:
    made = plan("gpt2")
    shown = made._repr_html_()
    parsed = Parsed(shown)
    assert not parsed.open and not [tag for tag, _ in parsed.tags if tag in ("script", "canvas")]
    assert all(words in " ".join(parsed.text) for _, words in shown_page.verdict(made))
    assert "\n" not in repr(made) and len(shown) < 20_000


def test_a_plan_without_its_model_says_how_to_read_it() -> None:
    with pytest.raises(ValueError, match=r"read it with autopar\.read_plan"):
        report_html(Plan.from_json(json.loads(json.dumps(plan("tower").to_json()))))


def test_the_command_writes_what_the_library_writes(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = CliRunner().invoke(
        app, ["plan", "tower:build", "--mesh", "dp=2,tp=2", "--cluster", "dgx-h100", "--out", str(file)]
    )
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["report", str(file), "-o", str(tmp_path / "plan.html")])
    assert done.exit_code == 0, done.output
    written = (tmp_path / "plan.html").read_text()
    assert json.loads(Parsed(written).data)["seconds"] == Plan.load(file).seconds
    failed = CliRunner().invoke(app, ["report", str(file), "-o", str(file)])
    assert failed.exit_code == 2 and "ends in .html" in failed.output.replace("\n", " ")
    assert Plan.load(file)
    with pytest.raises(ValueError, match="cannot be written"):
        save_report(plan("tower"), tmp_path)


# --- what is repeated


def layers(count: int, odd: int | None = None) -> dict[str, ParameterPlan]:
    alike = ParameterPlan(at_rest=("R", "S(0)"), in_use=(("R", "S(0)"),), gather="keep", shape=(64, 64))
    other = replace(alike, at_rest=("R", "R"), in_use=(("R", "R"),))
    names = [f"layers.{k}.{end}.weight" for k in range(count) for end in ("q", "mlp.up")]
    return {name: other if odd is not None and f".{odd}." in name else alike for name in ("embed.weight", *names)}


@pytest.mark.parametrize("count", [32, 128])
def test_equal_layers_are_one_with_their_count(count: int) -> None:
    tree = module_tree("Model", layers(count))
    (of_layers,) = tree.modules[1].modules
    assert (of_layers.name, of_layers.count, of_layers.path) == (f"0 to {count - 1}", count, "layers.0")
    assert tree.elements == (1 + 2 * count) * 64 * 64
    assert len(list(tree.walk())) == 7


def test_a_layer_that_differs_stands_alone() -> None:
    inner = module_tree("Model", layers(32, odd=5)).modules[1].modules
    assert [(module.name, module.count) for module in inner] == [("0 to 4", 5), ("5", 1), ("6 to 31", 26)]


def test_shards_are_drawn() -> None:
    whole = tensor_svg((64, 64), ("R", "R"), MESH)
    assert "whole on every rank" in whole and whole.count("<path") == 0
    split = tensor_svg((64, 64), ("S(0)", "S(1)"), MESH)
    assert split.count("<path") == 2 and 'class="own" x="0.0" y="0.0" width="27.0" height="27.0"' in split
    periods = tensor_svg((64,), ("S(0%16)", "R"), MESH)
    assert periods.count('class="own"') == 4
    many = tensor_svg((64, 64), ("S(0)",), {"dp": 1024})
    assert many.count("<path") == 0 and "dim 0 in 1024 on dp" in many
    assert "a number" in tensor_svg((), ("R",), {"dp": 2})


# --- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        try:
            made = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield made
        made.close()


@pytest.mark.parametrize("name", ["tower", "gpt2", "hostile"])
def test_a_browser_shows_it(browser: Any, name: str, tmp_path: Path) -> None:
    made = hostile() if name == "hostile" else plan(name)
    file = tmp_path / "plan.html"
    save_report(made, file)
    shown, said = browser.new_page(viewport={"width": 1200, "height": 900}), []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("dialog", lambda dialog: said.append("dialog"))
    shown.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
    shown.goto(file.as_uri())
    shown.wait_for_timeout(200)
    text = shown.inner_text("body")
    for _, words in shown_page.verdict(made):
        assert words in text
    assert f"of {short_seconds(made.seconds)}" in shown.inner_text("#range")
    shown.locator("#streams").hover(position={"x": 90, "y": 20})
    assert "from" in shown.inner_text("#tip") or "waits" in shown.inner_text("#tip")
    shown.locator("#memory").hover(position={"x": 300, "y": 100})
    assert "parameters" in shown.inner_text("#tip")
    for button in ("forward", "backward", "in", "in", "out", "whole"):
        shown.click(f"[data-zoom={button}]")
    shown.mouse.wheel(0, -300)
    parameter = next(reversed(made.parameters))
    shown.fill("#search", parameter[:12])
    visible = shown.locator("tr.parameter:visible").count()
    assert visible and visible <= shown.locator("tr.parameter").count()
    shown.fill("#search", "nothing has this name")
    assert shown.locator("tr.parameter:visible").count() == 0
    shown.fill("#search", "")
    shown.click("#unfold")
    assert shown.locator("tr.parameter:visible").count() == shown.locator("tr.parameter").count()
    shown.click("#fold")
    assert shown.locator("tr.parameter:visible").count() == 0
    assert said == []
    shown.close()


WRITTEN = """
const write = CanvasRenderingContext2D.prototype.fillText;
window.written = [];
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, most) {
  const wide = Math.min(this.measureText(text).width, most || 1e9);
  const left = x - ({ center: wide / 2, right: wide }[this.textAlign] || 0);
  const top = y - (this.textBaseline === "middle" ? 6 : 0);
  const whole = this.canvas.getBoundingClientRect().width;
  window.written.push([this.canvas.id, text, left, left + wide, top, top + 12, whole]);
  write.apply(this, [text, x, y, ...(most ? [most] : [])]);
};
"""


@pytest.mark.parametrize("width", [400, 700, 1200, 2000])
def test_labels_stand_apart_and_nothing_is_cut(browser: Any, width: int, tmp_path: Path) -> None:
    """The texts of the drawings as they are written, and the boxes of those of the page."""
    save_report(plan("gpt2"), tmp_path / "plan.html")
    shown = browser.new_page(viewport={"width": width, "height": 900})
    shown.add_init_script(WRITTEN)
    shown.goto((tmp_path / "plan.html").as_uri())
    shown.wait_for_timeout(200)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    shown.evaluate("window.written = []")
    shown.click("[data-zoom=whole]")
    written = shown.evaluate("window.written")
    texts = [text for _, text, *_ in written]
    assert {*json.loads(Parsed(page("gpt2")).data)["streams"]} <= {*texts} and any("peak" in text for text in texts)
    for one, (canvas, text, left, right, top, bottom, wide) in enumerate(written):
        assert left >= -1 and right <= wide + 1, text
        for other, name, start, end, above, below, _ in written[one + 1 :]:
            apart = canvas != other or right < start or end < left or bottom <= above or below <= top
            assert apart, f"{text} and {name}"
    boxes = shown.evaluate(
        "[...document.querySelectorAll('.ticks')].map(t => [...t.children].map(c => "
        "{ const b = c.getBoundingClientRect(); return [b.left, b.right]; }))"
    )
    assert len(boxes) == 2
    for row in boxes:
        assert all(before[1] < after[0] for before, after in itertools.pairwise(row))
    shown.close()
