"""Programs for tests, as text: an instruction a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ir.layout import REPLICATE, Split
from autopar.ir.program import Program, ProgramInput, ProgramOutput

BYTES = 4


LAB = str(Path(__file__).parents[2] / "benchmarks" / "lab" / "2x2.toml")


def program(text: str, shapes: dict[str, tuple[int, ...]], **names: Any) -> Program:
    """A program on 2 ranks, one instruction a line: `y = collective.all_reduce x sum 0`, `y = aten.mul.Tensor x x`.
    A line of dashes divides forward from backward. `names`: parameters, saved, outputs, gradients."""

    def instruction(line: str) -> Node:
        output, _, call = line.partition(" = ")
        op, *arguments = call.split()
        args = tuple(int(a) if a.isdigit() else a if a == "sum" else Ref(a) for a in arguments)
        return Node(op=op, args=args, outputs=(output,))

    halves = [[instruction(line.strip()) for line in half.strip().splitlines()] for half in text.split("---")]
    metas = {name: TensorMeta(shape, torch.float32) for name, shape in shapes.items()}

    def whole(name: str) -> TensorMeta:
        return TensorMeta((2 * shapes[name][0], *shapes[name][1:]), torch.float32)

    split = {name: (Split(0, 2 * shapes[name][0]),) for name in names.get("parameters", ())}
    inputs = [ProgramInput(name=n, role="parameter", target=n, meta=whole(n), layout=split[n]) for n in split]
    inputs.append(ProgramInput(name="x", role="input", target="x", meta=metas["x"], layout=(REPLICATE,)))
    outputs = [
        ProgramOutput(name=n, role=role, target=n, meta=metas[n], layout=(REPLICATE,))
        for role, key in (("output", "outputs"), ("gradient", "gradients"))
        for n in names.get(key, ())
    ]
    return Program(
        axes=("dp",),
        mesh=(2,),
        inputs=tuple(inputs),
        forward=tuple(halves[0]),
        backward=tuple(halves[1]) if len(halves) > 1 else (),
        saved=names.get("saved", ()),
        outputs=tuple(outputs),
        metas=metas,
    )
