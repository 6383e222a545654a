"""A copy of the model whose tensors are fakes, which share no memory with it."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat import watching
from autopar.compat.rebinding import Rebound
from autopar.compat.tensors import is_fake, is_plain, like, storage_span, take_notes
from autopar.compat.watching import hook_gradient, is_stepped_in_backward
from autopar.compat.wrapping import reduces_itself
from autopar.ir.precision import Precision
from autopar.ir.tree import joined

from .conversion import HERE
from .errors import CaptureError
from .trace_device import TraceDevice

logger = logging.getLogger(__name__)


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    if (wrapper := reduces_itself(model)) is not None:
        raise CaptureError(
            f"the model is in {wrapper}, which reduces its gradients: give the model inside of it (model.module), and "
            f"autopar does that"
        )
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for iterator in (model.named_parameters, model.named_buffers):
        for name, tensor in iterator(remove_duplicate=False):
            if nn.parameter.is_lazy(tensor):
                raise CaptureError(f"parameter {name} has no shape yet: call the model once, before autopar")
            if not is_plain(tensor):
                if isinstance(tensor, DTensor):
                    raise CaptureError(
                        f"{name} is a DTensor: the model is parallel already. Give the model that it was made of, and "
                        f"a plan with all axes of the mesh"
                    )
                raise CaptureError(
                    f"{name} is a {type(tensor).__name__} of layout {tensor.layout}: autopar takes the model as it "
                    f"is on one device, with plain strided tensors"
                )
            names[name] = first.setdefault(id(tensor), name)
            if names[name] == name and tensor.numel():
                storage, begin, end = storage_span(tensor)
                for other_begin, other_end, other in spans.setdefault(storage, []):
                    if begin < other_end and other_begin < end:
                        way = "tie them by making them one nn.Parameter"
                        if not isinstance(tensor, nn.Parameter):
                            way = f"take {name} of {other} in forward, where it is used"
                        raise CaptureError(
                            f"{other} and {name} are two tensors on the same memory: {way}, or give each its own memory"
                        )
                spans[storage].append((begin, end, name))
    return names


@dataclass(frozen=True, slots=True)
class Fakes:
    """Makes fakes of one mode. Parameters of a module are as operators use them, in the dtypes of `precision`."""

    mode: Any
    here: TraceDevice
    precision: Precision

    def tensor(self, name: str, source: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A fake of the same shape and stride, and dtype if none is given, on the CPU, a leaf of autograd."""
        if not is_plain(source):
            raise CaptureError(f"{name} is a {type(source).__name__}: give the global tensor, real, on meta or fake")
        if isinstance(source, nn.Parameter) and is_stepped_in_backward(source):
            raise CaptureError(
                f"{name} has a hook that runs once its gradient is accumulated, and the parallel module has parameters "
                f"of its own: register it on those, after parallelize"
            )
        with self.mode:
            return like(source, source.requires_grad, dtype=dtype, device=HERE)

    def alias(self, source: torch.Tensor) -> torch.Tensor:
        """The same real tensor, a leaf of autograd."""
        return self.here.tensor(source).detach().requires_grad_(source.requires_grad)

    def module(self, model: nn.Module) -> tuple[nn.Module, Rebound]:
        """`copied`, and shares no tensor with the model, and copies no data."""
        modules = model.named_modules()
        scripted = [path for path, module in modules if isinstance(module, torch.jit.ScriptModule)]
        if scripted:
            raise CaptureError(
                f"{scripted[0] or type(model).__name__} is a scripted module, whose parameters autopar cannot see: "
                f"give the module as it was before torch.jit.script or torch.jit.trace"
            )

        def held(name: str, tensor: torch.Tensor) -> torch.Tensor:
            is_parameter = isinstance(tensor, nn.Parameter)
            return self.tensor(name, tensor, self.precision.used_in(tensor.dtype) if is_parameter else None)

        def other(name: str, tensor: torch.Tensor) -> torch.Tensor:  # real ones become constants of the graph
            bare = tensor.device.type == "meta" or is_fake(tensor)
            return self.tensor(name, tensor) if bare else self.alias(tensor)

        made, rebound = copied(model, _replaced(model, held, other))
        for name, hooks in gradient_hooks(model).items():
            hook_gradient(made.get_parameter(name), map(rebound.of, hooks))
        return made, rebound


def skeleton(model: nn.Module) -> tuple[nn.Module, Rebound]:
    """`copied`, with parameters and buffers on `meta`."""

    def held(_: str, tensor: torch.Tensor) -> torch.Tensor:
        return like(tensor, isinstance(tensor, nn.Parameter) and tensor.requires_grad, device="meta")

    return copied(model, _replaced(model, held, lambda _, tensor: tensor))


def _replaced(
    model: nn.Module,
    held: Callable[[str, torch.Tensor], torch.Tensor],
    other: Callable[[str, torch.Tensor], torch.Tensor],
) -> dict[int, torch.Tensor]:
    """What stands for each tensor, with the same notes: for parameters and buffers, and for those in other
    attributes."""
    memo: dict[int, torch.Tensor] = {}
    named = (*model.named_parameters(), *model.named_buffers())
    for make, tensors in ((held, named), (other, _other_tensors(model))):
        for name, tensor in tensors:
            if id(tensor) not in memo:
                memo[id(tensor)] = make(name, tensor)
                take_notes(memo[id(tensor)], tensor)
    return memo


def gradient_hooks(model: nn.Module) -> dict[str, list[Callable[[torch.Tensor], Any]]]:
    """The hooks that wait for gradients of parameters, by name."""
    return {name: watching.gradient_hooks(parameter) for name, parameter in model.named_parameters()}


def _other_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a model's attributes that are neither parameter nor buffer, with the attribute's name."""
    for module in model.modules():
        for name, attribute in vars(module).items():
            if name not in _REGISTRIES:
                yield from ((name, leaf) for leaf in pytree.tree_leaves(attribute) if isinstance(leaf, torch.Tensor))


_REGISTRIES = ("_parameters", "_buffers", "_modules")


def copied(model: nn.Module, memo: Mapping[int, Any]) -> tuple[nn.Module, Rebound]:
    """A deep copy of the model, and what makes functions that hold on to the model hold on to the copy. It has what
    `memo` says in the place of parts of the model. Attributes that cannot be copied (operators of
    `torch.library.custom_op`, process groups, locks) are shared with it. The copy of a mirror is also that of the model
    that it stands for.
    """
    mirrored = [(m, of) for m in model.modules() if (of := vars(m).get(STANDS_FOR, _nothing)()) is not None]
    # a method that is bound to what a mirror stands for is bound to the mirror, and then to its copy
    made, whole = _deep_copy(model, {**memo, **{id(stands_for): module for module, stands_for in mirrored}})
    for module, stands_for in mirrored:
        whole[id(stands_for)] = whole[id(module)]
    rebound = Rebound(whole)
    for module in made.modules():
        vars(module).pop(STANDS_FOR, None)
        for name, value in [*vars(module).items()]:
            if name not in _REGISTRIES and (other := rebound.within(value)) is not value:
                vars(module)[name] = other
    return made, rebound


STANDS_FOR = "_autopar_stands_for"
"""The attribute of a module that stands for another one, to which it has a weak reference."""


def _nothing() -> None:
    return None


def _deep_copy(model: nn.Module, memo: Mapping[int, Any]) -> tuple[nn.Module, dict[int, Any]]:
    """And what is in the place of each object."""
    whole = dict(memo)
    try:
        return copy.deepcopy(model, whole), whole
    except Exception as error:
        shared = dict(memo)
        names = []
        for path, module in model.named_modules():
            for key, attribute in vars(module).items():
                if key not in _REGISTRIES and not _is_copyable(attribute, memo):
                    shared[id(attribute)] = attribute
                    names.append(joined(path, key))
        if not names:
            raise CaptureError(f"{type(model).__name__} cannot be copied, as capture must: {error}") from error
        logger.info("shared with the captured copy, since they cannot be copied: %s", ", ".join(names))
        return copy.deepcopy(model, shared), shared


def _is_copyable(value: Any, memo: Mapping[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True
