"""What computes an operator: torch's overload, or, where its results depend on the device, a function of one kind.

The statistics of layer and batch norm of half-precision inputs are float32 on CUDA, and on a CPU of the inputs' dtype
unless weights are wider. In a graph they are float32: here a CPU's are widened, and narrowed again for its backward,
which loses nothing.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopar.compat.tensors import norm_dtype, statistics_dtype
from autopar.ir.graph import overload, parameters
from autopar.ir.own import FUNCTIONS


def kernel_of(op: str) -> Callable[..., Any]:
    """The function of an operator ("aten.mm.default")."""
    return ADAPTED.get(op) or overload(op)


def function_of(op: str) -> Callable[..., Any]:
    """As `kernel_of`, by a way that costs less to call."""
    return FUNCTIONS.get(op) or EQUIVALENTS.get(op) or kernel_of(op)


def _forward(op: str) -> Callable[..., Any]:
    """Input and weight come first and (of layer norm, third); statistics are the second and third result."""
    function = overload(op)

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, mean, deviation, *rest = function(x, *args, **kwargs)
        wide = statistics_dtype(x)
        return out, mean.to(wide), deviation.to(wide), *rest

    return run


def _backward(op: str) -> Callable[..., Any]:
    function = overload(op)
    names = [parameter.name for parameter in parameters(op)]
    places = [names.index(name) for name in names if name in ("mean", "rstd", "save_mean", "save_invstd")]
    wider = [names.index(name) for name in ("weight", "running_mean") if name in names]

    def run(gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        args = [gradient, x, *rest]
        if x.device.type == "cpu":
            narrow = norm_dtype(x, next((args[place] for place in wider if args[place] is not None), None))
            for place in places:
                args[place] = None if args[place] is None else args[place].to(narrow)
        return function(*args)

    return run


_FORWARD = (
    "aten.native_layer_norm.default",
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.no_stats",
)
_BACKWARD = ("aten.native_layer_norm_backward.default", "aten.native_batch_norm_backward.default")

ADAPTED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {**{op: _forward(op) for op in _FORWARD}, **{op: _backward(op) for op in _BACKWARD}}
)

EQUIVALENTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "aten.add.Tensor": torch.add,
        "aten.addmm.default": torch.addmm,
        "aten.bmm.default": torch.bmm,
        "aten.cat.default": torch.cat,
        "aten.clone.default": torch.clone,
        "aten.contiguous.default": torch.Tensor.contiguous,
        "aten.div.Tensor": torch.div,
        "aten.expand.default": torch.Tensor.expand,
        "aten.mean.dim": torch.mean,
        "aten.mm.default": torch.mm,
        "aten.mul.Scalar": torch.mul,
        "aten.mul.Tensor": torch.mul,
        "aten.neg.default": torch.neg,
        "aten.permute.default": torch.permute,
        "aten.pow.Tensor_Scalar": torch.pow,
        "aten.reshape.default": torch.reshape,
        "aten.rsqrt.default": torch.rsqrt,
        "aten.squeeze.dim": torch.squeeze,
        "aten.sub.Tensor": torch.sub,
        "aten.sum.dim_IntList": torch.sum,
        "aten.t.default": torch.t,
        "aten.transpose.int": torch.transpose,
        "aten.unsqueeze.default": torch.unsqueeze,
        "aten.view.default": torch.Tensor.view,
    }
)
"""Functions that call the same overload with the same arguments for less: 0.8 us instead of 1.4, and more where caches
are cold."""
