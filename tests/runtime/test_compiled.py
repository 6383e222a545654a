"""Compiled programs: the same step, in stretches between collectives that are compiled once each."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import models
import plans
import pytest
import ranks
import torch
from fusing import plain, quick_compiler, run_compiled, traced
from models import CASES, assert_same, case, eager, simulated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

import autopar
from autopar.compat.tensors import memory_of
from autopar.cost.fusion import fusion
from autopar.cost.liveness import Memory, MemoryPlace
from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ir.layout import Replicate
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.passes.codegen.program import codegen
from autopar.passes.lower.bucket import bucket
from autopar.passes.lower.rematerialize import rematerialized
from autopar.passes.lower.stretches import Stretch
from autopar.runtime.compiled import watched_by
from autopar.runtime.compiling import Inductor
from autopar.runtime.execute import Executable, compile
from autopar.runtime.stretches import CompiledSource, Kernels, Unit, compiled_halves, laid_out, unit_of

planner = models.planners(case)


# ------------------------------------------------------------------------------------------------------- the same step


@pytest.mark.parametrize(("name", "mesh"), [*((name, {"dp": 2, "tp": 2}) for name in CASES), ("llama", {"a": 3})])
def test_simulated_ranks(name: str, mesh: dict[str, int]) -> None:
    """Of a plan that no one would like, so that every kind of collective cuts stretches."""
    made = planner(name, mesh)
    program = rematerialized(bucket(codegen(made.space, plans.random_assignment(made.space, seed=1))))
    compiler = quick_compiler()
    assert_same(
        simulated(program, made.captured, case(name), run=partial(run_compiled, compiler=compiler)), eager(case(name))
    )
    assert compiler.compiled and not compiler.failed


@pytest.mark.parametrize("name", ["T5", "Mixtral", "Mamba", "examples/unet.py"])
def test_models_that_people_use(name: str) -> None:
    zoo = pytest.importorskip("zoo")
    made = zoo.case(name)
    on = autopar.planning.planner.Planner(
        made.model, {"dp": 2, "tp": 2}, made.args, made.kwargs, loss_fn=made.loss_fn, compile=True
    )
    program, compiler = on.program(on.plan(solver="fsdp")), quick_compiler(traced)
    assert_same(simulated(program, on.captured, made, run=partial(run_compiled, compiler=compiler)), eager(made))
    assert compiler.compiled and not compiler.failed


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def stack(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(16) for _ in range(layers))).double()


def trained_on_ranks(compile: bool | str) -> list[float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(1)
    x = torch.randn(8, 16, dtype=torch.float64)
    module = autopar.parallelize(stack(2), mesh, (x,), loss_fn=lambda y: y.square().mean(), compile=compile)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for part in range(2):  # two micro-batches
                with module.no_sync() if not part else warnings.catch_warnings():
                    loss = module(x * (1 + part)).square().mean()
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    module.eval()
    with torch.no_grad():
        losses.append(module(x).square().mean().item())
    return losses


def test_trains_on_ranks_as_without() -> None:
    """By Inductor itself, with dropout, micro-batches and evaluation."""
    plain, compiled = (ranks.run(2, trained_on_ranks, how)[0] for how in (False, True))
    assert compiled == pytest.approx(plain, rel=1e-12)


# ----------------------------------------------------------------------------------------------------------- stretches


def program_of(layers: int, *, mesh: dict[str, int] | None = None) -> Program:
    x = torch.randn(8, 16, dtype=torch.float64)
    made = autopar.planning.planner.Planner(
        stack(layers), mesh or {"a": 1}, (x,), loss_fn=lambda y: y.square().mean(), compile=True
    )
    return made.program(made.plan(cost="serial"))


def units(program: Program) -> list[Unit]:
    memory = Memory.of(program, program.nodes)
    coordinate = (0,) * len(program.mesh)
    return [
        unit_of(item, memory, program, coordinate, torch.device("cpu"))
        for half in compiled_halves(program)
        for item in half
        if isinstance(item, Stretch)
    ]


def test_layers_alike_are_stretches_alike() -> None:
    few, many = (units(program_of(layers)) for layers in (4, 12))
    assert len({unit.key for unit in few}) == len({unit.key for unit in many}) < len(few) < len(many)


class Residual(nn.Module):
    """Layers without an operator that no compiler fuses."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.layer_norm(x + torch.tanh(layer(x)), (8,)) * torch.sigmoid(x)
        return x.square().mean()


def test_a_long_run_is_cut_at_its_period() -> None:
    made = autopar.planning.planner.Planner(Residual(24), {"a": 1}, (torch.randn(4, 8),), compile=True)
    program = made.program(made.plan(cost="serial"))
    found = units(program)
    assert len(found) > 24 and len({unit.key for unit in found}) <= 10
    given = {i.name: torch.randn(i.meta.shape) for i in program.inputs}
    plain, compiled = compile(program, [None]), compiled_with(program, quick_compiler())
    for one, other in zip(step(plain, given), step(compiled, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", [{"a": 1}, {"dp": 2, "tp": 2}], ids=["1", "2x2"])
def test_every_instruction_runs_once_and_in_order(mesh: dict[str, int]) -> None:
    program = program_of(3, mesh=mesh)
    for half, items in zip(program.halves, compiled_halves(program), strict=True):
        order = [node for item in items for node in (item.nodes if isinstance(item, Stretch) else (item,))]
        places = {node.outputs: place for place, node in enumerate(half)}
        seen = [places[node.outputs] for node in order if node.outputs in places]
        assert seen == sorted(seen) and len(seen) == len(set(seen)) >= len(half) - 2
        for item in items:
            if isinstance(item, Stretch):
                assert not any(node.op.startswith(("collective.", "autopar.")) for node in item.nodes)


def compiled_with(program: Program, compiler: Any) -> Executable:
    return compile(program, [None] * len(program.mesh), writer=partial(CompiledSource, compiler=compiler))


def values(program: Program) -> dict[str, torch.Tensor]:
    return {i.name: torch.randn(i.meta.shape, dtype=torch.float64).to(i.meta.dtype) for i in program.inputs}


def step(executable: Executable, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    inputs = executable.program.inputs
    results, saved = executable.forward([given[i.name] for i in inputs if i.role != "tangent"])
    gradients = executable.backward([*saved, *(given[i.name] for i in inputs if i.role == "tangent")])
    return [x for x in (*results, *gradients) if x is not None]


def test_operands_that_lie_otherwise_are_laid_out() -> None:
    program = program_of(2)
    given = {
        i.name: torch.randn(i.meta.shape, dtype=i.meta.dtype) for i in program.inputs if i.meta.dtype.is_floating_point
    }
    given |= {i.name: torch.zeros(i.meta.shape, dtype=i.meta.dtype) for i in program.inputs if i.name not in given}
    odd = {name: x.t().contiguous().t() if x.dim() == 2 else x for name, x in given.items()}
    executable = compiled_with(program, quick_compiler())
    for one, other in zip(step(executable, given), step(executable, odd), strict=True):
        torch.testing.assert_close(one, other)


# ---- values


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.float32)


def small(*nodes: Node, saved: Sequence[str] = (), results: Sequence[str] = (), **metas: TensorMeta) -> Program:
    """Of ten lines, on one rank."""
    layout = (Replicate(),)
    return Program(
        axes=("a",),
        mesh=(1,),
        inputs=tuple(
            ProgramInput(name=name, role="input", target=f"args.{name}", meta=metas[name], layout=layout)
            for name in ("x", "y")
            if name in metas
        ),
        forward=tuple(node for node in nodes if not node.backward),
        backward=tuple(node for node in nodes if node.backward),
        saved=tuple(saved),
        outputs=tuple(
            ProgramOutput(
                name=name,
                role="gradient" if name.startswith("g") else "output",
                target=name,
                meta=metas[name],
                layout=layout,
            )
            for name in results
        ),
        metas=metas,
    )


def op(name: str, *args: Any, out: str, backward: bool = False) -> Node:
    refs = tuple(Ref(a) if isinstance(a, str) else a for a in args)
    return Node(op=f"aten.{name}", args=refs, outputs=(out,), backward=backward)


def test_a_result_that_a_compiler_lets_share_memory_is_copied() -> None:
    """A compiler may drop a copy; an all-reduce in place would write both."""
    m = meta(4)
    nodes = op("exp.default", "x", out="a"), op("clone.default", "a", out="b")
    program = small(*nodes, results=("a", "b"), x=m, a=m, b=m)

    def shares(unit: Callable[..., Any], operands: Sequence[torch.Tensor], mode: str) -> Any:
        return lambda given: (given[0].exp(),) * 2

    executable = compiled_with(program, Inductor(fuse=shares, processes=0))
    for _ in range(2):
        (one, other), _ = executable.forward([torch.zeros(4)])
        assert one.data_ptr() != other.data_ptr()


def test_the_callers_autocast_is_not_compiled_in() -> None:
    nodes = op("mm.default", "x", "y", out="a"), op("exp.default", "a", out="b")
    program = small(*nodes, results=("b",), **{name: meta(4, 4) for name in "xyab"})
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        executable = compiled_with(program, Inductor(processes=0))
    (found,), _ = executable.forward([x, y])
    assert found is not None and found.dtype == torch.float32
    torch.testing.assert_close(found, (x @ y).exp())


class Classifier(nn.Module):
    """Whose loss Inductor's passes rewrite before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(torch.tanh(self.table(ids))), ids)


def test_a_loss_of_labels_compiles() -> None:
    torch.manual_seed(0)
    ids, compiler = torch.randint(64, (32,)), Inductor(processes=0)
    made = autopar.planning.planner.Planner(Classifier(), {"a": 1}, (ids,), compile=True)
    program = made.program(made.plan(cost="serial"))
    given = {i.name: torch.randn(i.meta.shape) if i.meta.dtype.is_floating_point else ids for i in program.inputs}
    plain, compiled = step(compile(program, [None]), given), step(compiled_with(program, compiler), given)
    assert compiler.compiled and not compiler.failed
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other)


def test_a_copy_that_a_compiler_drops_keeps_no_larger_tensor() -> None:
    m, part = meta(64), meta(4)
    nodes = (
        op("exp.default", "x", out="a"),
        op("slice.Tensor", "a", 0, 0, 4, out="b"),
        op("clone.default", "b", out="c"),
    )
    program = small(*nodes, results=("c",), x=m, a=m, b=part, c=part)
    executable = compiled_with(program, Inductor(processes=0))
    for _ in range(2):
        (found,), _ = executable.forward([torch.zeros(64)])
        assert found is not None and found.untyped_storage().nbytes() == 16


def test_an_operand_that_eager_expands_is_laid_out() -> None:
    place = MemoryPlace((3, 4), (0, 1), 0, torch.float32)
    x = torch.arange(4.0).repeat(3, 1)
    laid = laid_out(x, place)
    assert laid.stride() == (0, 1) and torch.equal(laid, x) and laid_out(laid, place) is laid


def test_styles_have_lines_of_their_own() -> None:
    """A watched program has more lines than a compiled one: errors after it still name the right instruction."""
    program = program_of(2)
    given = values(program)
    lines: list[Any] = []

    def around(half: Any, program: Program, groups: Any, of: Any) -> Any:
        lines.append(of)
        return half

    writer = partial(CompiledSource, compiler=quick_compiler())
    executable = compile(program, [None], writer=writer, around=around)
    before = dict(lines[0])
    with watched_by(lambda node, values: None):
        step(executable, given)
    assert lines[0] == before and lines[0] is not lines[-1]


def test_a_long_recurrence_is_not_made_again_as_a_whole() -> None:
    names = [f"h{number}" for number in range(1500)]
    nodes = [op("sin.default", before, out=name) for before, name in zip(["x", *names], names, strict=False)]
    back = op("mul.Tensor", "h1400", "h700", out="g", backward=True)
    metas = {name: meta(4) for name in (*names, "x", "g", "out")}
    last = op("exp.default", names[-1], out="out")
    program = small(*nodes, last, back, saved=("h700", "h1400"), results=("out", "g"), **metas)
    again = rematerialized(program)
    assert len(again.backward) < 3 * 64


def test_memory_of_an_operand_that_is_gone_may_be_that_of_two_results() -> None:
    """They share it all the same, where eager's do not."""
    m = meta(4)
    nodes = op("exp.default", "x", out="a"), op("clone.default", "a", out="b")
    (unit,) = units(small(*nodes, results=("a", "b"), x=m, a=m, b=m))
    result, gone = torch.zeros(4), torch.zeros(4)
    memories = [(memory_of(result), weakref.ref(gone.untyped_storage()))]
    del gone
    assert Kernels(unit, lambda given: ())._shared(memories, [result, result.view(4)]) == [1]


def test_what_does_not_compile_runs_as_it_is_and_is_named() -> None:
    def fails(unit: Callable[..., Any], operands: Sequence[torch.Tensor], mode: str) -> Any:
        raise RuntimeError("no compiler here\nand more")

    program = program_of(2)
    compiler = Inductor(fuse=fails, processes=0)
    with pytest.warns(UserWarning, match=r"operators of .* runs uncompiled.*RuntimeError: no compiler here$") as warned:
        executable = compiled_with(program, compiler)
    assert len(warned) == len({unit.key for unit in units(program)}) and "stretch" not in executable.source
    given = values(program)
    for one, other in zip(step(executable, given), step(compile(program, [None]), given), strict=True):
        assert torch.equal(one, other)


def test_each_instruction_is_seen_where_somebody_watches() -> None:
    program = program_of(2)
    given = values(program)
    executable, seen = compiled_with(program, quick_compiler()), []
    assert "stretch_0(" in executable.source
    with watched_by(lambda node, values: seen.append(node.name)):
        step(executable, given)
    assert set(seen) == {node.name for node in program.nodes}


def test_traces_name_the_instructions() -> None:
    program = program_of(2)
    given = values(program)
    executable = compiled_with(program, quick_compiler())
    with profile() as trace:
        step(executable, given)
    names = " ".join(event.name for event in trace.events() if event.name.startswith("stretch_"))
    fused = [
        node for half in compiled_halves(program) for item in half if isinstance(item, Stretch) for node in item.nodes
    ]
    assert fused and all(node.label in names for node in fused)


def test_what_is_dropped_is_dropped_before_the_call() -> None:
    """Operands that nobody else reads are alive in the kernels' list alone."""
    program = program_of(2)
    alive: list[int] = []

    def counting(unit: Callable[..., Any], operands: Sequence[torch.Tensor], mode: str) -> Any:
        import sys

        run = plain(unit, operands, mode)

        def called(given: list[torch.Tensor]) -> Any:
            alive.append(min(sys.getrefcount(x) for x in given))
            return run(given)

        return called

    executable = compiled_with(program, Inductor(fuse=counting, processes=0))
    given = values(program)
    for _ in range(2):  # the first run looks at the memory of its operands
        alive.clear()
        step(executable, given)
    assert min(alive) <= 3  # the list, the loop, and the call of getrefcount


# ------------------------------------------------------------------------------------------------ folders and processes


def test_processes_fill_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("autopar.runtime.compiling.FEW", 1)
    nodes = [op("exp.default", "x", out="v0")]
    wanted = []
    for number in range(2):
        program = small(
            *nodes, op("mul.Tensor", "v0", 1.5 + number, out="b"), results=("b",), x=meta(4), v0=meta(4), b=meta(4)
        )
        wanted += units(program)
    compiler = Inductor(processes=2)
    compiler.prepare([("a test", unit) for unit in wanted], together=True)
    assert len(compiler.compiled) == 2 and not compiler.failed
    assert len([*(tmp_path / "autopar").iterdir()]) == 2
    x = torch.randn(4)
    for number, unit in enumerate(wanted):
        kernels = compiler.kernels(unit)
        assert kernels is not None
        torch.testing.assert_close(kernels([x])[0], x.exp() * (1.5 + number))


def _without_a_folder(bad: int) -> str:
    """What a rank is told where one of them, or all (2), cannot write what is compiled."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    if bad in (mesh.get_rank(), 2):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/proc/nothing"
    try:
        autopar.parallelize(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()), mesh, (torch.randn(8, 16),), loss_fn=torch.sum, compile=True
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("bad", [1, 2])
def test_a_folder_that_cannot_be_made_is_one_error_on_all_ranks(bad: int) -> None:
    said = ranks.run(2, _without_a_folder, bad)
    assert all("'/proc/nothing'): set TORCHINDUCTOR_CACHE_DIR to a folder that can be written" in one for one in said)
    assert said[0] == said[1] and ("(on rank 1 of 2)" in said[0]) == (bad == 1)


def test_a_program_is_compiled_for_the_default_dtype_that_it_was_captured_with() -> None:
    """Products of integers with numbers have it."""
    nodes = op("mul.Tensor", "x", 0.5, out="a"), op("neg.default", "a", out="b")
    integers = {"x": TensorMeta((4,), torch.int64)}
    compiler, results = Inductor(processes=0), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            program = small(*nodes, results=("b",), **integers, **{name: TensorMeta((4,), dtype) for name in "ab"})
            results.append(compiled_with(program, compiler).forward([torch.arange(4)])[0][0])
        finally:
            torch.set_default_dtype(torch.float32)
    assert [x is not None and x.dtype for x in results] == [torch.float32, torch.float64]


def test_constants_that_differ_in_a_sign_have_names_of_their_own() -> None:
    m = TensorMeta((4,), torch.complex64)
    nodes = op("mul.Tensor", "x", 1 + 2j, out="a"), op("mul.Tensor", "a", 1 - 2j, out="b")
    x = torch.randn(4, dtype=torch.complex64)
    (found,), _ = compile(small(*nodes, results=("b",), x=m, a=m, b=m), [None]).forward([x])
    torch.testing.assert_close(found, x * 5)


def test_equal_texts_of_other_shapes_are_other_units() -> None:
    one, other = (
        units(small(op("exp.default", "x", out="a"), op("neg.default", "a", out="b"), results=("b",), x=m, a=m, b=m))[0]
        for m in (meta(4), meta(5))
    )
    assert one.key != other.key and one.key == replace(one).key


# -------------------------------------------------------------------------------------------- what backward makes again


@pytest.mark.parametrize("name", CASES)
def test_rematerialized_programs_keep_less_and_compute_the_same(name: str) -> None:
    made = planner(name, {"dp": 2, "tp": 2})
    program = bucket(codegen(made.space, plans.random_assignment(made.space, seed=2)))
    again = rematerialized(program)
    inputs = {i.name for i in program.inputs}
    kept, less = (sum(p.metas[s].bytes for s in p.saved if s not in inputs) for p in (program, again))
    assert less <= kept and again.collectives() == program.collectives()
    assert_same(simulated(again, made.captured, case(name)), eager(case(name)))
    assert rematerialized(again) == again


def test_backward_makes_again_what_is_element_wise() -> None:
    """x -> exp -> sin: of three values that backward reads, the smallest that leads to all is kept."""
    program = small(
        op("mm.default", "x", "y", out="a"),
        op("exp.default", "a", out="b"),
        op("sin.default", "b", out="c"),
        op("sum.default", "c", out="out"),
        op("mul.Tensor", "c", "b", out="d", backward=True),
        op("add.Tensor", "d", "a", out="g", backward=True),
        saved=("a", "b", "c"), results=("out", "g"),
        x=meta(4, 4), y=meta(4, 4), **{n: meta(4, 4) for n in "abcdg"}, out=meta(),
    )  # fmt: skip
    again = rematerialized(program)
    assert again.saved == ("a",)
    assert [node.op for node in again.backward].count("aten.exp.default") == 1


# --------------------------------------------------------------------------------------------------------------- prices


def test_a_kernel_reads_and_writes_once() -> None:
    program = small(
        op("exp.default", "x", out="a"), op("sin.default", "a", out="b"), op("mul.Tensor", "b", "x", out="c"),
        op("mm.default", "c", "y", out="d"), op("neg.default", "d", out="e"), op("add.Tensor", "e", "x", out="f"),
        results=("f",), x=meta(4, 4), y=meta(4, 4), **{n: meta(4, 4) for n in "abcdef"},
    )  # fmt: skip
    found = fusion(program)
    assert found.inside == {"a", "b", "e"}
    assert [part.launches for part in found.parts.values()] == [True, False, False, True, False]
    assert found.parts["a"].reads == {"x"} and found.parts["c"].writes == {"c"} and not found.parts["c"].reads
    assert found.parts["f"].reads == {"x"} and found.parts["a"].bytes == 2 * 64


def test_a_compiled_plan_says_so_and_is_shorter_and_smaller(tmp_path: Path) -> None:
    made = case("llama")
    how: dict[str, Any] = {"args": made.args, "kwargs": made.kwargs, "cluster": "dgx-h100"}
    plain = autopar.plan(made.model, {"dp": 2}, **how)
    compiled = autopar.plan(made.model, {"dp": 2}, **how, compile=True)
    assert compiled.seconds < plain.seconds and compiled.bytes <= plain.bytes
    assert "compiled by torch" in str(compiled) and "compiled" not in str(plain)
    assert plain.gap is not None and compiled.gap is None  # a bound of single operators is none of kernels
    compiled.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.training.compile == "default" and loaded == compiled
    again = autopar.read_plan(loaded, made.model, made.args, made.kwargs)
    assert again.seconds == compiled.seconds and again.bytes == compiled.bytes


@pytest.mark.parametrize("mode", ["fast", 1, "Default"])
def test_a_mode_that_there_is_not(mode: Any) -> None:
    made = case("mlp with loss_fn")
    with pytest.raises(ValueError, match=r"compile is .*: give True, False, or a mode of torch.compile \(default"):
        autopar.plan(made.model, {"dp": 2}, made.args, made.kwargs, loss_fn=made.loss_fn, compile=mode)


def test_prices_that_are_measured_are_of_operators_one_by_one() -> None:
    made = case("mlp with loss_fn")
    with pytest.raises(ValueError, match=r"compile is 'default' with measured costs.*use 'analytical'"):
        autopar.plan(made.model, {"dp": 2}, made.args, made.kwargs, loss_fn=made.loss_fn, compile=True, cost="hybrid")
