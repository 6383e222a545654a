"""The inputs of a call: their leaves by path, and their form, which decides what program runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.compat.outputs import current
from autopar.ir.graph import TensorMeta, meta_of
from autopar.ir.tree import flatten
from autopar.passes.capture.captured import Captured
from autopar.passes.capture.leaves import leaf_of, names_by, repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a captured graph depends on of its inputs: their structure, the dtype and shape of every tensor, every
    Python constant, which tensors are one object, and the order of keyword arguments, as far as forward sees these."""

    leaves: tuple[tuple[str, Any], ...]
    """Path -> the meta of a tensor, the type and value of a constant, or `torch.Tensor` and the path of a tensor that
    is the same object."""
    spec: pytree.TreeSpec = field(repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Form:
        return self

    def __str__(self) -> str:
        return ", ".join(f"{path} {_shown(leaf)}" for path, leaf in self.leaves) or "no inputs"

    def differs(self, other: Form) -> str:
        """In what this form differs from another one."""
        mine, others = dict(self.leaves), dict(other.leaves)
        changed = [f"{p} is {_shown(x)} and was {_shown(others[p])}" for p, x in mine.items() if others.get(p, x) != x]
        changed += [f"{path} {_shown(mine[path])} is new" for path in mine if path not in others]
        changed += [f"{path} is absent" for path in others if path not in mine]
        return ", ".join(changed) or "the containers of the inputs differ"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """The inputs of a call. `leaves` are by path; `identities` says whether the form tells which are one object."""

    leaves: Mapping[str, Any]
    form: Form
    identities: bool = False

    @staticmethod
    def of(
        args: Sequence[Any], kwargs: Mapping[str, Any], named: Collection[str] = (), *, identities: bool = False
    ) -> Inputs:
        """`named` are the keyword arguments whose order forward does not see, and `identities` says whether it sees
        which tensors are one object. Raises ValueError for an input that is neither a tensor nor a constant."""
        first = (name for name in named if name in kwargs)
        pairs, spec = flatten("", (tuple(args), {name: kwargs[name] for name in dict.fromkeys((*first, *kwargs))}))
        pairs = [(path, current(value)) for path, value in pairs]
        same = repeated(pairs) if identities else {}
        leaves = ((path, (torch.Tensor, same[path]) if path in same else _form(path, x)) for path, x in pairs)
        return Inputs(leaves=dict(pairs), form=Form(leaves=tuple(leaves), spec=spec), identities=identities)

    @staticmethod
    def captured(captured: Captured, model: nn.Module) -> Inputs:
        """Those that a step of the model was captured with, without values."""
        values: dict[str, Any] = {}
        for leaf in captured.input_leaves:
            bare = values.get(leaf.same)
            if leaf.meta is not None and bare is None:
                bare = torch.empty(leaf.meta.shape, dtype=leaf.meta.dtype, device="meta")
            values[leaf.path] = leaf.constant if leaf.meta is None else bare
        args, kwargs = pytree.tree_unflatten([*values.values()], captured.input_spec)
        return Inputs.of(args, kwargs, declared(model), identities=captured.reads.identities)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {path: value for path, value in self.leaves.items() if isinstance(value, torch.Tensor)}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """(args, kwargs), with other tensors."""
        leaves = [tensors.get(path, value) for path, value in self.leaves.items()]
        args, kwargs = pytree.tree_unflatten(leaves, self.form.spec)
        return args, kwargs


def each(
    tensors: Mapping[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a function makes of tensors, by path: one tensor of those that are one."""
    made: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in made:
            made[id(tensor)] = change(tensor)
    return {path: made[id(tensor)] for path, tensor in tensors.items()}


def declared(model: nn.Module) -> tuple[str, ...]:
    """The keyword arguments that forward declares, in its order: it does not see in which order a call gives them. (A
    decorator that takes `**kwargs` does.)"""
    parameters = signature(model.forward, follow_wrapped=False).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


class Names:
    """The names of inputs, those of forward's arguments, however a call gives them."""

    def __init__(self, model: nn.Module) -> None:
        self.signature = signature(model.forward)
        self.known: dict[tuple[str, ...], dict[str, str]] = {}

    def of(self, paths: Iterable[str]) -> dict[str, str]:
        """Path -> name."""
        key = tuple(paths)
        if key not in self.known:
            self.known[key] = names_by(self.signature, key)
        return self.known[key]


def _form(path: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return meta_of(value)
    leaf_of(path, value)  # which raises if it is no constant
    # NaN is NaN, 0.0 is not -0.0, and 1 is not True
    return type(value), repr(value) if isinstance(value, float | complex) else value


def _shown(leaf: Any) -> str:
    if isinstance(leaf, TensorMeta):
        return str(leaf)
    kind, value = leaf
    if kind is torch.Tensor:
        return f"the same tensor as {value}"
    return value if issubclass(kind, float | complex) else repr(value)
