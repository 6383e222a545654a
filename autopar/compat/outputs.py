"""DTensors that are the whole tensor to every operator."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor, Replicate

from .calls import is_within
from .distributed import _spec
from .redistributing import full_tensor, redistributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

_LOCAL: Any = vars(DTensor)["_local_tensor"]

VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of tensors that hold its elements."""

LOOKS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "__len__"),
        *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "is_same_size"),
        *("is_pinned", "is_shared", "__hash__", "__dir__"),
    }
)
"""Methods of tensors, and functions, that read no element."""

Hook = Callable[[torch.Tensor], torch.Tensor | None]
"""Of a gradient, which it may replace."""

OF_GRAPH = frozenset(
    {"grad_fn", "output_nr", "grad", "retains_grad", "_backward_hooks", "register_hook", "retain_grad"}
)
"""Attributes and methods of tensors that are of their place in the graph of autograd."""

ACCESSES = frozenset({"__get__", "__set__", "__delete__"})
"""Functions by which an attribute is read, set and deleted."""

GRADIENTS = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})
"""Functions that ask for gradients."""


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
        if func in GRADIENTS:
            return _differentiated(func, args, kwargs)
        name = _name(func)
        if name in OF_GRAPH and isinstance(args[0], Output) and not args[0].is_written:
            return args[0].of_graph(func, name, args)
        if _looks(func, name):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*(current(x) for x in args), **kwargs)
        outputs: list[Output] = []

        def whole(dtensor: DTensor) -> torch.Tensor:
            if isinstance(dtensor, Output):
                dtensor.check()
                outputs.append(dtensor)
            return _whole(dtensor)

        args, kwargs = pytree.tree_map_only(DTensor, whole, (args, kwargs))
        results = func(*args, **kwargs)
        for output in outputs:
            output.follow()
        return results

    def whole(self) -> torch.Tensor:
        """The whole tensor, gathered when it is first asked for, as what its gradients need."""
        attributes = vars(self)
        if attributes["_whole"] is None:
            with torch.inference_mode(self.is_inference()), torch.enable_grad():
                attributes["_whole"] = self.full_tensor()
            attributes["_gathered"], attributes["_seen"] = self._now, self._state
            attributes["_edge"] = self._split_edge
        gathered: torch.Tensor = attributes["_whole"]
        return gathered

    @property
    def _now(self) -> tuple[Any, bool]:
        """Its place in the graph of autograd where it is whole."""
        whole = vars(self)["_whole"]
        return whole.grad_fn, whole.requires_grad

    @property
    def _state(self) -> tuple[Any, bool, int]:
        """That, and how often it was written there."""
        whole = vars(self)["_whole"]
        return *self._now, 0 if whole.is_inference() else whole._version

    @property
    def _split_edge(self) -> Any:
        """Its node in the graph of autograd where it is split."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    # ---- its place in the graph of autograd: where it is split, which all that reads it comes to, until it is written

    @property
    def is_written(self) -> bool:
        """Whether an operator of autograd wrote into it. It stands where it is whole, then."""
        return vars(self)["_whole"] is not None and self._now != vars(self)["_gathered"]

    @property
    def is_followed(self) -> bool:
        """Whether where it is split knows of all that was written where it is whole."""
        return vars(self)["_whole"] is None or self._state == vars(self)["_seen"]

    def check(self) -> None:
        """Raises ValueError for what cannot be seen in time: what views wrote, which an operator sees next, within a
        function of autograd's own; and what such a function wrote."""
        if vars(self)["_whole"] is None:
            return
        functions = torch.autograd.Function.apply, torch.autograd.function.BackwardCFunction.apply
        if not self.is_followed and not torch.is_grad_enabled() and any(map(is_within, functions)):
            raise ValueError(
                "an output that was written through a view of it is given to a torch.autograd.Function: write it by a "
                "method of its own (output.mul_(...)), or give a clone() of it"
            )
        if self._split_edge is not vars(self)["_edge"]:
            raise ValueError(
                "an output was written by a torch.autograd.Function, which marks it dirty: give it a clone() of the "
                "output, and use what it returns"
            )

    def follow(self) -> None:
        """Where it is split is computed of where it is whole, once that was written: functions of autograd's own take
        it there."""
        attributes, whole = vars(self), vars(self)["_whole"]
        if self.is_followed:
            return
        moved = self._now != attributes["_seen"][:2]
        attributes["_seen"] = self._state
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            if not moved:
                torch.autograd.graph.increment_version(self)
            elif whole.requires_grad:
                _Followed.apply(self, whole)  # type: ignore[no-untyped-call]
            elif self.requires_grad:
                self.detach_()
        attributes["_edge"] = self._split_edge
        if not moved:
            return
        if (retained := attributes.pop("_retained", None)) is not None:
            retained.remove()
            if whole.requires_grad:
                whole.retain_grad()
        if (known := attributes.pop("_grad", None)) is not None:
            whole.grad = known

    def of_graph(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        """One of `OF_GRAPH`, with gradients that are whole."""
        attributes = vars(self)
        if name == "grad":
            return attributes.get("_grad") if func.__name__ == "__get__" else attributes.update(_grad=(*args, None)[1])
        if name == "retains_grad":
            return "_retained" in attributes
        with torch._C.DisableTorchFunctionSubclass():
            if name not in ("register_hook", "retain_grad") or not self.requires_grad:
                return func(*args)
            made = None if name == "retain_grad" else func(self, partial(_hooked, args[1]))
            if made is None or "_retained" in attributes:  # it keeps what is left of a gradient by all hooks
                if (before := attributes.pop("_retained", None)) is not None:
                    before.remove()
                keep = partial(_hooked, partial(_keep, weakref.ref(self)))
                attributes["_retained"] = torch.Tensor.register_hook(self, keep)  # type: ignore[no-untyped-call]
            return made

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
        if whole is None:
            vars(self)["_begin"]()
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


def _hooked(hook: Hook, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """What a person's hook makes of a gradient, if there is one."""
    if gradient is None:
        return None
    made = hook(gathered_gradient(gradient))
    if made is None or not isinstance(gradient, DTensor):
        return made
    replicated: DTensor = _Replicated.apply(made, gradient._spec)  # type: ignore[no-untyped-call]
    return replicated


def _keep(output: weakref.ref[Output], gradient: torch.Tensor) -> None:
    """Add to an output's `.grad`, if it is there."""
    if (kept := output()) is not None:
        known = vars(kept).get("_grad")
        vars(kept)["_grad"] = gradient.clone() if known is None else known + gradient


class Absent(torch.Tensor):
    """An output that no rank keeps. Its shape and dtype are there; who asks for its elements is told why they are
    not."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _looks(func, _name(func)):
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
    begin: Callable[[], None],
) -> Output:
    """The output of which this rank holds `local`, which is what `part` gives of a whole one. What gathers it calls
    `begin` before, on all ranks at once."""
    if (dynamo := sys.modules.get("torch._dynamo.config")) is not None:
        dynamo.nontraceable_tensor_subclasses.add(Output)  # what torch.compile makes has operators see it as it is
    spec = _spec(mesh, tuple(placements), shape, stride, local.dtype)
    made = Output(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    vars(made).update(_whole=None, _part=part, _begin=begin)
    return made


class _Gathered(torch.autograd.Function):
    """Gathers an output. Its gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, split: Output) -> torch.Tensor:
        ctx.spec, local = split._spec, split._local_tensor
        whole = full_tensor(DTensor(local, split._spec, requires_grad=False))  # type: ignore[no-untyped-call]
        if whole.untyped_storage()._cdata == local.untyped_storage()._cdata:  # of axes with one rank
            return whole.clone()
        return unviewed(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        made: DTensor = _Replicated.apply(gradient, ctx.spec)  # type: ignore[no-untyped-call]
        return made


class _Followed(torch.autograd.Function):
    """An output where it is split, computed of where it is whole. Its memory is not looked at."""

    @staticmethod
    def forward(ctx: Any, split: Output, whole: torch.Tensor) -> Output:
        ctx.mark_dirty(split)
        return split

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gathered_gradient(gradient)


class _Replicated(torch.autograd.Function):
    """A gradient that all ranks have whole, of a DTensor with a specification. Nothing is sent for it."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, spec: Any) -> DTensor:
        places, meta = (Replicate(),) * spec.mesh.ndim, spec.tensor_meta
        of_all = _spec(spec.mesh, places, meta.shape, meta.stride, gradient.dtype)
        return DTensor(gradient.detach(), of_all, requires_grad=False)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gathered_gradient(gradient), None


class _Split(torch.autograd.Function):
    """Splits a whole tensor."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, spec: Any, part: Callable[[torch.Tensor], torch.Tensor]) -> DTensor:
        local = part(whole.detach())
        own = local.clone() if local.untyped_storage()._cdata == whole.untyped_storage()._cdata else local
        return DTensor(own, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gathered_gradient(gradient), None, None


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
    part, begin = vars(tensor)["_part"], vars(tensor)["_begin"]
    return split_output(local, tensor.device_mesh, tensor.placements, shape, stride, part, begin)


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


def _name(func: Any) -> str:
    """Of a function, or of an attribute that is read or set."""
    return str(getattr(func.__self__, "__name__", "") if func.__name__ in ACCESSES else func.__name__)


def _looks(func: Any, name: str) -> bool:
    return name not in VALUES if func.__name__ == "__get__" else func.__name__ in LOOKS


def current(value: Any) -> Any:
    """What an output is now: the whole tensor, once it has been gathered. Any other value is itself."""
    if isinstance(value, Output) and vars(value)["_whole"] is not None:
        return vars(value)["_whole"]
    return value


def gathered_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient, gathered if it is split."""
    return full_tensor(gradient) if isinstance(gradient, DTensor) else gradient


def _differentiated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that asks for gradients, of outputs or from there."""
    call = inspect.signature(func).bind(*args, **kwargs)
    asked = call.arguments.pop("inputs", None)
    call.arguments = pytree.tree_map_only(DTensor, _whole, call.arguments)
    if asked is None:
        return func(*call.args, **call.kwargs)
    inputs = pytree.tree_leaves(asked, is_leaf=lambda x: isinstance(x, GradientEdge))
    outputs = [x for x in inputs if isinstance(x, Output) and x.requires_grad and not x.is_written]
    split = [] if call.arguments.get("is_grads_batched") else outputs  # functions of ours have no rule for a batch
    call.arguments["inputs"] = tuple(
        get_gradient_edge(x) if any(x is one for one in split) else x.whole() if isinstance(x, Output) else x
        for x in inputs
    )
    if func is not torch.autograd.grad:
        for x in split:
            x.retain_grad()  # as autograd does
        return func(*call.args, **call.kwargs)
    fills = bool(split) and call.arguments.pop("materialize_grads", False)
    if fills:
        call.arguments["allow_unused"] = True
    found = func(*call.args, **call.kwargs)
    gradients = [
        g if g is None or not isinstance(x, Output) else gathered_gradient(g)
        for x, g in zip(inputs, found, strict=True)
    ]
    if not fills:
        return tuple(gradients)
    zeros = (torch.zeros_like(x.whole() if isinstance(x, Output) else x) for x in inputs)
    return tuple(zero if g is None else g for zero, g in zip(zeros, gradients, strict=True))


def _whole(dtensor: DTensor) -> torch.Tensor:
    return dtensor.whole() if isinstance(dtensor, Output) else full_tensor(dtensor)
