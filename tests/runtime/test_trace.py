"""Traces: a simulated and a real run of one program under the same names; the verb and the command that make them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.cost.timeline import COMPUTE
from autopar.planning.texts import short_seconds
from autopar.report.figure import draw_timeline
from autopar.report.simulation import merged

MESH = {"dp": 2}
WIDTH = 16


def build() -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    """A model for module:callable."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return layers, (torch.randn(8, WIDTH),), torch.mean


def profiled(path: str) -> list[tuple[float, ...]]:
    """Two steps under a profiler between two without; the gradients of all."""
    model, args, loss_fn = build()
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    module = autopar.parallelize(model, mesh, args, loss_fn=loss_fn, solver="ddp")
    sums = []

    def step() -> None:
        module.zero_grad()
        loss_fn(module(*args)).backward()
        gradients = [p.grad for p in module.parameters()]
        sums.append(tuple(float(g.full_tensor().double().abs().sum()) for g in gradients))  # type: ignore[union-attr]

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
        step()
    step()
    if torch.distributed.get_rank() == 0:
        profiler.export_chrome_trace(path)
    return sums


def spans(trace: dict[str, Any], process: int) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == process]


def test_a_real_run_has_the_names_of_the_simulated_one(tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    (first, *others), _ = run(2, profiled, str(path))
    assert others == [first] * 3  # marks change nothing
    model, args, loss_fn = build()
    found = autopar.simulate(model, MESH, args, loss_fn=loss_fn, solver="ddp")
    trace = json.loads(json.dumps(merged(found.timeline, path)))
    simulated, real = spans(trace, 0), spans(trace, 1)
    threads = {e["args"]["name"]: e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert set(threads) == {COMPUTE, "dp"}
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {"simulated", "real"}
    for stream, tid in threads.items():
        names = [e["name"] for e in simulated if e["tid"] == tid and not e["name"].startswith("collective.wait")]
        there = [e["name"] for e in real if e["tid"] == tid and e["name"] in names]
        assert there == names and len(set(names)) == len(names), stream
    assert any(e["name"].startswith("collective.all_reduce") and e["tid"] == threads["dp"] for e in real)
    assert min(e["ts"] for e in real) == 0 and all(e["dur"] >= 0 for e in real)
    rows = replace(found, real=trace).deviations()
    difference = [abs(row["real_seconds"] - row["predicted_seconds"]) for row in rows]
    assert difference == sorted(difference, reverse=True) and {row["instruction"] for row in rows} >= {
        e["name"] for e in simulated if "all_reduce" in e["name"]
    }
    assert rows[0]["instruction"] in str(replace(found, real=trace)) and not found.deviations()
    # views that the simulation counts nothing for are marked too
    assert len({e["name"] for e in real if e["tid"] == threads[COMPUTE]}) >= len(names)


def test_a_profile_of_something_else_is_refused(tmp_path: Path) -> None:
    model, args, loss_fn = build()
    found = autopar.simulate(model, MESH, args, loss_fn=loss_fn, solver="ddp").timeline
    path = tmp_path / "real.json"
    with pytest.raises(ValueError, match=r"is no trace: cannot be read .* give what export_chrome_trace wrote"):
        merged(found, path)
    path.write_text("no trace")
    with pytest.raises(ValueError, match="is no trace: it is not JSON"):
        merged(found, path)
    with pytest.raises(ValueError, match="the profile is no trace: it has no traceEvents"):
        merged(found, {})
    with pytest.raises(ValueError, match=r"the profile has no marks of this program: export it with torch.profiler"):
        merged(found, {"traceEvents": [{"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 0, "dur": 1}]})


def test_the_command_simulates_plans_and_models(tmp_path: Path) -> None:
    plan, trace, figure = tmp_path / "plan.json", tmp_path / "trace.json", tmp_path / "step.png"
    arguments = ["simulate", "test_trace:build", "--mesh", "dp=2,tp=2", "--solver", "ddp", "--json"]
    told = json.loads(CliRunner().invoke(app, [*arguments, "--trace", str(trace), "--figure", str(figure)]).stdout)
    model, args, loss_fn = build()
    made = autopar.plan(model, {"dp": 2, "tp": 2}, args, loss_fn=loss_fn, solver="ddp")
    assert told["seconds"] == pytest.approx(made.seconds)
    assert sum(row["exposed_seconds"] for row in told["communication"]) == pytest.approx(told["exposed_seconds"])
    assert len(json.loads(trace.read_text())["traceEvents"]) > 3 and figure.stat().st_size > 1000
    made.save(plan)
    of_model = ["--model", "test_trace:build"]
    again = CliRunner().invoke(app, ["simulate", str(plan), *of_model, "--cluster", "dgx-a100", "--json"])
    there = autopar.read_plan(plan, model, args, loss_fn=loss_fn, cluster="dgx-a100")
    assert again.exit_code == 0, again.output
    same = json.loads(again.stdout)
    assert (same["cluster"], same["seconds"]) == ("dgx-a100", pytest.approx(there.seconds))
    assert same["utilization"] == pytest.approx(there.utilization)
    here = CliRunner().invoke(app, ["simulate", str(plan), *of_model])
    again_text = CliRunner().invoke(app, ["simulate", str(plan), *of_model, "--cluster", "dgx-a100"])
    assert made.utilization is None and f"step {short_seconds(made.seconds)}" in here.stdout
    assert f"step {short_seconds(there.seconds)}, MFU {there.utilization:.1%}" in again_text.stdout
    assert "give --model" in CliRunner().invoke(app, ["simulate", str(plan)]).stderr.replace("\n", " ")
    other = CliRunner().invoke(app, ["simulate", str(plan), "--solver", "fsdp"])
    assert other.exit_code == 2 and "--solver does not go with a saved plan" in other.stderr
    other = CliRunner().invoke(app, ["simulate", str(plan), "--param-dtype", "bfloat16"])
    assert other.exit_code == 2 and "--param-dtype does not go with a saved plan" in other.stderr
    missing = CliRunner().invoke(app, ["simulate", "test_trace:build"])
    assert missing.exit_code == 2 and "--mesh is missing" in missing.stderr
    alone = CliRunner().invoke(app, [*arguments, "--real", "x.json"])
    assert alone.exit_code == 2 and "x.json is no trace" in alone.stderr
    with pytest.raises(ValueError, match="the figure cannot be written"):
        draw_timeline(autopar.simulate(model, {"a": 2}, args, loss_fn=loss_fn).timeline, tmp_path / "step.nothing")
