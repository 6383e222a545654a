"""The runtime: programs written by hand, run by simulated ranks and by real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from autopar.passes.capture import capture
from autopar.runtime.agree import process_groups
from autopar.runtime.execute import compile
from autopar.runtime.module import ParallelModule
from autopar.runtime.placements import local_slice
from autopar.runtime.simulate import coordinates, simulate_step
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor import Replicate as Replicate_

from autopar.graph import Ref, TensorMeta
from autopar.layout import Layout, Replicate, Split, local_shape
from autopar.program import Instruction, Program, ProgramInput, ProgramOutput, RankIndex

R = Replicate()


class Builder:
    """A program by hand: values have global shapes and layouts, local shapes follow."""

    def __init__(self, **mesh: int) -> None:
        self.axes, self.mesh = tuple(mesh), tuple(mesh.values())
        self.inputs: list[ProgramInput] = []
        self.outputs: list[ProgramOutput] = []
        self.bodies: tuple[list[Instruction], list[Instruction]] = ([], [])
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
        made = Instruction(op=op, args=refs, kwargs=tuple(kwargs.items()), outputs=(name,), module="m")
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
    p.output("whole", "output", "whole", (8, 4), (R,), dtype)
    p.output("summed", "output", "summed", (8, 4), split, dtype)
    p.output("transposed", "output", "transposed", (8, 4), (Split(1, 4),), dtype)
    p.output("mine", "output", "mine", (8, 4), split, dtype)
    p.output("largest", "output", "largest", (n, 4), (R,), dtype)
    p.output("smallest", "output", "smallest", (n, 4), (R,), dtype)
    return p.build()


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
    assert not parallel.eval()(x).isnan()
    loss = parallel.train()(x)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    with pytest.raises(ValueError, match=r"args\.0 is float32\[4, 6\].*float32\[8, 6\]"):
        parallel(x[:4])
    with pytest.raises(ValueError, match=r"float64\[8, 6\]"):
        parallel(x.double())
    with pytest.raises(AttributeError, match="no_such_thing"):
        parallel.no_such_thing  # noqa: B018


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 2), (2, 2)])
def test_the_module_trains_as_the_model_does(dp: int, tp: int) -> None:
    run(dp * tp, train_beside_the_model, dp, tp)
