"""Compilers of stretches that are quick: they run what Inductor would get, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor import lowering as lowering  # of which decompositions ask
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.compat.inductor import Fused, fakes
from autopar.cost.liveness import Memory
from autopar.ir.graph import Node
from autopar.ir.layout import Shape
from autopar.ir.program import Program
from autopar.ops import lockstep
from autopar.ops.lockstep import Values
from autopar.runtime.compiling import Inductor
from autopar.runtime.simulate import check_outputs
from autopar.runtime.stretches import Compiler, compiled_halves, unit_of


def plain(function: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor], mode: str) -> Fused:
    """The function itself, for operands of these strides."""
    strides = [x.stride() for x in operands]

    def run(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        for x, wanted in zip(given, strides, strict=True):
            assert all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), wanted, strict=True))
        results = function(*given)
        given.clear()
        return results

    return run


def traced(function: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor], mode: str) -> Fused:
    """The operators that Inductor gets, after its decompositions."""
    from torch._inductor.decomposition import select_decomp_table

    with operands[0].fake_mode if operands else fakes():  # type: ignore[attr-defined]
        graph: Any = make_fx(function, decomposition_table=select_decomp_table())(*operands)
    return plain(graph, operands, mode)


def run_compiled(program: Program, inputs: Mapping[Shape, Values], *, compiler: Compiler) -> dict[Shape, Values]:
    """`simulate.run_ranks`, where each rank's stretches run compiled."""
    ranks = {coordinate: dict(values) for coordinate, values in inputs.items()}
    memory = Memory.of(program, program.nodes)
    for item in (item for half in compiled_halves(program) for item in half):
        if isinstance(item, Node):
            lockstep.run(item, program.mesh, ranks)
        else:
            for coordinate, values in ranks.items():
                operands = [values[name] for name in item.inputs]
                device = operands[0].device if operands else torch.device("cpu")
                unit = unit_of(item, memory, program, coordinate, device)
                compiler.prepare([(item.module, unit)], together=False)
                kernels = compiler.kernels(unit)
                results = unit(*operands) if kernels is None else kernels(operands)
                values.update(zip(item.outputs, results, strict=True))
        check_outputs(program, item, ranks)
    return ranks


def quick_compiler(fuse: Callable[..., Fused] = plain) -> Inductor:
    return Inductor(fuse=fuse, processes=0)
