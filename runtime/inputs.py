"""The inputs of a call: their leaves by path, and their form, which decides what program runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from autopar.compat.outputs import current
from autopar.ir.graph import TensorMeta, meta_of
from autopar.ir.tree import flatten
from autopar.passes.capture.captured import Captured, leaf_of, names_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a captured graph depends on of its inputs: their structure, the dtype and shape of every tensor, and every
    Python constant. Keyword arguments have no order."""

    leaves: tuple[tuple[str, Any], ...]
    """Path -> the meta of a tensor, or the type and value of a constant."""
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
    """The inputs of a call. `leaves` are by path, those of keyword arguments in the order of their names."""

    leaves: Mapping[str, Any]
    form: Form

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
        """Raises ValueError for an input that is neither a tensor nor a constant."""
        pairs, spec = flatten("", (tuple(args), {name: kwargs[name] for name in sorted(kwargs)}))
        pairs = [(path, current(value)) for path, value in pairs]
        form = Form(leaves=tuple((path, _form(path, value)) for path, value in pairs), spec=spec)
        return Inputs(leaves=dict(pairs), form=form)

    @staticmethod
    def captured(captured: Captured) -> Inputs:
        """Those that a step was captured with, without values."""
        leaves = [
            leaf.constant if leaf.meta is None else torch.empty(leaf.meta.shape, dtype=leaf.meta.dtype, device="meta")
            for leaf in captured.input_leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, captured.input_spec)
        return Inputs.of(args, kwargs)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {path: value for path, value in self.leaves.items() if isinstance(value, torch.Tensor)}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """(args, kwargs), with other tensors."""
        leaves = [tensors.get(path, value) for path, value in self.leaves.items()]
        args, kwargs = pytree.tree_unflatten(leaves, self.form.spec)
        return args, kwargs


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
    return value if issubclass(kind, float | complex) else repr(value)
