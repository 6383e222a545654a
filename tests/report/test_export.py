"""The program and the graph of a plan without ranks: as text, JSON, DOT, and as a module of torch.fx that ranks run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, case
from ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from tower import autopar_, given

import autopar
from autopar.ir.graph import JointGraph
from autopar.ir.program import Program
from autopar.planning.plan import Plan
from autopar.report.export import to_dot, to_json
from autopar.runtime.placements import local_slice

MESH = {"dp": 2, "tp": 2}


def planned(name: str = "llama tied", solver: str = "megatron_sp") -> Plan:
    """A plan of a model without values, as for a cluster that one does not own."""
    with torch.device("meta"):
        of = CASES[name]()
    return autopar.plan(of.model, MESH, of.args, of.kwargs, loss_fn=of.loss_fn, solver=solver)


# --- what a plan gives


def test_a_plan_gives_its_program_and_its_graph(tmp_path: Path) -> None:
    plan = planned()
    program, graph = plan.program(), plan.joint_graph()
    assert isinstance(program, Program) and isinstance(graph, JointGraph)
    plan.save(tmp_path / "plan.json")
    of = case("llama tied")
    read = autopar.read_plan(tmp_path / "plan.json", of.model, of.args, of.kwargs)
    assert read.program().digest == program.digest and str(read.joint_graph()) == str(graph)
    with pytest.raises(ValueError, match=r"read it with autopar.read_plan"):
        Plan.load(tmp_path / "plan.json").program()


def test_json_has_every_instruction_with_shapes_of_a_rank() -> None:
    plan = planned()
    program, graph = plan.program(), plan.joint_graph()
    told = json.loads(json.dumps(to_json(program), allow_nan=False))
    assert [node["op"] for node in told["nodes"]] == [n.op for n in (*program.forward, *program.backward)]
    assert sum(node["phase"] == "backward" for node in told["nodes"]) == len(program.backward)
    named = {i["target"]: i for i in told["inputs"]}
    weight = named["model.layers.0.mlp.up_proj.weight"]
    assert (weight["shape"], weight["local_shape"], weight["layout"]) == ([48, 32], [24, 32], "dp:R tp:S(0%48)")
    assert any({"rank": "tp_rank * 32"} in node["args"] for node in told["nodes"])
    whole = json.loads(json.dumps(to_json(graph), allow_nan=False))
    assert len(whole["nodes"]) == len(graph.nodes) and "mesh" not in whole and told["mesh"] == MESH


def test_dot_has_an_edge_for_each_operand() -> None:
    program = planned().program()
    text = to_dot(program)
    nodes = (*program.forward, *program.backward)
    assert len(re.findall(r"^  n\d+ \[", text, flags=re.MULTILINE)) == len(nodes)
    edges = re.findall(r"^  [ni]\d+ -> n\d+ ", text, flags=re.MULTILINE)
    assert len(edges) == sum(len(set(node.inputs)) for node in nodes)
    assert text.count("collective.all_gather tp") == sum(node.collective == "all_gather" for node in nodes)


# --- torch.fx


def exported(name: str, solver: str, file: str, digest: str) -> None:
    """A rank runs the module of a file beside the parallel model: outputs and gradients are the same, to the bit."""
    of = case(name)
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    parallel = autopar.parallelize(of.model, mesh, of.args, of.kwargs, loss_fn=of.loss_fn, solver=solver)
    program = parallel.program
    module = torch.load(file, weights_only=False)
    assert program.digest == digest
    values: dict[str, Any] = {**dict(of.model.named_buffers()), **dict(of.model.named_parameters())}
    values |= {f"args.{k}": v for k, v in enumerate(of.args)} | {f"kwargs.{k}": v for k, v in of.kwargs.items()}
    coordinate = tuple(mesh.get_coordinate() or ())
    inputs = [
        local_slice(
            torch.ones(i.meta.shape, dtype=i.meta.dtype) if i.role == "tangent" else values[i.target].detach(),
            i.layout,
            program.mesh,
            coordinate,
        )
        for i in program.inputs
    ]
    with torch.no_grad():
        outputs, gradients = module(mesh, *inputs)
    out = parallel(*of.args, **of.kwargs)
    loss = out if of.loss_fn is not None else out.loss
    local = loss.to_local() if isinstance(loss, DTensor) else loss
    forward = [o for o in program.outputs if not o.backward]
    found = next(value for o, value in zip(forward, outputs, strict=True) if value is not None and value.dim() == 0)
    assert torch.equal(found, local.detach())
    loss.backward()
    named = dict(parallel.named_parameters())
    checked = 0
    for o, gradient in zip((o for o in program.outputs if o.backward), gradients, strict=True):
        if o.role == "gradient" and o.target in named:
            expected = named[o.target].grad
            assert isinstance(expected, DTensor)
            assert torch.equal(gradient.reshape(-1), expected.to_local().reshape(-1)), o.target
            checked += 1
    assert checked == len(named)


@pytest.mark.parametrize(("name", "solver"), [("llama tied", "megatron_sp"), ("gpt2", "fsdp"), ("gpt2", "atp")])
def test_a_module_of_fx_is_what_ranks_run(name: str, solver: str, tmp_path: Path) -> None:
    plan = planned(name, solver)
    program, module = plan.program(), autopar.graph_module(plan.program())
    values = [node.meta["value"] for node in module.graph.nodes if "value" in node.meta]
    assert values == [name for n in (*program.forward, *program.backward) for name in n.outputs if name]
    torch.save(module, tmp_path / "program.pt")
    run(4, exported, name, solver, str(tmp_path / "program.pt"), program.digest)


# --- the command line


def test_show_writes_the_program_in_each_format(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    made = autopar_(*("plan", "tower:build", "--batch", "64", "--mesh", "dp=2,tp=2", "--out", file))
    assert made.exit_code == 0 and f"wrote {file}" in made.stderr.replace("\n", "")
    tower = given("tower")
    program = autopar.read_plan(file, **tower).program()
    assert autopar_("show", file, "--program").stdout.strip() == str(program)
    assert json.loads(autopar_("show", file, "--program", "--json").stdout) == json.loads(json.dumps(to_json(program)))
    dot = tmp_path / "graph.dot"
    assert autopar_("show", file, "--graph", "--format", "dot", "--out", str(dot)).stdout == ""
    assert dot.read_text().startswith("digraph {")
    saved = tmp_path / "program.pt"
    assert autopar_("show", file, "--program", "--format", "fx", "--out", str(saved)).exit_code == 0
    assert isinstance(torch.load(saved, weights_only=False), torch.fx.GraphModule)


def test_a_plan_of_python_needs_the_options_of_its_model(tmp_path: Path) -> None:
    tower, file = given("tower"), str(tmp_path / "plan.json")
    autopar.plan(tower.pop("model"), MESH, **tower).save(file)
    assert "give --model" in autopar_("show", file, "--program").output.replace("\n", " ")
    shown = autopar_("show", file, "--program", "--model", "tower:build", "--batch", "64")
    assert shown.exit_code == 0 and shown.stdout.startswith("# one rank of mesh dp=2, tp=2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--program", "--graph"), "were both given"),
        (("--program", "--format", "fx"), "give --out"),
        (("--graph", "--format", "fx"), "--format is 'fx': give text, json or dot"),
        (("--format", "dot"), "--format is 'dot': give text or json"),
        (("--program", "--format", "jsn"), "(did you mean 'json'?)"),
        (("--program", "--format", "dot", "--json"), "give one of them"),
    ],
)
def test_what_cannot_be_shown_is_refused_at_once(options: tuple[str, ...], message: str) -> None:
    failed = autopar_("show", "no-such-plan.json", *options)
    assert failed.exit_code == 2 and message in failed.output.replace("\n", " ")
