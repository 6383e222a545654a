"""The leaves of a call's inputs and of its output."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from autopar.ir.graph import TensorMeta, meta_of

from .errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A leaf of the inputs or of the output. `path` is the target of its graph input or output
    ("kwargs.input_ids", "output.logits"). A leaf that is not a tensor has `meta` None and is the
    Python constant that it was when the model was captured. `requires_grad` tells of an output whether
    eager would differentiate it, and `shares` the tensor of the model in whose memory eager's lies. `same` is the
    path of an earlier input that is the same object, where forward may see that."""

    path: str
    meta: TensorMeta | None = None
    constant: Any = None
    requires_grad: bool = False
    same: str = ""
    shares: str = ""


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


def same_value(a: Any, b: Any) -> bool:
    """Whether two constants or tensors are one to a program, bit by bit: NaN is NaN, 0.0 is not -0.0, and 1 is not
    True."""
    if type(a) is not type(b):
        return False
    if not isinstance(a, torch.Tensor):
        return repr(a) == repr(b) if isinstance(a, float | complex) else bool(a == b)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    one, other = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, other)
