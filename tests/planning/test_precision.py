"""Precision: a step with casts is that of one process which casts by hand, gathers and reductions are in the dtypes
that were asked for, and plans count and say what is cast."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import plans
import pytest
import torch
import torch.distributed as dist
from micro_batches import assert_promised
from models import assert_close, assert_same, eager, simulated, whole
from pairwise import pairwise
from ranks import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import Precision
from autopar.ir.graph import CAST, Node, Ref, TensorMeta
from autopar.ir.layout import Replicate, Split
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.passes.capture.errors import CaptureError
from autopar.passes.codegen.precision import with_casts, written
from autopar.passes.lower.accumulate import accumulation
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.request import Gathers, Request
from autopar.runtime.simulate import simulate_step

GRID = {"dp": 2, "tp": 2}
NAMES = ("gpt2", "llama of 4 layers", "mlp with loss_fn", "mlp with outputs", "llama tied")
"""gpt2's embedding is its head, too: its gradient is a sum of two."""

WIDE = Precision(param_dtype=torch.float32, reduce_dtype=torch.float64)
"""Of float64 models: what is wrong shows far above the rounding of float32."""

MIXED = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NARROW = Precision(reduce_dtype=torch.bfloat16)
REDUCTIONS = ("all_reduce", "reduce_scatter")


@functools.cache
def planner(name: str, precision: Precision, dtype: torch.dtype = torch.float32, micro_batches: int = 1) -> Planner:
    made = models.in_dtype(models.case(name), dtype)
    asked = Request(precision=precision, micro_batches=micro_batches)
    return Planner(made.model, GRID, made.args, made.kwargs, loss_fn=made.loss_fn, request=asked)


class ByHand(nn.Module):
    """A model that uses its parameters and inputs in another dtype, as one process does it; under its own names."""

    def __init__(self, model: nn.Module, used: torch.dtype, inputs: torch.dtype | None) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.__dict__.update(model=model, used=used, inputs=inputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point() and self.inputs is not None
            return value.to(self.inputs) if floating else value

        used = {name: parameter.to(self.used) for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(
            self.model, used, tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}
        )


def by_hand(name: str, dtype: torch.dtype, used: torch.dtype) -> models.Case:
    made = models.in_dtype(models.case(name), dtype)
    return models.Case(model=ByHand(made.model, used, used), batch=made.batch, loss_fn=made.loss_fn)


# --- the same as one process


@pytest.mark.parametrize(("name", "seed"), pairwise(NAMES, tuple(range(4))))
def test_any_plan_gives_what_one_process_gives_that_casts_by_hand(name: str, seed: int) -> None:
    made = planner(name, WIDE, torch.float64)
    program = written(made.space, plans.random_assignment(made.space, seed))
    case = by_hand(name, torch.float64, torch.float32)
    plain = models.in_dtype(models.case(name), torch.float64)
    expected = eager(case)
    assert {gradient.dtype for gradient in expected.gradients.values()} == {torch.float64}
    assert_same(simulated(program, made.captured, plain), expected, 2e-5)
    wrong = simulated(written(*_in(name, AS_IS)), planner(name, AS_IS, torch.float64).captured, plain)
    outputs = [name for name in expected.outputs if expected.outputs[name].is_floating_point()]
    assert any(not torch.equal(wrong.outputs[path].float(), expected.outputs[path].float()) for path in outputs)


AS_IS = Precision()


def _in(name: str, precision: Precision) -> Any:
    made = planner(name, precision, torch.float64)
    return made.space, plans.random_assignment(made.space, 0)


@pytest.mark.parametrize("solver", ["ddp", "fsdp", "dp"])
def test_lowered_programs_do_too(solver: str) -> None:
    name = "llama of 4 layers"
    made = planner(name, WIDE, torch.float64)
    program = made.program(made.plan(solver=solver, cost="serial"))
    plain = models.in_dtype(models.case(name), torch.float64)
    expected = eager(by_hand(name, torch.float64, torch.float32))
    assert_same(simulated(program, made.captured, plain), expected, 2e-5)


def test_a_layer_that_is_repeated_is_still_one_segment() -> None:
    made, plain = planner("llama of 4 layers", MIXED), planner("llama of 4 layers", AS_IS)
    assert [r.count for r in made.segments.repeats] == [r.count for r in plain.segments.repeats] != []


class Scaled(nn.Module):
    """A gradient that is the sum over the batch of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


@pytest.mark.parametrize(
    ("used", "reduced", "small", "expected"),
    [
        (torch.bfloat16, torch.float32, 2**-10, 1 + 2**-10),
        (torch.bfloat16, None, 2**-10, 1.0),
        (None, torch.bfloat16, 2**-10, 1.0),
        (None, None, 2**-10, 1 + 2**-10),
    ],
)
def test_what_two_ranks_add_up_is_rounded_in_the_dtype_of_the_reduction(
    used: torch.dtype | None, reduced: torch.dtype | None, small: float, expected: float
) -> None:
    """One rank has 1, the other 2^-10, whose sum bfloat16 does not have."""
    batch = torch.tensor([[1.0], [small]])
    made = Planner(Scaled(), {"a": 2}, (batch,), precision=Precision(param_dtype=used, reduce_dtype=reduced))
    program = made.program(made.plan(solver="ddp"))
    (gradient,) = simulate_step(program, {"weight": torch.ones(1)}, {"args.0": batch}).gradients.values()
    assert gradient.dtype == torch.float32 and gradient.item() == expected


# --- what is issued


def dtypes_of(program: Program) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Of the gathers of parameters, and of what enters the tail of backward, and all reductions in it."""
    known = {i.name for i in program.inputs if i.role == "parameter"}
    gathered: set[torch.dtype] = set()
    for node in (*program.forward, *program.backward):
        if node.inputs and known.issuperset(node.inputs):
            known.update(name for name in node.outputs if name)
            if node.collective:
                gathered.add(program.metas[node.name].dtype)
    rest = accumulation(program).rest
    return gathered, {rest.metas[node.name].dtype for node in rest.backward if node.collective}


@pytest.mark.parametrize("solver", ["fsdp", "megatron_sp"])
@pytest.mark.parametrize(
    ("precision", "gathered", "reduced"),
    [
        (MIXED, torch.bfloat16, torch.float32),
        (Precision(param_dtype="bfloat16"), torch.bfloat16, torch.bfloat16),
        (NARROW, torch.float32, torch.bfloat16),
    ],
)
def test_gathers_carry_what_is_used_and_reductions_what_is_asked_for(
    solver: str, precision: Precision, gathered: torch.dtype, reduced: torch.dtype
) -> None:
    made = planner("llama of 4 layers", precision)
    program = made.program(made.plan(solver=solver))
    found = dtypes_of(program)
    assert found[0] <= {gathered} and found[1] == {reduced}
    assert solver != "fsdp" or found[0]
    casts = [node for node in (*program.forward, *program.backward) if node.op == CAST]
    assert all(program.metas[node.inputs[0]].dtype != program.metas[node.name].dtype for node in casts)
    held = {i.meta.dtype for i in program.inputs if i.role == "parameter"}
    returned = {o.meta.dtype for o in program.outputs if o.role == "gradient" and o.meta is not None}
    assert held == returned == {torch.float32}


WAYS: tuple[tuple[int, Gathers], ...] = ((1, "each"), (4, "each"), (4, "once"))


@pytest.mark.parametrize(("name", "precision", "way", "seed"), pairwise(NAMES, (MIXED, NARROW), WAYS, tuple(range(5))))
def test_the_objective_counts_the_collectives_that_are_issued(
    name: str, precision: Precision, way: tuple[int, Gathers], seed: int
) -> None:
    micro_batches, gathers = way
    made = planner(name, precision, micro_batches=micro_batches).gathering(gathers)
    assignment = plans.random_assignment(made.space, seed)
    assert_promised(made.space, assignment, written(made.space, assignment), micro_batches, gathers)


@pytest.mark.parametrize("solver", ["serial", "analytical"])
def test_the_account_is_the_objective(solver: str) -> None:
    plan = planner("llama of 4 layers", MIXED).plan(cost=solver)
    assert plan.objective_seconds == pytest.approx(plan.account.seconds)
    assert 0 < plan.lower_bound_seconds <= plan.seconds


def test_gathers_halve_and_reductions_stay() -> None:
    """Against the same preset in float32: bytes as they are priced."""
    sent = {}
    for precision in (AS_IS, MIXED, NARROW):
        plan = planner("llama of 4 layers", precision).plan(solver="fsdp", cost="serial")
        sent[precision] = {(c.kind, c.axis): c.bytes for c in plan.account.collectives if c.bytes > 1000}
    for key, size in sent[AS_IS].items():
        assert sent[MIXED][key] == (size / 2 if key[0] == "all_gather" else size)
        assert sent[NARROW][key] == (size if key[0] == "all_gather" else size / 2)


def test_masters_gradients_and_states_are_as_wide_as_at_rest() -> None:
    mixed, plain = (planner("llama of 4 layers", p).plan(solver="fsdp") for p in (MIXED, AS_IS))
    for kind in ("parameters", "optimizer"):
        assert getattr(mixed.peak, kind) == getattr(plain.peak, kind)
    assert mixed.account.gradient_bytes == plain.account.gradient_bytes
    assert mixed.account.parameter_bytes == plain.account.parameter_bytes


def test_micro_batches_add_up_in_the_wider_dtype() -> None:
    for precision, pending in ((MIXED, torch.float32), (NARROW, torch.float32)):
        made = planner("llama of 4 layers", precision)
        parts = accumulation(made.program(made.plan(solver="fsdp")))
        assert {parts.rest.metas[name].dtype for name in parts.pending} == {pending}


# --- casts in a program


def program(forward: tuple[Node, ...], backward: tuple[Node, ...], saved: tuple[str, ...], gradient: str) -> Program:
    whole_meta, part = TensorMeta((4, 2), torch.bfloat16), TensorMeta((2, 2), torch.bfloat16)
    layout = (Split(0, 4),)
    names = {name for node in (*forward, *backward) for name in node.outputs}
    return Program(
        axes=("a",),
        mesh=(2,),
        inputs=(
            ProgramInput(name="w", role="parameter", target="w", meta=whole_meta, layout=layout),
            ProgramInput(name="t", role="tangent", target="output", meta=whole_meta, layout=(Replicate(),)),
        ),
        forward=forward,
        backward=backward,
        saved=saved,
        outputs=(
            ProgramOutput(name="y", role="output", target="output", meta=whole_meta, layout=(Replicate(),)),
            ProgramOutput(name=gradient, role="gradient", target="w", meta=whole_meta, layout=layout),
        ),
        metas={"w": part, "t": whole_meta, **{n: part if n in ("g", "g_done") else whole_meta for n in names}},
    )


GATHER = Node(op="collective.all_gather", args=(Ref("w"), 0), outputs=("w_all",))
WAIT = Node(op="collective.wait", args=(Ref("w_all"),), outputs=("w_there",))
USE = Node(op="aten.neg.default", args=(Ref("w_there"),), outputs=("y",))
DERIVE = Node(op="aten.neg.default", args=(Ref("t"),), outputs=("d",))
REDUCE = Node(op="collective.reduce_scatter", args=(Ref("d"), "sum", 0), outputs=("g",))
DONE = Node(op="collective.wait", args=(Ref("g"),), outputs=("g_done",))


def test_a_part_is_cast_before_it_is_gathered_and_a_gradient_before_and_after_it_is_reduced() -> None:
    made = with_casts(
        program((GATHER, WAIT, USE), (DERIVE, REDUCE, DONE), (), "g_done"), {"w": torch.float64}, torch.float32
    )
    assert [(n.op, n.outputs[0]) for n in made.forward][:2] == [(CAST, "w_used"), ("collective.all_gather", "w_all")]
    assert [n.outputs[0] for n in made.backward] == ["d", "d_to_reduce", "g", "g_done", "g_done_at_rest"]
    dtypes = {name: made.metas[name].dtype for name in ("w", "w_used", "d", "g", "g_done", "g_done_at_rest")}
    assert list(dtypes.values()) == [
        torch.float64, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.float64,
    ]  # fmt: skip
    assert made.inputs[0].meta.dtype == torch.float64 and made.outputs[1].name == "g_done_at_rest"


def test_backward_casts_anew_what_it_gathers_again_and_keeps_nothing_for_it() -> None:
    again = tuple(
        Node(op=n.op, args=tuple(Ref(f"{a}_late") if a == Ref("w_all") else a for a in n.args), outputs=(out,))
        for n, out in ((GATHER, "w_all_late"), (WAIT, "w_there_late"))
    )
    use = Node(op="aten.mul.Tensor", args=(Ref("w_there_late"), Ref("t")), outputs=("d",))
    made = with_casts(
        program((GATHER, WAIT, USE), (*again, use, REDUCE, DONE), ("w",), "g_done"), {"w": torch.float32}, None
    )
    assert made.saved == ("w",) and [n.op for n in made.backward].count(CAST) == 2
    assert made.metas["w"].dtype == torch.float32 and made.backward[1].inputs != ("w",)


def test_backward_reads_what_forward_cast_where_it_is_used_as_it_rests() -> None:
    use = Node(op="aten.mul.Tensor", args=(Ref("w"), Ref("t")), outputs=("d",))
    made = with_casts(program((GATHER, WAIT, USE), (use, REDUCE, DONE), ("w",), "g_done"), {"w": torch.float32}, None)
    assert made.saved == ("w_used",) and made.backward[0].inputs == ("w_used", "t")


def test_without_a_reduction_nothing_is_cast_to_its_dtype() -> None:
    plain = program((GATHER, WAIT, USE), (DERIVE,), (), "d")
    assert with_casts(plain, {}, torch.float32) == plain


# --- what is said


def test_a_plan_says_what_is_cast_and_reads_back(tmp_path: Path) -> None:
    made, case = planner("mlp with loss_fn", MIXED), models.case("mlp with loss_fn")
    plan = made.plan(solver="fsdp")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.training.precision == MIXED
    for text in (plan.text(width=1000), plan.text(width=1000, full=True)):
        assert "parameters rest in float32 and are used in bfloat16" in text
        assert "gradients are reduced in float32" in text
    again = autopar.read_plan(loaded, case.model, case.args, loss_fn=case.loss_fn)
    assert (again.seconds, again.bytes) == (pytest.approx(plan.seconds), plan.bytes)
    assert plan.digest != planner("mlp with loss_fn", AS_IS).plan(solver="fsdp").digest
    with pytest.raises(ValueError, match=r"training with .*param_dtype.*and this is the default"):
        planner("mlp with loss_fn", AS_IS).check(loaded)


def test_dtypes_are_torchs_or_text() -> None:
    assert Precision(param_dtype=torch.bfloat16) == Precision(param_dtype="bfloat16")
    assert Precision(param_dtype=torch.float16).used_in(torch.int64) == torch.int64


@pytest.mark.parametrize("wrong", ["bf16", torch.int64, torch.float8_e4m3fn, 16, True])
@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_what_is_no_floating_dtype_is_one_clear_error(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*: give a floating dtype \(float64, float32, "):
        Precision(**{name: wrong})


def test_what_is_no_precision_is_one_clear_error() -> None:
    case = models.case("mlp with loss_fn")
    with pytest.raises(ValueError, match=r"precision is 'bf16': give an autopar\.Precision, such as"):
        autopar.plan(case.model, GRID, case.args, loss_fn=case.loss_fn, precision="bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cast_forward_inputs is 1: give True or False"):
        Precision(cast_forward_inputs=1)  # type: ignore[arg-type]


def test_a_parameter_that_forward_writes_is_refused() -> None:
    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.count.add_(1)
            return super().forward(x).sum()

    model = Counting(4, 4)
    model.count = nn.Parameter(torch.zeros(1), requires_grad=False)
    with pytest.raises(CaptureError, match="forward writes parameter count, of which param_dtype gives it a cast"):
        autopar.plan(model, {"a": 2}, (torch.ones(2, 4),), precision=MIXED)


class Looking(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.to(self.weight.dtype)), str(x.dtype), str(self.weight.dtype)


@pytest.mark.parametrize(
    ("precision", "seen", "output"),
    [
        (Precision(param_dtype="bfloat16", output_dtype="float32"), ("bfloat16", "bfloat16"), torch.float32),
        (Precision(param_dtype="bfloat16", cast_forward_inputs=False), ("float32", "bfloat16"), torch.bfloat16),
        (Precision(reduce_dtype="bfloat16"), ("float32", "float32"), torch.float32),
    ],
)
def test_inputs_outputs_and_what_python_sees(precision: Precision, seen: tuple[str, str], output: torch.dtype) -> None:
    batch = torch.ones(2, 4)
    captured = Planner(Looking(4, 4), {"a": 2}, (batch,), precision=precision).captured
    assert captured.input_leaves[0].meta == TensorMeta((2, 4), torch.float32)
    assert captured.output_leaves[0].meta == TensorMeta((2, 4), output)
    assert [leaf.constant for leaf in captured.output_leaves[1:]] == [f"torch.{name}" for name in seen]


# --- real ranks

STEPS = 2


def parallel(precision: Precision, **options: Any) -> Any:
    case = models.case("llama of 4 layers")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("a",))
    with models.as_captured(planner("llama of 4 layers", precision).captured):
        module = autopar.parallelize(
            copy.deepcopy(case.model), mesh, case.args, case.kwargs, precision=precision, **options
        )
    return module, case


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, case: models.Case, clip: Callable[..., Any]) -> Any:
    """Losses and norms of some steps."""
    seen = []
    for step in range(STEPS):
        args, kwargs = case.batch(step)
        loss = module(*args, **kwargs).loss
        loss.backward()
        seen += [whole(loss).detach().float(), whole(clip(module.parameters(), 1.0)).float()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def on_ranks() -> None:
    """Masters, states and checkpoints are float32, and a step is that of one process that casts."""
    module, case = parallel(MIXED, solver="fsdp", verify=1)
    model = copy.deepcopy(case.model)
    alone = ByHand(model, torch.bfloat16, None)
    ours = trained(module, module.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-4), case, autopar.clip_grad_norm_)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-4)
    theirs = trained(alone, optimizer, case, torch.nn.utils.clip_grad_norm_)
    for found, expected in zip(ours, theirs, strict=True):
        assert_close(found, expected, "a loss or a norm", 2e-2)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.float32
        start = case.model.get_parameter(name).detach()
        moved, expected = whole(parameter) - start, model.get_parameter(name).detach() - start
        assert (moved - expected).norm() < 0.2 * expected.norm(), name
    # a step that bfloat16 would round away is kept
    weight = module.get_parameter("lm_head.weight")
    before = whole(weight).clone()
    with torch.no_grad():
        weight.mul_(1 + 2**-12)
    assert not torch.equal(before, whole(weight))
    # no_sync: the sum of two micro-batches
    for step in range(2):
        args, kwargs = case.batch(step)
        if step == 0:
            with module.no_sync():
                module(*args, **kwargs).loss.backward()
        else:
            module(*args, **kwargs).loss.backward()
    together = {name: whole(p.grad).clone() for name, p in module.named_parameters()}
    module.zero_grad()
    for step in range(2):
        args, kwargs = case.batch(step)
        module(*args, **kwargs).loss.backward()
    for name, parameter in module.named_parameters():
        assert_close(together[name], whole(parameter.grad), name, 1e-5)
    module.zero_grad()
    # a checkpoint of masters and states, in a module on another plan
    optimizer = module.optimizer(torch.optim.AdamW, lr=1e-2)
    trained(module, optimizer, case, autopar.clip_grad_norm_)
    weights, states = get_state_dict(module, optimizer)
    assert {s["exp_avg"].dtype for s in states["state"].values()} == {torch.float32}
    assert {value.dtype for value in weights.values()} == {torch.float32}
    other, _ = parallel(MIXED, solver="ddp")
    other.load_state_dict(weights)
    for name, parameter in other.named_parameters():
        assert torch.equal(whole(parameter), whole(module.get_parameter(name))), name


def test_ranks_train_masters_and_use_what_is_cast() -> None:
    planner("llama of 4 layers", MIXED)  # captured once, for both ranks
    run(2, on_ranks)


HALF = Precision(param_dtype=torch.float16, reduce_dtype=torch.float32)


def scaled() -> None:
    """`GradScaler` with float16: a step with an infinite gradient is skipped on all ranks, and the scale halves."""
    module, case = parallel(HALF, solver="fsdp")
    optimizer = module.optimizer(torch.optim.AdamW, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    scales, moved = [], []
    for step in range(12):
        before = whole(module.get_parameter("lm_head.weight")).clone()
        args, kwargs = case.batch(step)
        scaler.scale(module(*args, **kwargs).loss.float()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, whole(module.get_parameter("lm_head.weight"))))
    assert scales[0] == 2.0**25 and not moved[0] and moved[-1] and scales[-1] == scales[-2]
    assert all(p.isfinite().all() for p in map(whole, module.parameters()))


def test_grad_scaler_skips_steps_that_overflow() -> None:
    planner("llama of 4 layers", HALF)
    run(2, scaled)
