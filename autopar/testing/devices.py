"""A program on tensors without data of a device that need not be here.

What runs on a laptop's CPU may have no kernel on the cluster's GPU, may mix tensors of two devices, or may view what
does not lie there as it did. A program holds no autograd, so that fakes show all of it: every instruction runs, by its
meta kernel, on fakes of the device, in the shapes, dtypes and strides that it would have there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from autopar.compat.devices import devices_of
from autopar.compat.quick_fakes import quick_fakes
from autopar.compat.tensors import memory_of, unmodified
from autopar.ir.graph import RESHAPE, WAIT, Node, Ref, TensorMeta
from autopar.ir.layout import local_meta
from autopar.ir.program import Program, RankIndex, names_no_device
from autopar.ops import sdpa
from autopar.ops.kernels import kernel_of
from autopar.ops.prepared import prepared_arguments
from autopar.ops.strides import contiguous


@lru_cache(maxsize=1 << 16)
def _reshape(
    sizes: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """The shape and the strides of a reshape's result, and whether it is a view: one where that is possible, or else a
    copy, on any device alike. torch says which in Python for fakes, in a hundred times the time that it takes for a
    tensor on `meta`."""
    with unmodified():
        base = torch.empty_strided(sizes, strides, device="meta")
        made = base.reshape(shape)
        return tuple(made.shape), made.stride(), memory_of(made) == memory_of(base)


def _reshaped(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    made, strides, is_view = _reshape(tuple(x.shape), x.stride(), tuple(shape))
    if is_view:
        return torch.as_strided(x, made, strides, x.storage_offset())
    return torch.empty(made, dtype=x.dtype, device=x.device)


KERNELS: Mapping[str, Callable[..., Any]] = {
    **{f"autopar.{function.__name__}.default": function for function in sdpa.OPERATORS},
    RESHAPE: _reshaped,
}
"""Operators whose own code runs on fakes: ours, which choose torch's kernels by device, and one without a kernel."""


def run_on_fakes(program: Program, device_type: str = "cuda") -> None:
    """Run the program of the first rank on fakes of a device, as `DeviceFakes.run` does."""
    DeviceFakes(device_type).run(program)


class DeviceFakes:
    """Fakes of a device, for any number of programs. Instructions repeat, from layer to layer and from plan to plan:
    one whose operands lie as those of an earlier one did has the results of that one, and does not run again."""

    def __init__(self, device_type: str = "cuda") -> None:
        self.device = torch.device(device_type, 0)
        self._mode = quick_fakes()
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        """One for each way to lie in memory."""
        self._fresh: dict[TensorMeta, torch.Tensor] = {}
        """Contiguous ones in memory of their own."""
        self._results: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        """Of calls, by their operator and arguments, tensors of `_tensors` among them."""

    def run(self, program: Program) -> None:
        """Run the program of the first rank.

        Raises ValueError, with the instruction and the module that it is for, where an operator has no kernel on the
        device, where operands are on several, and where a result is not of the shape and dtype that the program says.
        """
        with self._mode, torch.no_grad(), _Methods():
            values: dict[str, torch.Tensor] = {}
            for i in program.inputs:
                values[i.name] = self._empty(local_meta(i.meta, i.layout, program.mesh))
            for instruction in program.nodes:
                try:
                    self._run(instruction, program, values)
                except Exception as error:
                    where = f" of {instruction.module}" if instruction.module else ""
                    raise ValueError(f"on {self.device.type}, {instruction}{where}: {error}") from error

    def _run(self, instruction: Node, program: Program, values: dict[str, torch.Tensor]) -> None:
        if instruction.op == WAIT:
            values[instruction.outputs[0]] = values[instruction.args[0].name]
            return
        if instruction.collective:
            contiguous(values[instruction.args[0].name])
            values[instruction.outputs[0]] = self._empty(program.metas[instruction.outputs[0]])
            return
        if self.device.type not in devices_of(instruction.op):
            raise ValueError(f"there is no such kernel on {self.device.type}")
        rank = (0,) * len(program.mesh)

        def value(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return values[argument.name]
            if isinstance(argument, RankIndex):
                return argument.at(rank)
            if isinstance(argument, torch.device):
                return self.device
            return [value(item) for item in argument] if isinstance(argument, (tuple, list)) else argument

        args, kwargs = [value(a) for a in instruction.args], {key: value(a) for key, a in instruction.kwargs}
        if names_no_device(instruction):
            kwargs["device"] = self.device
        call = (instruction.op, _key(args), tuple((name, _key(kwargs[name])) for name in sorted(kwargs)))
        if call not in self._results:
            self._results[call] = self._called(instruction.op, args, kwargs)
        for name, result in zip(instruction.outputs, self._results[call], strict=True):
            if name:
                _check(result, program.metas[name], name in program.uneven, self.device)
                values[name] = result

    def _called(self, op: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        args, kwargs = prepared_arguments(op, args, kwargs)
        if KERNELS.get(op) is _reshaped and (known := self._reshaped_before(*args)) is not None:
            return (known,)
        result = _result(KERNELS.get(op) or kernel_of(op), args, kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(self._kept(one) if isinstance(one, torch.Tensor) else one for one in results)

    def _reshaped_before(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
        """The earlier tensor, if there is one, that lies as the result of this reshape would."""
        if x.is_conj() or x.is_neg():
            return None
        made, strides, is_view = _reshape(tuple(x.shape), x.stride(), tuple(shape))
        offset, size = (x.storage_offset(), x.untyped_storage().nbytes()) if is_view else (0, x.numel() * x.itemsize)
        return self._tensors.get((len(made), (*made, *strides, offset, size), x.dtype, x.device, False, False))

    def _empty(self, meta: TensorMeta) -> torch.Tensor:
        if meta not in self._fresh:
            self._fresh[meta] = self._kept(torch.empty(meta.shape, dtype=meta.dtype, device=self.device))
        return self._fresh[meta]

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or the earlier one that lies as it does."""
        sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
        if not all(isinstance(size, int) for size in sizes):  # they depend on data
            return tensor
        lies = (tensor.dim(), sizes, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
        return self._tensors.setdefault(lies, tensor)


def _key(argument: Any) -> Any:
    """What an argument is known by: a tensor by itself, and a number by its type too."""
    if isinstance(argument, torch.Tensor):
        return argument
    return tuple(map(_key, argument)) if isinstance(argument, list) else (type(argument), argument)


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
