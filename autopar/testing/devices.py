"""A program on tensors without data of a device that need not be here.

What runs on a laptop's CPU may have no kernel on the cluster's GPU, may mix tensors of two devices, or may view what
does not lie there as it did. A program holds no autograd, so that fakes show all of it: every instruction runs, by its
meta kernel, on fakes of the device, in the shapes, dtypes and strides that it would have there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from autopar import compat
from autopar.ir.graph import WAIT, Node, Ref, TensorMeta
from autopar.ir.layout import local_meta
from autopar.ir.program import Program, RankIndex, names_no_device
from autopar.ops import sdpa
from autopar.ops.contract import prepared_arguments
from autopar.ops.kernels import kernel_of
from autopar.ops.strides import contiguous

KERNELS: Mapping[str, Callable[..., Any]] = {
    f"autopar.{function.__name__}.default": function for function in sdpa.OPERATORS
}
"""Operators of ours whose own code runs on fakes: it chooses torch's kernels by device."""


def run_on_fakes(program: Program, device_type: str = "cuda") -> None:
    """Run the program of the first rank on fakes of a device.

    Raises ValueError, with the instruction and the module that it is for, where an operator has no kernel on that
    device, where operands are on several, and where a result is not of the shape and dtype that the program says.
    """
    device = torch.device(device_type, 0)
    with compat.fake_mode(), torch.no_grad(), _Methods():
        values: dict[str, torch.Tensor] = {}
        for i in program.inputs:
            values[i.name] = _empty(local_meta(i.meta, i.layout, program.mesh), device)
        for instruction in (*program.forward, *program.backward):
            try:
                _run(instruction, program, values, device)
            except Exception as error:
                where = f" of {instruction.module}" if instruction.module else ""
                raise ValueError(f"on {device_type}, {instruction}{where}: {error}") from error


def _empty(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype, device=device)


def _run(instruction: Node, program: Program, values: dict[str, torch.Tensor], device: torch.device) -> None:
    if instruction.op == WAIT:
        values[instruction.outputs[0]] = values[instruction.args[0].name]
        return
    if instruction.collective:
        contiguous(values[instruction.args[0].name])
        values[instruction.outputs[0]] = _empty(program.metas[instruction.outputs[0]], device)
        return
    if device.type not in compat.devices_of(instruction.op):
        raise ValueError(f"there is no such kernel on {device.type}")
    rank = (0,) * len(program.mesh)

    def value(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return values[argument.name]
        if isinstance(argument, RankIndex):
            return argument.at(rank)
        if isinstance(argument, torch.device):
            return device
        return [value(item) for item in argument] if isinstance(argument, (tuple, list)) else argument

    args, kwargs = [value(a) for a in instruction.args], {key: value(a) for key, a in instruction.kwargs}
    if names_no_device(instruction):
        kwargs["device"] = device
    args, kwargs = prepared_arguments(instruction.op, args, kwargs)
    result = _result(KERNELS.get(instruction.op) or kernel_of(instruction.op), args, kwargs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    for name, tensor in zip(instruction.outputs, results, strict=True):
        if name:
            _check(tensor, program.metas[name], name in program.uneven, device)
            values[name] = tensor


def _result(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Of a call on fakes. Those of some convolutions ask a library of the device how its results would lie; where that
    is not here, they lie as on `meta`."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if "is not linked with support for" not in str(error):
            raise
    devices = {x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    if len(devices) > 1:
        raise ValueError(f"operands are on {', '.join(sorted(map(str, devices)))}")
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: _like(x, torch.device("meta")), (args, kwargs))
    return pytree.tree_map_only(torch.Tensor, lambda x: _like(x, *devices), function(*args, **kwargs))


def _like(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _check(tensor: Any, meta: TensorMeta, uneven: bool, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        return
    if tensor.device.type != device.type:
        raise ValueError(f"a result is on {tensor.device}")
    if tensor.dtype != meta.dtype or (not uneven and tuple(tensor.shape) != meta.shape):
        raise ValueError(f"a result is {tensor.dtype}{list(tensor.shape)}, and the program says {meta}")


class _Methods(TorchFunctionMode):
    """Methods that ask the device of their tensor, as operators that do not."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.contiguous:
            x = args[0]
            return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **kwargs)
        return func(*args, **kwargs)
