"""Products of matrices that lie on two mesh axes, as programs: MeshSlice's three dataflows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ir.layout import Layout, Shape, Split
from autopar.ir.program import Program, ProgramInput, ProgramOutput
from autopar.runtime.agreement import coordinate_of
from autopar.runtime.compiled import compile
from autopar.runtime.execute import process_groups
from autopar.runtime.placements import local_slice
from autopar.runtime.simulate import simulate_step

Dataflow = Literal["output", "left", "right"]
DATAFLOWS: Sequence[Dataflow] = ("output", "left", "right")
ROWS, COLUMNS = 0, 1


class Writer:
    def __init__(self, mesh: tuple[int, int], dtype: torch.dtype) -> None:
        self.mesh, self.dtype = mesh, dtype
        self.metas: dict[str, TensorMeta] = {}
        self.written: list[Node] = []

    def op(self, op: str, *args: Any, shape: tuple[int, ...]) -> str:
        name = f"v{len(self.metas)}"
        self.metas[name] = TensorMeta(shape, self.dtype)
        args = tuple(Ref(a) if isinstance(a, str) and a in self.metas else a for a in args)
        self.written.append(Node(op=op, args=args, outputs=(name,)))
        return name

    def turned(self, value: str) -> str:
        rows, columns = self.metas[value].shape
        return self.op("aten.permute.default", value, (1, 0), shape=(columns, rows))

    def collective(self, kind: str, value: str, *args: Any, axis: int, rows: int) -> str:
        copy = self.op("aten.contiguous.default", value, shape=self.metas[value].shape)
        shape = (rows, self.metas[value].shape[1])
        return self.op("collective.wait", self.op(f"collective.{kind}", copy, *args, axis, shape=shape), shape=shape)

    def gathered(self, value: str, dim: int, axis: int) -> str:
        """All ranks' parts of a dim, side by side."""
        n, (rows, columns) = self.mesh[axis], self.metas[value].shape
        if n == 1:
            return value
        whole = self.collective("all_gather", value, axis=axis, rows=n * rows)
        if dim == 0:
            return whole
        apart = self.op("aten.reshape.default", whole, (n, rows, columns), shape=(n, rows, columns))
        moved = self.op("aten.permute.default", apart, (1, 0, 2), shape=(rows, n, columns))
        return self.op("aten.reshape.default", moved, (rows, n * columns), shape=(rows, n * columns))

    def scattered(self, value: str, dim: int, axis: int) -> str:
        """This rank's part of a dim of the sum."""
        n, (rows, columns) = self.mesh[axis], self.metas[value].shape
        if n == 1:
            return value
        if dim == 1:
            apart = self.op("aten.reshape.default", value, (rows, n, columns // n), shape=(rows, n, columns // n))
            moved = self.op("aten.permute.default", apart, (1, 0, 2), shape=(n, rows, columns // n))
            value = self.op("aten.reshape.default", moved, (n * rows, columns // n), shape=(n * rows, columns // n))
        return self.collective("reduce_scatter", value, "sum", axis=axis, rows=self.metas[value].shape[0] // n)

    def mm(self, left: str, right: str) -> str:
        return self.op("aten.mm.default", left, right, shape=(self.metas[left].shape[0], self.metas[right].shape[1]))

    def product(self, flow: Dataflow, a: str, b: str) -> str:
        """C = A B, or A B^T ("left"), or A^T B ("right")."""
        if flow == "output":
            return self.mm(self.gathered(a, 1, COLUMNS), self.gathered(b, 0, ROWS))
        if flow == "left":
            return self.scattered(self.mm(a, self.turned(self.gathered(b, 0, ROWS))), 1, COLUMNS)
        return self.scattered(self.mm(self.turned(self.gathered(a, 1, COLUMNS)), b), 0, ROWS)


def product(flow: Dataflow, mesh: tuple[int, int], size: int, dtype: torch.dtype = torch.float32) -> Program:
    """C = A B of `size` x `size` matrices on rows x columns of ranks, with operands and the result cut along both
    dims; with `flow` "left", B is given transposed, and with "right", A is. Backward is C = A B again, of
    the tangent and A, so that it, too, has each collective."""
    writer = Writer(mesh, dtype)
    layout: Layout = (Split(0, size), Split(1, size))
    whole, part = TensorMeta((size, size), dtype), TensorMeta((size // mesh[0], size // mesh[1]), dtype)
    writer.metas.update(a=part, b=part, tangent=part)

    def written(a: str, b: str) -> tuple[str, tuple[Node, ...]]:
        writer.written = []
        return writer.product(flow, a, b), tuple(writer.written)

    result, forward = written("a", "b")
    gradient, backward = written("tangent", "a")
    given = [ProgramInput(name=n, role="parameter", target=n, meta=whole, layout=layout) for n in ("a", "b")]
    given.append(ProgramInput(name="tangent", role="tangent", target="c", meta=whole, layout=layout))
    return Program(
        axes=("rows", "columns"),
        mesh=mesh,
        inputs=tuple(given),
        forward=forward,
        backward=backward,
        saved=("a",),
        outputs=(
            ProgramOutput(name=result, role="output", target="c", meta=whole, layout=layout),
            ProgramOutput(name=gradient, role="gradient", target="b", meta=whole, layout=layout),
        ),
        metas=writer.metas,
    )


def forward_product(
    flow: Dataflow, mesh: tuple[int, int], m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16
) -> Program:
    """C = A B of m x k and k x n matrices as `product` has it, and no backward."""
    writer = Writer(mesh, dtype)
    shapes = {"a": (k, m) if flow == "right" else (m, k), "b": (n, k) if flow == "left" else (k, n)}

    def layout(shape: tuple[int, int]) -> Layout:
        return Split(0, shape[0]), Split(1, shape[1])

    for name, shape in shapes.items():
        writer.metas[name] = TensorMeta((shape[0] // mesh[0], shape[1] // mesh[1]), dtype)
    result = writer.product(flow, "a", "b")
    return Program(
        axes=("rows", "columns"),
        mesh=mesh,
        inputs=tuple(
            ProgramInput(name=name, role="parameter", target=name, meta=TensorMeta(s, dtype), layout=layout(s))
            for name, s in shapes.items()
        ),
        forward=tuple(writer.written),
        backward=(),
        saved=(),
        outputs=(
            ProgramOutput(
                name=result, role="output", target="c", meta=TensorMeta((m, n), dtype), layout=layout((m, n))
            ),
        ),
        metas=writer.metas,
    )


def operands(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and the tangent."""
    generator = torch.Generator().manual_seed(0)
    a, b, tangent = (torch.randn(size, size, generator=generator) for _ in range(3))
    return a, b, tangent


def wanted(flow: Dataflow, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return {"output": left @ right, "left": left @ right.T, "right": left.T @ right}[flow]


def equal(flow: Dataflow, program: Program, a: torch.Tensor, b: torch.Tensor, tangent: torch.Tensor) -> None:
    """The program makes what one device does of whole matrices."""
    made = simulate_step(program, {"a": a, "b": b}, {}, {"c": tangent})
    torch.testing.assert_close(made.outputs["c"], wanted(flow, a, b), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made.gradients["b"], wanted(flow, tangent, a), rtol=1e-4, atol=1e-4)


def differences_on_a_rank(cases: Mapping[str, tuple[Dataflow, Program]], size: int) -> dict[str, float]:
    """On one of gloo's ranks: what programs of products make forward and backward, less this rank's part of what one
    device does."""
    from torch.distributed.device_mesh import init_device_mesh

    a, b, tangent = operands(size)
    found = {}
    meshes = {shape: init_device_mesh("cpu", shape) for shape in sorted({p.mesh for _, p in cases.values()})}
    for name, (flow, program) in cases.items():
        device_mesh = meshes[program.mesh]
        coordinate, layout = coordinate_of(device_mesh), program.outputs[0].layout

        def part(
            whole: torch.Tensor, layout: Layout = layout, mesh: Shape = program.mesh, at: Shape = coordinate
        ) -> torch.Tensor:
            return local_slice(whole, layout, mesh, at)

        executable = compile(program, process_groups(device_mesh))
        (made,), saved = executable.forward([part(a), part(b)])
        (gradient,) = executable.backward([*saved, part(tangent)])
        assert made is not None and gradient is not None
        errors = (made - part(wanted(flow, a, b)), gradient - part(wanted(flow, tangent, a)))
        found[name] = max(float(error.abs().max()) for error in errors)
    return found
