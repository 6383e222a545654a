"""The runtime: programs written by hand, run by simulated ranks and by real ones."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from ranks import outcomes, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor import Replicate as Replicate_

from autopar.compat.distributed import local_tensor
from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ir.layout import Layout, Replicate, Split, is_legal, local_shape, shard
from autopar.ir.program import Program, ProgramInput, ProgramOutput, RankIndex
from autopar.passes.capture.trace import capture
from autopar.runtime.agreement import all_alike, exchange, on_first_rank, raise_together
from autopar.runtime.collectives import all_reduce, reduce_scatter
from autopar.runtime.compiled import compile
from autopar.runtime.execute import process_groups
from autopar.runtime.module import ParallelModule
from autopar.runtime.placements import is_gatherable, local_slice, placements_of
from autopar.runtime.simulate import coordinates, simulate_step

R = Replicate()


class Builder:
    """A program by hand: values have global shapes and layouts, local shapes follow."""

    def __init__(self, **mesh: int) -> None:
        self.axes, self.mesh = tuple(mesh), tuple(mesh.values())
        self.inputs: list[ProgramInput] = []
        self.outputs: list[ProgramOutput] = []
        self.bodies: tuple[list[Node], list[Node]] = ([], [])
        self.metas: dict[str, TensorMeta] = {}

    def input(
        self,
        name: str,
        role: Any,
        target: str,
        shape: tuple[int, ...],
        layout: Layout,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.inputs.append(
            ProgramInput(name=name, role=role, target=target, meta=TensorMeta(shape, dtype), layout=layout)
        )
        self.metas[name] = TensorMeta(local_shape(shape, layout, self.mesh), dtype)

    def op(
        self, name: str, op: str, *args: Any, shape: tuple[int, ...], backward: bool = False,
        dtype: torch.dtype = torch.float32, **kwargs: Any,
    ) -> str:  # fmt: skip
        """Strings that name a value are references; `shape` is local."""
        refs = tuple(Ref(a) if isinstance(a, str) and a in self.metas else a for a in args)
        made = Node(op=op, args=refs, kwargs=tuple(kwargs.items()), outputs=(name,), module="m")
        self.bodies[backward].append(made)
        self.metas[name] = TensorMeta(shape, dtype)
        return name

    def collective(self, name: str, kind: str, *args: Any, shape: tuple[int, ...], backward: bool = False) -> str:
        dtype = self.metas[args[0]].dtype
        self.op(f"{name}_started", f"collective.{kind}", *args, shape=shape, backward=backward, dtype=dtype)
        return self.op(name, "collective.wait", f"{name}_started", shape=shape, backward=backward, dtype=dtype)

    def output(
        self, name: str | None, role: Any, target: str, shape: tuple[int, ...], layout: Layout,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.outputs.append(
            ProgramOutput(name=name, role=role, target=target, meta=TensorMeta(shape, dtype), layout=layout)
        )

    def build(self, *saved: str) -> Program:
        return Program(
            axes=self.axes, mesh=self.mesh, inputs=tuple(self.inputs), forward=tuple(self.bodies[0]),
            backward=tuple(self.bodies[1]), saved=saved, outputs=tuple(self.outputs), metas=self.metas,
        )  # fmt: skip


def data_parallel_linear(ranks: int) -> Program:
    """loss = sum(x w^T) / 8, x [8, 6] split by rows, w [4, 6] whole."""
    b = Builder(dp=ranks)
    rows = 8 // ranks
    b.input("w", "parameter", "weight", (4, 6), (R,))
    b.input("x", "input", "args.0", (8, 6), (Split(0, 8),))
    b.input("t", "tangent", "output", (), (R,))
    b.op("wt", "aten.t.default", "w", shape=(6, 4))
    b.op("y", "aten.mm.default", "x", "wt", shape=(rows, 4))
    b.op("s", "aten.sum.default", "y", shape=())
    b.op("d", "aten.div.Tensor", "s", 8.0, shape=())
    b.collective("loss", "all_reduce", "d", "sum", 0, shape=())
    b.op("e", "aten.expand.default", "t", (rows, 4), shape=(rows, 4), backward=True)
    b.op("f", "aten.div.Tensor", "e", 8.0, shape=(rows, 4), backward=True)
    b.op("ft", "aten.t.default", "f", shape=(4, rows), backward=True)
    b.op("dw", "aten.mm.default", "ft", "x", shape=(4, 6), backward=True)
    b.collective("gw", "all_reduce", "dw", "sum", 0, shape=(4, 6), backward=True)
    b.output("loss", "output", "output", (), (R,))
    b.output("gw", "gradient", "weight", (4, 6), (R,))
    return b.build("x")


def parallel_mlp(dp: int, tp: int) -> Program:
    """loss = sum(relu(x a^T) b^T): x [8, 6] by rows over dp; a [16, 6] by columns, b [4, 16] by rows over tp."""
    p = Builder(dp=dp, tp=tp)
    n, h = 8 // dp, 16 // tp
    column: Layout = (R, Split(0, 16))
    row: Layout = (R, Split(1, 16))
    p.input("a", "parameter", "up.weight", (16, 6), column)
    p.input("b", "parameter", "down.weight", (4, 16), row)
    p.input("x", "input", "args.0", (8, 6), (Split(0, 8), R))
    p.input("t", "tangent", "output", (), (R, R))
    p.op("at", "aten.t.default", "a", shape=(6, h))
    p.op("u", "aten.mm.default", "x", "at", shape=(n, h))
    p.op("r", "aten.relu.default", "u", shape=(n, h))
    p.op("bt", "aten.t.default", "b", shape=(h, 4))
    p.op("y", "aten.mm.default", "r", "bt", shape=(n, 4))
    loss = p.op("l", "aten.sum.default", "y", shape=())
    gradients = {"a": ("ga", (16, 6), column), "b": ("gb", (4, 16), row)}
    for axis, size in enumerate((dp, tp)):
        if size > 1:
            loss = p.collective(f"l{axis}", "all_reduce", loss, "sum", axis, shape=())
    p.op("e", "aten.expand.default", "t", (n, 4), shape=(n, 4), backward=True)
    p.op("et", "aten.t.default", "e", shape=(4, n), backward=True)
    p.op("db", "aten.mm.default", "et", "r", shape=(4, h), backward=True)
    p.op("dr", "aten.mm.default", "e", "b", shape=(n, h), backward=True)
    p.op("du", "aten.threshold_backward.default", "dr", "r", 0, shape=(n, h), backward=True)
    p.op("dut", "aten.t.default", "du", shape=(h, n), backward=True)
    p.op("da", "aten.mm.default", "dut", "x", shape=(h, 6), backward=True)
    p.output(loss, "output", "output", (), (R, R))
    for name, target, shape, layout in (("a", "up.weight", (16, 6), column), ("b", "down.weight", (4, 16), row)):
        made = f"d{name}"
        if dp > 1:
            local = local_shape(shape, layout, p.mesh)
            made = p.collective(gradients[name][0], "all_reduce", made, "sum", 0, shape=local, backward=True)
        p.output(made, "gradient", target, shape, layout)
    return p.build("b", "x", "r")


def round_trips(ranks: int, dtype: torch.dtype) -> Program:
    """Each collective, and a rank's index, on an integer-valued tensor [8, 4] split by rows."""
    p = Builder(x=ranks)
    n = 8 // ranks
    split: Layout = (Split(0, 8),)
    p.input("a", "input", "args.0", (8, 4), split, dtype)
    p.collective("whole", "all_gather", "a", 0, shape=(8, 4))
    p.collective("summed", "reduce_scatter", "whole", "sum", 0, shape=(n, 4))
    p.op("columns", "aten.view.default", "a", (n, ranks, 4 // ranks), shape=(n, ranks, 4 // ranks), dtype=dtype)
    p.op("chunks", "aten.transpose.int", "columns", 0, 1, shape=(ranks, n, 4 // ranks), dtype=dtype)
    p.op(
        "c",
        "aten.clone.default",
        "chunks",
        shape=(ranks, n, 4 // ranks),
        dtype=dtype,
        memory_format=torch.contiguous_format,
    )
    p.collective("exchanged", "all_to_all", "c", 0, shape=(ranks, n, 4 // ranks))
    p.op("transposed", "aten.view.default", "exchanged", (8, 4 // ranks), shape=(8, 4 // ranks), dtype=dtype)
    p.op(
        "mine",
        "aten.slice.Tensor",
        "whole",
        0,
        RankIndex(((0, n),)),
        RankIndex(((0, n),), n),
        shape=(n, 4),
        dtype=dtype,
    )
    p.collective("largest", "all_reduce", "a", "max", 0, shape=(n, 4))
    p.collective("smallest", "all_reduce", "a", "min", 0, shape=(n, 4))
    offsets = {"down": 1, "up": -1, "far": ranks - 1}
    for name, offset in offsets.items():  # all under way at once
        p.op(f"{name}_started", "collective.shift", "a", offset, 0, shape=(n, 4), dtype=dtype)
    for name in offsets:
        p.op(name, "collective.wait", f"{name}_started", shape=(n, 4), dtype=dtype)
        p.output(name, "output", name, (8, 4), split, dtype)
    p.output("whole", "output", "whole", (8, 4), (R,), dtype)
    p.output("summed", "output", "summed", (8, 4), split, dtype)
    p.output("transposed", "output", "transposed", (8, 4), (Split(1, 4),), dtype)
    p.output("mine", "output", "mine", (8, 4), split, dtype)
    p.output("largest", "output", "largest", (n, 4), (R,), dtype)
    p.output("smallest", "output", "smallest", (n, 4), (R,), dtype)
    return p.build()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_shift_moves_shards_along_and_zeros_in(ranks: int) -> None:
    whole = torch.arange(32).reshape(8, 4) - 7
    made = simulate_step(round_trips(ranks, torch.int64), {}, {"args.0": whole}).outputs
    n = 8 // ranks
    none = torch.zeros(n, 4, dtype=torch.int64)
    torch.testing.assert_close(made["down"], torch.cat([none, whole[:-n]]))
    torch.testing.assert_close(made["up"], torch.cat([whole[n:], none]))
    torch.testing.assert_close(made["far"], torch.cat([none] * (ranks - 1) + [whole[:n]]))


def test_what_is_made_from_nothing_is_made_on_the_device_of_the_mesh() -> None:
    build = Builder(dp=1)
    build.op("i", "aten.arange.default", 4, shape=(4,), dtype=torch.int64)
    build.output("i", "output", "i", (4,), (R,), torch.int64)
    executable = compile(build.build(), [None], device=torch.device("meta"))
    (made,), _ = executable.forward([])
    assert made is not None and made.device.type == "meta"


def test_simulated_data_parallel_linear_equals_one_device() -> None:
    w, x = torch.randn(4, 6, requires_grad=True), torch.randn(8, 6)
    loss = (x @ w.t()).sum() / 8
    loss.backward()
    made = simulate_step(data_parallel_linear(4), {"weight": w}, {"args.0": x})
    torch.testing.assert_close(made.outputs["output"], loss.detach())
    torch.testing.assert_close(made.gradients["weight"], w.grad)


def test_64_simulated_ranks_equal_one_device() -> None:
    # 8 rows and 16 columns
    up, down, x = torch.randn(16, 6, requires_grad=True), torch.randn(4, 16, requires_grad=True), torch.randn(8, 6)
    loss = (torch.relu(x @ up.t()) @ down.t()).sum()
    loss.backward()
    made = simulate_step(parallel_mlp(4, 16), {"up.weight": up, "down.weight": down}, {"args.0": x})
    torch.testing.assert_close(made.outputs["output"], loss.detach())
    torch.testing.assert_close(made.gradients["up.weight"], up.grad)
    torch.testing.assert_close(made.gradients["down.weight"], down.grad)


def step_on_ranks(program: Program, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank makes of its slices of `whole` (by target), by name of value."""
    mesh = init_device_mesh("cpu", program.mesh, mesh_dim_names=program.axes)
    executable = compile(program, process_groups(mesh))
    local = {
        i.name: local_slice(whole[i.target], i.layout, program.mesh, executable.coordinate) for i in program.inputs
    }
    made, saved = executable.forward([local[i.name] for i in program.inputs if i.role != "tangent"])
    gradients = executable.backward([*saved, *(local[i.name] for i in program.inputs if i.role == "tangent")])
    forward = [o for o in program.outputs if o.role != "gradient"]
    backward = [o for o in program.outputs if o.role == "gradient"]
    return {o.target: v for o, v in zip([*forward, *backward], [*made, *gradients], strict=True) if v is not None}


def compare_programs(programs: list[tuple[Program, dict[str, torch.Tensor]]]) -> list[dict[str, torch.Tensor]]:
    return [step_on_ranks(program, whole) for program, whole in programs]


def programs_for(ranks: int) -> list[tuple[Program, dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    x, one = torch.randn(8, 6), torch.ones(())
    mlp = {"up.weight": torch.randn(16, 6), "down.weight": torch.randn(4, 16), "args.0": x, "output": one}
    made = [
        (data_parallel_linear(ranks), {"weight": torch.randn(4, 6), "args.0": x, "output": one}),
        (parallel_mlp(1, ranks), mlp),
        (parallel_mlp(ranks // 2, 2), mlp),
    ]
    numbers = torch.arange(32).reshape(8, 4) - 7
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        made.append((round_trips(ranks, dtype), {"args.0": numbers.to(dtype)}))
    return made


def check_against_simulation(ranks: int) -> None:
    programs = programs_for(ranks)
    for case, (program, whole) in enumerate(programs):
        simulated = simulate_step(program, whole, whole)
        together = {**simulated.outputs, **simulated.gradients}
        if case == 0:
            results = run(ranks, compare_programs, programs)
        for rank, coordinate in enumerate(coordinates(program.mesh)):
            for o in program.outputs:
                expected = local_slice(together[o.target], o.layout, program.mesh, coordinate)
                torch.testing.assert_close(
                    results[rank][case][o.target], expected, msg=lambda m, o=o: f"{o.target}: {m}"
                )


def test_two_ranks_equal_the_simulation() -> None:
    check_against_simulation(2)


def test_four_ranks_equal_the_simulation() -> None:
    check_against_simulation(4)


def test_the_source_frees_values_after_their_last_use() -> None:
    executable = compile(parallel_mlp(1, 1), (None, None))
    lines = [line.strip() for line in executable.source.splitlines()]
    use = lines.index("v_y = aten_mm_default(v_r, v_bt)")
    assert lines[use + 1] == "del v_bt", "r is saved for backward, bt is not"
    assert lines.index("del v_dr, v_r") > lines.index("def backward(arguments):")


class Mlp(nn.Module):
    """The model of `parallel_mlp`. The same weight is registered twice, and it has an attribute of its own."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.config = {"hidden": 16}
        self.up = nn.Linear(6, 16, bias=False)
        self.down = nn.Linear(16, 4, bias=False)
        if tied:
            self.other = nn.Module()
            self.other.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).sum()


def parallel_mlp_module(dp: int, tp: int, seed: int = 0, meta: bool = False, tied: bool = False) -> Any:
    torch.manual_seed(seed)
    model = Mlp(tied)
    x = torch.randn(8, 6)
    captured = capture(model, (x,))
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    program = parallel_mlp(dp, tp)
    return ParallelModule(model.to("meta") if meta else model, captured, program, None, mesh), model, x


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


def train_beside_the_model(dp: int, tp: int) -> None:
    """Claims, on each rank, that the parallel module trains as the model does."""
    parallel, model, x = parallel_mlp_module(dp, tp, tied=True)
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert parallel.state_dict().keys() == model.state_dict().keys() == {"up.weight", "down.weight", "other.weight"}
    assert parallel.other.weight is parallel.up.weight
    assert parallel.config == {"hidden": 16} and "ParallelModule(Mlp)" in str(parallel)
    assert parallel.up.weight.placements == (Replicate_(), Shard(0))
    assert parallel.down.weight.placements == (Replicate_(), Shard(1))
    assert parallel.input_placements == {"args.0": (Shard(0), Replicate_())}

    one = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    many = torch.optim.AdamW(parallel.parameters(), lr=0.1, foreach=True)
    for step in range(3):
        for _ in range(2):  # gradients accumulate over two backward passes
            expected, loss = model(x), parallel(x)
            torch.testing.assert_close(loss, expected)
            expected.backward()
            loss.backward()
        for (name, p), (_, q) in zip(model.named_parameters(), parallel.named_parameters(), strict=True):
            assert q.grad.placements == q.placements
            torch.testing.assert_close(full(q.grad), p.grad, msg=lambda m, name=name: f"{name}: {m}")
        wanted = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found = nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        torch.testing.assert_close(full(found), wanted)
        one.step()
        many.step()
        one.zero_grad(set_to_none=step == 0)
        many.zero_grad(set_to_none=step == 0)
    for (_, p), (_, q) in zip(model.named_parameters(), parallel.named_parameters(), strict=True):
        torch.testing.assert_close(full(q), p.detach(), rtol=1e-5, atol=1e-5)

    # a DTensor that says its own placement, wanted or not, gives the same loss
    for placement in (Shard(0), Replicate_()):
        given = distribute_tensor(x, parallel.mesh, [placement, Replicate_()])
        torch.testing.assert_close(parallel(given), parallel(x))

    with torch.no_grad():
        assert not parallel(x).requires_grad
    loss = parallel(x)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    parallel.zero_grad()
    loss = parallel(x)
    loss.backward(retain_graph=True)
    once = full(parallel.up.weight.grad).clone()
    loss.backward()
    torch.testing.assert_close(full(parallel.up.weight.grad), 2 * once)
    with pytest.raises(ValueError, match=r"args\.0 is float32\[4, 6\].*float32\[8, 6\]"):
        parallel(x[:4])
    with pytest.raises(ValueError, match=r"float64\[8, 6\]"):
        parallel(x.double())
    with pytest.raises(AttributeError, match="no_such_thing"):
        parallel.no_such_thing  # noqa: B018


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 2), (2, 2)])
def test_the_module_trains_as_the_model_does(dp: int, tp: int) -> None:
    run(dp * tp, train_beside_the_model, dp, tp)


class Rows(nn.Module):
    """y = sum over columns of weight * x, and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 4))
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return (self.weight * x).sum(1)


def parallel_rows(layout: Layout, **mesh: int) -> Program:
    """`Rows` with the rows of its weight in any layout."""
    b = Builder(**mesh)
    replicated = (R,) * len(mesh)
    n = local_shape((12,), layout, b.mesh)[0]
    b.input("w", "parameter", "weight", (12, 4), layout)
    b.input("c", "buffer", "count", (), replicated)
    b.input("x", "input", "args.0", (4,), replicated)
    b.input("t", "tangent", "output", (12,), layout)
    b.op("c2", "aten.add.Tensor", "c", 1, shape=())
    b.op("m", "aten.mul.Tensor", "w", "x", shape=(n, 4))
    b.op("y", "aten.sum.dim_IntList", "m", (1,), shape=(n,))
    b.op("u", "aten.reshape.default", "t", (n, 1), shape=(n, 1), backward=True)
    b.op("dw", "aten.mul.Tensor", "u", "x", shape=(n, 4), backward=True)
    b.op("v", "aten.mul.Tensor", "u", "w", shape=(n, 4), backward=True)
    dx = b.op("s", "aten.sum.dim_IntList", "v", (0,), shape=(4,), backward=True)
    for axis, placement in enumerate(layout):
        if isinstance(placement, Split):
            dx = b.collective(f"s{axis}", "all_reduce", dx, "sum", axis, shape=(4,), backward=True)
    b.output("c2", "mutation", "count", (), replicated)
    b.output("y", "output", "output", (12,), layout)
    b.output("dw", "gradient", "weight", (12, 4), layout)
    b.output(dx, "gradient", "args.0", (4,), replicated)
    return b.build("w", "x")


LAYOUTS: dict[str, Layout] = {
    "nested": (Split(0, 12), Split(0, 6)),
    "inner axis first": (Split(0, 6), Split(0, 12)),
    "each third": (R, Split(0, 4)),
    "each half, and of it each third": (Split(0, 12), Split(0, 2)),
}


def rows_in_every_layout(folder: str) -> torch.Tensor:
    before = None
    for name, layout in LAYOUTS.items():
        torch.manual_seed(0)
        model, x = Rows(), torch.randn(4, requires_grad=True)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        captured = capture(model, (x,))
        parallel = ParallelModule(model, captured, parallel_rows(layout, a=2, b=2), None, mesh)
        given = x.detach().clone().requires_grad_()
        expected, y = model(x), parallel(given)
        assert isinstance(y, DTensor), name
        torch.testing.assert_close(
            full(parallel.weight), model.weight.detach(), msg=lambda m, name=name: f"{name}: {m}"
        )
        torch.testing.assert_close(full(y), expected.detach(), msg=lambda m, name=name: f"{name}: {m}")
        expected.sum().backward()
        y.to_local().sum().backward()
        torch.testing.assert_close(full(parallel.weight.grad), model.weight.grad)
        torch.testing.assert_close(given.grad, x.grad)
        assert parallel.count == model.count == 1
        norms = []
        for module in (model, parallel):
            norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
            torch.optim.AdamW(module.parameters(), lr=0.1).step()
        torch.testing.assert_close(full(norms[1]), norms[0], msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(
            full(parallel.weight), model.weight.detach(), msg=lambda m, name=name: f"{name}: {m}"
        )
        # what one device saved, the mesh loads
        state = {key: value + 1 for key, value in model.state_dict().items()}
        parallel.load_state_dict(state)
        torch.testing.assert_close(full(parallel.weight), state["weight"])
        state["weight"] = distribute_tensor(state["weight"] + 1, mesh, [Shard(1), Shard(1)])
        parallel.load_state_dict(state)
        torch.testing.assert_close(full(parallel.weight), full(state["weight"]))
        assert parallel.count == 2
        nested = ParallelModule(Rows(), captured, parallel_rows(LAYOUTS["nested"], a=2, b=2), None, mesh)
        nested.load_state_dict(parallel.state_dict())
        torch.testing.assert_close(full(nested.weight), full(parallel.weight))
        # what the layout before saved, this one loads; the last one is loaded on other ranks
        saved = full(parallel.weight)
        if before is not None:
            with torch.no_grad():
                parallel.weight.zero_()
            checkpoint.load({"model": parallel.state_dict()}, checkpoint_id=f"{folder}/{before}")
            torch.testing.assert_close(full(parallel.weight), saved)
        checkpoint.save({"model": parallel.state_dict()}, checkpoint_id=f"{folder}/{name}")
        before = name

    with pytest.raises(ValueError, match=r"parameter weight is a:S\(0%2\) b:S\(0%4\), which a DTensor can express and"):
        ParallelModule(model, captured, parallel_rows((Split(0, 2), Split(0, 4)), a=2, b=2), None, mesh)
    return saved


def load_rows(folder: str) -> torch.Tensor:
    torch.manual_seed(1)
    model, x = Rows(), torch.randn(4)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    parallel = ParallelModule(model, capture(model, (x,)), parallel_rows((Split(0, 12),), a=2), None, mesh)
    checkpoint.load({"model": parallel.state_dict()}, checkpoint_id=folder)
    return full(parallel.weight)


def test_parameters_in_every_layout_train_and_are_saved_at_4_ranks_and_loaded_at_2(tmp_path: Path) -> None:
    saved = run(4, rows_in_every_layout, str(tmp_path))
    loaded = run(2, load_rows, str(tmp_path / [*LAYOUTS][-1]))
    assert all(torch.equal(tensor, saved[0]) for tensor in (*saved, *loaded))


def materialize_rows() -> None:
    layout: Layout = (Split(0, 6), Split(0, 12))
    x, whole = torch.randn(4), torch.arange(48.0).reshape(12, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = Rows()
    captured = capture(model, (x,))
    parallel = ParallelModule(model.to("meta"), captured, parallel_rows(layout, a=2, b=2), None, mesh)
    with pytest.raises(ValueError, match=r"weight is on meta: call materialize"):
        parallel(x)
    with pytest.raises(ValueError, match=r"lacks count, which are on meta"):
        parallel.materialize({"weight": whole})
    with pytest.raises(ValueError, match=r"weight is \[4, 12\] in the state_dict and \[12, 4\] in the model"):
        parallel.materialize({"weight": whole.t(), "count": torch.zeros(())})

    def init(name: str, tensor: torch.Tensor) -> None:
        if name == "weight" and dist.get_rank() == 3:
            raise KeyError("no such file")
        tensor.fill_(1.0)

    with pytest.raises(KeyError, match=r"no such file.* \(on rank 3 of 4\)"):
        parallel.materialize(init)
    assert parallel.weight.is_meta, "nothing changes unless all agree"
    with pytest.raises(ValueError, match=r"different values for 'weight'"):
        parallel.materialize(lambda name, tensor: tensor.fill_(dist.get_rank()))
    parallel.materialize(lambda name, tensor: tensor.copy_(whole) if name == "weight" else tensor.zero_())
    torch.testing.assert_close(full(parallel.weight), whole)
    assert local_tensor(parallel.weight).untyped_storage().nbytes() == 3 * 4 * 4, "only the slice is kept"
    parallel.materialize({"weight": distribute_tensor(whole + 1, mesh, [Shard(1), Shard(0)])})
    torch.testing.assert_close(full(parallel.weight), whole + 1)
    torch.testing.assert_close(full(parallel(x)), ((whole + 1) * x).sum(1))


def test_a_model_on_meta_is_materialized_slice_by_slice() -> None:
    run(4, materialize_rows)


def disagree() -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"different values for 'up.weight': seed every rank equally"):
        parallel_mlp_module(2, 1, seed=rank)
    with pytest.raises(ValueError, match=r"the ranks have different programs.*rank 0 has .*, rank 1 has "):
        torch.manual_seed(0)
        model, x = Mlp(), torch.randn(8, 6)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        program = parallel_mlp(2, 1)
        if rank == 1:
            program = dataclasses.replace(program, saved=("b", "r", "x"))
        ParallelModule(model, capture(model, (x,)), program, None, mesh)
    with pytest.raises(ValueError, match=r"the plan is for a mesh of \(1, 2\), and this mesh is \(2, 1\)"):
        ParallelModule(model, capture(model, (x,)), parallel_mlp(1, 2), None, mesh)
    parallel, _, x = parallel_mlp_module(2, 1)
    with pytest.raises(ValueError, match=r"rank 0: .*float32\[8, 6\]; rank 1: .*float32\[3, 6\]"):
        parallel(x[:3] if rank == 1 else x)
    with pytest.raises(ValueError, match=r"input args.0 differs between ranks: a plain tensor is the global batch"):
        parallel(x + rank)
    with pytest.raises(ValueError, match=r"keeps its device and dtype"):
        parallel.double()

    def plan() -> str:
        raise ValueError(f"no plan fits (rank {rank})")

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"^no plan fits \(rank 0\)$"):
        on_first_rank(plan, mesh)
    assert on_first_rank(lambda: rank + 10, mesh) == 10
    raise_together(None, mesh)
    with pytest.raises(KeyError, match=r"missing"):
        raise_together(KeyError("missing") if rank == 1 else None, mesh)
    # what one rank alone has is an error on those that have it not, too
    with pytest.raises(ValueError, match=r"^w differs$"):
        all_alike({"w": 1} if rank == 0 else {}, mesh, "{name} differs")
    all_alike({("w", rank): rank}, mesh, "{name} differs", everywhere=False)
    with pytest.raises(ValueError, match=r"^w differs$"):
        all_alike({("w", 0): rank}, mesh, "{name} differs", everywhere=False)


def test_ranks_that_disagree_all_raise() -> None:
    run(2, disagree)


def exchange_in_order() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    assert on_first_rank(dist.get_rank, mesh) == 0
    return exchange(dist.get_rank(), mesh)


def test_what_ranks_exchange_is_in_the_order_of_the_mesh() -> None:
    assert run(4, exchange_in_order) == [[0, 1, 2, 3]] * 4


def hang_on_rank_one() -> None:
    dist.barrier()  # a rank that ends while the other one still connects is another failure
    if dist.get_rank() == 1:
        time.sleep(100)


def fail_on_rank_one() -> None:
    dist.barrier()  # a rank that ends before all are connected is an error of its own
    if dist.get_rank() == 1:
        raise ValueError("one")


def test_no_rank_outlives_a_test() -> None:
    hung = outcomes(2, hang_on_rank_one, timeout_seconds=10)
    assert hung[0].error is None and isinstance(hung[1].error, TimeoutError)
    with pytest.raises(RuntimeError, match=r"rank 1: ValueError\('one'\)"):
        run(2, fail_on_rank_one)
    assert not multiprocessing.active_children()


class Dropped(Rows):
    """As `Rows`, with a dropout that was off when it was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.dropout(x))


def leave_the_captured_mode() -> None:
    model, x = Dropped().eval(), torch.ones(4)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    parallel = ParallelModule(model, capture(model, (x,)), parallel_rows((R,), a=1), None, mesh)
    assert not parallel.training
    torch.testing.assert_close(parallel(x), model.weight.sum(1))
    parallel.train()
    with pytest.raises(ValueError, match="a program for evaluation with gradients, and is called for training"):
        parallel(x)


def test_a_mode_that_was_not_captured_is_refused() -> None:
    run(1, leave_the_captured_mode)


def test_numbers_without_a_literal_are_written() -> None:
    p = Builder(x=1)
    p.input("a", "input", "args.0", (2,), (R,))
    for name, number in (("b", float("-inf")), ("c", float("nan"))):
        p.op(name, "aten.full_like.default", "a", number, shape=(2,), dtype=torch.float32)
        p.output(name, "output", name, (2,), (R,))
    (infinite, nothing), _ = compile(p.build(), (None,)).forward([torch.zeros(2)])
    assert infinite is not None and infinite.isneginf().all() and nothing is not None and nothing.isnan().all()


class Shared(nn.Module):
    """Two parameters whose gradients are one tensor, which is also the gradient that came in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self) -> torch.Tensor:
        return self.a + self.b


def gradients_apart() -> None:
    p = Builder(x=1)
    for name in ("a", "b"):
        p.input(name, "parameter", name, (3,), (R,))
    p.input("t", "tangent", "output", (3,), (R,))
    p.op("y", "aten.add.Tensor", "a", "b", shape=(3,))
    p.output("y", "output", "output", (3,), (R,))
    p.output("t", "gradient", "a", (3,), (R,))
    p.output("t", "gradient", "b", (3,), (R,))
    model = Shared()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    parallel = ParallelModule(model, capture(model), p.build(), None, mesh)
    for _ in range(2):
        given = torch.ones(3)
        parallel.zero_grad()
        parallel().backward(given)
        parallel.a.grad.mul_(5)
        assert full(parallel.b.grad).tolist() == given.tolist() == [1.0, 1.0, 1.0]


def test_gradients_do_not_share_memory() -> None:
    run(1, gradients_apart)


def free_in_backward() -> None:
    parallel, _, x = parallel_mlp_module(1, 1)
    loss = parallel(x)
    hidden = weakref.ref(loss.grad_fn.saved_tensors[2])
    assert hidden() is not None
    loss.backward()
    assert hidden() is None


def test_backward_frees_what_forward_saved() -> None:
    run(1, free_in_backward)


def place_every_layout(mesh_shape: tuple[int, ...], size: int) -> list[tuple[Layout, bool]]:
    mesh = init_device_mesh("cpu", mesh_shape)
    coordinate = tuple(mesh.get_coordinate() or ())
    whole = torch.arange(float(size))
    splits = [R, *(Split(0, period) for period in range(2, size + 1) if size % period == 0)]
    found = []
    for layout in itertools.product(splits, repeat=len(mesh_shape)):
        if is_legal((size,), layout, mesh_shape):
            placements = placements_of(layout, (size,), mesh_shape)
            local = local_slice(whole, layout, mesh_shape, coordinate)
            assert torch.equal(local, shard(whole, layout, mesh_shape, coordinate))
            distributed = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            if is_gatherable(layout, (size,), mesh_shape):
                assert torch.equal(distributed.full_tensor(), whole), layout
            found.append((layout, torch.equal(local_tensor(distributed), local)))
    return found


def test_placements_give_each_rank_what_its_layout_says() -> None:
    for found in run(4, place_every_layout, (2, 2), 24):
        assert len(found) > 30 and all(right for _, right in found)


def extremes(dtype: torch.dtype, reduction: str, special: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank has a row of its own, made of the same numbers in another order."""
    group = dist.group.WORLD
    assert group is not None
    mine = torch.tensor(special, dtype=dtype).roll(dist.get_rank())
    whole, handle = all_reduce(mine, reduction, group)
    handle.wait()
    part, handle = reduce_scatter(mine, reduction, group)
    handle.wait()
    return whole, part


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_extremes_show_what_is_no_number_on_any_rank(dtype: torch.dtype, reduction: str) -> None:
    special = [float("nan"), 1.5, -2.5, float("inf"), float("-inf"), -0.5]
    rows = torch.stack([torch.tensor(special, dtype=dtype).roll(rank) for rank in range(2)])
    expected = rows.amax(0) if reduction == "max" else rows.amin(0)
    for rank, (whole, part) in enumerate(run(2, extremes, dtype, reduction, special)):
        torch.testing.assert_close(whole, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(part, expected[3 * rank : 3 * rank + 3], rtol=0, atol=0, equal_nan=True)
