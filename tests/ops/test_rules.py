"""Rules that users register: a line makes an operator of one's own split, and the oracle proves the line."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import models
import plans
import pytest
import torch
from models import Case, assert_same, eager, simulated
from ranks import outcomes, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.ops.expansions import LocalCall, all_reduce
from autopar.ops.oracle import RuleError, make_call
from autopar.ops.rule import Call, OpRule
from autopar.ops.rules import rule_of
from autopar.ops.template import Dim, assemble
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.planning.planner import Planner


def scale_rows() -> Any:
    """y[m, k] = x[m, k] * s[m], with its gradient, under a name that no other test has."""

    @torch.library.custom_op(f"autopar_test_{uuid.uuid4().hex}::scale_rows", mutates_args=())
    def op(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x * s[:, None]

    @op.register_fake
    def fake(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, s = ctx.saved_tensors
        return op(gradient, s), (gradient * x).sum(1)

    op.register_autograd(backward, setup_context=setup)
    return op


def name(op: Any) -> str:
    return f"{op._qualname.replace('::', '.')}.default"


class Scaled(nn.Module):
    def __init__(self, op: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(16, 1)
        self.op = lambda *args: op(*args)  # unlike the operator itself, a function can be copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.op(self.up(x), self.gate(x)[:, 0])))


def scaled(op: Callable[..., torch.Tensor], rows: int = 8) -> Case:
    torch.manual_seed(0)

    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(rows, 16, generator=torch.Generator().manual_seed(step)),), {}

    return Case(model=Scaled(op), batch=batch, loss_fn=models.mean_square)


# ------------------------------------------------------------------------------------- what a line does


def test_a_line_is_proved_and_splits_the_operator() -> None:
    op = scale_rows()
    with pytest.raises(ValueError, match="has no rule for"):
        autopar.check_rule(name(op), torch.randn(12, 12), torch.randn(12))
    model = scaled(op).model
    model.op = op
    assert Planner(model, {"a": 4}, scaled(op).args).space.without_rule == {name(op): 2}
    autopar.register_rule(op._qualname, "m k, m -> m k", linear=[[0], [1]])
    report = autopar.check_rule(op._qualname, torch.randn(12, 12), torch.randn(12))
    assert set(report.factors) == {"m", "k"} and report.linear > 0 and report.instances > 20


@pytest.mark.parametrize("mesh", [{"a": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_a_model_with_an_operator_of_its_own(mesh: dict[str, int]) -> None:
    op = scale_rows()
    autopar.register_rule(op._qualname, "m k, m -> m k", linear=[[0], [1]])
    made = scaled(op)
    expected = eager(made)
    planner = Planner(made.model, mesh, made.args, loss_fn=made.loss_fn)
    assert not planner.space.without_rule
    for solver in ("dp", "ddp", "fsdp", "megatron", "megatron_sp"):
        assert_same(simulated(planner.program(planner.plan(solver=solver)), planner.captured, made), expected)
    for seed in range(5):
        program = bucket(codegen(planner.space, plans.random_assignment(planner.space, seed)))
        assert_same(simulated(program, planner.captured, made), expected)


def local_rows(op: Any, program: Any) -> set[int]:
    """Rows that a rank gives to the operator."""
    calls = [i for i in (*program.forward, *program.backward) if i.op == name(op)]
    assert len(calls) == 2
    return {program.metas[i.outputs[0]].shape[0] for i in calls}


def test_the_solver_splits_it_as_it_does_its_own() -> None:
    """Many rows, small weights: every rank has its rows of the operator; weights and gradients travel, rows do not."""
    op = scale_rows()
    autopar.register_rule(op._qualname, "m k, m -> m k", linear=[[0], [1]])
    made = scaled(op, rows=1 << 20)
    with torch.device("meta"):
        model = Scaled(op)
    inputs = (torch.empty(1 << 20, 16, device="meta"),)
    planner = Planner(model, {"a": 4}, inputs, loss_fn=made.loss_fn)
    program = planner.program(planner.plan(solver="dp"))
    assert local_rows(op, program) == {1 << 18}
    assert max(size for *_, size in program.collectives()) < 1 << 20


def test_a_wrong_line_is_found_out() -> None:
    """The scale belongs to the rows: a line that gives it to nothing is false for every split of the rows."""
    op = scale_rows()
    autopar.register_rule(op._qualname, "m k, k -> m k")
    with pytest.raises(RuleError, match="factor m of size 12 % 2 on 2 ranks: does not run on shards"):
        autopar.check_rule(op._qualname, torch.randn(12, 12), torch.randn(12))
    autopar.register_rule(op._qualname, "m k, m -> m k", linear=[[0, 1]], replace=True)
    with pytest.raises(RuleError, match=r"Partial operands \(0, 1\)"):
        autopar.check_rule(op._qualname, torch.randn(12, 12), torch.randn(12))
    autopar.register_rule(op._qualname, "m k, m -> m k", replace=True)
    assert autopar.check_rule(op._qualname, torch.randn(12, 12), torch.randn(12)).linear == 0


def tiles() -> Any:
    """x [m, k] -> [times m, k], its rows repeated as a whole, and the sums of the columns."""

    @torch.library.custom_op(f"autopar_test_{uuid.uuid4().hex}::tiles", mutates_args=())
    def op(x: torch.Tensor, times: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.shape[0] == rows
        return x.repeat(times, 1), x.sum(0)

    @op.register_fake
    def fake(x: torch.Tensor, times: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty(times * x.shape[0], x.shape[1]), x.new_empty(x.shape[1])

    return op


def test_a_function_and_arguments_for_shards() -> None:
    """A split of x's rows is a split of every tile, and the op is told how many rows it has."""
    op = tiles()

    def rule(call: Call) -> OpRule | None:
        if call.argument("times") > 3:
            return None
        return assemble(call, [("m", "k")], [("m", "k"), ("k",)], {"m": Dim(size=call.inputs[0].shape[0])})

    def local(call: Call, inputs: Any, outputs: Any) -> Any:
        args = call.node.args
        return (args[0], args[1], inputs[0][0]), call.node.kwargs

    autopar.register_rule(op._qualname, rule, local=local)
    report = autopar.check_rule(op._qualname, torch.randn(12, 12), 3, 12)
    assert set(report.factors) == {"m", "k"}
    assert rule_of(make_call(name(op), (torch.randn(12, 12), 4, 12), {})[0]) is None


def largest() -> Any:
    """x [m, k] -> [m]: the logarithm of the sum of exponentials."""

    @torch.library.custom_op(f"autopar_test_{uuid.uuid4().hex}::logsum", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.logsumexp(1)

    @op.register_fake
    def fake(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape[0])

    return op


def test_an_expansion() -> None:
    """log sum exp over a split dim, from those of the shards."""

    def expand(local: LocalCall) -> torch.Tensor:
        mine = local.result()
        largest = all_reduce(mine, "max", local.splits["k"])
        total = all_reduce(torch.exp(mine - largest), "sum", local.splits["k"])
        return torch.log(total) + largest

    def rule(call: Call) -> OpRule:
        return assemble(call, [("m", "k")], [("m",)], {"k": Dim(expands=True, reductions=("",))})

    op = largest()
    autopar.register_rule(op._qualname, rule, expand=expand)
    assert set(autopar.check_rule(op._qualname, torch.randn(12, 12)).factors) == {"m", "k"}


# ----------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("m k, m", {}, "one '->'"),
        ("m k -> m k", {}, r"it has 1 operands, and the op 2 tensors \(x, s\)"),
        ("m k, m -> m k, m", {}, "it has 2 results, and the op 1"),
        ("m k, m -> m j", {}, "no operand has 'j'"),
        ("m k, m -> m k?", {}, r"'k\?' is no dim"),
        ("m m, m -> m m", {}, "'m m' has a name twice"),
        ("*i *j, m -> *i", {}, "'\\*i \\*j' has two parts of any number"),
        ("m k, m -> m k", {"linear": [[2]]}, r"linear of .* holds \(2,\): give sets of tensor arguments, 0 to 1"),
        ("m k, m -> m k", {"linear": [[]]}, r"linear of .* holds \(\)"),
        ("m k, m -> m k", {"expands": ["m"]}, "give `expands` .* and `expand` .* together"),
        ("m k, m -> m k", {"expands": ["j"], "expand": print}, "expands names 'j', which no operand has"),
        (lambda call: None, {"linear": [[0]]}, "go with a template"),
    ],
)
def test_lines_that_do_not_fit(rule: Any, options: dict[str, Any], message: str) -> None:
    op = scale_rows()
    with pytest.raises(ValueError, match=message):
        autopar.register_rule(op._qualname, rule, **options)
    assert rule_of(make_call(name(op), (torch.randn(2, 2), torch.randn(2)), {})[0]) is None


def test_operators_that_cannot_be_registered() -> None:
    for op, message in (
        ("mylib::nothing", "there is no operator 'mylib::nothing'"),
        ("aten.mm.sideways", "there is no operator"),
        ("scale rows", "is no operator's name"),
        (3, "is no operator's name"),
        ("aten::mm", "autopar has a rule of its own for aten.mm.default"),
        ("aten::reshape", "autopar has a rule of its own for aten.reshape.default"),
        ("aten::add_.Tensor", "writes into its arguments"),
    ):
        with pytest.raises(ValueError, match=message):
            autopar.register_rule(op, "m k, m k -> m k")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no operator"):
        autopar.check_rule("mylib::nothing", torch.randn(2))


def test_a_second_registration() -> None:
    op = scale_rows()
    for _ in range(2):
        autopar.register_rule(op._qualname, "m k, m -> m k")
    for rule, options in (("m k, m! -> m k", {}), ("m k, m -> m k", {"linear": [[0]]})):
        with pytest.raises(ValueError, match=r"registered already, as 'm k, m -> m k' .*replace=True"):
            autopar.register_rule(op._qualname, rule, **options)  # type: ignore[arg-type]
    autopar.register_rule(op._qualname, "m k!, m -> m k!", replace=True)
    assert autopar.check_rule(op._qualname, torch.randn(12, 12), torch.randn(12)).factors == ("m",)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("b m k, m -> b m k", r"it has 3 dims for float32\[8, 32\]: write '\*name'"),
        (lambda call: "m k", "it is a str: return an OpRule"),
        (lambda call: OpRule(factors=(), inputs=((None,) * 2,), outputs=((None,) * 2,)), "1 operands, and the call 2"),
        (
            lambda call: OpRule(factors=(), inputs=((0, None), (None,)), outputs=((None,) * 2,)),
            r"operand 0 carries \(0, None\), and there are 0 factors",
        ),
        (
            lambda call: OpRule(factors=(), inputs=((None,), (None,)), outputs=((None,) * 2,)),
            r"it has 1 dims for operand 0, which is float32\[8, 32\]",
        ),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_a_call(rule: Any, message: str) -> None:
    op = scale_rows()
    autopar.register_rule(op._qualname, rule)
    made = scaled(op)
    with pytest.raises(ValueError, match=message):
        autopar.plan(made.model, {"a": 2}, made.args, loss_fn=made.loss_fn)


# ------------------------------------------------------------------------------------------- real ranks


def train_with_a_rule(on: tuple[int, ...]) -> None:
    """Steps of a model with a custom operator, on ranks of which those in `on` register its rule."""

    @torch.library.custom_op("autopar_test_ranks::scale_rows", mutates_args=())
    def op(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x * s[:, None]

    @op.register_fake
    def fake(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, s = ctx.saved_tensors
        return op(gradient, s), (gradient * x).sum(1)

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    if torch.distributed.get_rank() in on:
        autopar.register_rule("autopar_test_ranks::scale_rows", "m k, m -> m k", linear=[[0], [1]])
    made = scaled(op)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    module = autopar.parallelize(made.model, mesh, made.args, loss_fn=made.loss_fn, solver="ddp")
    assert "autopar_test_ranks.scale_rows.default" in str(module.program)
    assert local_rows(op, module.program) == {4} if on == (0, 1) else True
    expected = models.train(models.Eager(made), models.adamw(made.model), made, range(3))
    found = models.train(module, models.adamw(module), made, range(3))
    assert found[0] == pytest.approx(expected[0], rel=1e-5)


def test_a_rule_on_two_ranks() -> None:
    run(2, train_with_a_rule, (0, 1))


def test_a_rule_on_one_rank_only() -> None:
    found = outcomes(2, train_with_a_rule, (0,))
    messages = {str(outcome.error) for outcome in found}
    assert len(messages) == 1 and all(isinstance(outcome.error, ValueError) for outcome in found), found
