"""What capture knows about a step: its graph, its leaves, and how a call is bound to them."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.ir.graph import JointGraph, TensorMeta, meta_of
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.tree import flatten

from .concrete import Pinned, same_value
from .looks import Reads


class CaptureError(ValueError):
    """The model cannot be captured as it is; the message says what to change."""


class NothingTrainedError(CaptureError):
    """Nothing that is differentiated depends on any trainable parameter, in eager neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A leaf of the inputs or of the output. `path` is the target of its graph input or output
    ("kwargs.input_ids", "output.logits"). A leaf that is not a tensor has `meta` None and is the
    Python constant that it was when the model was captured. `requires_grad` tells of an output whether
    eager would differentiate it, and `shares` the parameter or buffer in whose memory eager's lies.
    `same` is the path of an earlier input that is the same object, where forward may see that."""

    path: str
    meta: TensorMeta | None = None
    constant: Any = None
    requires_grad: bool = False
    same: str = ""
    shares: str = ""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What capture knows about a step.

    `input_leaves` are the leaves of (args, kwargs) and `output_leaves` those of the model's output
    (of the loss, where a loss_fn is given), which `output_spec` puts together again. `loss` is the path
    of the scalar that is differentiated, or None where gradients flow into every floating output.
    `tied` maps other names of a parameter or buffer to the name under which it stands in the graph.
    `constants` are tensors that the model closed over: graph inputs of role "buffer" by target.
    `without_gradient` names the trainable parameters on which nothing that is differentiated depends.
    `autocast` is the dtype of the `torch.autocast` context in which it was captured. `reads` are the attributes that
    Python read while the model was traced. `pinned` is what Python read of the values of inputs: the graph is the step
    of calls in which that comes out the same. `checkpoints` counts the calls of `torch.utils.checkpoint`. `early` names
    what forward gives gradients by a `backward()` of its own, `hooked` the parameters whose gradients hooks see.
    `precision` says what is cast.
    """

    graph: JointGraph
    input_spec: pytree.TreeSpec
    input_leaves: tuple[Leaf, ...]
    output_spec: pytree.TreeSpec
    output_leaves: tuple[Leaf, ...]
    loss: str | None
    tied: Mapping[str, str]
    constants: Mapping[str, torch.Tensor] = field(repr=False)
    training: bool
    without_gradient: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    reads: Reads = field(default_factory=Reads, repr=False)
    pinned: Pinned = field(default_factory=Pinned, repr=False)
    checkpoints: int = 0
    early: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    precision: Precision = AS_IS

    def bind(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """The tensors of a call by path. Raises ValueError where the call differs from the captured one in
        structure, in a shape or dtype, or in a Python constant."""
        return self.bound(dict(flatten("", (tuple(args), dict(kwargs or {})))[0]))

    def bound(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """As `bind`, of the leaves of a call by path."""
        expected = {leaf.path: leaf for leaf in self.input_leaves}
        if given.keys() != expected.keys():
            missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
            raise ValueError(
                f"the inputs differ in structure from those that the model was captured with: "
                f"missing {missing or 'none'}, unexpected {extra or 'none'}"
            )
        tensors = {}
        for path, leaf in expected.items():
            value = given[path]
            if leaf.meta is None:
                if not same_value(value, leaf.constant):
                    raise ValueError(
                        f"input {path} is {value!r}, and the model was captured with the constant {leaf.constant!r}: "
                        f"capture it again for another value"
                    )
            elif not isinstance(value, torch.Tensor) or meta_of(value) != leaf.meta:
                shown = meta_of(value) if isinstance(value, torch.Tensor) else repr(value)
                raise ValueError(f"input {path} is {shown}, and the model was captured with {leaf.meta}")
            elif leaf.same and value is not given[leaf.same]:
                raise ValueError(f"input {path} is another tensor than {leaf.same}, and was the same one when captured")
            else:
                tensors[path] = value
        return tensors

    def unflatten(self, values: Mapping[str, Any]) -> Any:
        """The model's output, in its own structure, from its tensors by path."""
        leaves = [leaf.constant if leaf.meta is None else values[leaf.path] for leaf in self.output_leaves]
        return pytree.tree_unflatten(leaves, self.output_spec)


def is_constant(value: Any) -> bool:
    plain = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
    return isinstance(value, (*plain, Enum))


def leaf_of(path: str, value: Any) -> Leaf:
    if isinstance(value, torch.Tensor):
        if value.dim() > 1 and not value.shape[0]:
            raise CaptureError(
                f"input {path} is {meta_of(value)}, an empty batch: a program has the sizes of its example inputs, so "
                f"give one of the size that you train with"
            )
        return Leaf(path=path, meta=meta_of(value))
    if not is_constant(value):
        raise CaptureError(
            f"input {path} is a {type(value).__name__}: inputs are tensors and Python constants in dataclasses and "
            f"containers that torch.utils._pytree knows"
        )
    return Leaf(path=path, constant=value)


def repeated(pairs: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """The paths of tensors that are the same object as an earlier one -> the path of that."""
    first: dict[int, str] = {}
    found = ((path, first.setdefault(id(x), path)) for path, x in pairs if isinstance(x, torch.Tensor))
    return {path: earlier for path, earlier in found if earlier != path}


def input_names(model: nn.Module, paths: Sequence[str]) -> dict[str, str]:
    """Readable names of inputs: that of forward's argument, followed by the path inside it."""
    return names_by(inspect.signature(model.forward), paths)


def names_by(signature: inspect.Signature, paths: Sequence[str]) -> dict[str, str]:
    """`input_names`, by the signature of forward."""
    positional = [
        p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = {}
    for path in paths:
        kind, first, *rest = path.split(".")
        if kind == "args":
            first = positional[int(first)] if int(first) < len(positional) else f"args_{first}"
        names[path] = ".".join([first, *rest])
    return names
