"""DTensors that are the whole tensor to every operator."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor, Replicate

from .distributed import _spec
from .redistributing import full_tensor, redistributed
from .watching import gradient_hooks, hook_gradient

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

_LOCAL: Any = vars(DTensor)["_local_tensor"]

VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of tensors that hold its elements."""

LOOKS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "__len__"),
        *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "__hash__"),
    }
)
"""Methods of tensors, and functions, that read no element."""

EDGE = frozenset({"grad_fn", "output_nr"})
"""Attributes of tensors that are their place in the graph of autograd. Gathering changes none."""


class Output(DTensor):
    """A DTensor that is the whole tensor to every operator, function and method of torch: numbers, comparisons, sums
    and losses are those of one device. The first one gathers it, on all ranks at once; what is gathered is kept, and
    writes in place go there. What is a DTensor's own (`placements`, `to_local()`, `redistribute()`, `full_tensor()`) is
    what it is of any, and so is what these return."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _looks(func):
            its_own = getattr(getattr(func, "__self__", None), "__name__", "") in EDGE
            with torch._C.DisableTorchFunctionSubclass():
                return func(*(x if its_own and _is_as_gathered(x) else current(x) for x in args), **kwargs)
        if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            return _differentiated(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(DTensor, _whole, (args, kwargs))
        return func(*args, **kwargs)

    def whole(self) -> torch.Tensor:
        """The whole tensor, gathered when it is first asked for."""
        attributes = vars(self)
        if attributes["_whole"] is None:
            hooks = gradient_hooks(self)
            with torch.enable_grad():
                gathered = self.full_tensor()
            hook_gradient(gathered, hooks)  # a backward may end there
            attributes["_whole"] = gathered
        whole: torch.Tensor = attributes["_whole"]
        return whole

    @property
    def _local_tensor(self) -> torch.Tensor:
        attributes = vars(self)
        if attributes.get("_whole") is None:
            local: torch.Tensor = _LOCAL.__get__(self)
            return local
        with torch.no_grad():
            part: torch.Tensor = attributes["_part"](attributes["_whole"].detach())
            return part

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        _LOCAL.__set__(self, local)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor, in memory of its own."""
        whole = vars(self)["_whole"]
        made: torch.Tensor = _Gathered.apply(self) if whole is None else whole.clone()  # type: ignore
        return made

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """What this rank holds."""
        return DTensor.to_local(self._split(), grad_placements=grad_placements)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """A DTensor of other placements, which is nothing else."""
        return DTensor.redistribute(self._split(), *args, **kwargs)

    def _split(self) -> DTensor:
        whole = vars(self)["_whole"]
        made: DTensor = self if whole is None else _Split.apply(whole, self._spec, vars(self)["_part"])  # type: ignore
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        if vars(self)["_whole"] is not None:
            return repr(vars(self)["_whole"])
        return (
            f"Output({list(self.shape)}, {self.dtype}, of which this rank holds {list(self._local_tensor.shape)}, "
            f"placed {list(self.placements)}: print its full_tensor(), on all ranks at once)"
        )


class Absent(torch.Tensor):
    """An output that no rank keeps. Its shape and dtype are there; who asks for its elements is told why they are
    not."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _looks(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Absent))
        raise ValueError(
            f"{vars(found)['_path']} is not kept in a training step of a pipeline, which computes it micro-batch by "
            f"micro-batch: call the module under torch.no_grad(), or compute with it in loss_fn="
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({vars(self)['_path']}, {list(self.shape)}, {self.dtype})"


def absent_output(path: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Absent:
    """An output of a training step that no rank keeps."""
    made = torch.empty((), dtype=dtype, device=device).expand(*shape).as_subclass(Absent)
    vars(made)["_path"] = path
    return made


def split_output(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
    part: Callable[[torch.Tensor], torch.Tensor],
) -> Output:
    """The output of which this rank holds `local`, which is what `part` gives of a whole one."""
    if (dynamo := sys.modules.get("torch._dynamo.config")) is not None:
        dynamo.nontraceable_tensor_subclasses.add(Output)  # what torch.compile makes has operators see it as it is
    spec = _spec(mesh, tuple(placements), shape, stride, local.dtype)
    made = Output(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    vars(made).update(_whole=None, _part=part)
    return made


class _Gathered(torch.autograd.Function):
    """Gathers an output. Its gradient is the same on all ranks, of which each takes its part."""

    @staticmethod
    def forward(ctx: Any, split: Output) -> torch.Tensor:
        ctx.spec, ctx.part = split._spec, vars(split)["_part"]
        local = split._local_tensor
        whole = full_tensor(DTensor(local, split._spec, requires_grad=False))  # type: ignore[no-untyped-call]
        if whole.untyped_storage()._cdata == local.untyped_storage()._cdata:  # of axes with one rank
            return whole.clone()
        return unviewed(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        local = ctx.part(gradient.detach())
        return DTensor(local, ctx.spec, requires_grad=False)  # type: ignore[no-untyped-call]


class _Split(torch.autograd.Function):
    """Splits a whole tensor."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, spec: Any, part: Callable[[torch.Tensor], torch.Tensor]) -> DTensor:
        local = part(whole.detach())
        own = local.clone() if local.untyped_storage()._cdata == whole.untyped_storage()._cdata else local
        return DTensor(own, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (full_tensor(gradient) if isinstance(gradient, DTensor) else gradient), None, None


def shortened(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The beginning of an output along a dim, as a value. One that is split along it, or that no rank keeps, stays
    whole."""
    if isinstance(tensor, Absent):
        return tensor
    if not isinstance(tensor, Output):
        return unviewed(tensor.narrow(dim, 0, size))
    if any(getattr(place, "dim", None) == dim for place in tensor.placements):
        return tensor
    shape = torch.Size((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))
    local, stride = tensor._local_tensor.narrow(dim, 0, size), torch.empty(shape, device="meta").stride()
    return split_output(local, tensor.device_mesh, tensor.placements, shape, stride, vars(tensor)["_part"])


def lengthened(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The gradient of an output of this shape, of which `gradient` is that of what was cut from it: zeros beyond."""
    if gradient.shape == (shape := torch.Size(shape)):
        return gradient
    missing = [n - own for n, own in zip(shape, gradient.shape, strict=True)]
    pad = [n for more in reversed(missing) for n in (0, more)]
    if not isinstance(gradient, DTensor):
        return torch.nn.functional.pad(gradient, pad)
    mesh, placements = gradient.device_mesh, gradient.placements
    split = [place.is_partial() or missing[getattr(place, "dim", 0)] > 0 for place in placements]
    placements = tuple(Replicate() if one else place for one, place in zip(split, placements, strict=True))
    local = torch.nn.functional.pad(redistributed(gradient, mesh, placements)._local_tensor, pad)
    spec = _spec(mesh, placements, shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def unviewed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which autograd takes for no view of another one, and lets people write into."""
    return tensor.data if is_view(tensor) else tensor


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes it for a view of another one."""
    return tensor._is_view()


def _looks(func: Any) -> bool:
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return func.__name__ == "__get__" and getattr(func.__self__, "__name__", "") not in VALUES
    return func.__name__ in LOOKS


def current(value: Any) -> Any:
    """What an output is now: the whole tensor, once it has been gathered. Any other value is itself."""
    if isinstance(value, Output) and vars(value)["_whole"] is not None:
        return vars(value)["_whole"]
    return value


def _is_as_gathered(output: Output) -> bool:
    """Whether nothing was written into an output that was gathered, if it was."""
    whole = vars(output)["_whole"]
    return whole is None or isinstance(whole.grad_fn, _Gathered._backward_cls)


def _differentiated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of autograd that is given outputs. One whose gradient is asked for is asked where it is split, too:
    only there comes what others bring that the program computes of it, which their hooks see."""
    call = inspect.signature(func).bind(*args, **kwargs)
    given = call.arguments.pop("inputs", None)
    call.arguments = pytree.tree_map_only(DTensor, _whole, call.arguments)
    if given is not None:
        inputs = pytree.tree_leaves(given, is_leaf=lambda x: isinstance(x, GradientEdge))
        edges = [get_gradient_edge(x) for x in inputs if isinstance(x, Output) and x.requires_grad]
        call.arguments["inputs"] = (*pytree.tree_map_only(DTensor, _whole, inputs), *edges)
    results = func(*call.args, **call.kwargs)
    return None if results is None else results[: len(inputs)]


def _whole(dtensor: DTensor) -> torch.Tensor:
    return dtensor.whole() if isinstance(dtensor, Output) else full_tensor(dtensor)
